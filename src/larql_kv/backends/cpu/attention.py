"""Attention over a layer's K/V store, and appending to it.

A block is a tensor (2, kv_heads, 64, hd), K then V, float32 or bf16; the last block of a ring has ring % 64
rows
when that is not zero. A result's bits depend on the query, the attended rows and their positions only: not on
where the rows lie (ring, blocks, new), nor on how the tokens were cut into calls, nor on threads.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from larql_kv.backends.cpu.attention_kernels import (
    CODE_RING,
    CODE_TABLE,
    CODED,
    FEW_ROWS,
    IS_BF16,
    K_BITS,
    K_BYTES,
    LEVELS,
    RING,
    SINK_TABLE,
    SINKS,
    STORE_WORDS,
    TABLE,
    TILE_ROWS,
    V_BITS,
    V_BYTES,
    append_kernel,
    attend_kernel,
    scratch_layout,
)
from larql_kv.backends.cpu.runtime import MAX_THREADS, sync_threads, thread_scratch

if TYPE_CHECKING:
    from larql_kv.codec.turbo import TurboCode

KV_BLOCK_ROWS = 64
_SERIAL_WORK = 150_000  # below this many multiply-adds, two more launches cost more than they save


def _table_blocks(table: Tensor) -> int:
    if table.dtype is not torch.int64 or table.dim() != 1 or not table.is_contiguous():
        raise ValueError(f"table must be contiguous int64 (blocks,), got {table.dtype}")
    return table.numel()


class KvStore:
    """Where one layer's past rows lie, in the words that the kernels read.

    Position p is in slot p (a ring of `ring` rows: p % ring), block slot // 64, row slot % 64 of `table`,
    int64 (blocks,): the addresses of the blocks, which the caller keeps alive. `set_sinks` and `set_codes`
    say which positions lie elsewhere.
    """

    __slots__ = ("_held", "_levels", "_words", "address", "blocks", "coded", "ring", "sinks")

    def __init__(self, table: Tensor, ring: int = 0, is_bf16: bool = False) -> None:
        if ring < 0:
            raise ValueError(f"ring must be >= 0, got {ring}")
        self.blocks = _table_blocks(table)
        self.ring = ring  # 0: not a ring
        self.sinks = self.coded = 0
        self._held: list[Tensor] = [table]
        self._words = array("q", [0] * STORE_WORDS)
        self.address = self._words.buffer_info()[0]
        self._words[TABLE], self._words[RING], self._words[IS_BF16] = table.data_ptr(), ring, int(is_bf16)

    def set_sinks(self, sinks: int, table: Tensor) -> None:
        """Positions below `sinks` lie in full precision in the blocks of `table`, p in slot p."""
        if sinks > KV_BLOCK_ROWS * _table_blocks(table):
            raise ValueError(f"{sinks} sinks do not fit {table.numel()} blocks of {KV_BLOCK_ROWS}")
        self._words[SINKS], self._words[SINK_TABLE] = sinks, table.data_ptr()
        self.sinks = sinks
        self._held.append(table)

    def set_codes(self, table: Tensor, ring: int, k: TurboCode, v: TurboCode) -> None:
        """Positions sinks <= p < `coded` lie as codes (see `state/kv_rows.py` for a block's layout) in the
        blocks of `table`."""
        words = self._words
        self._levels = array("f", [*k.coefficients, *v.coefficients])
        words[CODE_TABLE], words[CODE_RING], words[LEVELS] = (
            table.data_ptr(), ring, self._levels.buffer_info()[0]
        )  # fmt: skip
        _table_blocks(table)
        words[K_BITS], words[V_BITS] = k.bits, v.bits
        words[K_BYTES], words[V_BYTES] = k.code_bytes, v.code_bytes
        self._held.append(table)

    def set_coded(self, coded: int) -> None:
        """Positions below `coded` lie as codes, but for sinks."""
        self._words[CODED] = self.coded = coded

    def check_holds(self, rows: int) -> None:
        """Raises ValueError unless there are blocks for positions coded..rows-1 (a ring: for the ring)."""
        slots = min(rows, self.ring) if self.ring else rows
        if max(self.coded, self.sinks) < rows and slots > KV_BLOCK_ROWS * self.blocks:
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
    store: KvStore,
    first_position: int,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    past_start: int = 0,
    sinks: int = 0,
    q_codes: Tensor | None = None,
) -> Tensor:
    """q (n, heads, hd), k_new and v_new (n, kv_heads, hd), float32 -> (n, heads*hd) float32.

    Row i stands at P = first_position + i and attends max(past_start, P-window+1)..P (from past_start
    without a window) and positions below `sinks`: those before first_position from the store, the others from
    k_new/v_new, whose values the caller has rounded to the store's dtype. Codes meet `q_codes` (as q; q where
    None). softcap: s = cap*tanh(s/cap) after the scale.
    """
    n, heads, hd, kv_heads = _check(q, k_new, v_new)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if not 0 <= past_start <= first_position:
        raise ValueError(f"past_start {past_start} must lie in 0..first_position = {first_position}")
    past_start = max(past_start, sinks)
    low = past_start if window is None else max(past_start, first_position - window + 1)
    if low < first_position:
        store.check_holds(first_position)
        full = first_position - max(low, store.coded)  # rows of full precision
        if store.ring and full > store.ring:
            raise ValueError(
                f"positions {first_position - full}..{first_position - 1} do not fit a ring of {store.ring} "
                "rows"
            )
    if min(sinks, first_position) > store.sinks and store.ring:
        raise ValueError(f"{sinks} sinks are attended, the store keeps {store.sinks}")
    out = q.new_empty(n, heads * hd)
    if n == 0:
        return out
    threads = sync_threads()
    few = n <= FEW_ROWS and (first_position + n - low) * heads * hd > _SERIAL_WORK
    layout = scratch_layout(n, heads, kv_heads, hd, first_position, low, window or 0, sinks, few)
    floats = layout[2] + threads * _tile_floats(hd) if few else threads * layout[2]
    attend_kernel(
        q.data_ptr(), _meeting(q, q_codes, store), k_new.data_ptr(), v_new.data_ptr(), out.data_ptr(),
        store.address, first_position, window or 0, n, heads, kv_heads, hd, past_start, sinks, threads,
        _SERIAL_WORK, thread_scratch("attention", floats), scale, softcap or 0.0,
    )  # fmt: skip
    return out


def _meeting(q: Tensor, q_codes: Tensor | None, store: KvStore) -> int:
    """Address of the queries that codes meet, 0 without codes."""
    if store.coded <= store.sinks:
        return 0
    if q_codes is None:
        return q.data_ptr()
    if q_codes.shape != q.shape or q_codes.dtype is not torch.float32 or not q_codes.is_contiguous():
        raise ValueError(f"q_codes must be as q {tuple(q.shape)}, got {q_codes.dtype} {tuple(q_codes.shape)}")
    return q_codes.data_ptr()


def _tile_floats(hd: int) -> int:
    return TILE_ROWS * ((hd + 15) // 16 * 16)


class RowAttention:
    """`attend` and `append_rows` for one row of one model: the shapes are known, and checked where rows are
    made. Every argument is of the shapes that those two document."""

    def __init__(self, heads: int, kv_heads: int, hd: int, scale: float, softcap: float | None) -> None:
        self._width = heads * hd
        self._shape = (1, heads, kv_heads, hd)
        self._append_shape = (0, 1, kv_heads, hd)
        self._scale, self._softcap = scale, softcap or 0.0
        self._scratch = (0, 0, 0)  # positions, sinks, and the floats that suffice below them

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        store: KvStore,
        first: int,
        window: int | None,
        start: int = 0,
        sinks: int = 0,
        q_codes: Tensor | None = None,
    ) -> Tensor:
        """The row at position `first`, over the past in `store` -> (1, heads * hd)."""
        window, start = window or 0, max(start, sinks)
        store.check_holds(first)
        low = max(start, first - window + 1) if window else start
        if store.ring and first - max(low, store.coded) > store.ring:
            raise ValueError(f"a window of {window or None} does not fit a ring of {store.ring} rows")
        positions, most_sinks, floats = self._scratch
        if first >= positions or sinks > most_sinks:
            positions, most_sinks, floats = self._scratch = self._scratch_below(2 * first + 256, sinks)
        out = torch.empty(1, self._width)
        attend_kernel(
            q.data_ptr(), _meeting(q, q_codes, store), k.data_ptr(), v.data_ptr(), out.data_ptr(),
            store.address, first, window, *self._shape, start, sinks, sync_threads(), _SERIAL_WORK,
            thread_scratch("attention", floats), self._scale, self._softcap,
        )  # fmt: skip
        return out

    def _scratch_below(self, positions: int, sinks: int) -> tuple[int, int, int]:
        """Floats of scratch that suffice below `positions`, with any window and any thread count."""
        few, many = (scratch_layout(*self._shape, positions, 0, 0, sinks, few)[2] for few in (True, False))
        floats = max(few + MAX_THREADS * _tile_floats(self._shape[3]), MAX_THREADS * many)
        return positions, sinks, floats

    def append(self, k: Tensor, v: Tensor, store: KvStore, first: int) -> None:
        """Write the row of position `first` into its slot."""
        store.check_holds(first + 1)
        append_kernel(k.data_ptr(), v.data_ptr(), *self._append_shape, store.address, first)


def append_rows(k_new: Tensor, v_new: Tensor, store: KvStore, first_position: int, skip: int = 0) -> None:
    """Write rows skip.. of k_new, v_new (n, kv_heads, hd) float32 into their slots (rounded when the store
    is bf16).

    In a ring, later rows overwrite earlier ones, as they should.
    """
    n, kv_heads, hd, _ = _check(k_new, k_new, v_new)
    if skip >= n:
        return
    if skip < 0 or first_position < 0:
        raise ValueError(f"skip and first_position must not be negative, got {skip}, {first_position}")
    store.check_holds(first_position + n)
    append_kernel(
        k_new.data_ptr(), v_new.data_ptr(), skip, n, kv_heads, hd, store.address, first_position
    )  # fmt: skip
