"""K/V rows: what `standard` keeps, and what residual states derive."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from larql_kv.model.model import Model
from larql_kv.state.base import RowState, StepRows
from larql_kv.state.kv_code import KvCoding
from larql_kv.state.kv_rows import KvRows
from larql_kv.state.ledger import LedgerEntry, Role
from larql_kv.state.pages import BLOCK


def effective_window(layer_window: int | None, engine_window: int | None) -> int | None:
    """The narrower of the model's own window and the engine's."""
    windows = [window for window in (layer_window, engine_window) if window is not None]
    return min(windows) if windows else None


def rows_seen(first: int, count: int, window: int | None) -> int:
    """Rows that queries at positions first..first+count-1 attend, summed."""
    last = first + count
    if window is None or last <= window:
        return count * first + count * (count + 1) // 2
    growing = max(0, window - first)
    return growing * first + growing * (growing + 1) // 2 + (count - growing) * window


@dataclass(frozen=True)
class KvLayout:
    """Which K/V rows a state keeps, and in which form.

    window, sinks    the last `window` positions, and the first `sinks` ones wherever that window cuts
    tumbling         windows of so many tokens, one after the other: a query sees its own, and the last
                     position of the one before
    coding           rows of chosen layers become codes when they leave the recent tail
    retire           False: keep every row, and only mask (the reference of a windowed state)
    """

    window: int | None = None
    sinks: int = 0
    tumbling: int | None = None
    coding: KvCoding | None = None
    retire: bool = True

    def rows(self, model: Model) -> list[KvRows]:
        """The rows of every layer, empty."""
        windows = [layer.window for layer in model.config.layers]
        coded = [False] * len(windows)
        if self.coding is not None:
            coded = self.coding.layers_coded(model.config, self.window or self.tumbling)
        return [self._layer(model, *each) for each in zip(windows, coded, strict=True)]

    def _layer(self, model: Model, own: int | None, coded: bool) -> KvRows:
        window = effective_window(own, self.window)
        sinks = self.sinks if self.window is not None and window != own else 0
        keep = effective_window(window, None if self.tumbling is None else self.tumbling + 1)
        if not coded:
            return KvRows(model, window, sinks, keep if self.retire else None)
        assert self.coding is not None
        code = self.coding.code(model.config)
        ring = (code.recent + BLOCK - 1) // BLOCK * BLOCK + 2 * BLOCK
        return KvRows(model, window, sinks, ring, code, keep, max(sinks, self.coding.sinks))


class KVState(RowState):
    """K/V rows per layer, in the model's K/V dtype or as codes, attended in the form they are held in."""

    def __init__(self, model: Model, layout: KvLayout | None = None, role: Role = "canonical") -> None:
        self.layout = layout = layout or KvLayout()
        self.rows = layout.rows(model)
        self.windows = [rows.window for rows in self.rows]
        kept = None if layout.tumbling is None else layout.tumbling + 1
        rings = [effective_window(window, kept) if layout.retire else None for window in self.windows]
        super().__init__(model, rings)
        self._role: Role = role
        self._form = str(model.kv_dtype).removeprefix("torch.")
        self._layers_by_window = list(Counter(self.windows).items())
        self._step_rows: StepRows | None = None
        self.tallied = self.tallied_coded = 0  # rows read on coded layers, and those of them read as codes
        self.capturable = layout.tumbling is None and all(rows.plain for rows in self.rows)
        model.decoder.check_kv_rows(self.rows)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, first = self.rows[layer], self.first
        if rows.code is None:
            if self.layout.tumbling is None:
                return self.attend_at(layer, q, k, v, first)
            return self._attend_pieces(layer, q, k, v)
        return self.model.decoder.turned_back(self._attend_pieces(layer, q, k, v), rows)

    def _attend_pieces(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention in pieces of rows that see the same start, and the same rows as codes."""
        rows, out = self.rows[layer], []
        for begin, stop in self._pieces(rows, self.first, self.first + len(q)):
            part = slice(begin - self.first, stop - self.first)
            if self.layout.tumbling is not None:
                rows.start = max(0, self._span(begin)[0] - 1)
            if rows.code is not None:
                stage = self.clock.switch("state_append")
                rows.encode_below(rows.code.edge(begin))
                self.clock.switch(stage)
            out.append(self.attend_at(layer, q[part], k[part], v[part], begin))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _pieces(self, rows: KvRows, first: int, stop: int) -> Iterator[tuple[int, int]]:
        while first < stop:
            end = stop
            if rows.code is not None:
                end = min(end, first + BLOCK - (first - rows.code.recent) % BLOCK)
            if self.layout.tumbling is not None:
                end = min(end, self._span(first)[1])
            yield first, end
            first = end

    def _span(self, position: int) -> tuple[int, int]:
        """Of tumbling windows, the one of the row at `position`: its first position, and its end."""
        assert self.layout.tumbling is not None
        start = position // self.layout.tumbling * self.layout.tumbling
        return start, start + self.layout.tumbling

    def attend_at(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int
    ) -> torch.Tensor:
        """`attend` for rows at positions first.. of a layer whose rows see and hold the same throughout."""
        rows, q_codes = self.rows[layer], None
        if rows.code is not None:
            q, q_codes, k, v = self.model.decoder.turned(q, k, v, rows)
        out = self.model.decoder.attend(q, k, v, rows, first, q_codes)
        self._count(rows, first, len(q))
        stage = self.clock.switch("state_append")
        self.append(layer, k, v, first)
        self.clock.switch(stage)
        return out

    def _count(self, rows: KvRows, first: int, count: int) -> None:
        if rows.plain:
            self.rows_read[self._form] += rows_seen(first, count, rows.window)
            return
        full, coded = rows.read_as(first, count)
        self.rows_read[self._form] += full
        if rows.code is not None:
            self.rows_read[rows.code.name] += coded
            self.tallied += full + coded
            self.tallied_coded += coded

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, first: int) -> None:
        """Write K/V rows of positions first.. into their slots: sinks, and of the others the last `ring`."""
        rows, count = self.rows[layer], k.shape[0]
        write = self.model.decoder.append_rows
        skip = max(0, min(rows.kept_sinks - first, count))
        if skip:
            rows.reserve(first, first + skip)
            write(k[:skip], v[:skip], rows, first, 0)
        if rows.hot.ring is not None:
            skip = max(skip, count - rows.hot.ring)
        if skip < count:
            rows.reserve(first + skip, first + count)
            write(k, v, rows, first, skip)

    def put(self, layer: int, k: torch.Tensor, v: torch.Tensor, first: int) -> None:
        """Hold K/V rows of positions first.. as a forward pass over them would have left them."""
        rows = self.rows[layer]
        if rows.code is not None:
            _, _, k, v = self.model.decoder.turned(k, k, v, rows)
        for begin, stop in self._pieces(rows, first, first + len(k)):
            if rows.code is not None:
                rows.encode_below(rows.code.edge(begin))
            part = slice(begin - first, stop - first)
            self.append(layer, k[part], v[part], begin)

    def step_rows(self) -> StepRows | None:
        if not self.capturable:
            return None
        if self._step_rows is None:
            self._step_rows = StepRows(self.rows)
        return self._step_rows

    def count_step(self, first: int) -> None:
        self.rows_read[self._form] += sum(
            layers * rows_seen(first, 1, window) for window, layers in self._layers_by_window
        )

    def coded_share(self) -> float | None:
        if self.layout.coding is None:
            return None
        return self.tallied_coded / max(1, self.tallied)

    def trim(self, length: int) -> None:
        self.length = self._resolve_trim(length)
        for rows in self.rows:
            rows.truncate(self.length)

    def coded_past(self, length: int) -> bool:
        return any(rows.code is not None and rows.coded > rows.code.edge(length) for rows in self.rows)

    def clear(self) -> None:
        """Let every row go."""
        self.length = self._written = 0
        for rows in self.rows:
            rows.clear()

    def fork(self) -> KVState:
        twin = copy.copy(self)
        twin.rows = [rows.fork() for rows in self.rows]
        twin.rows_read = self.rows_read.copy()
        twin._step_rows = None
        return twin

    def entries(self) -> list[LedgerEntry]:
        return [item for rows in self.rows for item in rows.entries(self._role, self.length)]


class RecomputeState(KVState):
    """`no-cache`: K/V live for one call as workspace, so every step runs all ids again."""

    keeps_rows = False

    def __init__(self, model: Model) -> None:
        super().__init__(model, role="workspace")
        self.capturable = False  # a step is a prefill of the whole text

    def end_step(self) -> None:
        self.clear()
