"""A tiny random llama, written by hand as a Hugging Face directory, so that the demos need no download.

Its text is noise, its arithmetic is that of a real model: grouped-query attention, RoPE, SwiGLU, byte-level
tokens. 4 layers, hidden 64, 4 heads over 2 K/V heads of 16, vocabulary 258.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import larql_kv as lk

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, CONTEXT = 64, 4, 4, 2, 16, 128, 512


def load_tiny_model() -> lk.Model:
    """The model in float32, the mode in which `Exact` means the same bits."""
    with tempfile.TemporaryDirectory(prefix="larql-example-", ignore_cleanup_errors=True) as directory:
        return lk.load_model(write_tiny_model(Path(directory)), dtype="float32")


def write_tiny_model(path: Path, seed: int = 0) -> Path:
    """config.json, tokenizer.json and model.safetensors in `path`."""
    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(vocabulary),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(_weights(len(vocabulary), seed), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _weights(vocab: int, seed: int) -> dict[str, np.ndarray]:
    """Random matrices (out, in), wide enough for attention that is far from uniform."""
    random = np.random.default_rng(seed)

    def matrix(out: int, inner: int, gain: float = 1.6) -> np.ndarray:
        return (gain / inner**0.5 * random.standard_normal((out, inner))).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, HIDDEN, gain=4.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(vocab, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            name + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            name + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            name + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            name + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            name + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            name + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            name + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            name + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return weights
