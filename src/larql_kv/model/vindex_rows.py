"""Rows in another format or orientation, a bounded chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.dequant import dequantize
from larql_kv.model.gguf_file import tensor_types
from larql_kv.model.tensors import RawTensor

FLOAT_KINDS = ("F32", "F16", "BF16")
CHUNK_BYTES = 16 << 20  # of float32 values that are in work at once
DOWN_FORMS = ("f32", "bf16", "q8_0")


@cache
def block_sizes() -> dict[str, tuple[int, int]]:
    """ggml type name -> (elements per block, bytes per block)."""
    return {name: (elements, size) for name, elements, size in tensor_types().values()}


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row. Raises ModelError when it is no whole number of blocks."""
    elements, size = block_sizes()[kind]
    if columns % elements:
        raise ModelError(f"rows of {columns} values cannot be {kind}: its blocks hold {elements}")
    return columns // elements * size


def encode_rows(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 (n, columns) -> uint8 (n, row_bytes) in `kind`: F32, BF16 (nearest, ties to even) or Q8_0."""
    values = np.require(values, np.float32, ["C", "W"])
    if kind == "F32":
        return values.view(np.uint8)
    if kind == "BF16":
        import torch

        return torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
    if kind == "Q8_0":
        import gguf

        return gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    raise ValueError(f"rows are not encoded as {kind}")


@dataclass(frozen=True)
class Rows:
    """A tensor made chunk by chunk from another one, with the same values in `kind`; `transposed` turns a
    matrix (out, in) into (in, out). The other one is loaded when chunks are asked for, and let go after."""

    load: Callable[[], RawTensor]
    source_kind: str
    source_shape: tuple[int, ...]
    kind: str
    transposed: bool = False

    @classmethod
    def of(cls, raw: RawTensor, kind: str, transposed: bool = False) -> Rows:
        """Over a tensor that is there."""
        return cls(lambda: raw, raw.kind, raw.shape, kind, transposed)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source_shape[::-1] if self.transposed else self.source_shape

    @property
    def row_count(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.kind, self.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.row_count * self.row_bytes

    @property
    def lossless(self) -> bool:
        """Whether every value survives: float32, or the source's own kind (blocks that lie along other rows
        are made anew)."""
        same = self.kind == self.source_kind and (not self.transposed or self.kind in FLOAT_KINDS)
        return same or self.kind == "F32"

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(what the source has, what is stored) of consecutive rows, each uint8 (n, bytes of a row); the
        first in the source's kind, or float32 where that had to be read anyhow."""
        if self.transposed:
            yield from self._transposed()
            return
        data = self.load().data.reshape(self.row_count, -1)
        step = max(1, CHUNK_BYTES // (4 * self.shape[-1]))
        for first in range(0, len(data), step):
            part = data[first : first + step]
            if self.kind == self.source_kind:
                yield part, part
            else:
                values = dequantize(self.source_kind, part)
                yield values.view(np.uint8), encode_rows(values, self.kind)

    def _transposed(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        outer, inner = self.source_shape
        data = self.load().data.reshape(outer, -1)
        elements, size = block_sizes()[self.source_kind]
        blocks = max(1, CHUNK_BYTES // (4 * outer * elements))
        for first in range(0, inner // elements, blocks):
            part = data[:, first * size : (first + blocks) * size]
            if self.kind == self.source_kind and elements == 1:  # plain numbers move as they are
                words = np.ascontiguousarray(part).view(np.dtype(f"u{size}"))
                turned = np.ascontiguousarray(words.T).view(np.uint8)
                yield turned, turned
            else:
                values = dequantize(self.source_kind, part)
                values = np.ascontiguousarray(values.T)
                yield values.view(np.uint8), encode_rows(values, self.kind)

    def whole(self) -> RawTensor:
        """The tensor in memory."""
        data = np.empty((self.row_count, self.row_bytes), np.uint8)
        at = 0
        for _, stored in self.chunks():
            data[at : at + len(stored)] = stored
            at += len(stored)
        return RawTensor("", self.kind, self.shape, data)


def feature_major_kind(down_kind: str, form: str) -> str:
    """How the feature-major twin of a down matrix is held: a float matrix keeps its kind, else `form` (f32,
    bf16 or q8_0) decides."""
    return down_kind if down_kind in FLOAT_KINDS else form.upper()
