"""Stage timers: exclusive time by stage, free when off."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

STAGES = (
    "embed",
    "recompute_cold",
    "recompute_hot",
    "attention",
    "ffn",
    "state_capture",
    "state_materialise",
    "state_append",
    "head",
)


class Clock:
    """The clock that is off: `switch` does nothing."""

    def switch(self, stage: str) -> str:
        """Charge the time since the last switch to the stage that ends, start `stage`; the old one."""
        return ""


NULL_CLOCK = Clock()


@dataclass
class StageClock(Clock):
    """A clock that is on. `seconds` holds exclusive time by stage.

    `sync` waits for a device that runs behind the program: what a stage has launched is charged to it.
    """

    sync: Callable[[], None] | None = None

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*STAGES, "other"), 0.0))
    steps: int = 0
    _stage: str = "other"
    _since: float = field(default_factory=time.perf_counter)

    def switch(self, stage: str) -> str:
        now = self._now()
        ended = self._stage
        self.seconds[ended] += now - self._since
        self._stage, self._since = stage, now
        return ended

    def restart(self) -> None:
        """Begin a step: what lies between steps is charged to nobody."""
        self._stage, self._since = "other", self._now()

    def finish(self) -> None:
        self.switch("other")
        self.steps += 1

    def _now(self) -> float:
        if self.sync is not None:
            self.sync()
        return time.perf_counter()


@dataclass(frozen=True)
class StageSummary:
    """Mean microseconds a step, by stage, and their sum."""

    microseconds: dict[str, float]
    total: float
    steps: int

    @classmethod
    def of(cls, clock: StageClock) -> StageSummary:
        steps = max(clock.steps, 1)
        stages = {stage: 1e6 * spent / steps for stage, spent in clock.seconds.items()}
        return cls(stages, sum(stages.values()), clock.steps)

    def to_dict(self) -> dict[str, float]:
        return {**self.microseconds, "total": self.total, "steps": self.steps}
