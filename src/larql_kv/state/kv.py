"""K/V rows: what `standard` keeps, and what residual states derive."""

from __future__ import annotations

import copy
from collections import Counter

import torch

from larql_kv.model.model import Model
from larql_kv.state.base import RowState, StepRows
from larql_kv.state.ledger import LedgerEntry, Role
from larql_kv.state.pages import PagedRows, allocate_block


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


class KVState(RowState):
    """K/V rows per layer, in the model's K/V dtype, attended in place.

    `window=N` keeps the last N rows on every layer. `retire=False` keeps every row and only masks:
    the reference that a windowed state is compared with.
    """

    capturable = True

    def __init__(
        self, model: Model, window: int | None = None, retire: bool = True, role: Role = "canonical"
    ) -> None:
        config = model.config
        self.windows = [effective_window(layer.window, window) for layer in config.layers]
        rings = self.windows if retire else [None] * len(self.windows)
        super().__init__(model, rings)
        self._role: Role = role
        self._form = str(model.kv_dtype).removeprefix("torch.")

        def make_block(rows: int) -> torch.Tensor:
            shape = (2, config.kv_heads, rows, config.head_dim)
            return allocate_block(shape, model.kv_dtype, model.device)

        self.pages = [PagedRows(make_block, ring) for ring in rings]
        self._layers_by_window = list(Counter(self.windows).items())
        self._step_rows: StepRows | None = None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pages, window, first = self.pages[layer], self.windows[layer], self.first
        decoder = self.model.decoder
        out = decoder.attend(q, k, v, pages, first, window)
        self.rows_read[self._form] += rows_seen(first, q.shape[0], window)
        stage = self.clock.switch("state_append")
        self.append(layer, k, v, first)
        self.clock.switch(stage)
        return out

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, first: int) -> None:
        """Write K/V rows of positions first.. into their slots (the last `ring` of them)."""
        pages = self.pages[layer]
        count = k.shape[0]
        skip = max(0, count - pages.ring) if pages.ring is not None else 0
        pages.reserve(first + skip, first + count)
        self.model.decoder.append_rows(k, v, pages, first, skip)

    def step_rows(self) -> StepRows | None:
        if self._step_rows is None:
            self._step_rows = StepRows(self.pages, self.windows)
        return self._step_rows

    def count_step(self, first: int) -> None:
        self.rows_read[self._form] += sum(
            layers * rows_seen(first, 1, window) for window, layers in self._layers_by_window
        )

    def trim(self, length: int) -> None:
        self.length = self._resolve_trim(length)
        for pages in self.pages:
            pages.truncate(pages.live_rows(self.length))

    def clear(self) -> None:
        """Let every row go."""
        self.length = self._written = 0
        for pages in self.pages:
            pages.clear()

    def fork(self) -> KVState:
        twin = copy.copy(self)
        twin.pages = [pages.fork() for pages in self.pages]
        twin.rows_read = self.rows_read.copy()
        twin._step_rows = None
        return twin

    def entries(self) -> list[LedgerEntry]:
        return [item for pages in self.pages for item in pages.entries("K/V rows", self._role, self.length)]


class RecomputeState(KVState):
    """`no-cache`: K/V live for one call as workspace, so every step runs all ids again."""

    keeps_rows = False
    capturable = False

    def __init__(self, model: Model) -> None:
        super().__init__(model, role="workspace")

    def step_rows(self) -> None:
        return None  # a step is a prefill of the whole text

    def end_step(self) -> None:
        self.clear()
