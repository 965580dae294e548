"""Linear layers on packed weights, and the embedding table read from the mapped file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from larql_kv.backends.cpu.formats import BLOCK, FORMAT_OF_KIND, MAX_ROWS, Format
from larql_kv.backends.cpu.linear_kernels import (
    PANEL_K,
    ROW_CHUNK,
    panel_kernel,
    small_kernel,
    unpack_bf16_kernel,
)
from larql_kv.backends.cpu.runtime import sync_threads, thread_scratch
from larql_kv.backends.cpu.unpack import KIND_CODES, STORED_BLOCK, pack_kernel, rows_kernel

if TYPE_CHECKING:
    from larql_kv.model.tensors import RawTensor

SMALL_ROWS = 8  # up to here a packed block is read directly, above by float32 panels (or a bf16 product)


def _aligned_bytes(size: int) -> Tensor:
    """uint8 tensor on a 64-byte boundary. numpy asks the kernel for huge pages, torch does not."""
    raw = np.empty(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return torch.from_numpy(raw[start : start + size])


def check_rows(x: Tensor, columns: int, name: str = "x") -> int:
    """Raises ValueError unless `x` is a contiguous float32 CPU tensor (n, columns); returns n."""
    if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != columns or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous float32 (n, {columns}), got {x.dtype} {tuple(x.shape)}"
            + ("" if x.is_contiguous() else " not contiguous")
        )
    return x.shape[0]


@dataclass(frozen=True)
class Part:
    """Consecutive outputs that share one format."""

    fmt: Format
    first: int  # first output in the whole
    outputs: int
    data: Tensor  # uint8, blocks * block_bytes

    @property
    def blocks(self) -> int:
        return -(-self.outputs // BLOCK)

    @property
    def block_bytes(self) -> int:
        return self.data.numel() // self.blocks


class PackedLinear:
    """y = x W^T (+ bias) for a weight held in packed form; see `formats` for the layout.

    The float32 products are "invariant": a row's bits depend on that row and the weight only.
    """

    def __init__(
        self, parts: list[Part], in_features: int, *, gemm_bf16: bool, bias: Tensor | None = None
    ) -> None:
        self.parts = parts
        self.in_features = in_features
        self.out_features = sum(part.outputs for part in parts)
        self.gemm_bf16 = gemm_bf16
        self.bias = bias
        self._bf16: Tensor | None = None
        # The arguments of a decode step that never change, so that a call only fills in x and out.
        self._fixed = [
            (
                p.fmt,
                p.data.data_ptr(),
                p.blocks,
                p.block_bytes,
                in_features // p.fmt.record_k,
                p.first,
                p.outputs,
            )
            for p in parts
        ]

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    @bias.setter
    def bias(self, value: Tensor | None) -> None:
        if value is not None:
            if value.dtype is not torch.float32 or value.shape != (self.out_features,):
                raise ValueError(
                    f"bias must be float32 ({self.out_features},), got {value.dtype} {tuple(value.shape)}"
                )
            value = value.contiguous()
        self._bias = value
        self._bias_at = 0 if value is None else value.data_ptr()
        self._plan = self._make_gated_plan()

    @property
    def nbytes(self) -> int:
        """Bytes that one decode step reads."""
        return sum(part.data.numel() for part in self.parts) + (
            0 if self._bias is None else self._bias.nbytes
        )

    @property
    def resident_bytes(self) -> int:
        """Bytes of every form held, the bf16 one included once it was made."""
        return self.nbytes + (0 if self._bf16 is None else self._bf16.nbytes)

    def tensors(self) -> list[Tensor]:
        """Every tensor held (for a ledger)."""
        return [
            *(part.data for part in self.parts),
            *([] if self._bias is None else [self._bias]),
            *([] if self._bf16 is None else [self._bf16]),
        ]

    def __call__(self, x: Tensor, invariant: bool = False) -> Tensor:
        """x (n, in_features) float32 contiguous -> (n, out_features) float32.

        With more than a few rows and `gemm_bf16`, and unless `invariant`, x is rounded to bf16 and
        multiplied by
        the weight in bf16; otherwise the product is float32 and row-invariant.
        """
        n = check_rows(x, self.in_features)
        if n > SMALL_ROWS and self.gemm_bf16 and not invariant:
            y = F.linear(x.bfloat16(), self._bf16_weight()).float()
            return y if self._bias is None else y.add_(self._bias)
        out = x.new_empty(n, self.out_features)
        if n == 0:
            return out
        threads = sync_threads()
        x_at, out_at, stride = x.data_ptr(), out.data_ptr(), 4 * self.out_features
        if n <= SMALL_ROWS:
            pad = self.pad_address(threads)
            for fmt, w, blocks, block_bytes, records, first, outputs in self._fixed:
                bias = self._bias_at + 4 * first if self._bias_at else 0
                small_kernel(
                    fmt.code, n, x_at, 4 * self.in_features, w, blocks, block_bytes, records,
                    out_at + 4 * first, stride, outputs, bias, pad, MAX_ROWS,
                )  # fmt: skip
            return out
        pad = thread_scratch("panel", threads * (PANEL_K + ROW_CHUNK) * BLOCK)
        for fmt, w, blocks, block_bytes, records, first, outputs in self._fixed:
            bias = self._bias_at + 4 * first if self._bias_at else 0
            panel_kernel(
                fmt.code, n, x_at, 4 * self.in_features, w, blocks, block_bytes, records, fmt.record_k,
                fmt.record_bytes, out_at + 4 * first, stride, outputs, bias, pad, ROW_CHUNK,
            )  # fmt: skip
        return out

    def pad_address(self, threads: int) -> int:
        """Scratch of the small-row kernels: (threads, 4, 64) float32."""
        return thread_scratch("small", threads * 4 * BLOCK)

    def gated_plan(self) -> tuple[int, ...] | None:
        """(code, address, block bytes) of the first and of the second half of the outputs, then the records
        a block;
        None where the halves do not start on blocks of one record size, or there is a bias."""
        return self._plan

    def _make_gated_plan(self) -> tuple[int, ...] | None:
        half = self.out_features // 2
        if self.out_features % (2 * BLOCK) or self._bias is not None or len(self.parts) > 2:
            return None
        gate, up = self.parts[0], self.parts[-1]
        if (len(self.parts) == 2 and up.first != half) or gate.fmt.record_k != up.fmt.record_k:
            return None
        skip = half // BLOCK * up.block_bytes if len(self.parts) == 1 else 0
        return (
            gate.fmt.code, gate.data.data_ptr(), gate.block_bytes, up.fmt.code, up.data.data_ptr() + skip,
            up.block_bytes, self.in_features // gate.fmt.record_k,
        )  # fmt: skip

    def prepare_gemm(self) -> None:
        """Make the bf16 weight of large products now instead of at the first of them."""
        if self.gemm_bf16:
            self._bf16_weight()

    def _bf16_weight(self) -> Tensor:
        if self._bf16 is None:
            weight = torch.empty((self.out_features, self.in_features), dtype=torch.bfloat16)
            pad = thread_scratch("panel", sync_threads() * (PANEL_K + ROW_CHUNK) * BLOCK)
            for fmt, w, blocks, block_bytes, records, first, outputs in self._fixed:
                unpack_bf16_kernel(
                    fmt.code, w, blocks, block_bytes, records, fmt.record_k, fmt.record_bytes,
                    weight.data_ptr() + 2 * first * self.in_features, outputs, pad,
                )  # fmt: skip
            self._bf16 = weight
        return self._bf16


def pack_linear(raws: list[RawTensor], *, gemm_bf16: bool) -> PackedLinear:
    """Concatenate the output rows of matrices (out_i, in) and pack them.

    Kinds with an own packed format keep their bits; every other kind is dequantised to float32. Raises
    ValueError
    when the input sizes differ or a matrix is not one.
    """
    if not raws:
        raise ValueError("pack_linear needs at least one tensor")
    for raw in raws:
        if len(raw.shape) != 2 or raw.shape[1] != raws[0].shape[1]:
            raise ValueError(
                f"tensors of one linear must be (out, {raws[0].shape[-1]}), but {raw.name} is {raw.shape}"
            )
    inputs = int(raws[0].shape[1])
    runs: list[tuple[str, list[tuple[str, np.ndarray, int]]]] = []  # (kind, [(name, bytes, rows)])
    for raw in raws:
        kind, data = _stored_rows(raw, inputs)
        if runs and runs[-1][0] == kind:
            runs[-1][1].append((raw.name, data, raw.shape[0]))
        else:
            runs.append((kind, [(raw.name, data, raw.shape[0])]))
    parts, first = [], 0
    for kind, members in runs:
        addresses = np.concatenate(
            [
                data.ctypes.data + np.arange(rows, dtype=np.int64) * data.strides[0]
                for _, data, rows in members
            ]
        )
        parts.append(_pack_part(kind, addresses, inputs, first))
        first += len(addresses)
    return PackedLinear(parts, inputs, gemm_bf16=gemm_bf16)


def _stored_rows(raw: RawTensor, inputs: int) -> tuple[str, np.ndarray]:
    """(kind, rows of bytes) that the pack kernel can read."""
    if raw.kind in FORMAT_OF_KIND:
        weights, size = STORED_BLOCK[raw.kind]
        if inputs % weights:
            raise ValueError(f"{raw.name}: {inputs} inputs are no multiple of {weights}, as {raw.kind} needs")
        expected = (raw.shape[0], inputs // weights * size)
        data = raw.data
        if data.size != expected[0] * expected[1]:
            raise ValueError(
                f"{raw.name}: {data.size} bytes for {raw.shape} in {raw.kind}, expected {expected}"
            )
        if data.shape != expected or data.dtype != np.uint8 or data.strides[1] != 1:
            data = np.ascontiguousarray(data).view(np.uint8).reshape(expected)
        return raw.kind, data
    values = np.ascontiguousarray(raw.dequantize(), dtype=np.float32)
    return "F32", values.view(np.uint8).reshape(raw.shape[0], 4 * inputs)


def _pack_part(kind: str, addresses: np.ndarray, inputs: int, first: int) -> Part:
    fmt = FORMAT_OF_KIND[kind]
    outputs = len(addresses)
    blocks = -(-outputs // BLOCK)
    block_bytes = inputs // fmt.record_k * fmt.record_bytes
    data = _aligned_bytes(blocks * block_bytes)
    if outputs % BLOCK:
        data[(blocks - 1) * block_bytes :].zero_()
    codes = np.empty((blocks, 64), dtype=np.uint8)
    sync_threads()
    pack_kernel(
        KIND_CODES[kind], addresses.ctypes.data, blocks, outputs, inputs, data.data_ptr(), block_bytes,
        codes.ctypes.data,
    )  # fmt: skip
    return Part(fmt, first, outputs, data)


class EmbeddingTable:
    """Rows of a stored matrix (vocabulary, hidden), dequantised on demand from the mapped file."""

    def __init__(self, raw: RawTensor) -> None:
        if len(raw.shape) != 2:
            raise ValueError(f"an embedding is a matrix, but {raw.name} is {raw.shape}")
        self.raw = raw
        self.vocabulary, self.hidden = int(raw.shape[0]), int(raw.shape[1])
        self._compiled = raw.kind in KIND_CODES and self.hidden % STORED_BLOCK[raw.kind][0] == 0
        if self._compiled:
            _, data = _stored_rows(raw, self.hidden)
            self._data = data  # keeps the mapping alive
            self._args = (KIND_CODES[raw.kind], data.ctypes.data, data.strides[0])
        else:
            raw.dequantize(
                slice(0, 1)
            )  # a type that cannot be read is refused at load, not at the first step

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """ids (n,) int64 -> (n, hidden) float32, the stored values times `scale` (rounded to float32)."""
        if ids.dtype is not torch.int64 or ids.dim() != 1:
            raise ValueError(f"ids must be int64 (n,), got {ids.dtype} {tuple(ids.shape)}")
        n = ids.shape[0]
        ids = ids.contiguous()
        if n and not (int(ids.min()) >= 0 and int(ids.max()) < self.vocabulary):
            raise ValueError(f"token ids must lie in 0..{self.vocabulary - 1}")
        if not self._compiled:
            values = torch.from_numpy(self.raw.dequantize(ids.numpy()).reshape(n, self.hidden))
            return values * float(np.float32(scale))
        out = torch.empty((n, self.hidden), dtype=torch.float32)
        codes = np.empty(64, dtype=np.uint8)  # of this call: threads may look up rows at the same time
        kind, table, row_bytes = self._args
        rows_kernel(
            kind, ids.data_ptr(), n, table, row_bytes, self.hidden, out.data_ptr(), codes.ctypes.data,
            float(np.float32(scale)),
        )  # fmt: skip
        return out


__all__ = ["EmbeddingTable", "PackedLinear", "Part", "pack_linear"]
