"""One small bench run on a tiny model, shared by the tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from larql_kv.bench.plan import Plan, Report
from larql_kv.bench.runner import run_bench
from larql_kv.bench.text import text_ids
from larql_kv.engine import parse_spec
from tests.models import tiny

SPECS = ("standard", "markov-rs", "no-cache", "standard:window=8")


def make_plan(family: str = "llama", **changes: Any) -> Plan:
    model = tiny(family)
    settings: dict[str, Any] = {"tokens": 12, "warmup": 2, "repeats": 2, "group": 5, "sweep_steps": 3}
    return Plan(tuple(text_ids(model, 20)), "bench text", **settings | changes)


def run(specs: Sequence[str] = SPECS, family: str = "llama", **changes: Any) -> Report:
    plan = make_plan(family, **changes)
    return run_bench(tiny(family), [parse_spec(spec) for spec in specs], plan, family, bandwidth=10.0)


@functools.cache
def full_report() -> Report:
    """Everything on: sweep, profile, check."""
    return run(contexts=(16, 32, 64), profile=True)
