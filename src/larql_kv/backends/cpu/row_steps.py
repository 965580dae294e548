"""A layer's composite steps for a single row: one call of compiled code each, arguments made at load time.

The decoder comes here when it is handed one row (`is_row`); many rows, and anything malformed, go the other
way, where every argument is validated. The bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from larql_kv.backends.cpu.linear import BLOCK, PackedLinear
from larql_kv.backends.cpu.row_kernels import (
    PART_WORDS,
    add_kernel,
    add_linear_kernel,
    ffn_kernel,
    inputs_kernel,
)
from larql_kv.backends.cpu.rowop_kernels import ACTIVATION_CODES, norm_kernel_serial
from larql_kv.backends.cpu.runtime import MAX_THREADS, sync_threads, thread_scratch

if TYPE_CHECKING:
    from larql_kv.model.config import ModelConfig
    from larql_kv.model.rope import RopeTable

_FLOAT32 = torch.float32
_TABLE_ROWS = 256  # a rotary table's address is asked for anew after so many positions


def is_row(x: Tensor, size: int) -> bool:
    """Whether `x` is one contiguous float32 row of `size` values."""
    return x.numel() == size and x.dtype is _FLOAT32 and x.is_contiguous()


class RotaryRows:
    """Addresses of the rows of a rotary table (which layers share), without slicing it at every step."""

    def __init__(self, table: RopeTable) -> None:
        self._table = table
        self._held = (0, 0, 0, 0, None)  # rows, address of cos, of sin, bytes a row, what keeps them alive

    def at(self, position: int) -> tuple[int, int]:
        """Addresses of cos and sin (rot/2,) float32. Raises ValueError for a negative position."""
        held = self._held
        if not 0 <= position < held[0]:
            cos, sin = self._table.rows(0, max(0, position // _TABLE_ROWS + 1) * _TABLE_ROWS)
            self._table.rows(position, 1)  # refuses a negative position
            held = (len(cos), cos.data_ptr(), sin.data_ptr(), 4 * cos.shape[1], (cos, sin))
            self._held = held
        offset = position * held[3]
        return held[1] + offset, held[2] + offset


@dataclass
class LayerWeights:
    """One layer's weights: packed linears and float32 norm vectors (None where the model has none)."""

    attn_norm: Tensor
    q: PackedLinear
    kv: PackedLinear
    o: PackedLinear
    ffn_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_attn_norm: Tensor | None
    post_ffn_norm: Tensor | None
    rope: RopeTable


def _address(vector: Tensor | None, size: int) -> int:
    """Address of a float32 vector (size,); 0 for None. Raises ValueError for any other tensor."""
    if vector is None:
        return 0
    if vector.dtype is not torch.float32 or vector.shape != (size,) or not vector.is_contiguous():
        raise ValueError(f"a vector must be float32 ({size},), got {vector.dtype} {tuple(vector.shape)}")
    return vector.data_ptr()


class _Linears:
    """Linears of one input as the table of parts that `row_kernels` walks; outputs one after the other."""

    def __init__(self, *linears: PackedLinear) -> None:
        words: list[int] = []
        self.blocks = self.outputs = 0
        for linear in linears:
            if linear.in_features != linears[0].in_features:
                raise ValueError(f"linears of {linear.in_features} and {linears[0].in_features} inputs")
            for part in linear.parts:
                self.blocks += part.blocks
                bias = 0 if linear.bias is None else linear.bias.data_ptr() + 4 * part.first
                words += [
                    part.fmt.code, part.data.data_ptr(), part.block_bytes,
                    linear.in_features // part.fmt.record_k, 4 * (self.outputs + part.first), part.outputs,
                    bias, self.blocks,
                ]  # fmt: skip
            self.outputs += linear.out_features
        self.table = torch.tensor(words, dtype=torch.int64).view(-1, PART_WORDS)
        self.args = (self.table.data_ptr(), self.blocks)


class RowSteps:
    """The steps of one layer on one row. Results are fresh tensors; nothing is kept of what is handed in."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, rotary: RotaryRows, exact: bool) -> None:
        hidden, heads, kv_heads, hd = config.hidden, config.heads, config.kv_heads, config.head_dim
        self._weights = weights  # what the addresses below point into
        self._tables = (
            _Linears(weights.q, weights.kv), _Linears(weights.o), _Linears(weights.gate_up),
            _Linears(weights.down),
        )  # fmt: skip
        inputs, out, gate_up, down = self._tables
        sizes = (inputs.outputs, out.outputs, gate_up.outputs, down.outputs)
        if sizes != ((heads + 2 * kv_heads) * hd, hidden, 2 * config.intermediate, hidden):
            raise ValueError(f"linears of {sizes} outputs do not fit the configuration")
        self._rotary = rotary
        self._eps = config.norm_eps
        self._hidden = hidden
        self._heads = (heads, kv_heads, hd)
        self._inputs = (
            _address(weights.attn_norm, hidden), hidden, int(not exact), *inputs.args, heads, kv_heads, hd,
            len(weights.rope.spec.inv_freq), _address(weights.q_norm, hd), _address(weights.k_norm, hd),
        )  # fmt: skip
        self._out = (*out.args, hidden, _address(weights.post_attn_norm, hidden))
        self._ffn_norm = (1, hidden, _address(weights.ffn_norm, hidden), 0)
        self._ffn = (
            *(weights.gate_up.gated_plan() or (0,) * 7), *gate_up.args, config.intermediate,
            ACTIVATION_CODES[config.activation], *down.args,
        )  # fmt: skip
        self._post = (hidden, _address(weights.post_ffn_norm, hidden))
        # Enough for as many threads as there can be: a kernel does not ask how many run it.
        self._floats = max(hidden + inputs.outputs, 3 * config.intermediate) + MAX_THREADS * 2 * BLOCK

    def inputs(self, row: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """row (1, hidden) -> q (1, heads, hd), k and v (1, kv_heads, hd)."""
        heads, kv_heads, hd = self._heads
        q, k, v = torch.empty(1, heads, hd), torch.empty(1, kv_heads, hd), torch.empty(1, kv_heads, hd)
        sync_threads()
        inputs_kernel(
            *self._inputs, row.data_ptr(), *self._rotary.at(position), q.data_ptr(), k.data_ptr(),
            v.data_ptr(), thread_scratch("row", self._floats), self._eps,
        )  # fmt: skip
        return q, k, v

    def add_attention_(self, row: Tensor, attended: Tensor) -> None:
        """row (1, hidden) += the output projection of attended (1, heads * hd), normed where there is one."""
        add_linear_kernel(
            *self._out, attended.data_ptr(), row.data_ptr(), thread_scratch("row", self._floats), self._eps
        )

    def ffn_input(self, row: Tensor) -> Tensor:
        """(1, hidden) -> (1, hidden), normed."""
        out = torch.empty_like(row)
        norm_kernel_serial(row.data_ptr(), out.data_ptr(), *self._ffn_norm, self._eps)
        return out

    def ffn(self, x: Tensor) -> Tensor:
        """(1, hidden) -> (1, hidden)."""
        out = torch.empty_like(x)
        sync_threads()  # it may run in another thread than the rest of the step
        ffn_kernel(*self._ffn, x.data_ptr(), out.data_ptr(), thread_scratch("row", self._floats))
        return out

    def add_ffn_(self, row: Tensor, update: Tensor) -> None:
        """row (1, hidden) += update (1, hidden), normed where there is a norm."""
        add_kernel(*self._post, update.data_ptr(), row.data_ptr(), self._eps)
