"""Where `generate` takes its tokens from: one step at a time, or fed back on the device one step ahead."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from larql_kv.backends.draw import Draw
from larql_kv.engine.ahead import AheadRun, StepExecutor, executor_of
from larql_kv.engine.sampling import Sampler, SamplingOptions
from larql_kv.errors import InvariantViolation

if TYPE_CHECKING:
    from larql_kv.engine.base import KvEngine

Choose = Callable[[torch.Tensor], int]  # logits (1, vocab) -> the next token


class Chosen(NamedTuple):
    """A token, and the logits (1, vocab) it was chosen from, where they came to the host."""

    id: int
    logits: torch.Tensor | None


class TokenSource:
    """Tokens after a prefill, each from a step of its own that runs when it is asked for."""

    def __init__(self, engine: KvEngine, hidden: torch.Tensor, choose: Choose) -> None:
        """`hidden` (1, hidden) is of the last token that the engine holds."""
        self._engine, self._hidden, self._choose = engine, hidden, choose
        self._token: int | None = None  # handed out last, not yet run
        self._changes = engine.changes

    def next(self, more: bool) -> Chosen:
        """Run the token handed out last, and choose one. `more`: another may be asked for after this.

        Raises as `decode_step`, and InvariantViolation when tokens of the engine came or went in between.
        """
        self._check_alone()
        if self._token is not None:
            self._hidden = self._engine.decode_step(self._token)
        logits = self._engine.logits(self._hidden)
        return self._hand_out(self._choose(logits), logits)

    def close(self) -> None:
        """No token is wanted any more: the engine holds what was run for those handed out."""
        return

    def _check_alone(self) -> None:
        if self._engine.changes != self._changes:
            raise InvariantViolation("the engine was used for something else while this text was generated")

    def _hand_out(self, token: int, logits: torch.Tensor | None) -> Chosen:
        self._token, self._changes = token, self._engine.changes
        return Chosen(token, logits)


class FedSource(TokenSource):
    """The device feeds its choice to the next step, which is enqueued before the choice is read: it never
    waits for the program. The first token, and what has to run layer by layer, go step by step."""

    def __init__(
        self,
        engine: KvEngine,
        hidden: torch.Tensor,
        choose: Choose,
        executor: StepExecutor,
        draw: Draw | None,
    ) -> None:
        super().__init__(engine, hidden, choose)
        self._executor, self._draw = executor, draw
        self._run: AheadRun | None = None  # the step of the token handed out last, under way
        self._taken_back = engine.taken_back

    def next(self, more: bool) -> Chosen:
        if self._token is None:
            return super().next(more)
        self._check_alone()
        run, self._run = self._run, None
        if run is None or self._engine.taken_back != self._taken_back:
            run = self._enqueue(self._token)
        if run is None:
            return super().next(more)
        self._run = self._enqueue(run) if more else None
        token = run.wait(0)
        self._engine.land(self._token)
        return self._hand_out(token, None)

    def _enqueue(self, after: int | AheadRun) -> AheadRun | None:
        run = self._engine.enqueue(self._executor, after, 1, self._draw)
        self._changes, self._taken_back = self._engine.changes, self._engine.taken_back
        return run

    def close(self) -> None:
        if self._engine.changes == self._changes:
            self._engine.forget_ahead()


def token_source(engine: KvEngine, hidden: torch.Tensor, options: SamplingOptions) -> TokenSource:
    """The fastest source that can do what `options` ask for. The text does not depend on which one it is."""
    executor = executor_of(engine)
    if executor is None or options.repetition_penalty != 1:
        return TokenSource(engine, hidden, _by_host(engine, options))
    draw = _draw_of(options)
    choose = _by_device(engine, executor, draw)
    if options.with_logits:
        return TokenSource(engine, hidden, choose)
    return FedSource(engine, hidden, choose, executor, draw)


def _by_host(engine: KvEngine, options: SamplingOptions) -> Choose:
    sampler, nothing = Sampler(options), torch.empty(0, dtype=torch.int64)
    if options.repetition_penalty == 1:
        return lambda logits: sampler.choose(logits, nothing)
    return lambda logits: sampler.choose(logits, torch.tensor(engine.tokens))


def _by_device(engine: KvEngine, executor: StepExecutor, draw: Draw | None) -> Choose:
    """What a captured step chooses from the same logits."""
    if draw is None:
        return lambda logits: int(logits.argmax())
    return lambda logits: executor.draw(logits, engine.length, draw)


def _draw_of(options: SamplingOptions) -> Draw | None:
    """None for greedy; a seed of its own where none is given."""
    if options.temperature == 0:
        return None
    seed = secrets.randbits(62) if options.seed is None else options.seed
    return Draw(options.temperature, options.top_k, options.top_p, options.min_p, seed)
