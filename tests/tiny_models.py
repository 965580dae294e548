"""Tiny random models of every supported family, built by transformers, with its logits as reference.

`model_dir(name)` gives a directory (safetensors, config.json, tokenizer.json) that is built once per
process; `write_tiny_gguf` writes the same weights as llama.cpp's converter would.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import string
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_VOCAB = 128
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Neither a multiple of a vector width nor of a quantisation block, and an odd vocabulary.
_ODD = {"vocab_size": 131, "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 6}


def _llama(**extra: Any) -> Callable[[], Any]:
    return lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SIZES | extra))


def _mistral() -> Any:
    return tf.MistralForCausalLM(tf.MistralConfig(**_SIZES, head_dim=16, sliding_window=8))


def _qwen2(**extra: Any) -> Callable[[], Any]:
    return lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SIZES | extra))


def _qwen3() -> Any:
    sizes = _SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": True}
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**sizes, head_dim=24))


def _gemma2() -> Any:
    extra = {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    }
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**_SIZES, **extra))


def _gemma3() -> Any:
    sizes = _SIZES | {"num_hidden_layers": 7, "num_key_value_heads": 1}
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config = tf.Gemma3TextConfig(
        **sizes, head_dim=32, sliding_window=8, query_pre_attn_scalar=32, rope_parameters=rope
    )
    return tf.Gemma3ForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama(),
    "llama-llama3": _llama(rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama-linear": _llama(rope_parameters=LINEAR),
    "llama-yarn": _llama(rope_parameters=YARN),
    "llama-bias": _llama(attention_bias=True, mlp_bias=True),
    "llama-odd": _llama(**_ODD),
    "mistral": _mistral,
    "qwen2": _qwen2(),
    "qwen2-window": _qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}


def build(name: str, seed: int = 0) -> Any:
    """The model `name` in float32 with weights that keep logits and attention far from flat."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if key.endswith("norm.weight") or "layernorm" in key:
                # Gemma multiplies by 1 + w, the others by w.
                weight.copy_(0.3 * noise + (0.0 if "gemma" in name else 1.0))
            elif key.endswith(".bias"):
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in key:
                # Gemma multiplies embeddings by sqrt(hidden), and its head is tied to them.
                weight.copy_((0.15 if "gemma" in name else 0.5) * noise)
            else:
                # Wide enough for peaked attention (plain std-0.02 models attend uniformly).
                weight.copy_(noise * 1.6 / weight.shape[1] ** 0.5)
    return model


@functools.cache
def _root() -> Path:
    path = Path(tempfile.mkdtemp(prefix="larql-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def model_dir(name: str, dtype: str = "float32", sharded: bool = False) -> Path:
    """Directory of the tiny model `name`, weights stored as `dtype` (float32, float16 or bfloat16)."""
    path = _root() / f"{name}-{dtype}{'-sharded' if sharded else ''}"
    save(build(name).to(getattr(torch, dtype)), path, sharded)
    return path


def save(model: Any, path: Path, sharded: bool = False) -> None:
    """Saves model and tokenizer to `path`; sharded means several files and an index."""
    model.save_pretrained(path, max_shard_size="60KB" if sharded else "1GB")
    write_tokenizer(path, model.config.vocab_size)


def reference_logits(path: Path, ids: Sequence[int]) -> np.ndarray:
    """Logits (n, vocab) float32 of the model in `path`, all positions at once, by transformers (eager)."""
    model = _reference(str(path))
    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()


@functools.lru_cache(maxsize=4)
def _reference(path: str) -> Any:
    model = tf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def sample_ids(n: int, vocab: int = _VOCAB, seed: int = 3) -> list[int]:
    """n token ids outside the special ones."""
    return np.random.default_rng(seed).integers(3, vocab, n).tolist()


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE with exactly `size` entries (letters, digits, a few pairs)."""
    tokens = ["<pad>", "<s>", "</s>", "Ġ", "Ċ", *string.ascii_letters, *string.digits, *".,;:!?'\"()-+*/=<>_"]
    merges: list[str] = []
    letters = string.ascii_lowercase
    pairs = (f"{a} {b}" for a in ("Ġ", "t", "a", "e", "o", "i") for b in letters)
    while len(tokens) < size:
        merge = next(pairs)
        merges.append(merge)
        tokens.append(merge.replace(" ", ""))
    return tokens[:size], merges


def write_tokenizer(path: Path, size: int) -> None:
    """tokenizer.json (byte-level BPE of `size` tokens) and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = vocabulary(size)
    bpe = models.BPE(
        {token: index for index, token in enumerate(tokens)},
        [tuple(merge.split(" ")) for merge in merges],  # type: ignore[misc]
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tiny_gguf(name: str, path: Path, quant: str = "F32") -> Path:
    """The tiny model `name` as a GGUF file; see `tests/tiny_gguf.py`."""
    from tests.tiny_gguf import write_gguf

    return write_gguf(model_dir(name), path, quant)
