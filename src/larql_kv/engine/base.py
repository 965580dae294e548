"""The engine front: one class drives every per-token K/V engine; what differs is the state it holds."""

from __future__ import annotations

import copy
import operator
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from larql_kv.engine.capture import mask_in_force, parse_mask
from larql_kv.engine.ids import check_ids, token_list
from larql_kv.engine.info import EngineFacts
from larql_kv.errors import BackendFailure, InvariantViolation, RemoteError, StoreError
from larql_kv.ffn.base import DenseFfn, FfnBackend
from larql_kv.model.clock import NULL_CLOCK, StageClock, StageSummary
from larql_kv.model.model import Model
from larql_kv.spec import EngineSpec
from larql_kv.state.bridge import CaptureMask
from larql_kv.state.tokens import TokenLog

if TYPE_CHECKING:
    from larql_kv.backends.draw import Draw
    from larql_kv.engine.ahead import AheadRun, StepExecutor
    from larql_kv.engine.generate import Token
    from larql_kv.engine.windows import Windows

# What a forward pass may die of: it becomes a BackendFailure.
_RUN_TIME_FAILURES = (
    RuntimeError,
    MemoryError,
    ArithmeticError,
    ValueError,
    OSError,
    RemoteError,
    StoreError,
)
PREFILL_ROWS = 512  # rows run at once: bounds the workspace of a long prompt


class KvEngine(EngineFacts):
    """One sequence on one model under one engine spec.

    Not thread-safe. A call that fails or is interrupted leaves the engine as it was before the call.
    """

    def __init__(self, spec: EngineSpec, model: Model, ffn: FfnBackend | None = None) -> None:
        self.spec = spec
        self.model = model
        if ffn is not None and not callable(getattr(ffn, "forward", None)):
            raise TypeError(f"ffn must be an FfnBackend, got {ffn!r}")
        self.ffn: FfnBackend = DenseFfn(model) if ffn is None else ffn
        self._state = spec.build_state(model)
        self._asked: CaptureMask | None = None
        self.capture = self._capture_by(None)
        self._tokens = TokenLog()
        self._rows_ffn: FfnBackend | None = None  # the FFN that the kept rows went through
        self._rows_mark: Hashable = None  # and its mark then
        self._path = ""  # that the last call ran on, where the backend has several
        self.changes = 0  # goes up whenever tokens come or go, so that a generator sees it was overtaken
        self.taken_back = 0  # goes up whenever steps that ran ahead of the tokens are trimmed away
        self.reused_tokens = 0  # of the last prompt given to `generate`
        self.recomputed_tokens = 0  # of the last call: tokens held before it that had to be run again

    # -- capture -------------------------------------------------------------------------------------

    def set_capture(self, mask: CaptureMask | str) -> None:
        """Stage by `mask` (full, h_only, none) instead of the best one. `capture` is the mask in force: a
        backend that cannot leave anything out stages in full.

        Raises SpecError for a mask that is unknown or does not serve this engine, InvariantViolation once
        the engine holds tokens.
        """
        asked = parse_mask(mask)
        if len(self._tokens):
            raise InvariantViolation("set_capture after tokens were run: reset() first")
        self.capture = self._capture_by(asked)

    def _capture_by(self, asked: CaptureMask | None) -> CaptureMask:
        mask = mask_in_force(self._state, self.model.decoder, self.spec.engine_name, asked)
        self._state.set_capture(mask)
        self._asked = asked
        return mask

    # -- running -------------------------------------------------------------------------------------

    def prefill(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Append tokens; returns the last one's hidden (1, hidden) float32, before the final norm.

        Raises EmptyPrompt for no tokens; ModelError, before any work, for an id outside the vocabulary or
        a text longer than the model's context; BackendFailure when the forward pass fails.
        """
        return self._run(token_ids, keep=1, query=True)

    def prefill_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """As `prefill`, returning every new token's hidden, (n, hidden)."""
        return self._run(token_ids, keep=None, query=True)

    def decode_step(self, token_id: int) -> torch.Tensor:
        """Append one token; returns its hidden (1, hidden) float32, before the final norm.

        Raises InvariantViolation before any prefill; otherwise as `prefill`.
        """
        if not len(self._tokens):
            raise InvariantViolation("decode_step before prefill: the engine holds no tokens")
        return self._run([token_id], keep=1)

    def _run(self, token_ids: Sequence[int], keep: int | None, query: bool = False) -> torch.Tensor:
        ids = token_list(token_ids)
        self.check_ids(ids)
        self.check_ffn()
        self.forget_ahead()
        held = len(self._tokens)
        with self._guarded(held):
            self.changes += 1
            self._tokens.append(ids)
            self.recomputed_tokens = held - min(held, self._state.length)
            return self._forward(held if keep is None else len(self._tokens) - keep, query)

    @contextmanager
    def _guarded(self, length: int) -> Iterator[None]:
        """Whatever ends the block early leaves `length` tokens, and a state that knows what it lost."""
        clock = self._state.clock
        if isinstance(clock, StageClock):
            clock.restart()
        try:
            self._rows_ffn = self.ffn
            yield
        except BaseException as error:
            self._state.end_step()
            self._cut(length)
            if self._state.coded_past(length):  # codes cannot be taken back: the next call runs the ids again
                self._state.trim(0)
            if isinstance(error, _RUN_TIME_FAILURES):
                raise BackendFailure(f"forward pass of {self.info.summary} failed: {error}") from error
            raise
        self._rows_mark = self.ffn.mark  # now: a remote FFN may have connected on the way
        if isinstance(clock, StageClock):
            clock.finish()

    def _forward(self, keep_from: int, query: bool = False) -> torch.Tensor:
        """Run every position the state does not hold; returns hidden rows of positions keep_from.. ."""
        state, clock = self._state, self._state.clock
        first = state.length
        ids = self._tokens.since(first)
        executor: StepExecutor | None = getattr(self.model.decoder, "step_executor", None)
        if executor is not None:
            if len(ids) == 1 and self.served_by(executor):
                return self._finite(executor.step(state, int(ids[0])))
            self._path = "eager"
        rows_at_once = getattr(self.model.decoder, "prefill_rows", PREFILL_ROWS)
        kept = []
        state.begin_call(self._tokens, self.ffn, query)
        position, stop = first, first + len(ids)
        while position < stop:
            end = state.chunk_end(position, min(stop, position + rows_at_once))
            chunk = ids[position - first : end - first]
            clock.switch("embed")
            rows = self.model.embed(chunk)
            state.begin(position, len(chunk))
            hidden = self.model.forward(rows, position, state, self.ffn, clock=clock)
            state.commit(end)
            if end > keep_from:
                kept.append(hidden[max(0, keep_from - position) :])
            position = end
        state.end_step()
        return self._finite(torch.cat(kept))

    def _finite(self, hidden: torch.Tensor) -> torch.Tensor:
        if not bool(torch.isfinite(hidden).all()):
            raise BackendFailure("the forward pass gave values that are not finite: are the weights corrupt?")
        return hidden

    def check_ids(self, ids: Sequence[int], held: int | None = None) -> None:
        """Refuse `ids` that cannot follow `held` tokens (default: those held): EmptyPrompt, ModelError."""
        check_ids(ids, len(self._tokens) if held is None else held, self.model.config)

    def check_ffn(self) -> None:
        """Raises InvariantViolation when rows are held that went through another FFN, or through this one
        before its patches or what its server serves changed."""
        if not self._state.length or self._rows_ffn is None:
            return
        if self._rows_ffn is self.ffn and self._rows_mark != self.ffn.mark:
            raise InvariantViolation(
                f"FFN {self.ffn.name!r} has changed since the rows held were made (its patches, or what its "
                "server serves): reset() first"
            )
        if self._rows_ffn != self.ffn or self._rows_mark != self.ffn.mark:
            raise InvariantViolation(
                f"the rows held were made under FFN {self._rows_ffn.name!r} and cannot be continued under "
                f"{self.ffn.name!r}: reset() first"
            )

    def _cut(self, length: int) -> None:
        """State first: tokens that the state does not hold are run again, the reverse would be skipped."""
        self.changes += 1
        self._state.trim(length)
        self._tokens.truncate(length)

    # -- steps that run ahead of their tokens ----------------------------------------------------------

    def decode_ahead(self, count: int, token_id: int) -> Iterator[int]:
        """Run `token_id` and then `count` - 1 greedy tokens; yields the `count` tokens chosen, as they land.

        The bits of `decode_step` and argmax, one after the other. Where the backend feeds tokens back itself,
        this call enqueues every step before the first token is read; else they run as they are asked for.
        Whenever iteration stops, the engine holds the tokens that were run for those yielded: steps beyond
        are trimmed away (what a ring lost by that is run again by the next call). Raises as `decode_step`;
        InvariantViolation when the engine was used for something else in between.
        """
        from larql_kv.engine.ahead import decode_ahead

        return decode_ahead(self, count, token_id)

    def served_by(self, executor: StepExecutor) -> bool:
        """Whether `executor` can run this engine's next step (never with the stage timers on)."""
        served = self._state.clock is NULL_CLOCK and executor.serves(self._state, self.ffn)
        if served:
            self._path = executor.path
        return served

    def enqueue(
        self, executor: StepExecutor, after: int | AheadRun, count: int, draw: Draw | None = None
    ) -> AheadRun | None:
        """Enqueue `count` steps from the token `after` on, or from the one that the run `after` chooses last;
        they choose the largest logit, or draw. Tokens join the sequence as they `land`. None where the steps
        have to run layer by layer."""
        self.check_ffn()
        if isinstance(after, int):
            self.forget_ahead()
        if self._state.clock is not NULL_CLOCK:
            return None
        with self._guarded(len(self._tokens)):
            if not self.served_by(executor):
                return None
            self.changes += 1
            self.recomputed_tokens = 0
            return executor.run_ahead(self._state, after, count, draw)

    def land(self, token: int) -> None:
        """The step that ran `token` is done: the sequence has one token more."""
        self.changes += 1
        self._tokens.append([token])

    def forget_ahead(self) -> None:
        """Trim steps that were enqueued and whose tokens nobody took."""
        if self._state.length > len(self._tokens):
            self.taken_back += 1
            self._state.trim(len(self._tokens))

    # -- time ----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Start over with an empty sequence."""
        self._cut(0)
        self._rows_ffn, self._rows_mark = None, None

    def trim(self, length: int) -> int:
        """Keep the first `length` tokens. What a ring had overwritten is run again from the ids now;
        returns how many tokens that were. Raises ValueError for a negative length, TypeError for none."""
        length = operator.index(length)
        if length < 0:
            raise ValueError(f"trim needs a length >= 0, got {length}")
        self.forget_ahead()
        if length >= len(self._tokens):
            return 0
        if length == 0:
            self.reset()
            return 0
        self.check_ffn()
        dropped = not self._state.length  # before this: the next call runs the ids again in any case
        self._cut(length)
        return 0 if dropped else self._restore()

    def _restore(self) -> int:
        """Run again what the state lost of the tokens held (nothing, where it keeps token ids only)."""
        lost = len(self._tokens) - self._state.length
        if not lost or not self._state.keeps_rows:
            return 0
        with self._guarded(len(self._tokens)):
            self._forward(len(self._tokens) - 1)
        return lost

    def fork(self) -> KvEngine:
        """An independent continuation; state blocks are shared until one side writes to them."""
        self.forget_ahead()
        twin = copy.copy(self)
        twin._tokens = self._tokens.fork()
        twin._state = self._state.fork()
        twin._state.clock = NULL_CLOCK  # a profile belongs to one engine
        return twin

    def fresh(self) -> KvEngine:
        """The same engine, spec, model, FFN and capture mask with an empty sequence."""
        twin = KvEngine(self.spec, self.model, self.ffn)
        if self._asked is not None:
            twin.set_capture(self._asked)
        return twin

    def reference(self) -> KvEngine:
        """The engine whose logits this engine's contract names, empty."""
        from larql_kv.engine.reference import Reference

        return KvEngine(Reference(**self.policy.contract.mask), self.model, self.ffn)

    # -- state ---------------------------------------------------------------------------------------

    def drop_derivative(self) -> int:
        """Let all derivative state go; the next step derives it again. Returns the bytes freed."""
        self.forget_ahead()
        return self._state.drop_derivative()

    # -- choosing ------------------------------------------------------------------------------------

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`model.logits(hidden)`, (n, hidden) -> (n, vocab) float32, charged to the stage `head`.

        Raises BackendFailure for logits that nothing can be chosen from (nan, or a largest that is infinite).
        """
        clock = self._state.clock
        if isinstance(clock, StageClock):
            clock.restart()
            clock.switch("head")
        logits = self.model.logits(hidden)
        if not bool(torch.isfinite(logits.amax(-1)).all()):  # amax passes nan on; -inf elsewhere is a choice
            raise BackendFailure("the logits are not finite: are the head's weights corrupt?")
        clock.switch("other")
        return logits

    # -- windows -------------------------------------------------------------------------------------

    @property
    def windows(self) -> Windows:
        """The windows of `unlimited-context`: its figures, archive, replays and `flush`. Raises
        BackendUnavailable for an engine that keeps none."""
        from larql_kv.engine.windows import windows_of

        return windows_of(self, self._state)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, the state holds every token, and can run those that it archived again."""
        self.check_ffn()
        self.forget_ahead()
        self._restore()
        with self._guarded(len(self._tokens)):
            self._state.begin_call(self._tokens, self.ffn, query=False)
            yield
            self._state.end_step()

    # -- measuring -----------------------------------------------------------------------------------

    def profile(self, on: bool = True) -> None:
        """Switch the stage timers on (from zero) or off."""
        sync = getattr(self.model.decoder, "synchronize", None)
        self._state.clock = StageClock(sync) if on else NULL_CLOCK

    def stage_summary(self) -> StageSummary | None:
        """Mean microseconds per call by stage, or None when `profile` is off."""
        clock = self._state.clock
        return StageSummary.of(clock) if isinstance(clock, StageClock) else None

    # -- generating ----------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], max_tokens: int = 64, **options: Any) -> Iterator[Token]:
        """Continue `prompt` (text, or token ids), yielding `Token`s as they are chosen.

        The longest common prefix of the prompt and the tokens held is reused (`reused_tokens`). Options:
        temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, with_logits; see SamplingOptions.
        """
        from larql_kv.engine.generate import SamplingOptions, generate

        return generate(self, prompt, max_tokens, SamplingOptions(**options))

    @contextmanager
    def using(self, ffn: FfnBackend) -> Iterator[KvEngine]:
        """Run with another FFN inside the block; with rows held under a different one, the next call
        raises InvariantViolation."""
        before, self.ffn = self.ffn, ffn
        try:
            yield self
        finally:
            self.ffn = before
