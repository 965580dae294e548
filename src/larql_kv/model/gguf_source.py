"""A GGUF file's tensors by their canonical names."""

from __future__ import annotations

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.config import ModelConfig
from larql_kv.model.gguf_file import GgufFile
from larql_kv.model.shapes import check_tensors, refuse_unknown
from larql_kv.model.tensors import RawTensor

_TOP = {"token_embd.weight": "embed", "output_norm.weight": "final_norm", "output.weight": "head"}
_LAYER = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_output.bias": "o_bias",
    "ffn_gate.bias": "gate_bias",
    "ffn_up.bias": "up_bias",
    "ffn_down.bias": "down_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "post_attention_norm.weight": "post_attn_norm",
    "ffn_norm.weight": "ffn_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "post_ffw_norm.weight": "post_ffn_norm",
}
# Read by config_from_gguf (rope_freqs), or a leftover of old converters that only repeats the base.
_CONSUMED = ("rope_freqs.weight", "attn_rot_embd.weight")


class GgufSource:
    """The tensors of `file` under the names of `tensors.py`, as views of the mapping.

    Only Q and K of the llama architecture are copied, at each `get`: llama.cpp's converter stores their
    rows pairwise interleaved, and we want the half-split order. A row is whole blocks in every format,
    so rows move as bytes. Gemma's norms already hold 1 + w in a GGUF file.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """Raises ModelError for a missing, misshapen or unknown tensor; no data is read."""
        self.file = file
        self.config = config
        self._names: dict[str, str] = {}
        unknown: list[str] = []
        for name in file.tensors:
            canonical = _canonical(name)
            if canonical is not None:
                self._names[canonical] = name
            elif not name.endswith(_CONSUMED):
                unknown.append(name)
        refuse_unknown(unknown)
        check_tensors(
            config, {canon: (name, file.tensors[name].shape) for canon, name in self._names.items()}
        )
        self._interleaved = config.architecture == "llama"

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def get(self, name: str) -> RawTensor:
        """The tensor of canonical `name`, its own name that of the file. Raises ModelError when absent."""
        if name not in self._names:
            raise ModelError(f"{self.file.path}: no tensor {name!r} in this model")
        tensor = self.file.tensors[self._names[name]]
        suffix = name.rsplit(".", 1)[-1]
        if self._interleaved and suffix in ("q", "k", "q_bias", "k_bias"):
            heads = self.config.heads if suffix.startswith("q") else self.config.kv_heads
            return _half_split(tensor, heads, self.config.head_dim)
        return tensor


def half_split_order(heads: int, head_dim: int) -> np.ndarray:
    """Which stored row each half-split row is, (heads * head_dim,) int64.

    The inverse of llama.cpp's `permute` (convert_hf_to_gguf.py), which views the rows as (heads, 2,
    head_dim/2) and swaps the last two axes.
    """
    stored = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)


def _half_split(tensor: RawTensor, heads: int, head_dim: int) -> RawTensor:
    order = half_split_order(heads, head_dim)
    if len(tensor.shape) == 2:
        return RawTensor(tensor.name, tensor.kind, tensor.shape, tensor.data[order])
    if tensor.kind not in ("F32", "F16", "BF16"):
        raise ModelError(f"bias {tensor.name!r} is of type {tensor.kind}, expected F32, F16 or BF16")
    elements = tensor.data.reshape(order.size, -1)
    return RawTensor(tensor.name, tensor.kind, tensor.shape, elements[order].reshape(1, -1))


def _canonical(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `layers.3.q`; None for a name that the forward pass does not use."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".", 2)
    if len(parts) != 3 or parts[0] != "blk" or not (parts[1].isascii() and parts[1].isdigit()):
        return None
    if len(parts[1]) > 4 or str(int(parts[1])) != parts[1] or parts[2] not in _LAYER:
        return None
    return f"layers.{parts[1]}.{_LAYER[parts[2]]}"
