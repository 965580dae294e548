"""Attention over a layer's K/V store, and appending to it.

A block is a tensor (2, kv_heads, 64, hd), K then V, float32 or bf16; the last block of a ring has ring % 64
rows
when that is not zero. A result's bits depend on the query, the attended rows and their positions only: not on
where the rows lie (ring, blocks, new), nor on how the tokens were cut into calls, nor on threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from larql_kv.backends.cpu.attention_kernels import append_kernel, decode_kernel, prefill_kernel
from larql_kv.backends.cpu.runtime import sync_threads, thread_scratch

KV_BLOCK_ROWS = 64
_DECODE_ROWS = 4  # up to here keys and parts of a head are spread over threads; above, rows are
_SERIAL_WORK = 150_000  # below this many multiply-adds, two more launches cost more than they save
_TASK_QUERIES = 24  # vector queries of a prefill task: their scores share one pass over K and V


class KvView:
    """Where one layer's past rows lie. Position p is in slot p (a ring of `ring` rows: p % ring), block
    slot // 64,
    row slot % 64. `table`: int64 (blocks,), the addresses of the blocks, which the caller keeps alive."""

    __slots__ = ("address", "blocks", "dtype_is_bf16", "ring", "rows_per_block", "table")

    def __init__(
        self, table: Tensor, rows_per_block: int = KV_BLOCK_ROWS, ring: int = 0, dtype_is_bf16: bool = False
    ) -> None:
        if table.dtype is not torch.int64 or table.dim() != 1 or not table.is_contiguous():
            raise ValueError(f"table must be contiguous int64 (blocks,), got {table.dtype}")
        if rows_per_block != KV_BLOCK_ROWS or ring < 0:
            raise ValueError(f"rows_per_block must be 64 and ring >= 0, got {rows_per_block}, {ring}")
        self.table = table
        self.rows_per_block = rows_per_block
        self.ring = ring  # 0: not a ring
        self.dtype_is_bf16 = dtype_is_bf16
        self.address = table.data_ptr()
        self.blocks = table.numel()

    def check_holds(self, rows: int) -> None:
        """Raises ValueError unless the table has blocks for positions 0..rows-1 (a ring: for the ring)."""
        slots = min(rows, self.ring) if self.ring else rows
        if slots > KV_BLOCK_ROWS * self.blocks:
            raise ValueError(f"{slots} K/V rows do not fit {self.blocks} blocks of {KV_BLOCK_ROWS}")


def _check(q: Tensor, k_new: Tensor, v_new: Tensor) -> tuple[int, int, int, int]:
    """(n, heads, hd, kv_heads); raises ValueError unless the three are float32, contiguous and fitting."""
    for name, t in (("q", q), ("k_new", k_new), ("v_new", v_new)):
        if t.dtype is not torch.float32 or t.dim() != 3 or not t.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 (n, heads, hd), got {t.dtype} {tuple(t.shape)}"
            )
    n, heads, hd = q.shape
    shape = k_new.shape
    if shape != v_new.shape:
        raise ValueError(f"k_new {tuple(shape)} and v_new {tuple(v_new.shape)} differ")
    kv_heads = shape[1]
    if shape[0] != n or shape[2] != hd or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q {tuple(q.shape)} and k_new {tuple(shape)} do not fit together")
    return n, heads, hd, kv_heads


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
    n, heads, hd, kv_heads = _check(q, k_new, v_new)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if not 0 <= past_start <= first_position:
        raise ValueError(f"past_start {past_start} must lie in 0..first_position = {first_position}")
    low = past_start if window is None else max(past_start, first_position - window + 1)
    if low < first_position:
        view.check_holds(first_position)
        if view.ring and first_position - low > view.ring:
            raise ValueError(f"positions {low}..{first_position - 1} do not fit a ring of {view.ring} rows")
    out = q.new_empty(n, heads * hd)
    if n == 0:
        return out
    threads = sync_threads()
    width, group = (hd + 15) // 16, heads // kv_heads
    shape = (
        q.data_ptr(), k_new.data_ptr(), v_new.data_ptr(), n, heads, kv_heads, hd, view.address,
        view.ring, int(view.dtype_is_bf16), first_position, window or 0, past_start, out.data_ptr(),
    )  # fmt: skip
    cap = 0.0 if softcap is None else softcap
    span = first_position + n - low
    if n <= _DECODE_ROWS and span * heads * hd > _SERIAL_WORK:
        # The rows' scores start at multiples of 16, and end with a whole group of 16.
        s_stride = ((first_position + n - (low & -16)) + 15) // 16 * 64
        queries = n * heads
        floats = 2 * queries * width * 16 + (queries + 15) // 16 * 16 + queries * s_stride // 4
        at = thread_scratch("attention", floats + threads * 64 * width * 16)
        # Parts of 32 head dimensions where parts of 64 would leave threads idle.
        split = 4 if kv_heads * ((width + 3) // 4) % threads == 0 else 2
        decode_kernel(*shape, 256, split, at, at + 4 * floats, s_stride, scale, cap)
        return out
    task_rows = max(1, _TASK_QUERIES // group)
    if window is not None:
        span = min(span, window + task_rows)
    s_stride = (span + 47) // 16 * 64
    queries = task_rows * group
    floats = 2 * queries * width * 16 + (queries + 15) // 16 * 16 + 64 * width * 16 + queries * s_stride // 4
    at = thread_scratch("attention", threads * floats)
    prefill_kernel(*shape, task_rows, at, 4 * floats, s_stride, scale, cap)
    return out


def append_rows(k_new: Tensor, v_new: Tensor, view: KvView, first_position: int, skip: int = 0) -> None:
    """Write rows skip.. of k_new, v_new (n, kv_heads, hd) float32 into their slots (rounded when the store
    is bf16).

    In a ring, later rows overwrite earlier ones, as they should.
    """
    n, kv_heads, hd, _ = _check(k_new, k_new, v_new)
    if skip >= n:
        return
    if skip < 0 or first_position < 0:
        raise ValueError(f"skip and first_position must not be negative, got {skip}, {first_position}")
    view.check_holds(first_position + n)
    append_kernel(
        k_new.data_ptr(), v_new.data_ptr(), skip, n, kv_heads, hd, view.address, view.ring,
        int(view.dtype_is_bf16), first_position,
    )  # fmt: skip
