"""What a window's K/V rows were when it was open: recorded from the engine's own forward passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from larql_kv.engine.base import KvEngine
from larql_kv.model.model import Model
from tests import tiny_models
from tests.models import tiny

FAMILIES = ("llama", "gemma3")  # gemma3: sliding layers of 8


def roomy(family: str) -> Model:
    """A tiny model with room for more than its 256 tokens."""
    model = tiny(family)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, context=4096))


def ids_of(model: Model, count: int, seed: int = 3) -> list[int]:
    return tiny_models.sample_ids(count, model.config.vocab, seed)


class Live:
    """K/V that one engine's own rows had, by layer and position, as they left the projection last."""

    def __init__(self, engine: KvEngine) -> None:
        self.engine = engine
        self.rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def window(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V (layers, n, kv_heads, head_dim)"""
        layers = range(self.engine.model.config.layer_count)
        at = [[self.rows[layer, position] for position in range(first, stop)] for layer in layers]
        k, v = (torch.stack([torch.stack([row[part] for row in rows]) for rows in at]) for part in (0, 1))
        return k, v


@contextmanager
def recorded(engine: KvEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """Replays and probes run through states of their own: they are not recorded."""
    model, live = engine.model, Live(engine)
    forward, inputs = model.forward, model.decoder.attention_inputs
    running: list[object] = []

    def noted_forward(rows, first, state, *others, **named):
        running.append(state)
        try:
            return forward(rows, first, state, *others, **named)
        finally:
            running.pop()

    def noted_inputs(layer, rows, first):
        q, k, v = inputs(layer, rows, first)
        if running and running[-1] is live.engine._state:
            live.rows |= {(layer, first + i): (k[i].clone(), v[i].clone()) for i in range(len(k))}
        return q, k, v

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", noted_forward)
        patch.setattr(model.decoder, "attention_inputs", noted_inputs)
        yield live


def check_replays(engine: KvEngine, live: Live, ids: list[int] | None = None) -> None:
    """Replays of windows have the bits that the windows had; the engine is not touched."""
    before = engine.ledger().to_dict(), engine.length
    for item in engine.windows.archive() if ids is None else [list(engine.windows.archive())[i] for i in ids]:
        stop = item.first + len(item.token_ids)
        assert item.token_ids == engine.tokens[item.first : stop]
        rows = engine.windows.replay_window(item.id)
        k, v = live.window(item.first, stop)
        assert rows.first == item.first
        assert torch.equal(rows.k, k), item.id
        assert torch.equal(rows.v, v), item.id
    assert (engine.ledger().to_dict(), engine.length) == before
