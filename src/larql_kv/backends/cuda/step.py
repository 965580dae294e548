"""Decode steps as captured graphs: one launch a token, every length and position read on the device.

A graph belongs to a capacity (it doubles, so a growing text is captured O(log n) times), to what the state
keeps besides K/V, and to what ends the step. Engines on one model take turns with the same graphs: what is
theirs (block addresses, position, token) lies in device tables that are written when another state comes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from larql_kv.backends.cuda.program import Ending, StepBuffers, StepProgram
from larql_kv.errors import BackendFailure

if TYPE_CHECKING:
    from larql_kv.backends.cuda.decoder import CudaDecoder
    from larql_kv.backends.draw import Draw
    from larql_kv.ffn.base import FfnBackend
    from larql_kv.state.base import State, StepRows

_LEAST_CAPACITY = 1024
_PATIENCE = 30.0  # seconds for a token to land before the device is asked what is wrong


class StepExecutor:
    """Runs one-row steps of any capturable state of one model, on one stream."""

    def __init__(self, decoder: CudaDecoder) -> None:
        self._owner = weakref.ref(decoder)  # not a cycle: weights would wait for the collector
        self._buffers: StepBuffers | None = None
        self._programs: dict[tuple[object, ...], StepProgram] = {}
        # Whose tables are on the device, at which version. Weak: a dropped conversation holds nothing.
        self._bound: tuple[weakref.ref[StepRows], int] | None = None
        self._next = -1  # position that the device would run by itself
        self._chosen = -1  # number of the choice that is the device's token; -1: the host set it
        self._draw: Draw | None = None  # the settings that the device holds
        self._whole = True  # whether the last step was enqueued to its end
        self.capture_seconds: list[float] = []  # of each graph captured so far
        self.steps = 0  # steps that ran as graphs

    @property
    def _decoder(self) -> CudaDecoder:
        decoder = self._owner()
        assert decoder is not None, "the model was dropped"
        return decoder

    # -- asked by engines ------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """How steps run here, for results: "graph", or "interpreter" without a card."""
        return "graph" if self._decoder.device.type == "cuda" else "interpreter"

    def serves(self, state: State, ffn: FfnBackend) -> bool:
        """Whether the next step of this state under this FFN runs as a graph."""
        asked = getattr(ffn, "in_graph", None)
        return asked is not None and asked(self._decoder) and state.length > 0 and state.capturable

    def step(self, state: State, token: int) -> torch.Tensor:
        """Run one token; its hidden (1, hidden) float32, a tensor of its own."""
        self._enqueue(state, token, Ending.HIDDEN)
        return self._require_buffers().hidden[None].clone()

    def run_ahead(self, state: State, after: int | StepRun, count: int, draw: Draw | None = None) -> StepRun:
        """Enqueue `count` steps, reading no token: the first runs the token `after`, or the one that the run
        `after` chose last; each one's choice (the largest logit, or drawn by `draw`) is the next one's token.

        Only where other steps came between `after` and these is its token waited for.
        """
        buffers = self._require_buffers()
        if draw is not None:
            self._set_draw(draw)
        run = StepRun(buffers)
        token = self._token_of(after)
        for _ in range(count):
            run.numbers.append(self._enqueue(state, token, Ending.GREEDY if draw is None else Ending.SAMPLE))
            token = None
        return run

    def draw(self, logits: torch.Tensor, position: int, draw: Draw) -> int:
        """Draw the token of `position` from logits (1, vocab) float32: what a step would draw from them.

        Raises BackendFailure when they are not finite.
        """
        buffers = self._require_buffers()
        self._set_draw(draw)
        self._begin()
        buffers.set_position(position)
        number = buffers.open_choice()
        buffers.draw(logits[0])
        self._chosen, self._next, self._whole = number, position, True
        return _valid(buffers.landed(number, _PATIENCE))

    def logits(self) -> torch.Tensor:
        """Logits (1, vocab) float32 of the last step that had an ending, a tensor of its own."""
        return self._require_buffers().logits[None].clone()

    def prepare(self) -> None:
        """Make the buffers; kernels compile when the first graph is captured."""
        self._require_buffers()

    def buffers(self) -> Iterable[torch.Tensor]:
        """Every tensor the steps own."""
        return () if self._buffers is None else self._buffers.tensors()

    @property
    def captures(self) -> int:
        """Graphs captured so far."""
        return len(self.capture_seconds)

    def forget(self) -> None:
        """Drop every graph (their kernels may have other tiles now)."""
        self._decoder.synchronize()
        self._programs.clear()
        self._bound = None

    # -- one step --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """What the device's token, position and choices are is unknown until the step was enqueued."""
        if not self._whole:  # the last one was given up half-way
            self._require_buffers().realign()
        self._whole, self._chosen, self._next = False, -1, -1

    def _enqueue(self, state: State, token: int | None, ending: Ending) -> int:
        """Enqueue the step of `token` (None: of the token chosen last); returns the number of its choice, or
        -1 where it makes none."""
        buffers = self._require_buffers()
        position, next_position = state.length, self._next
        state.begin(position, 1)
        rows = state.step_rows()
        if rows is None:
            raise BackendFailure("this state cannot run as a captured step now")
        version = rows.reserve(position)
        buffers.grow(position + 1)
        self._begin()
        program = self._program(rows, position, ending)
        bound = self._bound
        if bound is None or bound[0]() is not rows or bound[1] != version:
            buffers.upload(rows)
            self._bound = (weakref.ref(rows), version)
        if token is not None:
            buffers.set_token(token)
        if next_position != position:
            buffers.set_position(position)
        number = -1 if ending is Ending.HIDDEN else buffers.open_choice()
        program.replay()
        self._chosen, self._next, self._whole = number, position + 1, True
        self.steps += 1
        state.count_step(position)
        state.commit(position + 1)
        return number

    def _program(self, rows: StepRows, position: int, ending: Ending) -> StepProgram:
        buffers = self._require_buffers()
        bridge = rows.bridge
        # What a graph has the addresses of: tables by capacity, RoPE rows (a prompt may grow those).
        sizes = (buffers.capacity, *(rope.capacity for rope in self._decoder.rope_tables))
        key = (
            sizes,
            tuple((kv.hot.ring, kv.window) for kv in rows.kv),
            rows.residual is not None,
            # A bridge has two halves of staging, in turn: a graph for each.
            None if bridge is None else (bridge.staging.data_ptr(), bridge.full, position & 1),
            ending,
        )
        if key not in self._programs:
            buffers.synchronize()  # a graph that is dropped must not be under way
            self._programs = {old: kept for old, kept in self._programs.items() if old[0] == sizes}
            self._bound = None  # the warm-up below needs the tables
            buffers.upload(rows)
            buffers.set_position(position)
            begin = time.perf_counter()
            self._programs[key] = StepProgram(weakref.proxy(self._decoder), buffers, rows, position, ending)
            self.capture_seconds.append(time.perf_counter() - begin)
        return self._programs[key]

    def _token_of(self, after: int | StepRun) -> int | None:
        """The token to run after that; None where the device has it."""
        if isinstance(after, StepRun):
            return None if after.numbers[-1] == self._chosen else after.wait(-1)
        return after

    def _set_draw(self, draw: Draw) -> None:
        if draw != self._draw:
            self._require_buffers().sampling.set(*draw)
            self._draw = draw

    def _require_buffers(self) -> StepBuffers:
        if self._buffers is None:
            self._buffers = StepBuffers(weakref.proxy(self._decoder), _LEAST_CAPACITY)
        return self._buffers


class StepRun:
    """Steps that were enqueued; `wait(i)` gives the token that step i chose."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self.numbers: list[int] = []  # of the choices
        self._tokens: dict[int, int] = {}  # collected before their slots were used again
        buffers.watch(self)

    def wait(self, index: int) -> int:
        """The token, as soon as the device has written it.

        Raises BackendFailure when the step had no finite logits, or the device failed.
        """
        number = self.numbers[index]
        token = self._tokens.get(number)
        return _valid(self._buffers.landed(number, _PATIENCE) if token is None else token)

    def collect(self) -> None:
        """Keep every token; all have landed."""
        for number in self.numbers:
            if number not in self._tokens:
                self._tokens[number] = self._buffers.landed(number, 0.0)


def _valid(token: int) -> int:
    if token < 0:
        raise BackendFailure("the logits are not finite: are the head's weights corrupt?")
    return token
