"""Rows by absolute position, in blocks of 64: growth without copying, rings, copy-on-write forks.

A layer that sees the whole past keeps position p in slot p. A layer with a window of W tokens is a
ring: slot p % W, never more than W rows. Blocks are what forks share; a block is cloned by whoever
writes to it first.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable

import numpy as np
import torch

from larql_kv.state.ledger import LedgerEntry, Role, entry

BLOCK = 64
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_ONE_THREAD = 1 << 18  # bytes: below, waking torch's threads takes longer than a copy


def allocate_block(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A block's tensor, uninitialised. On the host it is a mapping of its own: malloc would keep freed
    blocks for the process, so that dropped state (and whole conversations) would never leave memory.
    Private, so that a forked process cannot write into its parent's; populated at once (on Linux), for it is
    about to be written and a page fault for every 4 KiB takes longer than the copy. Raises MemoryError."""
    if device.type != "cpu":  # pragma: cuda only
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE)
    except OSError as error:
        raise MemoryError(f"no memory for a state block of {size:,} bytes: {error}") from error
    return torch.frombuffer(mapping, dtype=dtype).view(shape)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """target <- source; a few rows between host tensors of one dtype by this thread alone."""
    few = target.nbytes <= _ONE_THREAD and target.dtype is source.dtype
    if few and target.device.type == source.device.type == "cpu":
        if target.dtype is torch.bfloat16:  # numpy has none
            target, source = target.view(torch.int16), source.view(torch.int16)
        np.copyto(target.numpy(), source.detach().numpy())
    else:
        target.copy_(source)


class _Block:
    """One block tensor and the page lists that hold it (weak, so a dropped fork lets go by itself)."""

    __slots__ = ("owners", "tensor")

    def __init__(self, tensor: torch.Tensor, owner: PagedRows) -> None:
        self.tensor = tensor
        self.owners: weakref.WeakSet[PagedRows] = weakref.WeakSet((owner,))


class PagedRows:
    """Rows of one kind for one layer.

    `make_block(rows)` allocates a block of that many rows (at most 64); `ring` is the number of rows
    kept, or None for all. Writers call `reserve(first, stop)` before they write those positions, and
    write through `table`, the block addresses (int64), or `block(index)`. `version` goes up whenever the
    block list or an address changes, so that a copy of the table knows when it is old.
    """

    def __init__(self, make_block: Callable[[int], torch.Tensor], ring: int | None) -> None:
        self._make_block = make_block
        self.ring = ring
        self._blocks: list[_Block | None] = []  # None: let go of, see `release_below`
        self.table = torch.zeros(8, dtype=torch.int64)
        self.version = 0
        self.has_gaps = False  # whether some block may be None
        self._shared = False  # only a page list that was forked pays for the ownership check

    def block(self, index: int) -> torch.Tensor:
        block = self._blocks[index]
        assert block is not None
        return block.tensor

    @property
    def block_count(self) -> int:
        return len(self._blocks)

    def rows_of_block(self, index: int) -> int:
        """Rows that block `index` has room for: 64, fewer in the last block of a ring."""
        return BLOCK if self.ring is None else min(BLOCK, self.ring - index * BLOCK)

    def live_rows(self, length: int) -> int:
        """Rows in use when the state holds `length` positions."""
        return length if self.ring is None else min(length, self.ring)

    def reserve(self, first: int, stop: int) -> None:
        """Make the slots of positions first..stop-1 writable."""
        if self.ring is not None:
            if stop <= self.ring:
                pass
            elif stop - first >= self.ring or first // self.ring != (stop - 1) // self.ring:
                first, stop = 0, self.ring
            else:
                first, stop = first % self.ring, (stop - 1) % self.ring + 1
        first_block, last_block = first // BLOCK, (stop - 1) // BLOCK
        for index in range(
            first_block if self.has_gaps else min(first_block, len(self._blocks)), last_block + 1
        ):
            if index >= len(self._blocks) or self._blocks[index] is None:
                self._make(index)
        if self._shared:
            for index in range(first_block, last_block + 1):
                self._unshare(index)

    def _make(self, index: int) -> None:
        block = _Block(self._make_block(self.rows_of_block(index)), self)
        while len(self.table) <= index:
            self.table = torch.cat((self.table, torch.zeros_like(self.table)))
        self._blocks.extend([None] * (index + 1 - len(self._blocks)))
        self._blocks[index] = block
        self.table[index] = block.tensor.data_ptr()
        self.version += 1

    def _unshare(self, index: int) -> None:
        block = self._blocks[index]
        if block is not None and len(block.owners) > 1:
            own = _Block(self._make_block(self.rows_of_block(index)).copy_(block.tensor), self)
            self._blocks[index] = own
            self.table[index] = own.tensor.data_ptr()
            self.version += 1
            block.owners.discard(self)  # last: until then the other side clones before it writes

    def write(self, rows: torch.Tensor, first: int) -> None:
        """Copy rows (n, ...) into the slots of positions first.. (reserved before); blocks are (64, ...)."""
        for offset, index, slot, count in self.runs(first, first + rows.shape[0]):
            _copy(self.block(index)[slot : slot + count], rows[offset : offset + count])

    def put(self, rows: torch.Tensor, first: int) -> None:
        """Reserve and write rows (n, ...) of positions first..; of a ring, the last that it keeps."""
        skip = max(0, len(rows) - self.ring) if self.ring is not None else 0
        self.reserve(first + skip, first + len(rows))
        self.write(rows[skip:], first + skip)

    def read(self, first: int, stop: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of positions first..stop-1, concatenated (into `out`, of that shape)."""
        runs = self.runs(first, stop)
        return torch.cat([self.block(index)[slot : slot + count] for _, index, slot, count in runs], out=out)

    def runs(self, first: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Positions first..stop-1 as runs within one block: (offset, block, row in block, count)."""
        runs = []
        position = first
        while position < stop:
            slot = position if self.ring is None else position % self.ring
            index, row = divmod(slot, BLOCK)
            count = min(self.rows_of_block(index) - row, stop - position)
            runs.append((position - first, index, row, count))
            position += count
        return runs

    def truncate(self, length: int) -> None:
        """Let go of the blocks that no slot below `length` lies in."""
        self._release((length + BLOCK - 1) // BLOCK)

    def release_below(self, position: int) -> None:
        """Let go of the blocks wholly below `position` (no ring): their rows are kept elsewhere now. They are
        made again where `reserve` asks for them."""
        for index in range(min(position // BLOCK, len(self._blocks)) - 1, -1, -1):
            block = self._blocks[index]
            if block is None:
                break
            block.owners.discard(self)
            self._blocks[index] = None
            self.table[index] = 0
            self.has_gaps = True
            self.version += 1

    def clear(self) -> None:
        self._release(0)

    def _release(self, keep: int) -> None:
        if keep >= len(self._blocks):
            return
        for block in self._blocks[keep:]:
            if block is not None:
                block.owners.discard(self)
        del self._blocks[keep:]
        self.has_gaps = self.has_gaps and keep > 0
        self.version += 1
        self.table[keep:] = 0  # an address that nobody owns must not be followed

    def fork(self) -> PagedRows:
        """A page list with the same rows; the blocks are shared until either side writes."""
        twin = PagedRows(self._make_block, self.ring)
        twin._blocks, twin.table = list(self._blocks), self.table.clone()
        twin.has_gaps = self.has_gaps
        for block in twin._blocks:
            if block is not None:
                block.owners.add(twin)
        self._shared = twin._shared = True
        self.version += 1  # what was writable is shared now
        twin.version = self.version
        return twin

    def entries(self, name: str, role: Role, length: int, cold_below: int = 0) -> list[LedgerEntry]:
        """One ledger entry a block, and the table; blocks wholly below `cold_below` are tier cold."""
        live = self.live_rows(length)
        listed = []
        for index, block in enumerate(self._blocks):
            if block is None:
                continue
            rows = self.rows_of_block(index)
            used = max(0, min(rows, live - index * BLOCK))
            row_bytes = block.tensor.untyped_storage().nbytes() // rows
            cold = self.ring is None and (index + 1) * BLOCK <= cold_below
            listed.append(entry(name, role, block.tensor, used * row_bytes, "cold" if cold else "hot"))
        listed.append(entry("block tables", "workspace", self.table, 8 * len(self._blocks)))
        return listed
