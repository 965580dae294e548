"""Attention over a layer's K/V store, and appending to it.

A block is a tensor (2, kv_heads, 64, hd), K then V, float32 or bf16; the last block of a ring has ring % 64
rows
when that is not zero. A result's bits depend on the query, the attended rows and their positions only: not on
where the rows lie (ring, blocks, new), nor on how the tokens were cut into calls, nor on threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from larql_kv.backends.cpu.attention_kernels import append_kernel, decode_kernel, prefill_kernel
from larql_kv.backends.cpu.runtime import sync_threads

KV_BLOCK_ROWS = 64
_DECODE_ROWS = 4  # up to here keys and parts of a head are spread over threads; above, rows are
_TASK_QUERIES = 24  # vector queries of a prefill task: their scores share one pass over K and V


@dataclass(frozen=True)
class KvView:
    """Where one layer's past rows lie. Position p is slot p (or p % ring), in block slot // 64, row slot %
    64."""

    table: Tensor  # int64 (blocks,): addresses of the blocks
    rows_per_block: int = KV_BLOCK_ROWS
    ring: int = 0  # rows of the ring; 0: not a ring
    dtype_is_bf16: bool = False

    def __post_init__(self) -> None:
        if self.table.dtype is not torch.int64 or self.table.dim() != 1 or not self.table.is_contiguous():
            raise ValueError(f"table must be contiguous int64 (blocks,), got {self.table.dtype}")
        if self.rows_per_block != KV_BLOCK_ROWS or self.ring < 0:
            raise ValueError(
                f"rows_per_block must be 64 and ring >= 0, got {self.rows_per_block}, {self.ring}"
            )

    def check_holds(self, rows: int) -> None:
        """Raises ValueError unless the table has blocks for positions 0..rows-1 (a ring: for the ring)."""
        slots = min(rows, self.ring) if self.ring else rows
        if slots > KV_BLOCK_ROWS * self.table.numel():
            raise ValueError(f"{slots} K/V rows do not fit {self.table.numel()} blocks of {KV_BLOCK_ROWS}")


def _check_new(k_new: Tensor, v_new: Tensor) -> None:
    for name, t in (("k_new", k_new), ("v_new", v_new)):
        if t.dtype is not torch.float32 or t.dim() != 3 or not t.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 (n, kv_heads, hd), got {t.dtype} {tuple(t.shape)}"
            )
    if k_new.shape != v_new.shape:
        raise ValueError(f"k_new {tuple(k_new.shape)} and v_new {tuple(v_new.shape)} differ")


def attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    view: KvView,
    first_position: int,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    past_start: int = 0,
) -> Tensor:
    """q (n, heads, hd), k_new and v_new (n, kv_heads, hd), float32 -> (n, heads*hd) float32.

    Row i stands at P = first_position + i and attends max(past_start, P-window+1)..P (from past_start
    without a
    window): positions before first_position from the view, the others from k_new/v_new, whose values the
    caller
    has rounded to the store's dtype. softcap: s = cap*tanh(s/cap) after the scale.
    """
    _check_new(k_new, v_new)
    if q.dtype is not torch.float32 or q.dim() != 3 or not q.is_contiguous():
        raise ValueError(f"q must be contiguous float32 (n, heads, hd), got {q.dtype} {tuple(q.shape)}")
    n, heads, hd = q.shape
    kv_heads = k_new.shape[1]
    if k_new.shape != (n, kv_heads, hd) or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q {tuple(q.shape)} and k_new {tuple(k_new.shape)} do not fit together")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if not 0 <= past_start <= first_position:
        raise ValueError(f"past_start {past_start} must lie in 0..first_position = {first_position}")
    low = past_start if window is None else max(past_start, first_position - window + 1)
    if low < first_position:
        view.check_holds(first_position)
        if view.ring and first_position - low > view.ring:
            raise ValueError(f"positions {low}..{first_position - 1} do not fit a ring of {view.ring} rows")
    out = torch.empty((n, heads * hd), dtype=torch.float32)
    if n == 0:
        return out
    threads = sync_threads()
    width, group = (hd + 15) // 16, heads // kv_heads
    shape = (
        q.data_ptr(), k_new.data_ptr(), v_new.data_ptr(), n, heads, kv_heads, hd, view.table.data_ptr(),
        view.ring,
        int(view.dtype_is_bf16), first_position, window or 0, past_start, out.data_ptr(),
    )  # fmt: skip
    cap = 0.0 if softcap is None else softcap
    if n <= _DECODE_ROWS:
        # The rows' scores start at multiples of 16, and end with a whole group of 16.
        s_stride = ((first_position + n - (low & -16)) + 15) // 16 * 64
        queries = n * heads
        floats = 2 * queries * width * 16 + (queries + 15) // 16 * 16 + queries * s_stride // 4
        scratch = torch.empty(floats + threads * 64 * width * 16, dtype=torch.float32)
        at = scratch.data_ptr()
        # Parts of 32 head dimensions where parts of 64 would leave threads idle.
        split = 4 if kv_heads * ((width + 3) // 4) % threads == 0 else 2
        decode_kernel(*shape, 256, split, at, at + 4 * floats, s_stride, scale, cap)
        return out
    task_rows = max(1, _TASK_QUERIES // group)
    span = task_rows + (first_position + n if window is None else min(first_position + n, window + task_rows))
    s_stride = (span + 47) // 16 * 64
    queries = task_rows * group
    floats = 2 * queries * width * 16 + (queries + 15) // 16 * 16 + 64 * width * 16 + queries * s_stride // 4
    scratch = torch.empty(threads * floats, dtype=torch.float32)
    prefill_kernel(*shape, task_rows, scratch.data_ptr(), 4 * floats, s_stride, scale, cap)
    return out


def append_rows(k_new: Tensor, v_new: Tensor, view: KvView, first_position: int, skip: int = 0) -> None:
    """Write rows skip.. of k_new, v_new (n, kv_heads, hd) float32 into their slots (rounded when the store
    is bf16).

    In a ring, later rows overwrite earlier ones, as they should.
    """
    _check_new(k_new, v_new)
    n, kv_heads, hd = k_new.shape
    if skip >= n:
        return
    if skip < 0 or first_position < 0:
        raise ValueError(f"skip and first_position must not be negative, got {skip}, {first_position}")
    view.check_holds(first_position + n)
    append_kernel(
        k_new.data_ptr(), v_new.data_ptr(), skip, n, kv_heads, hd, view.table.data_ptr(), view.ring,
        int(view.dtype_is_bf16), first_position,
    )  # fmt: skip
