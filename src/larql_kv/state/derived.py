"""K/V as derivative state: what residual rows and bare token ids have in common."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch

from larql_kv.model.model import Model
from larql_kv.state.base import RowState, StepRows
from larql_kv.state.bridge import CaptureMask, HostBridge, crosses_to_host
from larql_kv.state.coded_rows import CodedRows
from larql_kv.state.kv import KvLayout, KVState
from larql_kv.state.kv_code import KvCoding
from larql_kv.state.ledger import LedgerEntry
from larql_kv.state.pages import PagedRows

Derived = TypeVar("Derived", bound="DerivedKVState")


class DerivedKVState(RowState):
    """K/V that may be dropped at any time, and the bridge that stages rows to the host where a mask asks.

    A subclass says where K/V come from again, and which mask serves it best (`best_capture`).
    """

    best_capture = CaptureMask.NONE

    def __init__(self, model: Model, coding: KvCoding | None = None) -> None:
        """`coding`: hold the derived K/V as codes."""
        super().__init__(model, [layer.window for layer in model.config.layers])
        self.kv = KVState(model, KvLayout(coding=coding), role="derivative")
        self.capturable = self.kv.capturable
        self.rows_read = self.kv.rows_read
        self.bridge: HostBridge | None = None
        self._step_rows: StepRows | None = None

    def set_capture(self, mask: CaptureMask) -> None:
        crosses = mask != CaptureMask.NONE and crosses_to_host(self.model.decoder)
        self.bridge = HostBridge(self.model, mask, self._host_rows()) if crosses else None
        self._step_rows = None

    def _host_rows(self) -> Sequence[PagedRows | CodedRows] | None:
        """The canonical residual rows that lie on the host, or None."""
        return None

    def _device_rows(self) -> list[PagedRows] | None:
        """The residual rows that a step writes on the device, or None."""
        return None

    # -- running -------------------------------------------------------------------------------------

    def begin(self, first: int, count: int) -> None:
        super().begin(first, count)
        self.kv.begin(first, count)
        self.kv.clock = self.clock
        if self.bridge is not None:
            self.bridge.begin(first, count)

    def observe(self, layer: int, rows: torch.Tensor) -> None:
        if self.bridge is not None:
            stage = self.clock.switch("state_capture")
            self.bridge.take_rows(layer, rows)
            self.clock.switch(stage)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = self.kv.attend(layer, q, k, v)
        if self.bridge is not None:
            stage = self.clock.switch("state_capture")
            self.bridge.take_kv(layer, k, v)
            self.clock.switch(stage)
        return out

    def commit(self, length: int) -> None:
        if self.bridge is not None:
            self.bridge.commit()
        self.length = self.kv.length = length

    def step_rows(self) -> StepRows | None:
        if not self.capturable:
            return None
        if self._step_rows is None:
            self._step_rows = StepRows(self.kv.rows, self._device_rows(), self.bridge)
        return self._step_rows

    def count_step(self, first: int) -> None:
        self.kv.count_step(first)

    # -- keeping -------------------------------------------------------------------------------------

    def drop_derivative(self) -> int:
        freed = sum(item.capacity for item in self.kv.entries() if item.role == "derivative")
        if self.bridge is not None:
            freed += self.bridge.drop()
        for rows in self.kv.rows:
            rows.clear()
        return freed

    def trim(self, length: int) -> None:
        self.length = self.kv.length = self._resolve_trim(length)
        if self.bridge is not None:
            self.bridge.trim(self.length)
        for rows in self.kv.rows:
            rows.truncate(self.length)
        if self.kv.coded_past(self.length):
            self.drop_derivative()  # what this length would not have coded is derived again

    def coded_share(self) -> float | None:
        return self.kv.coded_share()

    def _twin(self: Derived) -> Derived:
        """A copy with forked K/V; the subclass forks its rows, then the bridge (`_fork_bridge`)."""
        if self.bridge is not None:
            self.bridge.drain()
        twin = copy.copy(self)
        twin.kv = self.kv.fork()
        twin.rows_read = twin.kv.rows_read
        twin._step_rows = None
        return twin

    def _fork_bridge(self, twin: DerivedKVState) -> None:
        if self.bridge is not None:
            twin.bridge = self.bridge.fork(twin._host_rows())

    def _bridge_entries(self) -> list[LedgerEntry]:
        return [] if self.bridge is None else self.bridge.entries(self.length)
