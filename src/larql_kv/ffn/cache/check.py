"""How far `features` hits are trusted: the output of an equal set of features is an approximation, so hits
are recomputed by sample, and an entry that is off by more than a bound goes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from larql_kv.errors import SpecError

DEFAULT_BOUND = 0.1
DEFAULT_EVERY = 64


@dataclass(frozen=True)
class HitCheck:
    """`bound`: the largest relative error |cached - computed| / |computed| that a hit may have. The first hit
    of every entry is recomputed, and then one in `every` (1: all of them), at places that `seed` draws."""

    bound: float = DEFAULT_BOUND
    every: int = DEFAULT_EVERY
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.bound < float("inf"):
            raise SpecError(f"the bound of a hit's relative error must be 0 or more, got {self.bound}")
        if self.every < 1:
            raise SpecError(f"every must be at least 1 (each hit is recomputed), got {self.every}")


class HitSampler:
    """Which hits are recomputed, and what came of it. Not locked: its cache is."""

    def __init__(self, check: HitCheck) -> None:
        self.check = check
        self.checked = self.rejected = 0
        self.worst = 0.0  # relative error of accepted hits
        self._sum = 0.0
        self._random = random.Random(check.seed)
        self._left = self._draw()

    def _draw(self) -> int:
        """Hits until the next sample: 1 .. 2 * every - 1, `every` on average."""
        return self._random.randint(1, 2 * self.check.every - 1)

    def wants(self, is_first: bool) -> bool:
        """Whether this hit is to be recomputed."""
        self._left -= 1
        if self._left == 0:
            self._left = self._draw()
            return True
        return is_first

    def accepts(self, error: float) -> bool:
        """Book a recomputed hit; False where its entry has to go (a nan, too)."""
        self.checked += 1
        if not error <= self.check.bound:
            self.rejected += 1
            return False
        self.worst = max(self.worst, error)
        self._sum += error
        return True

    def stats(self) -> dict[str, float | int | None]:
        accepted = self.checked - self.rejected
        return {
            "checked": self.checked,
            "rejected": self.rejected,
            "error_bound": self.check.bound,
            "mean_error": self._sum / accepted if accepted else None,
            "max_error": self.worst if accepted else None,
        }


def relative_error(given: torch.Tensor, computed: torch.Tensor) -> float:
    """|given - computed| / |computed| in float64; 0 where both are zero."""
    apart = float((given.double() - computed.double()).norm())
    size = float(computed.double().norm())
    return apart / size if size else 0.0 if apart == 0 else float("inf")
