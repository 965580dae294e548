"""Residual rows of one layer in two tiers: hot in the model's K/V dtype, cold in a codec."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from larql_kv.codec.rows import channel_weights
from larql_kv.model.model import Model
from larql_kv.state.ledger import LedgerEntry, Role
from larql_kv.state.pages import BLOCK, PagedRows, allocate_block

if TYPE_CHECKING:
    from larql_kv.codec.rows import RowCodec


class CodedRows:
    """Stands where a `PagedRows` of residual rows does: positions below `coded` lie in the codec, the others
    in `hot`, whose blocks go when all their rows are coded.

    `alive`: how many of the last rows anybody asks for (None: all); `window` of those are hot.
    """

    def __init__(
        self, model: Model, layer: int, codec: RowCodec, window: int, alive: int | None, device: torch.device
    ) -> None:
        self.codec, self.window, self.ring = codec, window, alive
        self._norm = functools.partial(model.decoder.attention_norm, layer)
        self._device = device
        self.coded = 0
        self._width = width = model.config.hidden

        def make_rows(rows: int) -> torch.Tensor:
            return allocate_block((rows, width), model.kv_dtype, device)

        def make_codes(rows: int) -> torch.Tensor:
            return allocate_block((rows, codec.bytes_per_row(width)), torch.uint8, device)

        self.hot = PagedRows(make_rows, None)
        self.codes = PagedRows(make_codes, None if alive is None else max(BLOCK, alive - window))

    def edge(self, position: int) -> int:
        """A query at `position` reads what is derived from the codes of positions below this: whole blocks
        behind the window."""
        return max(0, position - self.window) // BLOCK * BLOCK

    def cool(self, edge: int) -> tuple[int, torch.Tensor] | None:
        """Code the rows below `edge`; returns the first position and the rows (n, hidden) float32 that they
        decode to, or None where there are none. A row is coded once, from its full precision."""
        first = self.coded
        if self.codes.ring is not None:
            first = max(first, edge - self.codes.ring)
        if first >= edge:
            return None
        codes = self.codec.encode(self.hot.read(first, edge).float(), self._weight())
        self.codes.put(codes, first)
        self.coded = edge
        self.hot.release_below(edge)
        return first, self.codec.decode(codes, self._width, self._weight())

    def _weight(self) -> torch.Tensor:
        """(hidden,): rows go through this layer's input norm and nothing else, so its weight says which
        channels to code more finely."""
        return channel_weights(self._norm()).to(self._device)

    # -- as PagedRows ----------------------------------------------------------------------------------

    def put(self, rows: torch.Tensor, first: int) -> None:
        """Rows (n, hidden) of positions first.., none of them coded."""
        self.hot.put(rows, first)

    def read(self, first: int, stop: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of positions first..stop-1 (into `out`, of that shape)."""
        edge = min(max(first, self.coded), stop)
        parts = []
        if first < edge:
            parts.append(self.codec.decode(self.codes.read(first, edge), self._width, self._weight()))
        if edge < stop:
            parts.append(self.hot.read(edge, stop).float())
        rows = torch.cat(parts)
        return rows if out is None else out.copy_(rows)

    def live_rows(self, length: int) -> int:
        """Rows in use when the state holds `length` positions."""
        return length if self.ring is None else min(length, self.ring)

    def truncate(self, length: int) -> None:
        """Forget positions >= `length`; what is coded below stays coded."""
        self.coded = min(self.coded, length)
        self.hot.truncate(length)
        self.codes.truncate(self.codes.live_rows(self.coded))

    def clear(self) -> None:
        self.truncate(0)

    def fork(self) -> CodedRows:
        twin = copy.copy(self)
        twin.hot, twin.codes = self.hot.fork(), self.codes.fork()
        return twin

    def entries(self, name: str, role: Role, length: int, _cold_below: int = 0) -> list[LedgerEntry]:
        """The ledger's lines when the state holds `length` positions."""
        cold = self.codes.entries(f"{name}, {self.codec.name}", role, self.coded)
        return [*self.hot.entries(name, role, length), *(replace(item, tier="cold") for item in cold)]
