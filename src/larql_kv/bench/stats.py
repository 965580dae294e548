"""The arithmetic of the bench: pure functions of numbers, so that they can be tested by hand."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie, linearly interpolated (numpy's default)."""
    ranked = sorted(values)
    at = share * (len(ranked) - 1)
    low = int(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (at - low)


@dataclass(frozen=True)
class Spread:
    """Milliseconds per token over every timed step."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        ms = [1e3 * value for value in seconds]
        return cls(statistics.fmean(ms), percentile(ms, 0.5), percentile(ms, 0.99))


@dataclass(frozen=True)
class Line:
    """A least-squares line y = intercept + slope * x. `r2` is None where y does not vary."""

    slope: float
    intercept: float
    r2: float | None


def fit_line(points: Sequence[tuple[float, float]]) -> Line | None:
    """The least-squares line through (x, y) points; None for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread_x = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread_x
    intercept = mean_y - slope * mean_x
    total = sum((y - mean_y) ** 2 for _, y in points)
    rest = sum((y - intercept - slope * x) ** 2 for x, y in points)
    return Line(slope, intercept, 1 - rest / total if total > 0 else None)


def id_hash(ids: Sequence[int]) -> str:
    """First 12 hex digits of sha256 over the ids in decimal, joined by commas."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:12]


def same_beginning(ids: Sequence[int], reference: Sequence[int]) -> bool:
    """Whether two runs agree as far as both went (a capped run is shorter)."""
    return all(a == b for a, b in zip(ids, reference, strict=False))


def round_robin(names: Sequence[str], repeat: int) -> list[str]:
    """The order of `names` in repeat number `repeat`: rotated by one each time, so nobody is always first."""
    shift = repeat % len(names) if names else 0
    return [*names[shift:], *names[:shift]]


def gigabytes_per_second(weight_bytes: int, state_bytes: float, seconds: float) -> float:
    """Bytes that one step must read, over the time it took; 1 GB = 1e9 bytes."""
    return (weight_bytes + state_bytes) / seconds / 1e9


def is_increasing(values: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(values))


def plain_json(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that it lacks (inf, nan) become null, other objects text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def format_bytes(count: float) -> str:
    """Decimal units, as memory bandwidth is counted: `1.9 MB`."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
