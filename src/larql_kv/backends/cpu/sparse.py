"""One layer's FFN on the features of the largest gate scores: rows are gathered, nothing is masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from larql_kv.backends.cpu.linear import BLOCK, PackedLinear, Part, check_rows, pack_linear
from larql_kv.backends.cpu.row_steps import _Linears
from larql_kv.backends.cpu.rowop_kernels import ACTIVATION_CODES
from larql_kv.backends.cpu.runtime import MAX_THREADS, sync_threads, thread_scratch
from larql_kv.backends.cpu.sparse_kernels import (
    HISTOGRAM_WORDS,
    MAX_PARTS,
    PART_FEATURES,
    score_select_kernel,
    select_kernel,
    walk_kernel,
)
from larql_kv.backends.cpu.unpack import KIND_CODES, STORED_BLOCK

if TYPE_CHECKING:
    from larql_kv.backends.cpu.decoder import CpuDecoder
    from larql_kv.model.config import Activation
    from larql_kv.model.tensors import RawTensor


class Selection(NamedTuple):
    """The features of one row's largest |gate scores|, ids ascending. Of equal scores the lower id is in."""

    ids: np.ndarray  # uint32 (k,)
    gates: np.ndarray  # float32 (k,), the scores
    bitmap: bytes  # the set: bit f of the bytes, (features + 7) // 8 of them


@dataclass(frozen=True)
class StoredRows:
    """A matrix (features, hidden) as the gather kernels read it: stored rows, often of a mapped file."""

    raw: RawTensor
    kind: str
    data: np.ndarray  # (features, row bytes) uint8; keeps the addresses below alive

    @classmethod
    def of(cls, raw: RawTensor) -> StoredRows:
        """The rows of `raw` as they are stored; kinds without kernels as float32."""
        inputs = raw.shape[1]
        kind, data = raw.kind, raw.data
        if kind not in KIND_CODES or inputs % STORED_BLOCK[kind][0]:
            kind, data = "F32", raw.dequantize()
        weights, size = STORED_BLOCK[kind]
        if data.dtype != np.uint8 or data.ndim != 2 or data.strides[1] != 1:
            data = np.ascontiguousarray(data).view(np.uint8).reshape(raw.shape[0], -1)
        if data.shape != (raw.shape[0], inputs // weights * size):
            raise ValueError(f"{raw.name}: {data.shape} bytes for {raw.shape} in {kind}")
        return cls(raw, kind, data)

    @property
    def args(self) -> tuple[int, int, int]:
        """Code of the kind, address, bytes from row to row."""
        return KIND_CODES[self.kind], self.data.ctypes.data, self.data.strides[0]

    @property
    def row_bytes(self) -> int:
        return self.data.shape[1]

    def values(self, rows: np.ndarray) -> Tensor:
        """Rows (m,) -> (m, hidden) float32."""
        return torch.from_numpy(np.array(self.raw.dequantize(rows), dtype=np.float32))


def first_outputs(linear: PackedLinear, count: int) -> PackedLinear:
    """The first `count` outputs of a packed linear, on the same memory."""
    parts = []
    for part in linear.parts:
        outputs = min(part.outputs, count - part.first)
        if outputs > 0:
            used = -(-outputs // BLOCK) * part.block_bytes
            parts.append(Part(part.fmt, part.first, outputs, part.data[:used]))
    bias = None if linear.bias is None else linear.bias[:count]
    return PackedLinear(parts, linear.in_features, gemm_bf16=False, bias=bias)


class SparseLayer:
    """gate (packed), up and down rows of one layer. Inputs are float32 (n, hidden), contiguous.

    Not bound to a number of features: every call names its own.
    """

    def __init__(
        self,
        gate: PackedLinear,
        up: StoredRows,
        down: StoredRows,
        activation: Activation,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        self.hidden, self.features = gate.in_features, gate.out_features
        self.gate, self.up, self.down = gate, up, down
        self._table = _Linears(gate)
        self.up_bias, self.down_bias = up_bias, down_bias  # what addresses below point into
        up_at, down_at = (0 if bias is None else bias.data_ptr() for bias in (up_bias, down_bias))
        self._args = (*up.args, up_at, *down.args, down_at, self.hidden, ACTIVATION_CODES[activation])

    @classmethod
    def of_decoder(
        cls, decoder: CpuDecoder, layer: int, gate: RawTensor, up: RawTensor, down: RawTensor
    ) -> SparseLayer:
        """The rows of an index with the biases of the model's FFN. Gate scores come from the decoder's own
        packed weights where these hold the same bytes, else the index's gate rows are packed here."""
        weights = decoder._layers[layer]
        own = decoder._source.get(f"layers.{layer}.gate")
        biases = weights.gate_up.bias
        packed = (
            first_outputs(weights.gate_up, gate.shape[0])
            if _same_bytes(own, gate)
            else pack_linear([gate], gemm_bf16=False)
        )
        if biases is not None and packed.bias is None:
            packed.bias = biases[: gate.shape[0]].clone()
        up_bias = None if biases is None else biases[gate.shape[0] :].clone()
        return cls(
            packed,
            StoredRows.of(up),
            StoredRows.of(down),
            decoder.config.activation,
            up_bias,
            weights.down.bias,
        )

    def step_bytes(self, count: int) -> int:
        """Weight bytes that a walk of one row over `count` features reads."""
        return self.gate.nbytes + count * (self.up.row_bytes + self.down.row_bytes)

    def values(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Up and down rows of features `ids` (k,), float32 (k, hidden) each."""
        return self.up.values(ids), self.down.values(ids)

    def scores(self, x: Tensor) -> Tensor:
        """Gate scores (n, features) float32."""
        return self.gate(x, invariant=True)

    def select(self, scores: Tensor, count: int) -> Selection:
        """The `count` largest of scores (features,) float32 by magnitude."""
        ids, gates, bitmap = self._empty(count)
        histogram = thread_scratch("histogram", HISTOGRAM_WORDS)
        select_kernel(
            scores.data_ptr(), self.features, count, ids.ctypes.data, gates.ctypes.data, bitmap.ctypes.data,
            histogram,
        )  # fmt: skip
        return Selection(ids, gates, bitmap.tobytes())

    def score_and_select(self, x: Tensor, count: int) -> Selection:
        """`select` of the gate scores of one row x (1, hidden), in one call."""
        ids, gates, bitmap = self._empty(count)
        sync_threads()
        scores = thread_scratch("scores", self.features + 128 * MAX_THREADS)
        score_select_kernel(
            *self._table.args, x.data_ptr(), self.features, count, scores, ids.ctypes.data, gates.ctypes.data,
            bitmap.ctypes.data, thread_scratch("histogram", HISTOGRAM_WORDS), scores + 4 * self.features,
        )  # fmt: skip
        return Selection(ids, gates, bitmap.tobytes())

    def _empty(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not 0 < count <= self.features:
            raise ValueError(f"{count} features of {self.features}")
        return (
            np.empty(count, np.uint32),
            np.empty(count, np.float32),
            np.empty((self.features + 7) // 8, np.uint8),
        )

    def walk(self, x: Tensor, ids: np.ndarray, gates: np.ndarray) -> Tensor:
        """x (1, hidden) -> (1, hidden): sum of act(gate) * (up . x) * down over features `ids` (uint32 (k,))
        with gate scores `gates` (float32 (k,)), and the down bias; |act * up| <= 1e-10 is left out."""
        parts, stride, floats = self._plan(len(ids))
        out = torch.empty_like(x)
        sync_threads()
        walk_kernel(
            1, *self._args, x.data_ptr(), ids.ctypes.data, gates.ctypes.data, 0, self.features, len(ids),
            parts, stride, thread_scratch("walk", floats), 0, out.data_ptr(),
        )  # fmt: skip
        return out

    def walk_rows(self, x: Tensor, scores: Tensor, count: int) -> Tensor:
        """x (n, hidden) with gate scores (n, features) -> (n, hidden), each row as `select` and `walk` have
        it, to the bit."""
        n = check_rows(x, self.hidden)
        parts, stride, floats = self._plan(count)
        floats += 2 * count + (self.features + 63) // 64 * 2 + HISTOGRAM_WORDS
        out = torch.empty_like(x)
        scratch = thread_scratch("walk", sync_threads() * floats)
        walk_kernel(
            n, *self._args, x.data_ptr(), 0, 0, scores.data_ptr(), self.features, count, parts, stride,
            scratch, 4 * floats, out.data_ptr(),
        )  # fmt: skip
        return out

    def _plan(self, count: int) -> tuple[int, int, int]:
        """(parts, most features a part rounded up to 4, floats of scratch): of the feature count alone."""
        parts = max(1, min(MAX_PARTS, count // PART_FEATURES))
        stride = (count // parts + 4) & ~3
        return parts, stride, parts * (2 * stride + self.hidden + 63)


def dense_bytes(decoder: CpuDecoder, layer: int) -> int:
    """Weight bytes that the dense FFN of a layer reads for one row."""
    weights = decoder._layers[layer]
    return weights.gate_up.nbytes + weights.down.nbytes


def _same_bytes(a: RawTensor, b: RawTensor) -> bool:
    if a.kind != b.kind or a.shape != b.shape:
        return False
    return a.data.ctypes.data == b.data.ctypes.data or np.array_equal(a.data, b.data)
