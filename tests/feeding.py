"""A stand-in for a device's step executor, on the CPU: fast, deterministic, and it keeps a trace."""

from __future__ import annotations

from typing import Any

import torch

import larql_kv as lk
from larql_kv.backends.draw import Draw
from larql_kv.engine.sampling import Sampler, SamplingOptions
from larql_kv.model.model import Model
from larql_kv.state.base import State
from tests.lanes import staging


class Executor:
    """Does by hand what a captured graph does: it sees `StepRows` alone, never `observe` or `attend`."""

    path = "graph"

    def __init__(self, model: Model) -> None:
        self.model = model
        self.trace: list[str] = []
        self.fails_at = -1  # step of a `run_ahead` that cannot be enqueued
        self.no_numbers_at = -1  # of all tokens read, the one whose logits were not finite
        self._reads = 0

    def serves(self, state: State, ffn: Any) -> bool:
        return isinstance(ffn, lk.DenseFfn) and state.length > 0 and state.step_rows() is not None

    def step(self, state: State, token: int) -> torch.Tensor:
        decoder, position = self.model.decoder, state.length
        state.begin(position, 1)
        rows = state.step_rows()
        assert rows is not None
        rows.reserve(position)
        hidden = decoder.embed(torch.tensor([token]))
        for layer, pages in enumerate(rows.kv):
            q, k, v = decoder.attention_inputs(layer, hidden, position)
            if rows.residual is not None:
                rows.residual[layer].write(hidden, position)
            if rows.bridge is not None:
                parts = (hidden, k, v) if rows.bridge.full else (hidden,)
                staged = torch.cat([part.flatten() for part in parts])
                rows.bridge.staging[position & 1, layer].copy_(staged)
            attended = decoder.attend(q, k, v, pages, position)
            decoder.append_rows(k, v, pages, position, 0)
            decoder.add_attention_(layer, hidden, attended)
            decoder.add_ffn_(layer, hidden, decoder.dense_ffn(layer, decoder.ffn_input(layer, hidden)))
        state.count_step(position)
        state.commit(position + 1)
        self.trace.append("step")
        return hidden

    def run_ahead(self, state: State, after: int | Run, count: int, draw: Draw | None = None) -> Run:
        tokens: list[int] = []
        token = after.tokens[-1] if isinstance(after, Run) else after
        for index in range(count):
            if index == self.fails_at:
                raise RuntimeError("the device is gone")
            logits = self.model.logits(self.step(state, token))
            token = int(logits.argmax()) if draw is None else self.draw(logits, state.length, draw)
            tokens.append(token)
        return Run(self, tokens)

    def draw(self, logits: torch.Tensor, position: int, draw: Draw) -> int:
        options = SamplingOptions(
            draw.temperature, draw.top_k, draw.top_p, draw.min_p, seed=draw.seed + position
        )
        return Sampler(options).choose(logits, torch.empty(0, dtype=torch.int64))

    def read(self) -> None:
        self.trace.append("read")
        self._reads += 1
        if self._reads - 1 == self.no_numbers_at:
            raise lk.BackendFailure("the logits are not finite")


class Run:
    """Tokens chosen on the device."""

    def __init__(self, executor: Executor, tokens: list[int]) -> None:
        self.executor, self.tokens = executor, tokens

    def wait(self, index: int) -> int:
        self.executor.read()
        return self.tokens[index]


def feeding(family: str) -> tuple[Model, Executor]:
    """A model whose decoder has the stand-in, and stages by mask."""
    model = staging(family)
    executor = model.decoder.step_executor = Executor(model)  # type: ignore[attr-defined]
    return model, executor
