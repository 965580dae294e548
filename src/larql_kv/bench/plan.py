"""What a bench run is asked to do, and what it found: plain data between measuring and showing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from larql_kv.bench.stats import Line, Spread
from larql_kv.errors import ModelError
from larql_kv.policy import Verdict

# Engines that keep token ids only run the whole text at every step: O(n^2), so they get this many steps.
RECOMPUTE_STEPS = 8
RECOMPUTE_WARMUP = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """The settings of one bench run. Counts are tokens."""

    prompt_ids: tuple[int, ...]
    prompt: str  # as the user gave it, or what it is, for the report
    tokens: int = 50
    warmup: int = 3
    repeats: int = 3
    contexts: tuple[int, ...] = ()
    sweep_steps: int = 16
    group: int = 10  # steps an engine runs before the next engine's turn
    check: bool = True
    profile: bool = False
    masks: bool = False  # also run each engine of the capture cascade under the mask `full`

    def check_context(self, context: int) -> None:
        """Raises ModelError, before any work, when a run would not fit the model's context."""
        needed = len(self.prompt_ids) + self.warmup + self.tokens
        sweep = max(self.contexts, default=0) + self.sweep_steps + 1 if self.contexts else 0
        if max(needed, sweep) > context:
            what = "prompt + warm-up + tokens" if needed >= sweep else "the longest --context + its steps"
            raise ModelError(
                f"{what} is {max(needed, sweep)} tokens, more than the model's context of {context}"
            )


@dataclass
class SweepPoint:
    """Decode cost at one context length. `context` is the mean number of tokens held over the timed steps."""

    context: float
    ms_per_token: float  # median
    steps: int


@dataclass
class Failure:
    """An engine that could not be measured, and why."""

    kind: str
    message: str
    recoverable: bool

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": self.message, "recoverable": self.recoverable}


@dataclass
class Row:
    """What was measured of one engine. Seconds are raw; bytes are the ledger's; times of steps cover the
    whole token: the engine's step, the head, and the choice of the next id."""

    spec: str
    backend: str = ""
    capture: str = ""  # the capture mask in force
    policy: dict[str, str] = field(default_factory=dict)
    prefill_seconds: list[float] = field(default_factory=list)  # one a repeat
    step_seconds: list[list[float]] = field(default_factory=list)  # one list a repeat
    ids: list[int] = field(default_factory=list)  # of the first repeat, warm-up included
    same_in_every_repeat: bool = True
    equals_standard: bool | None = None
    recomputed: list[int] = field(default_factory=list)  # ids run again, one number a timed step
    weight_bytes: int = 0
    state_bytes_read: float | None = None  # per step; None where a step is no read of state
    ledger: dict[str, Any] = field(default_factory=dict)
    kv_bytes_of_standard: int = 0
    contract: dict[str, Any] | None = None
    stages: dict[str, float] | None = None
    sweep: list[SweepPoint] = field(default_factory=list)
    sweep_line: Line | None = None
    notes: list[str] = field(default_factory=list)
    failure: Failure | None = None
    full_mask: Row | None = None  # the same engine under the mask `full`

    @property
    def all_steps(self) -> list[float]:
        return [seconds for repeat in self.step_seconds for seconds in repeat]

    @property
    def spread(self) -> Spread | None:
        return Spread.of(self.all_steps) if self.all_steps else None

    @property
    def rates(self) -> list[float]:
        """Decode tokens per second, one number a repeat."""
        return [len(repeat) / sum(repeat) for repeat in self.step_seconds if repeat]


@dataclass
class Report:
    """A whole run."""

    timestamp: int  # unix seconds
    model: str
    dtype: str
    facts: dict[str, Any]  # the decoder's
    machine: dict[str, Any]
    plan: Plan
    bandwidth: float | None  # GB/s, measured in this run
    rows: list[Row]
    order: list[tuple[int, str, str]]  # (repeat, phase, spec) as it was run: shows the interleaving
    other_cores: float | None = None  # cores that other processes kept busy meanwhile
    device: dict[str, Any] = field(default_factory=dict)  # `device_facts`
    ffn: dict[str, Any] = field(default_factory=dict)  # `ffn_facts`

    @property
    def exit_code(self) -> int:
        """0, or 1 when an engine broke its contract or failed in a way that is not recoverable."""
        failed = any(row.failure is not None and not row.failure.recoverable for row in self.rows)
        broken = any((row.contract or {}).get("verdict") == Verdict.BROKEN for row in self.rows)
        return int(failed or broken)
