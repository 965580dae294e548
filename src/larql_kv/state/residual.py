"""Residual rows as canonical state, K/V as derivative state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from larql_kv.model.model import Model
from larql_kv.state.base import StepRows
from larql_kv.state.bridge import CaptureMask
from larql_kv.state.coded_rows import CodedRows
from larql_kv.state.derived import DerivedKVState
from larql_kv.state.kv_code import KvCoding
from larql_kv.state.ledger import LedgerEntry
from larql_kv.state.pages import BLOCK, PagedRows, allocate_block

if TYPE_CHECKING:
    from larql_kv.codec.rows import RowCodec

_DERIVE_ROWS = 512  # rows whose K/V are rebuilt at once: bounds the workspace


class ResidualState(DerivedKVState):
    """Per layer, the residual rows that entered it (in the model's K/V dtype) and the K/V they derive.

    `place` is where the rows live: beside the K/V, or in host memory, staged there by the bridge.
    `window=N` keeps the last N rows hot; older 64-row blocks are the cold tier. It is lossless without
    `codecs` (one a layer): attention is exact over both tiers then. With them a cold row's K/V are those of
    the row that its codes decode to, from the moment it is coded. K/V may be dropped at any time: the next
    step projects them again from the rows, by the projection that made them: the same bits on the CPU, on
    CUDA the same within the noise floor. `coding` holds the K/V themselves as codes.
    """

    def __init__(
        self,
        model: Model,
        window: int | None = None,
        place: Literal["device", "host"] = "device",
        codecs: Sequence[RowCodec] | None = None,
        coding: KvCoding | None = None,
    ) -> None:
        super().__init__(model, coding)
        self.hot_window = window
        self.place = place
        if place == "host":  # somebody has to bring them there
            self.best_capture = CaptureMask.H_ONLY
        config, device = model.config, model.device if place == "device" else torch.device("cpu")

        def make_block(rows: int) -> torch.Tensor:
            return allocate_block((rows, config.hidden), model.kv_dtype, device)

        def make_rows(layer: int, ring: int | None) -> PagedRows | CodedRows:
            if codecs is None or window is None or (ring is not None and ring <= window + BLOCK):
                return PagedRows(make_block, ring)
            return CodedRows(model, layer, codecs[layer], window, ring, device)

        self.pages = [make_rows(layer, ring) for layer, ring in enumerate(self.rings)]
        self._tallied = self._tallied_coded = 0  # rows read on layers with a codec, those of them coded
        self._derived = [True] * config.layer_count

    def _host_rows(self) -> list[PagedRows | CodedRows] | None:
        return self.pages if self.place == "host" else None

    def _device_rows(self) -> list[PagedRows] | None:
        if self.place == "host":
            return None
        return [pages.hot if isinstance(pages, CodedRows) else pages for pages in self.pages]

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
            pages = self.pages[layer]
            if write is None:
                pages.put(rows, self.first)
            else:
                write(rows, pages.hot if isinstance(pages, CodedRows) else pages, self.first)
            self.clock.switch(stage)
        super().observe(layer, rows)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pages = self.pages[layer]
        if isinstance(pages, PagedRows):
            return super().attend(layer, q, k, v)
        out, first = [], self.first
        while first < self.first + len(q):
            # What is coded changes only here: a query's K/V do not depend on how the text came in.
            stop = min(self.first + len(q), first + BLOCK - (first - pages.window) % BLOCK)
            self._cool(layer, pages, first)
            part = slice(first - self.first, stop - self.first)
            out.append(self._attend_part(layer, pages, q[part], k[part], v[part], first))
            first = stop
        if self.bridge is not None:
            self.bridge.take_kv(layer, k, v)
        return torch.cat(out)

    def _attend_part(
        self, layer: int, pages: CodedRows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int
    ) -> torch.Tensor:
        out = self.kv.attend_at(layer, q, k, v, first)
        self._tally(layer, pages, first, len(q))
        return out

    def _tally(self, layer: int, pages: CodedRows, first: int, count: int) -> None:
        seen, coded = self.kv.rows[layer].read_as(first, count, pages.coded)
        form = str(self.model.kv_dtype).removeprefix("torch.")
        self.rows_read[form] -= coded
        self.rows_read[f"{form} of {pages.codec.name} rows"] += coded
        self._tallied += seen + coded
        self._tallied_coded += coded

    def _cool(self, layer: int, pages: CodedRows, position: int) -> None:
        """Code what left the window of a query at `position`; its K/V become those of the decoded rows."""
        edge = pages.edge(position)
        if edge <= pages.coded:
            return
        stage = self.clock.switch("state_append")
        if self.bridge is not None and self.place == "host":
            self.bridge.drain()
        cooled = pages.cool(edge)
        if cooled is not None:
            begin, rows = cooled
            rows = rows.to(self.model.device)
            for low in range(0, len(rows), _DERIVE_ROWS):
                part = rows[low : low + _DERIVE_ROWS]
                k, v = self.model.decoder.project_kv(layer, part, begin + low)
                self.kv.put(layer, k, v, begin + low)
                if self.bridge is not None:
                    self.bridge.refill(layer, begin + low, part, k, v)
        self.clock.switch(stage)

    def step_rows(self) -> StepRows | None:
        for layer, derived in enumerate(self._derived):
            if not derived:
                self._derive(layer)
        for layer, pages in enumerate(self.pages):
            if isinstance(pages, CodedRows):
                self._cool(layer, pages, self.length)
        return super().step_rows()

    def count_step(self, first: int) -> None:
        super().count_step(first)
        for layer, pages in enumerate(self.pages):
            if isinstance(pages, CodedRows):
                self._tally(layer, pages, first, 1)

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
                self.kv.put(layer, k, v, low)
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

    def coded_share(self) -> float | None:
        if any(isinstance(pages, CodedRows) for pages in self.pages):
            return self._tallied_coded / max(1, self._tallied)
        return super().coded_share()

    def trim(self, length: int) -> None:
        super().trim(length)
        for pages in self.pages:
            pages.truncate(pages.live_rows(self.length) if isinstance(pages, PagedRows) else self.length)
        if self.length == 0:
            self._derived = [True] * len(self._derived)

    def coded_past(self, length: int) -> bool:
        return any(isinstance(pages, CodedRows) and pages.coded > pages.edge(length) for pages in self.pages)

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
            for kv, derived in zip(self.kv.rows, self._derived, strict=True)
            for item in kv.entries("derivative", self.length if derived else 0, cold)
        ]
        return [*rows, *kv, *self._bridge_entries()]
