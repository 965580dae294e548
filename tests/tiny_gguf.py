"""A Hugging Face directory -> GGUF, with the conventions of llama.cpp's convert_hf_to_gguf.py.

Written apart from `larql_kv`, so that a misreading of a convention there does not hide here: tensor
names come from the `gguf` package's own name map.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

# Mistral becomes a llama file, as llama.cpp's converter makes it.
_ARCH = {"gemma3_text": "gemma3", "mistral": "llama"}
_MODEL_ARCH = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def write_gguf(directory: Path, path: Path, quant: str = "F32", **overrides: Any) -> Path:
    """Writes the model of `directory` to `path`. Matrices whose rows are whole blocks become `quant`,
    everything else F32. `overrides`: metadata key tail -> value (None drops it)."""
    config = json.loads((directory / "config.json").read_text())
    arch = _ARCH.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for key, value in (_metadata(config, arch, head_dim) | overrides).items():
        _add(writer, f"{arch}.{key}", value)
    writer.add_name(f"tiny {config['model_type']}")
    _tokenizer(writer, directory, config["vocab_size"])

    names = gguf.get_tensor_name_map(_MODEL_ARCH[arch], config["num_hidden_layers"])
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= {name: tensor.float().numpy() for name, tensor in load_file(shard).items()}
    for name, values in tensors.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = permute(values, heads)
        kind = gguf.GGMLQuantizationType[quant]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if values.ndim == 2 and values.shape[1] % block == 0 and quant != "F32":
            writer.add_tensor(target, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values, dtype=np.float32))
    factors = _llama3_factors(config, head_dim)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of convert_hf_to_gguf.py (heads: the key/value heads for K)."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def _metadata(config: dict[str, Any], arch: str, head_dim: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "vocab_size": config["vocab_size"],
    }
    if arch == "llama":
        values["rope.dimension_count"] = head_dim
    else:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if arch == "gemma3" or config["model_type"] == "mistral" or config.get("use_sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
    if config.get("use_sliding_window"):
        values["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config["layer_types"]
        ]
    if arch == "gemma2":
        values |= {
            "attention.sliding_window": config["sliding_window"],
            "attn_logit_softcapping": float(config["attn_logit_softcapping"]),
            "final_logit_softcapping": float(config["final_logit_softcapping"]),
        }
    if arch.startswith("gemma") and config["query_pre_attn_scalar"] != head_dim:
        values["attention.scale"] = float(config["query_pre_attn_scalar"] ** -0.5)
    rope = config["rope_parameters"]
    if arch == "gemma3":
        values["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    values["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return values


def _llama3_factors(config: dict[str, Any], head_dim: int) -> np.ndarray | None:
    """LlamaModel.generate_extra_tensors of convert_hf_to_gguf.py."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") != "llama3":
        return None
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    factors = []
    for freq in 1.0 / (rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)):
        wavelen = 2 * math.pi / freq
        if wavelen < context / high:
            factors.append(1.0)
        elif wavelen > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelen - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _tokenizer(writer: gguf.GGUFWriter, directory: Path, size: int) -> None:
    """The byte-level BPE of tokenizer.json as a `gpt2` tokenizer."""
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    assert len(tokens) == size
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (size - 3))
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
