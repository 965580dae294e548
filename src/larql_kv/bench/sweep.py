"""Decode cost by context length: a short prompt measures the intercept, the slope is the engine's own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from larql_kv.bench.plan import Plan, Progress, SweepPoint
from larql_kv.bench.stats import fit_line, round_robin
from larql_kv.bench.steps import next_id, next_ids
from larql_kv.bench.text import text_ids

if TYPE_CHECKING:
    from larql_kv.bench.runner import Contestant

_RECOMPUTE_SWEEP_STEPS = 2


def run_sweep(
    field: Sequence[Contestant], plan: Plan, order: list[tuple[int, str, str]], progress: Progress
) -> None:
    """Fill `row.sweep` and `row.sweep_line` of every contestant.

    At each length, `repeats` times in rotating order, a fresh engine is prefilled with the bench's text to
    that length and `sweep_steps` whole tokens are timed after one warm-up step. The line goes through the
    medians, over the mean number of tokens held while they were timed.
    """
    by_text = {item.spec.text: item for item in field}
    for context in plan.contexts:
        seconds: dict[str, list[float]] = {text: [] for text in by_text}
        for repeat in range(plan.repeats):
            for text in round_robin(list(by_text), repeat):
                contestant = by_text[text]
                if contestant.alive:
                    progress(f"context {context} {text}")
                    order.append((repeat, f"context {context}", text))
                    with contestant.guarded():
                        seconds[text] += _time_steps(contestant, context, plan.sweep_steps)
        for text, contestant in by_text.items():
            if contestant.alive and seconds[text]:
                per_run = len(seconds[text]) / plan.repeats
                held = context + 1 + (per_run + 1) / 2  # the warm-up token, then 1..steps new ones
                ms = 1e3 * statistics.median(seconds[text])
                contestant.row.sweep.append(SweepPoint(held, ms, len(seconds[text])))
    for contestant in field:
        points = [(point.context, point.ms_per_token) for point in contestant.row.sweep]
        contestant.row.sweep_line = fit_line(points)


def _time_steps(contestant: Contestant, context: int, steps: int) -> list[float]:
    model, engine = contestant.model, contestant.build()
    (token,) = next_ids(engine, next_id(model, engine.prefill(text_ids(model, context))), 1)
    seconds = []
    last = time.perf_counter()
    for _ in next_ids(engine, token, min(steps, _RECOMPUTE_SWEEP_STEPS) if contestant.recomputes else steps):
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return seconds
