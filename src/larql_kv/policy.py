"""What an engine keeps and what it promises: canonical state, derivative state, contract.

A `Contract` names its reference run and checks itself against it on the user's own model. It knows
engines only through the small surface in `Checkable`, so that this module stays at the bottom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Protocol


class StateKind(StrEnum):
    """The kinds of state an engine can hold."""

    TOKEN_IDS = "token ids"
    KV = "K/V rows"
    KV_CODES = "K/V codes"
    KV_WINDOW = "K/V rows of a window, checkpoints and token ids"
    RESIDUAL_ROWS = "residual rows"
    RESIDUAL_CODES = "residual rows, cold ones coded"
    NOTHING = "nothing"


class Verdict(StrEnum):
    """The outcome of a contract check."""

    BITS = "holds: same bits"
    HOLDS = "holds"
    NOT_EXERCISED = "not exercised"
    BROKEN = "broken"


# Mean KL (nats) that an execution form may differ by: what `dtype=None` is chosen under on the CPU. The
# reference engine has nothing but its own noise floor to be judged by, so that floor has to stay under this,
# or under what the backend says of a form whose steps and passes are two different approximations.
FORM_BOUND = 1.5e-3
CODED_FLOOR = 0.8  # share of coded layers' rows that a compressing engine must have read coded


class Runner(Protocol):
    """One run of a check: an engine, as far as a contract uses it."""

    @property
    def model(self) -> Any: ...

    def prefill(self, token_ids: Sequence[int]) -> Any: ...

    def prefill_rows(self, token_ids: Sequence[int]) -> Any: ...

    def decode_step(self, token_id: int) -> Any: ...

    def drop_derivative(self) -> int: ...

    def read_forms(self) -> dict[str, float]: ...

    def coded_share(self) -> float | None: ...


class Checkable(Protocol):
    """What a contract asks of an engine in order to check it."""

    @property
    def is_reference(self) -> bool:
        """Whether `Exact` compares with this engine, so that only its own single pass can judge it."""
        ...

    @property
    def widest_window(self) -> int:
        """The widest window that rows retire behind: a shorter text exercises nothing. 0 for none."""
        ...

    @property
    def form_bound(self) -> float:
        """Mean KL (nats) that the reference's steps may differ by from its single pass, on this backend."""
        ...

    def fresh(self) -> Runner:
        """The same engine with empty state."""
        ...

    def reference(self) -> Runner:
        """The engine whose logits this engine's contract names, with empty state."""
        ...


@dataclass(frozen=True)
class Divergence:
    """How two runs of logits differ. KL in nats, reference against candidate."""

    steps: int
    max_kl: float
    mean_kl: float
    top1_agreement: float
    max_abs_logit: float
    same_bits: bool
    first_top1_divergence: int | None


@dataclass(frozen=True)
class ContractReport:
    """What `Contract.check` measured. `forms` is the share of attended rows read in each form."""

    contract: str
    verdict: Verdict
    reason: str
    teacher_forced: Divergence
    noise_floor: Divergence
    free_running_tokens: int
    first_divergence: int | None  # in the free-running greedy decode
    forms: dict[str, float]

    @property
    def ok(self) -> bool:
        return self.verdict in (Verdict.BITS, Verdict.HOLDS)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


@dataclass(frozen=True)
class Contract:
    """A promise about logits, with the reference it is measured against.

    `check(engine, token_ids, prompt_tokens)` prefills the first `prompt_tokens` ids, then decodes the
    rest token by token (teacher-forced), and lets both runs continue greedily on their own.
    """

    @property
    def reference_window(self) -> int | None:
        """The window that the reference run is masked to, None for the whole text."""
        return None

    @property
    def mask(self) -> dict[str, int]:
        """How the reference run is masked: `window` and `sinks`, or `tumbling`; empty for the whole text."""
        return {}

    @property
    def name(self) -> str:
        given = {key.name: getattr(self, key.name) for key in fields(self)}
        shown = ", ".join(
            f"{key.name}={given[key.name]:g}" for key in fields(self) if given[key.name] != key.default
        )
        return f"{type(self).__name__}({shown})" if shown else type(self).__name__

    @property
    def nats_allowed(self) -> float:
        """The largest KL against the reference that a step may show beyond noise."""
        return 0.0

    def check(
        self,
        engine: Checkable,
        token_ids: Sequence[int],
        prompt_tokens: int | None = None,
        free_tokens: int = 32,
    ) -> ContractReport:
        """Measure this promise for `engine` on at least 4 `token_ids`. Raises ValueError for fewer."""
        ids = list(token_ids)
        if len(ids) < 4:
            raise ValueError(f"a contract check needs at least 4 token ids, got {len(ids)}")
        prompt = len(ids) // 2 if prompt_tokens is None else prompt_tokens
        if not 0 < prompt < len(ids):
            raise ValueError(f"prompt_tokens must lie in 1..{len(ids) - 1}, got {prompt}")
        if free_tokens < 1:
            raise ValueError(f"free_tokens must be at least 1, got {free_tokens}")
        reference, candidate = engine.reference(), engine.fresh()
        reference_logits = _stepwise(reference, ids, prompt)
        candidate_logits = _stepwise(candidate, ids, prompt, drops=(len(ids) - prompt) // 3)
        at_once = _at_once(engine.reference(), ids, prompt)
        floor = divergence(at_once, reference_logits)
        # The reference against itself proves nothing: its steps are judged by its own single pass.
        forced = divergence(at_once if engine.is_reference else reference_logits, candidate_logits)
        unexercised = self._unexercised(engine, len(ids), candidate.coded_share())
        verdict, reason = self._judge(engine, forced, floor)
        if unexercised and verdict != Verdict.BROKEN:
            verdict, reason = Verdict.NOT_EXERCISED, unexercised
        diverged = _free_run(engine, ids[:prompt], free_tokens)
        return ContractReport(
            self.name, verdict, reason, forced, floor, free_tokens, diverged, candidate.read_forms()
        )

    def _unexercised(self, engine: Checkable, tokens: int, coded: float | None) -> str | None:
        """Why this run could not have failed, or None."""
        if coded is not None and coded < CODED_FLOOR:
            return f"only {coded:.0%} of the coded layers' rows were read coded"
        widest = max(engine.widest_window, self.reference_window or 0)
        if tokens <= widest:
            return f"{tokens} tokens never pass the window of {widest}"
        return None

    def _judge(self, engine: Checkable, forced: Divergence, floor: Divergence) -> tuple[Verdict, str]:
        if not math.isfinite(forced.max_kl):
            return Verdict.BROKEN, "the logits are not finite"
        if forced.same_bits:
            return Verdict.BITS, "every logit has the reference's bits"
        if engine.is_reference:
            what, value, limit = "step by step against one pass: mean KL", forced.mean_kl, engine.form_bound
        elif floor.same_bits and not self.nats_allowed:
            return (
                Verdict.BROKEN,
                f"the bits differ (max KL {forced.max_kl:.2e}) where the reference's repeat",
            )
        else:  # both runs carry the noise of their own shapes
            what, value, limit = "max KL", forced.max_kl, self.nats_allowed + 2 * floor.max_kl
        holds = value <= limit
        return (
            Verdict.HOLDS if holds else Verdict.BROKEN,
            f"{what} {value:.2e} {'<=' if holds else '>'} {limit:.2e}",
        )


@dataclass(frozen=True)
class Exact(Contract):
    """The logits of `standard`: its bits where it repeats its own bits (float32 on the CPU), elsewhere within
    twice the noise floor. `standard` itself: its steps against its single pass, mean KL by `form_bound`."""


@dataclass(frozen=True)
class ExactWithinWindow(Contract):
    """The logits of a full run in which every layer sees only the last `window` positions, and the first
    `sinks`; or with `tumbling`, those of its own window among windows that follow one another, and the last
    position of the one before."""

    window: int
    sinks: int = 0
    tumbling: bool = False

    @property
    def reference_window(self) -> int:
        return self.window

    @property
    def mask(self) -> dict[str, int]:
        return {"tumbling": self.window} if self.tumbling else {"window": self.window, "sinks": self.sinks}


@dataclass(frozen=True)
class BoundedKL(Contract):
    """No step's KL exceeds `nats` (plus twice the noise floor): against `standard`, or in full precision
    against a `window` with its `sinks`, or `tumbling` windows of so many tokens."""

    nats: float
    tumbling: int = 0
    window: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.nats < math.inf:
            raise ValueError(f"a KL bound must be positive and finite, got {self.nats}")

    @property
    def reference_window(self) -> int | None:
        return self.tumbling or self.window or None

    @property
    def mask(self) -> dict[str, int]:
        if self.tumbling:
            return {"tumbling": self.tumbling}
        return {"window": self.window, "sinks": self.sinks} if self.window else {}

    @property
    def nats_allowed(self) -> float:
        return self.nats


@dataclass(frozen=True)
class BoundedKLPerLayer(BoundedKL):
    """As `BoundedKL`, with the budget divided among layers by a calibration record."""


@dataclass(frozen=True)
class TaskLevel(Contract):
    """No promise about logits: the answer to a task is right, which only an accuracy suite can check."""

    def _unexercised(self, engine: Checkable, tokens: int, coded: float | None) -> str | None:
        return "this contract is about tasks, not logits"

    @property
    def nats_allowed(self) -> float:
        return math.inf


@dataclass(frozen=True)
class StatePolicy:
    """An engine's identity: what it cannot lose, what it may drop, what it promises."""

    canonical: StateKind
    derivative: StateKind
    contract: Contract

    def to_dict(self) -> dict[str, str]:
        return {
            "canonical": str(self.canonical),
            "derivative": str(self.derivative),
            "contract": self.contract.name,
        }


def divergence(reference: Any, candidate: Any) -> Divergence:
    """Compare logits (steps, vocab), reference first, in float64."""
    import torch

    reference_log = torch.log_softmax(reference.double(), -1)
    candidate_log = torch.log_softmax(candidate.double(), -1)
    kl = (reference_log.exp() * (reference_log - candidate_log)).sum(-1).clamp_min(0.0)
    agree = reference.argmax(-1) == candidate.argmax(-1)
    apart = (~agree).nonzero()
    return Divergence(
        steps=len(kl),
        max_kl=float(kl.max()),
        mean_kl=float(kl.mean()),
        top1_agreement=float(agree.double().mean()),
        max_abs_logit=float((reference - candidate).abs().max()),
        same_bits=bool(torch.equal(reference, candidate)),
        first_top1_divergence=int(apart[0]) if len(apart) else None,
    )


def _stepwise(engine: Runner, ids: list[int], prompt: int, drops: int | None = None) -> Any:
    """Prefill, then teacher-forced steps. With `drops`, derivative state is dropped before every so many
    steps: what the engine derives again has to come from the canonical state that it claims."""
    import torch

    logits = [engine.model.logits(engine.prefill(ids[:prompt]))]
    for step, token in enumerate(ids[prompt:-1]):
        if drops is not None and step % max(drops, 1) == 0:
            engine.drop_derivative()
        logits.append(engine.model.logits(engine.decode_step(token)))
    return torch.cat(logits)


def _at_once(engine: Runner, ids: list[int], prompt: int) -> Any:
    return engine.model.logits(engine.prefill_rows(ids[:-1])[prompt - 1 :])


def _free_run(engine: Checkable, prompt: list[int], count: int) -> int | None:
    """Index of the first greedy token at which the engine and its reference part, or None."""
    runs = []
    for runner in (engine.reference(), engine.fresh()):
        tokens = [int(runner.model.logits(runner.prefill(prompt)).argmax())]
        while len(tokens) < count:
            tokens.append(int(runner.model.logits(runner.decode_step(tokens[-1])).argmax()))
        runs.append(tokens)
    return next((index for index, (a, b) in enumerate(zip(*runs, strict=True)) if a != b), None)
