"""One layer's K/V rows: in full precision, or as codes once they left the recent tail.

A block of full-precision rows is a tensor (2, kv_heads, rows, head_dim), K then V, laid out by the rows
that it has room for (64; fewer at the end of a ring). A block of codes is uint8: K codes (heads, 64, bytes),
V codes, float32 scales of K (kv_heads, 64) and of V, bfloat16 means of K (kv_heads, head_dim): what is coded
of a K row is what is left of it after the mean of the block's rows. Rows of a coded layer are rotated, coded
or not: attention on them runs in the rotated domain. K rows that are coded were divided by a scale a channel
first (`scale`), and meet queries that were multiplied by it: what a channel has more than others would
otherwise be spread over all of them by the rotation, with its error.
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
    centred: bool = True  # False: the means of K are zeros
    scaled: bool = True  # code K's channels over scales that the first rows coded give

    @property
    def name(self) -> str:
        """As the bench prints it: turbo4, or turbo4/3 for K bits / V bits."""
        bits = f"{self.k.bits}" if self.k.bits == self.v.bits else f"{self.k.bits}/{self.v.bits}"
        return f"turbo{bits}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one K and one V vector with their scales, means apart."""
        return self.k.code_bytes + self.v.code_bytes + 8

    def block_bytes(self, kv_heads: int) -> int:
        """Bytes of a block of codes."""
        return kv_heads * (BLOCK * self.row_bytes + 2 * self.k.dim)

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
        self.scale: torch.Tensor | None = None  # (kv_heads, head_dim) float32, set by the first rows coded
        self.view: tuple[int, Any] | None = None  # the backend's description of this, and its version
        self._shape = (heads, width)
        self._encode = model.decoder.encode

        def make_block(rows: int) -> torch.Tensor:
            return allocate_block((2, heads, rows, width), model.kv_dtype, model.device)

        def make_codes(_rows: int) -> torch.Tensor:
            assert code is not None
            return allocate_block((code.block_bytes(heads),), torch.uint8, model.device)

        self._make_block = make_block
        self.hot = PagedRows(make_block, ring)
        self.sink_pages = PagedRows(make_block, None) if self.kept_sinks else None
        self.code_pages = None
        if code is not None:
            behind = None if alive is None else max(1, alive - code.recent)
            whole = None if behind is None else (behind + BLOCK - 1) // BLOCK * BLOCK
            self.code_pages = PagedRows(make_codes, whole)

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

    def new_pages(self) -> PagedRows:
        """Empty pages for rows of full precision."""
        return PagedRows(self._make_block, None)

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
        first = max(self.coded, self.kept_sinks, self.start)
        if edge <= self.coded:
            return
        assert self.code is not None
        assert self.code_pages is not None
        ring = self.code_pages.ring
        first = first if ring is None else max(first, edge - ring)
        if first < edge:
            both = self._full_precision(first, edge)
            if self.code.scaled:
                both[0] = self._scaled(both[0])
            self.code_pages.reserve(first, edge)
            for offset, index, slot, count in self.code_pages.runs(first, edge):
                part = both[:, :, offset : offset + count]
                k, v, k_scale, v_scale, mean = self._code_views(index)
                if first + offset == max((first + offset) // BLOCK * BLOCK, self.kept_sinks, self.start):
                    mean.copy_(part[0].mean(1)) if self.code.centred else mean.zero_()
                rows = slice(slot, slot + count)
                self._encode(self.code.k, part[0], mean.float(), k[:, rows], k_scale[:, rows])
                self._encode(self.code.v, part[1], None, v[:, rows], v_scale[:, rows])
        self.coded = edge

    def _scaled(self, k: torch.Tensor) -> torch.Tensor:
        """Rotated K (kv_heads, n, head_dim) over the channel scales, rotated again."""
        assert self.code is not None
        k = self.code.k.rotate(k.contiguous())
        if self.scale is None:
            spread = (k - k.mean(1, keepdim=True)).square().mean(1)
            spread += (
                1e-3 * spread.mean(1, keepdim=True) + 1e-30
            )  # a dead channel is no reason for a huge scale
            scale = spread.sqrt().sqrt()
            self.scale = (scale / scale.square().mean(1, keepdim=True).sqrt()).clamp(1 / 8, 8)
        return self.code.k.rotate(k / self.scale.unsqueeze(1))

    def _full_precision(self, first: int, stop: int) -> torch.Tensor:
        """(2, kv_heads, n, head_dim) float32 of positions that are not coded yet."""
        parts = [
            self.hot.block(index)[:, :, slot : slot + count]
            for _, index, slot, count in self.hot.runs(first, stop)
        ]
        return torch.cat(parts, 2).float()

    def _code_views(self, index: int) -> tuple[torch.Tensor, ...]:
        """K codes (kv_heads, 64, bytes), V codes, K scales (kv_heads, 64), V scales, K means (kv_heads,
        head_dim) of a block."""
        assert self.code is not None
        assert self.code_pages is not None
        heads, width = self._shape
        vectors = heads * BLOCK
        sizes = [vectors * self.code.k.code_bytes, vectors * self.code.v.code_bytes, 8 * vectors]
        k, v, scales, means = self.code_pages.block(index).split([*sizes, 2 * heads * width])
        k_scale, v_scale = scales.view(torch.float32).view(2, heads, BLOCK)
        rows = (heads, BLOCK, -1)
        return k.view(rows), v.view(rows), k_scale, v_scale, means.view(torch.bfloat16).view(heads, width)

    def decoded(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (over the channel scales) and V (n, kv_heads, head_dim) float32 of coded positions, rotated."""
        assert self.code is not None
        assert self.code_pages is not None
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for _, index, slot, count in self.code_pages.runs(first, stop):
            k, v, k_scale, v_scale, mean = self._code_views(index)
            rows = slice(slot, slot + count)
            parts[0].append(self.code.k.decode(k[:, rows], k_scale[:, rows], mean.float().unsqueeze(1)))
            parts[1].append(self.code.v.decode(v[:, rows], v_scale[:, rows]))
        k, v = (torch.cat(part, 1).transpose(0, 1).contiguous() for part in parts)
        return k, v

    # -- time ----------------------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        """Forget positions >= `length`; what is coded below it stays coded."""
        self.coded = min(self.coded, length)
        if length == 0:
            self.start, self.view = 0, None
        if self.coded <= self.kept_sinks:  # nothing is coded: another text may give other scales
            self.scale = None
        self.hot.truncate(self.hot.live_rows(length) if length > self.coded else 0)
        if self.sink_pages is not None and length < self.kept_sinks:
            self.sink_pages.truncate(length)
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
        if self.scale is not None:
            listed.append(entry("K channel scales", role, self.scale, self.scale.nbytes))
        return listed
