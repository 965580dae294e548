"""`decode_ahead`: greedy steps that are enqueued before the first of their tokens is read.

A backend that feeds its own tokens back offers a `StepExecutor` as `decoder.step_executor`; without one
(the CPU) the same tokens come from one step at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from larql_kv.engine.ids import token_list
from larql_kv.errors import InvariantViolation, ModelError

if TYPE_CHECKING:
    import torch

    from larql_kv.backends.draw import Draw
    from larql_kv.engine.base import KvEngine
    from larql_kv.ffn.base import FfnBackend
    from larql_kv.state.base import State


class AheadRun(Protocol):
    """Steps that were enqueued."""

    def wait(self, index: int) -> int:
        """The token chosen by step `index`, as soon as it is there.

        Raises BackendFailure when it had no finite logits to choose from.
        """
        ...


class StepExecutor(Protocol):
    """Runs one-row steps as captured graphs whose next token is fed back on the device."""

    @property
    def path(self) -> str:
        """What `EngineInfo.backend` calls it: "graph"."""
        ...

    def serves(self, state: State, ffn: FfnBackend) -> bool:
        """Whether steps of this state under this FFN can run so."""
        ...

    def step(self, state: State, token: int) -> torch.Tensor:
        """Run one token; its hidden (1, hidden) float32, a tensor of its own."""
        ...

    def run_ahead(
        self, state: State, after: int | AheadRun, count: int, draw: Draw | None = None
    ) -> AheadRun:
        """Enqueue `count` steps, reading no token: from the token `after` on, or from the one that the run
        `after` of this state chooses last. A step chooses the largest logit, or draws. For each, `State`'s
        protocol of a captured step, `commit` included."""
        ...

    def draw(self, logits: torch.Tensor, position: int, draw: Draw) -> int:
        """What a step would draw from logits (1, vocab) as the token of `position`."""
        ...


Mark = tuple[int, int]


def executor_of(engine: KvEngine) -> StepExecutor | None:
    """What runs the steps of this engine's model as graphs, on a backend that has it."""
    return getattr(engine.model.decoder, "step_executor", None)


def decode_ahead(engine: KvEngine, count: int, token_id: int) -> Iterator[int]:
    """See `KvEngine.decode_ahead`."""
    (token,) = token_list([token_id])
    count = operator.index(count)
    if count < 1:
        raise ValueError(f"decode_ahead needs a count >= 1, got {count}")
    if not engine.length:
        raise InvariantViolation("decode_ahead before prefill: the engine holds no tokens")
    engine.check_ids([token])
    context = engine.model.config.context
    if engine.length + count > context:
        raise ModelError(
            f"{engine.length + count} tokens do not fit the model's context of {context}: at most "
            f"{context - engine.length} can follow"
        )
    engine.check_ffn()
    executor = executor_of(engine)
    if executor is None:
        return _by_steps(engine, count, token, _mark(engine))
    if engine.held_positions < engine.length:
        return _first_by_itself(engine, count, token, _mark(engine))
    run = engine.enqueue(executor, token, count)
    if run is None:
        return _by_steps(engine, count, token, _mark(engine))
    return _landing(engine, run, token, count, _mark(engine))


def _step(engine: KvEngine, token: int) -> int:
    return int(engine.logits(engine.decode_step(token)).argmax())


def _by_steps(engine: KvEngine, count: int, token: int, mark: Mark) -> Iterator[int]:
    for _ in range(count):
        _check_alone(engine, mark)
        token = _step(engine, token)
        mark = _mark(engine)
        yield token


def _first_by_itself(engine: KvEngine, count: int, token: int, mark: Mark) -> Iterator[int]:
    """The first step runs again what was dropped; the others follow on the device (of an engine that keeps
    nothing, each runs by itself)."""
    _check_alone(engine, mark)
    first = _step(engine, token)
    mark = _mark(engine)
    yield first
    _check_alone(engine, mark)
    if count > 1:
        kept = engine.held_positions == engine.length
        rest = decode_ahead(engine, count - 1, first) if kept else _by_steps(engine, count - 1, first, mark)
        yield from rest


def _landing(engine: KvEngine, run: AheadRun, token: int, count: int, mark: Mark) -> Iterator[int]:
    """Hand out tokens as they land. The engine holds what was run for those; the rest is forgotten."""
    try:
        for index in range(count):
            _check_alone(engine, mark)
            landed = run.wait(index)
            engine.land(token)
            token, mark = landed, _mark(engine)
            yield landed
    finally:
        if _mark(engine) == mark:
            engine.forget_ahead()


def _mark(engine: KvEngine) -> Mark:
    """What tells whether somebody else used the engine since."""
    return engine.changes, engine.taken_back


def _check_alone(engine: KvEngine, mark: Mark) -> None:
    if _mark(engine) != mark:
        raise InvariantViolation("the engine was used for something else while its tokens were handed out")
