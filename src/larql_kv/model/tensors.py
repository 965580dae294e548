"""Tensors as the file holds them, and the names the forward pass asks for them by.

A `TensorSource` (a GGUF file or a Hugging Face directory) answers to canonical names:

    embed, final_norm, head (absent when tied)
    layers.N.{attn_norm, q, k, v, o, q_bias, k_bias, v_bias, o_bias, q_norm, k_norm, post_attn_norm,
              ffn_norm, gate, up, down, post_ffn_norm}

Conventions a source must have resolved: matrices are (out, in); Q and K rows are in the half-split
RoPE order of Hugging Face; a norm weight is the factor that is multiplied (Gemma's 1 + w is applied).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class RawTensor:
    """A tensor in its stored format. `data` is (rows, row_bytes) uint8, usually a view of the mapped file."""

    name: str
    kind: str  # ggml type name: F32, F16, BF16, Q4_0, ..., Q6_K, ...
    shape: tuple[int, ...]  # (out, in) or (n,)
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dequantize(self, rows: np.ndarray | slice | None = None) -> np.ndarray:
        """The tensor (or the given rows of a matrix) as float32, by the `gguf` package's routines."""
        from larql_kv.model.dequant import dequantize

        data = self.data if rows is None else self.data[rows]
        values = dequantize(self.kind, data)
        return values.reshape(self.shape) if rows is None else values


class TensorSource(Protocol):
    """Where a model's tensors come from; see the module's docstring for the names."""

    def get(self, name: str) -> RawTensor:
        """The tensor of that canonical name. Raises ModelError when the file lacks it."""
        ...

    def __contains__(self, name: object) -> bool: ...
