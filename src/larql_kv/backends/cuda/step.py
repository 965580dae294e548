"""Decode steps as captured graphs: one launch a token, every length and position read on the device.

A graph belongs to a capacity (it doubles, so a growing text is captured O(log n) times), to what the state keeps
besides K/V, and to what ends the step. Engines on one model take turns with the same graphs: what is theirs
(block addresses, position, token) lies in device tables that are written when another state comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from larql_kv.backends.cuda.program import Ending, StepBuffers, StepProgram
from larql_kv.errors import BackendFailure

if TYPE_CHECKING:
    from larql_kv.backends.cuda.decoder import CudaDecoder
    from larql_kv.ffn.base import FfnBackend
    from larql_kv.state.base import State, StepRows

_LEAST_CAPACITY = 1024
_PATIENCE = 30.0  # seconds for a token to land before the device is asked what is wrong


class StepExecutor:
    """Runs one-row steps of any capturable state of one model, on one stream."""

    def __init__(self, decoder: CudaDecoder) -> None:
        self._decoder = decoder
        self._buffers: StepBuffers | None = None
        self._programs: dict[tuple[object, ...], StepProgram] = {}
        self._bound: tuple[StepRows, int] | None = None  # whose tables are on the device, at which version
        self._next = -1  # position and token that the device would run by itself
        self.capture_seconds: list[float] = []  # of each graph captured so far
        self.steps = 0  # steps that ran as graphs

    # -- asked by engines ------------------------------------------------------------------------------

    def serves(self, state: State, ffn: FfnBackend) -> bool:
        """Whether the next step of this state under this FFN runs as a graph."""
        asked = getattr(ffn, "in_graph", None)
        return (
            asked is not None and asked(self._decoder) and state.length > 0 and state.step_rows() is not None
        )

    def step(self, state: State, token: int) -> torch.Tensor:
        """Run one token; its hidden (1, hidden) float32, a tensor of its own."""
        self._enqueue(state, token, Ending.HIDDEN)
        return self._require_buffers().hidden[None].clone()

    def run_ahead(
        self, state: State, first_token: int | None, count: int, ending: Ending = Ending.GREEDY
    ) -> StepRun:
        """Enqueue `count` steps from `first_token` on (None: from the token chosen last); each one's choice
        is the next one's token."""
        buffers = self._require_buffers()
        slots = []
        for index in range(count):
            slots.append(buffers.open_slot())
            self._enqueue(state, first_token if index == 0 else None, ending)
        return StepRun(buffers, slots)

    def logits(self) -> torch.Tensor:
        """Logits (1, vocab) float32 of the last step that had an ending, a tensor of its own."""
        return self._require_buffers().logits[None].clone()

    def prepare(self) -> None:
        """Make the buffers; kernels compile when the first graph is captured."""
        self._require_buffers()

    def buffers(self) -> Iterable[torch.Tensor]:
        """Every tensor the steps own on the device."""
        return () if self._buffers is None else self._buffers.tensors()

    @property
    def captures(self) -> int:
        """Graphs captured so far."""
        return len(self.capture_seconds)

    def forget(self) -> None:
        """Drop every graph (their kernels may have other tiles now)."""
        self._programs.clear()
        self._bound = None

    # -- one step --------------------------------------------------------------------------------------

    def _enqueue(self, state: State, token: int | None, ending: Ending) -> None:
        buffers = self._require_buffers()
        position = state.length
        state.begin(position, 1)
        rows = state.step_rows()
        if rows is None:
            raise BackendFailure("this state cannot run as a captured step now")
        version = rows.reserve(position)
        buffers.grow(position + 1)
        program = self._program(rows, position, ending)
        if self._bound is None or self._bound[0] is not rows or self._bound[1] != version:
            buffers.upload(rows)
            self._bound = (rows, version)
        if token is not None:
            buffers.set_token(token)
        if self._next != position:
            buffers.set_position(position)
        self._next = -1  # until this step is enqueued
        program.replay()
        self._next = position + 1
        self.steps += 1
        state.count_step(position)
        state.commit(position + 1)

    def _program(self, rows: StepRows, position: int, ending: Ending) -> StepProgram:
        buffers = self._require_buffers()
        bridge = rows.bridge
        key = (
            buffers.capacity,
            tuple(pages.ring for pages in rows.kv),
            tuple(rows.windows),
            rows.residual is not None,
            # A bridge has two halves of staging, in turn: a graph for each.
            None if bridge is None else (bridge.staging.data_ptr(), bridge.full, position & 1),
            ending,
        )
        if key not in self._programs:
            self._programs = {old: kept for old, kept in self._programs.items() if old[0] == buffers.capacity}
            self._bound = None  # the warm-up below needs the tables
            buffers.upload(rows)
            buffers.set_position(position)
            begin = time.perf_counter()
            self._programs[key] = StepProgram(self._decoder, buffers, rows, position, ending)
            self.capture_seconds.append(time.perf_counter() - begin)
            self._next = -1
        return self._programs[key]

    def _require_buffers(self) -> StepBuffers:
        if self._buffers is None:
            self._buffers = StepBuffers(self._decoder, _LEAST_CAPACITY)
        return self._buffers


@dataclass
class StepRun:
    """Steps that were enqueued; `wait(i)` gives the token that step i chose."""

    buffers: StepBuffers
    slots: list[int]

    def wait(self, index: int) -> int:
        """The token, as soon as the device has written it.

        Raises BackendFailure when the step had no finite logits, or the device failed.
        """
        token = self.buffers.landed(self.slots[index], _PATIENCE)
        if token < 0:
            raise BackendFailure("the logits are not finite: are the head's weights corrupt?")
        return token
