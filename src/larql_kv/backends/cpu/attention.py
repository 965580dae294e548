"""Attention over a layer's K/V store, and appending to it.

A block is a tensor (2, kv_heads, 64, hd), K then V, float32 or bf16; the last block of a ring has ring % 64
rows
when that is not zero. A result's bits depend on the query, the attended rows and their positions only: not on
where the rows lie (ring, blocks, new), nor on how the tokens were cut into calls, nor on threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from larql_kv.backends.cpu.attention_kernels import FEW_ROWS, append_kernel, attend_kernel, scratch_layout
from larql_kv.backends.cpu.runtime import MAX_THREADS, sync_threads, thread_scratch

KV_BLOCK_ROWS = 64
_SERIAL_WORK = 150_000  # below this many multiply-adds, two more launches cost more than they save


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
        _check_holds(self.blocks, self.ring, rows)


def _check_holds(blocks: int, ring: int, rows: int) -> None:
    slots = min(rows, ring) if ring else rows
    if slots > KV_BLOCK_ROWS * blocks:
        raise ValueError(f"{slots} K/V rows do not fit {blocks} blocks of {KV_BLOCK_ROWS}")


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
    few = n <= FEW_ROWS and (first_position + n - low) * heads * hd > _SERIAL_WORK
    layout = scratch_layout(n, heads, kv_heads, hd, first_position, low, window or 0, few)
    floats = layout[2] + threads * _tile_floats(hd) if few else threads * layout[2]
    attend_kernel(
        q.data_ptr(), k_new.data_ptr(), v_new.data_ptr(), out.data_ptr(), view.address, first_position,
        window or 0, n, heads, kv_heads, hd, view.ring, int(view.dtype_is_bf16), past_start, threads,
        _SERIAL_WORK, thread_scratch("attention", floats), scale, softcap or 0.0,
    )  # fmt: skip
    return out


def _tile_floats(hd: int) -> int:
    return KV_BLOCK_ROWS * ((hd + 15) // 16 * 16)


class RowAttention:
    """`attend` and `append_rows` for one row of one model: the shapes are known, and checked where rows are
    made. Every argument is of the shapes that those two document."""

    def __init__(
        self, heads: int, kv_heads: int, hd: int, is_bf16: bool, scale: float, softcap: float | None
    ) -> None:
        self._width = heads * hd
        self._shape = (1, heads, kv_heads, hd)
        self._append_shape = (0, 1, kv_heads, hd)
        self._is_bf16 = int(is_bf16)
        self._scale, self._softcap = scale, softcap or 0.0
        self._scratch = (0, 0)  # floats that positions below the first number need

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, ring: int, first: int, window: int | None
    ) -> Tensor:
        """The row at position `first`, over the past in the blocks of `table` -> (1, heads * hd)."""
        window = window or 0
        _check_holds(table.numel(), ring, first)
        if ring and not 0 < window <= ring + 1:
            raise ValueError(f"a window of {window or None} does not fit a ring of {ring} rows")
        positions, floats = self._scratch
        if first >= positions:
            positions, floats = self._scratch = self._scratch_below(2 * first + 256)
        out = torch.empty(1, self._width)
        attend_kernel(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), table.data_ptr(), first, window,
            *self._shape, ring, self._is_bf16, 0, sync_threads(), _SERIAL_WORK,
            thread_scratch("attention", floats), self._scale, self._softcap,
        )  # fmt: skip
        return out

    def _scratch_below(self, positions: int) -> tuple[int, int]:
        """(positions, floats of scratch that suffice below them, with any window and any thread count)."""
        few, many = (scratch_layout(*self._shape, positions, 0, 0, few)[2] for few in (True, False))
        return positions, max(few + MAX_THREADS * _tile_floats(self._shape[3]), MAX_THREADS * many)

    def append(self, k: Tensor, v: Tensor, table: Tensor, ring: int, first: int) -> None:
        """Write the row of position `first` into its slot."""
        _check_holds(table.numel(), ring, first + 1)
        append_kernel(
            k.data_ptr(), v.data_ptr(), *self._append_shape, table.data_ptr(), ring, self._is_bf16, first
        )


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
