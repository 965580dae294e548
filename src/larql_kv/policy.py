"""What an engine keeps and what it promises: canonical state, derivative state, contract.

A `Contract` names its reference run and checks itself against it on the user's own model. It knows
engines only through the small surface in `Checkable`, so that this module stays at the bottom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol


class StateKind(StrEnum):
    """The kinds of state an engine can hold."""

    TOKEN_IDS = "token ids"
    KV = "K/V rows"
    RESIDUAL_ROWS = "residual rows"
    NOTHING = "nothing"


class Verdict(StrEnum):
    """The outcome of a contract check."""

    BITS = "holds: same bits"
    HOLDS = "holds"
    NOT_EXERCISED = "not exercised"
    BROKEN = "broken"


# Mean KL (nats) that an execution form may differ by: what `dtype=None` is chosen under. The reference
# engine has nothing but its own noise floor to be judged by, so that floor has to stay under this.
FORM_BOUND = 1.5e-3


class Checkable(Protocol):
    """What a contract asks of an engine in order to check it."""

    def fresh(self) -> Any:
        """The same engine with empty state."""
        ...

    def reference(self) -> Any:
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

    reference_window: ClassVar[int | None] = None

    @property
    def name(self) -> str:
        fields = ", ".join(f"{key}={value:g}" for key, value in asdict(self).items())
        return f"{type(self).__name__}({fields})" if fields else type(self).__name__

    def bound(self, floor: Divergence) -> float:
        """The largest KL (nats) a step may show."""
        raise NotImplementedError

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
        reference, candidate = engine.reference(), engine.fresh()
        reference_logits = _stepwise(reference, ids, prompt)
        candidate_logits = _stepwise(candidate, ids, prompt)
        at_once = _at_once(engine.reference(), ids, prompt)
        forced = divergence(reference_logits, candidate_logits)
        floor = divergence(at_once, reference_logits)
        if candidate.is_own_reference:  # standard against standard proves nothing: use the one-pass run
            forced = divergence(at_once, candidate_logits)
        diverged = _free_run(engine, ids[:prompt], free_tokens)
        forms = candidate.read_forms()
        if candidate.is_own_reference:
            verdict, reason = _judge_reference(forced)
        else:
            verdict, reason = self._judge(forced, floor, candidate.coded_share())
        return ContractReport(self.name, verdict, reason, forced, floor, free_tokens, diverged, forms)

    def _judge(self, forced: Divergence, floor: Divergence, coded: float | None) -> tuple[Verdict, str]:
        if not math.isfinite(forced.max_kl):
            return Verdict.BROKEN, "the candidate's logits are not finite"
        if coded is not None and coded < 0.8:
            return Verdict.NOT_EXERCISED, f"only {coded:.0%} of the coded layers' rows were read coded"
        if forced.same_bits:
            return Verdict.BITS, "every logit has the reference's bits"
        limit = self.bound(floor)
        if forced.max_kl <= limit:
            return Verdict.HOLDS, f"max KL {forced.max_kl:.2e} <= {limit:.2e} nats"
        return Verdict.BROKEN, f"max KL {forced.max_kl:.2e} > {limit:.2e} nats"


@dataclass(frozen=True)
class Exact(Contract):
    """The logits of `standard`: the same bits in float32 on the CPU, within the noise floor elsewhere."""

    def bound(self, floor: Divergence) -> float:
        return 2 * floor.max_kl  # the candidate's noise and the reference's


@dataclass(frozen=True)
class ExactWithinWindow(Contract):
    """The logits of a full run in which every layer sees only the last `window` positions."""

    window: int

    @property
    def reference_window(self) -> int:  # type: ignore[override]
        return self.window

    def bound(self, floor: Divergence) -> float:
        return 2 * floor.max_kl


@dataclass(frozen=True)
class BoundedKL(Contract):
    """No step's KL against `standard` exceeds `nats` (plus twice the noise floor)."""

    nats: float

    def bound(self, floor: Divergence) -> float:
        return self.nats + 2 * floor.max_kl


@dataclass(frozen=True)
class BoundedKLPerLayer(BoundedKL):
    """As `BoundedKL`, with the budget divided among layers by a calibration record."""


@dataclass(frozen=True)
class TaskLevel(Contract):
    """No promise about logits: the answer to a task is right. Checked by the accuracy suite."""

    def bound(self, floor: Divergence) -> float:
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


def _judge_reference(forced: Divergence) -> tuple[Verdict, str]:
    """The engine that defines exactness: its steps against its own single pass, under an absolute bound."""
    if forced.same_bits:
        return Verdict.BITS, "step by step has the bits of one pass"
    if forced.mean_kl <= FORM_BOUND:
        return (
            Verdict.HOLDS,
            f"step by step against one pass: mean KL {forced.mean_kl:.2e} <= {FORM_BOUND:.1e}",
        )
    return Verdict.BROKEN, f"step by step against one pass: mean KL {forced.mean_kl:.2e} > {FORM_BOUND:.1e}"


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


def _stepwise(engine: Any, ids: list[int], prompt: int) -> Any:
    import torch

    logits = [engine.model.logits(engine.prefill(ids[:prompt]))]
    logits += [engine.model.logits(engine.decode_step(token)) for token in ids[prompt:-1]]
    return torch.cat(logits)


def _at_once(engine: Any, ids: list[int], prompt: int) -> Any:
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
