"""Residual rows as canonical state, K/V as derivative state."""

from __future__ import annotations

import copy

import torch

from larql_kv.model.model import Model
from larql_kv.state.base import RowState
from larql_kv.state.kv import KVState
from larql_kv.state.ledger import LedgerEntry
from larql_kv.state.pages import BLOCK, PagedRows, allocate_block

_DERIVE_ROWS = 512  # rows whose K/V are rebuilt at once: bounds the workspace


class ResidualState(RowState):
    """Per layer, the residual rows that entered it (in the model's K/V dtype) and the K/V they derive.

    `window=N` keeps the last N rows hot; older 64-row blocks are the cold tier, held losslessly. Attention
    is exact over both. K/V may be dropped at any time: the next step projects them again from the rows, by
    the row-invariant projection that made them, so the bits are the same.
    """

    def __init__(self, model: Model, window: int | None = None) -> None:
        config = model.config
        rings = [layer.window for layer in config.layers]
        super().__init__(model, rings)
        self.hot_window = window

        def make_block(rows: int) -> torch.Tensor:
            return allocate_block((rows, config.hidden), model.kv_dtype, model.device)

        self.pages = [PagedRows(make_block, ring) for ring in rings]
        self.kv = KVState(model, role="derivative")
        self.rows_read = self.kv.rows_read
        self._derived = [True] * config.layer_count

    @property
    def cold_below(self) -> int:
        """Positions below this are in the cold tier: whole blocks that left the window."""
        if self.hot_window is None:
            return 0
        return max(0, self.length - self.hot_window) // BLOCK * BLOCK

    def begin(self, first: int, count: int) -> None:
        super().begin(first, count)
        self.kv.begin(first, count)
        self.kv.clock = self.clock

    def observe(self, layer: int, rows: torch.Tensor) -> None:
        if not self._derived[layer]:
            self._derive(layer)  # before a ring's rows are overwritten by the new ones
        stage = self.clock.switch("state_capture")
        pages = self.pages[layer]
        count = rows.shape[0]
        skip = max(0, count - pages.ring) if pages.ring is not None else 0
        pages.reserve(self.first + skip, self.first + count)
        pages.write(rows[skip:], self.first + skip)
        self.clock.switch(stage)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.kv.attend(layer, q, k, v)

    def commit(self, length: int) -> None:
        self.length = self.kv.length = length

    def _derive(self, layer: int) -> None:
        pages = self.pages[layer]
        start = self.first - pages.live_rows(self.first)
        edge = min(max(start, self.cold_below), self.first)
        for tier, begin, stop in (("recompute_cold", start, edge), ("recompute_hot", edge, self.first)):
            for low in range(begin, stop, _DERIVE_ROWS):
                high = min(low + _DERIVE_ROWS, stop)
                stage = self.clock.switch("state_materialise")
                rows = pages.read(low, high).float()
                self.clock.switch(tier)
                k, v = self.model.decoder.project_kv(layer, rows, low)
                self.kv.append(layer, k, v, low)
                self.clock.switch(stage)
        self._derived[layer] = True

    def drop_derivative(self) -> int:
        freed = sum(item.capacity for item in self.kv.entries() if item.role == "derivative")
        for pages in self.kv.pages:
            pages.clear()
        self._derived = [False] * len(self._derived)
        return freed

    def trim(self, length: int) -> None:
        self.length = self.kv.length = self._resolve_trim(length)
        for pages in (*self.pages, *self.kv.pages):
            pages.truncate(pages.live_rows(self.length))
        if self.length == 0:
            self._derived = [True] * len(self._derived)

    def fork(self) -> ResidualState:
        twin = copy.copy(self)
        twin.pages = [pages.fork() for pages in self.pages]
        twin.kv = self.kv.fork()
        twin.rows_read = twin.kv.rows_read
        twin._derived = list(self._derived)
        return twin

    def entries(self) -> list[LedgerEntry]:
        cold = self.cold_below
        rows = [
            item
            for pages in self.pages
            for item in pages.entries("residual rows", "canonical", self.length, cold)
        ]
        return rows + [
            item
            for pages, derived in zip(self.kv.pages, self._derived, strict=True)
            for item in pages.entries("K/V rows", "derivative", self.length if derived else 0, cold)
        ]
