"""One layer's K/V rows: in full precision, or as codes once they left the recent tail.

A block of full-precision rows is a tensor (2, kv_heads, rows, head_dim), K then V. A block of codes is uint8:
K codes (kv_heads, rows, code bytes), V codes, zeros up to a multiple of 4, then float32 scales of K
(kv_heads, rows) and of V. Both are laid out by the rows that the block has room for (64; fewer at the end of
a ring). Rows of a coded layer are rotated, coded or not: attention on them runs in the rotated domain.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from larql_kv.codec.turbo import TurboCode
from larql_kv.state.ledger import LedgerEntry, Role, entry
from larql_kv.state.pages import BLOCK, PagedRows, allocate_block

if TYPE_CHECKING:
    from larql_kv.model.model import Model


@dataclass(frozen=True)
class KvCode:
    """How K and V vectors are held as codes, and how many of the latest rows are not."""

    k: TurboCode
    v: TurboCode
    recent: int
    centred: bool = True  # of K, code what is left after the mean of the first block's rows

    @property
    def name(self) -> str:
        """As the bench prints it: turbo4, or turbo4/3 for K bits / V bits."""
        bits = f"{self.k.bits}" if self.k.bits == self.v.bits else f"{self.k.bits}/{self.v.bits}"
        return f"turbo{bits}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one K and one V vector with their scales."""
        return self.k.code_bytes + self.v.code_bytes + 8

    def edge(self, position: int) -> int:
        """A query at `position` reads positions below this as codes: whole blocks behind the recent rows."""
        return max(0, position - self.recent) // BLOCK * BLOCK


class KvRows:
    """Where one layer's K/V rows lie and which of them are attended.

    window, sinks    a query at P attends the last `window` positions and those below `sinks`
    start            positions below it are not attended, sinks excepted
    hot              rows of full precision
    sink_pages       those of positions below `kept_sinks`, which no ring may drop and no code replaces
    code, code_pages, coded    positions kept_sinks <= p < coded lie as codes
    """

    def __init__(
        self,
        model: Model,
        window: int | None = None,
        sinks: int = 0,
        ring: int | None = None,
        code: KvCode | None = None,
        alive: int | None = None,
        kept_sinks: int | None = None,
    ) -> None:
        """`ring`: rows of `hot`, None for all; `alive`: of a coded layer, how many of the last rows any query
        sees. `kept_sinks`: those in pages of their own (default `sinks`)."""
        config = model.config
        heads, width = config.kv_heads, config.head_dim
        self.window, self.sinks, self.start = window, sinks, 0
        self.kept_sinks = sinks if kept_sinks is None else kept_sinks
        self.code, self.coded = code, 0
        self.mean: torch.Tensor | None = None  # (kv_heads, head_dim) float32: of K, rotated
        self.view: tuple[int, Any] | None = None  # the backend's description of this, and its version
        self._shape = (heads, width)
        self._encode = model.decoder.encode

        def make_block(rows: int) -> torch.Tensor:
            return allocate_block((2, heads, rows, width), model.kv_dtype, model.device)

        def make_codes(rows: int) -> torch.Tensor:
            assert code is not None
            return allocate_block((_code_bytes(rows * heads, code),), torch.uint8, model.device)

        self.hot = PagedRows(make_block, ring)
        self.sink_pages = PagedRows(make_block, None) if self.kept_sinks else None
        self.code_pages = None
        if code is not None:
            behind = None if alive is None else max(BLOCK, alive - code.recent)
            self.code_pages = PagedRows(make_codes, behind)

    @property
    def pages(self) -> list[PagedRows]:
        return [pages for pages in (self.hot, self.sink_pages, self.code_pages) if pages is not None]

    @property
    def version(self) -> int:
        """Goes up whenever a block list or an address changes."""
        if self.sink_pages is None and self.code_pages is None:  # twice a layer and step
            return self.hot.version
        return sum([pages.version for pages in self.pages])

    @property
    def plain(self) -> bool:
        """Whether a window (or none) over full-precision rows is all there is to it."""
        return not (self.sinks or self.kept_sinks or self.start or self.code)

    def reserve(self, first: int, stop: int) -> None:
        """Make positions first..stop-1 writable in full precision."""
        if self.sink_pages is not None and first < self.kept_sinks:
            self.sink_pages.reserve(first, min(stop, self.kept_sinks))
            first = self.kept_sinks
        if first < stop:
            self.hot.reserve(first, stop)

    # -- codes ---------------------------------------------------------------------------------------

    def encode_below(self, edge: int) -> None:
        """From now on positions below `edge` lie as codes, sinks excepted. Each row is coded once, from its
        full precision."""
        first = max(self.coded, self.kept_sinks)
        if edge <= self.coded:
            return
        assert self.code is not None
        assert self.code_pages is not None
        ring = self.code_pages.ring
        first = first if ring is None else max(first, edge - ring)
        if first < edge:
            both = self._full_precision(first, edge)
            if self.code.centred and self.mean is None:
                self.mean = both[0].mean(1)
            self.code_pages.reserve(first, edge)
            for offset, index, slot, count in self.code_pages.runs(first, edge):
                part = both[:, :, offset : offset + count]
                k, v, k_scale, v_scale = (view[:, slot : slot + count] for view in self._code_views(index))
                self._encode(self.code.k, part[0], self.mean, k, k_scale)
                self._encode(self.code.v, part[1], None, v, v_scale)
        self.coded = edge

    def _full_precision(self, first: int, stop: int) -> torch.Tensor:
        """(2, kv_heads, n, head_dim) float32 of positions that are not coded yet."""
        parts = [
            self.hot.block(index)[:, :, slot : slot + count]
            for _, index, slot, count in self.hot.runs(first, stop)
        ]
        return torch.cat(parts, 2).float()

    def _code_views(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """K codes (kv_heads, rows, bytes), V codes, K scales (kv_heads, rows), V scales of a block."""
        assert self.code is not None
        assert self.code_pages is not None
        heads, rows = self._shape[0], self.code_pages.rows_of_block(index)
        block = self.code_pages.block(index)
        k_end = heads * rows * self.code.k.code_bytes
        v_end = k_end + heads * rows * self.code.v.code_bytes
        scales = block[(v_end + 3) // 4 * 4 :].view(torch.float32).view(2, heads, rows)
        return block[:k_end].view(heads, rows, -1), block[k_end:v_end].view(heads, rows, -1), *scales

    def decoded(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (n, kv_heads, head_dim) float32 of coded positions, rotated."""
        assert self.code is not None
        assert self.code_pages is not None
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        mean = None if self.mean is None else self.mean.unsqueeze(1)
        for _, index, slot, count in self.code_pages.runs(first, stop):
            k, v, k_scale, v_scale = (view[:, slot : slot + count] for view in self._code_views(index))
            parts[0].append(self.code.k.decode(k, k_scale, mean))
            parts[1].append(self.code.v.decode(v, v_scale))
        k, v = (torch.cat(part, 1).transpose(0, 1).contiguous() for part in parts)
        return k, v

    # -- time ----------------------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        """Forget positions >= `length`; what is coded below it stays coded."""
        self.coded = min(self.coded, length)
        if length == 0:
            self.mean, self.start, self.view = None, 0, None
        self.hot.truncate(self.hot.live_rows(length) if length > self.coded else 0)
        if self.sink_pages is not None:
            self.sink_pages.truncate(min(length, self.kept_sinks))
        if self.code_pages is not None:
            self.code_pages.truncate(self.code_pages.live_rows(self.coded))

    def clear(self) -> None:
        self.truncate(0)

    def fork(self) -> KvRows:
        twin = copy.copy(self)
        twin.view = None
        twin.hot = self.hot.fork()
        twin.sink_pages = None if self.sink_pages is None else self.sink_pages.fork()
        twin.code_pages = None if self.code_pages is None else self.code_pages.fork()
        return twin

    # -- counting ------------------------------------------------------------------------------------

    def read_as(self, first: int, count: int, coded_below: int | None = None) -> tuple[int, int]:
        """Rows that queries first..first+count-1 attend, summed: in full precision, and as codes (or of rows
        below `coded_below` that were codes)."""
        below = self.coded if coded_below is None else coded_below
        seen = coded = 0
        for position in (first,) if count == 1 else range(first, first + count):
            low = self.start if self.window is None else max(self.start, position - self.window + 1)
            low = max(low, min(self.sinks, position + 1))
            seen += position + 1 - low + min(self.sinks, position + 1)
            coded += max(0, below - max(low, self.kept_sinks))
        return seen - coded, coded

    def entries(self, role: Role, length: int, cold_below: int = 0) -> list[LedgerEntry]:
        """The ledger's lines when the state holds `length` positions."""
        live = length
        if self.code_pages is not None:  # what is coded is not live in full precision any more
            live = min(length - self.coded, self.hot.live_rows(length))
        listed = self.hot.entries("K/V rows", role, live, cold_below)
        if self.sink_pages is not None:
            listed += self.sink_pages.entries("K/V rows", role, min(length, self.kept_sinks))
        if self.code_pages is not None:
            listed += self.code_pages.entries("K/V codes", role, self.coded, cold_below)
        if self.mean is not None:
            listed.append(entry("K means", role, self.mean, self.mean.nbytes))
        return listed


def _code_bytes(vectors: int, code: KvCode) -> int:
    return (vectors * (code.k.code_bytes + code.v.code_bytes) + 3) // 4 * 4 + 8 * vectors
