"""From logits to the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen, and when to stop.

    temperature 0 is greedy. top_k (0: off), top_p (1: off) and min_p (0: off) cut the distribution in that
    order, after the temperature; repetition_penalty (1: off, CTRL arXiv 1909.05858) divides positive logits
    of ids seen before and multiplies negative ones. `stop` strings end the text before they appear; stop
    tokens come from the model's files unless `ignore_stop_tokens`. Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_stop_tokens: bool = False
    with_logits: bool = False

    def __post_init__(self) -> None:
        checks = {
            "temperature must be >= 0": 0 <= self.temperature < float("inf"),
            "top_k must be >= 0": self.top_k >= 0,
            "top_p must lie in (0, 1]": 0 < self.top_p <= 1,
            "min_p must lie in [0, 1)": 0 <= self.min_p < 1,
            "repetition_penalty must lie in [0.001, 1000]": 1e-3 <= self.repetition_penalty <= 1e3,
            "seed must be an integer of 64 bits": self.seed is None
            or (isinstance(self.seed, int) and -(2**63) <= self.seed < 2**64),
            "stop strings must not be empty": all(self.stop_strings),
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(f"{message}, got {getattr(self, message.split()[0])!r}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Sampler:
    """Chooses ids under `SamplingOptions`; one random stream per sampler, fixed by the seed."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._random = torch.Generator()
        if options.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(options.seed)

    def choose(self, logits: torch.Tensor, seen: torch.Tensor) -> int:
        """The next id from logits (1, vocab) float32; `seen` holds the ids so far, int64 (n,)."""
        options = self._options
        logits = logits.cpu()  # the random stream is the host's
        if options.repetition_penalty != 1.0 and len(seen):
            logits = penalised(logits, seen, options.repetition_penalty)
        if options.temperature == 0:
            return int(logits.argmax())
        scaled = (logits[0].double() - logits[0].max()) / options.temperature
        weights = filtered(scaled, options)
        return int(torch.multinomial(weights, 1, generator=self._random))


def penalised(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits (1, vocab) with the ids in `seen` (n,) made less likely by `penalty`."""
    ids = seen.unique()
    values = logits[0, ids]
    result = logits.clone()
    result[0, ids] = torch.where(values > 0, values / penalty, values * penalty)
    return result


def filtered(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Probabilities (vocab,) after top-k, top-p and min-p. At least one id keeps its weight."""
    probabilities = torch.softmax(logits.double(), -1)
    if not options.top_k and options.top_p == 1 and not options.min_p:
        return probabilities
    count = min(options.top_k or len(probabilities), len(probabilities))
    ranked, order = probabilities.topk(count)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if options.top_p < 1:
        keep &= (ranked.cumsum(0) - ranked) < options.top_p * ranked.sum()
    if options.min_p > 0:
        keep &= ranked >= options.min_p * ranked[0]
    keep[0] = True
    return torch.zeros_like(probabilities).scatter(0, order, torch.where(keep, ranked, 0.0))
