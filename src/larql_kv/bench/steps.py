"""Greedy steps as a bench runs them: the way the backend decodes fastest, whole tokens one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from larql_kv.engine.ahead import executor_of

if TYPE_CHECKING:
    from larql_kv.engine import KvEngine
    from larql_kv.model.model import Model


def next_id(model: Model, hidden: Any) -> int:
    """The greedy next id after the last hidden row (1, hidden)."""
    return int(model.logits(hidden).argmax())


def next_ids(engine: KvEngine, token: int, count: int) -> Iterator[int]:
    """Run `token`, then greedy ones: `count` ids in all, each as soon as the host knows it.

    Where the backend feeds its choice to the next step itself, all steps are enqueued first and the ids
    land while it goes on; elsewhere each step, its head and the choice run when the id is asked for.
    """
    if executor_of(engine) is not None:
        if count:
            yield from engine.decode_ahead(count, token)
        return
    for _ in range(count):
        token = next_id(engine.model, engine.decode_step(token))
        yield token
