"""`decode_ahead`: greedy steps that are enqueued before the first of their tokens is read.

A backend that feeds its own tokens back offers a `StepExecutor` as `decoder.step_executor`; without one
(the CPU) the same tokens come from one step at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from larql_kv.engine.ids import token_list
from larql_kv.errors import InvariantViolation

if TYPE_CHECKING:
    import torch

    from larql_kv.engine.base import KvEngine
    from larql_kv.ffn.base import FfnBackend
    from larql_kv.state.base import State


class AheadRun(Protocol):
    """Steps that were enqueued."""

    def wait(self, index: int) -> int:
        """The token chosen by step `index`, as soon as it is there; asked for in order.

        Raises BackendFailure when it had no finite logits to choose from.
        """
        ...


class StepExecutor(Protocol):
    """Runs one-row steps as captured graphs whose next token is fed back on the device."""

    def serves(self, state: State, ffn: FfnBackend) -> bool:
        """Whether steps of this state under this FFN can run so."""
        ...

    def step(self, state: State, token: int) -> torch.Tensor:
        """Run one token; its hidden (1, hidden) float32, a tensor of its own."""
        ...

    def run_ahead(self, state: State, first_token: int, count: int) -> AheadRun:
        """Enqueue `count` greedy steps from `first_token` on, reading no token: for each, `State`'s protocol
        of a captured step, `commit` included."""
        ...


def decode_ahead(engine: KvEngine, count: int, token_id: int) -> Iterator[int]:
    """See `KvEngine.decode_ahead`."""
    (token,) = token_list([token_id])
    count = operator.index(count)
    if count < 1:
        raise ValueError(f"decode_ahead needs a count >= 1, got {count}")
    if not engine.length:
        raise InvariantViolation("decode_ahead before prefill: the engine holds no tokens")
    engine.check_ids([token] * count)
    engine.check_ffn()
    executor: StepExecutor | None = getattr(engine.model.decoder, "step_executor", None)
    if executor is None:
        return _by_steps(engine, count, token)
    if engine.held_positions < engine.length:
        return _first_by_itself(engine, count, token)
    run = engine.enqueue(executor, token, count)
    return _by_steps(engine, count, token) if run is None else _landing(engine, run, token, count)


def _step(engine: KvEngine, token: int) -> int:
    return int(engine.logits(engine.decode_step(token)).argmax())


def _by_steps(engine: KvEngine, count: int, token: int) -> Iterator[int]:
    changes = engine.changes
    for _ in range(count):
        _check_alone(engine, changes)
        token = _step(engine, token)
        changes = engine.changes
        yield token


def _first_by_itself(engine: KvEngine, count: int, token: int) -> Iterator[int]:
    """The first step runs again what was dropped; the others follow on the device."""
    first = _step(engine, token)
    changes = engine.changes
    yield first
    _check_alone(engine, changes)
    if count > 1:
        yield from decode_ahead(engine, count - 1, first)


def _landing(engine: KvEngine, run: AheadRun, token: int, count: int) -> Iterator[int]:
    """Hand out tokens as they land. The engine holds what was run for those; the rest is forgotten."""
    changes = engine.changes
    try:
        for index in range(count):
            _check_alone(engine, changes)
            landed = run.wait(index)
            engine.land(token)
            token, changes = landed, engine.changes
            yield landed
    finally:
        if engine.changes == changes:
            engine.forget_ahead()


def _check_alone(engine: KvEngine, changes: int) -> None:
    if engine.changes != changes:
        raise InvariantViolation("the engine was used for something else while its tokens were handed out")
