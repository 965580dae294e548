"""Residual rows as canonical state, K/V as derivative state."""

from __future__ import annotations

from typing import Literal

import torch

from larql_kv.model.model import Model
from larql_kv.state.base import StepRows
from larql_kv.state.bridge import CaptureMask
from larql_kv.state.derived import DerivedKVState
from larql_kv.state.ledger import LedgerEntry
from larql_kv.state.pages import BLOCK, PagedRows, allocate_block

_DERIVE_ROWS = 512  # rows whose K/V are rebuilt at once: bounds the workspace


class ResidualState(DerivedKVState):
    """Per layer, the residual rows that entered it (in the model's K/V dtype) and the K/V they derive.

    `place` is where the rows live: beside the K/V, or in host memory, staged there by the bridge.
    `window=N` keeps the last N rows hot; older 64-row blocks are the cold tier, held losslessly. Attention
    is exact over both. K/V may be dropped at any time: the next step projects them again from the rows, by
    the projection that made them: the same bits on the CPU, on CUDA the same within the noise floor.
    """

    def __init__(
        self, model: Model, window: int | None = None, place: Literal["device", "host"] = "device"
    ) -> None:
        super().__init__(model)
        self.hot_window = window
        self.place = place
        if place == "host":  # somebody has to bring them there
            self.best_capture = CaptureMask.H_ONLY
        config, device = model.config, model.device if place == "device" else torch.device("cpu")

        def make_block(rows: int) -> torch.Tensor:
            return allocate_block((rows, config.hidden), model.kv_dtype, device)

        self.pages = [PagedRows(make_block, ring) for ring in self.rings]
        self._derived = [True] * config.layer_count

    def _host_rows(self) -> list[PagedRows] | None:
        return self.pages if self.place == "host" else None

    def _device_rows(self) -> list[PagedRows] | None:
        return self.pages if self.place == "device" else None

    @property
    def cold_below(self) -> int:
        """Positions below this are in the cold tier: whole blocks that left the window."""
        if self.hot_window is None:
            return 0
        return max(0, self.length - self.hot_window) // BLOCK * BLOCK

    def observe(self, layer: int, rows: torch.Tensor) -> None:
        if not self._derived[layer]:
            self._derive(layer)  # before a ring's rows are overwritten by the new ones
        if self.bridge is None or self.place == "device":
            stage = self.clock.switch("state_capture")
            write = getattr(self.model.decoder, "write_rows", None) if self.place == "device" else None
            if write is None:
                self.pages[layer].put(rows, self.first)
            else:
                write(rows, self.pages[layer], self.first)
            self.clock.switch(stage)
        super().observe(layer, rows)

    def step_rows(self) -> StepRows | None:
        for layer, derived in enumerate(self._derived):
            if not derived:
                self._derive(layer)
        return super().step_rows()

    def _derive(self, layer: int) -> None:
        pages = self.pages[layer]
        start = self.length - pages.live_rows(self.length)
        edge = min(max(start, self.cold_below), self.length)
        for tier, begin, stop in (("recompute_cold", start, edge), ("recompute_hot", edge, self.length)):
            for low in range(begin, stop, _DERIVE_ROWS):
                high = min(low + _DERIVE_ROWS, stop)
                stage = self.clock.switch("state_materialise")
                rows = self._read(layer, low, high)
                self.clock.switch(tier)
                k, v = self.model.decoder.project_kv(layer, rows, low)
                self.kv.append(layer, k, v, low)
                if self.bridge is not None:
                    self.bridge.refill(layer, low, rows, k, v)
                self.clock.switch(stage)
        self._derived[layer] = True

    def _read(self, layer: int, first: int, stop: int) -> torch.Tensor:
        """Rows (n, hidden) float32 on the device."""
        if self.bridge is not None and self.place == "host":
            return self.bridge.upload(layer, first, stop).float()
        return self.pages[layer].read(first, stop).float()

    def drop_derivative(self) -> int:
        freed = super().drop_derivative()
        self._derived = [False] * len(self._derived)
        return freed

    def trim(self, length: int) -> None:
        super().trim(length)
        for pages in self.pages:
            pages.truncate(pages.live_rows(self.length))
        if self.length == 0:
            self._derived = [True] * len(self._derived)

    def fork(self) -> ResidualState:
        twin = self._twin()
        twin.pages = [pages.fork() for pages in self.pages]
        twin._derived = list(self._derived)
        self._fork_bridge(twin)
        return twin

    def entries(self) -> list[LedgerEntry]:
        if self.bridge is not None:
            self.bridge.drain()
        cold = self.cold_below
        rows = [
            item
            for pages in self.pages
            for item in pages.entries("residual rows", "canonical", self.length, cold)
        ]
        kv = [
            item
            for pages, derived in zip(self.kv.pages, self._derived, strict=True)
            for item in pages.entries("K/V rows", "derivative", self.length if derived else 0, cold)
        ]
        return [*rows, *kv, *self._bridge_entries()]
