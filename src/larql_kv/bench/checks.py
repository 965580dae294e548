"""Beside the speed: does the engine keep its promise, and where does a step's time go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from larql_kv.bench.text import text_ids

if TYPE_CHECKING:
    from larql_kv.engine import KvEngine

_SHORT, _STEPS, _FREE = 64, 24, 24


def contract_of(engine: KvEngine, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """The verdict of a short check: 24 teacher-forced steps and 24 free ones.

    The text is made long enough to pass the widest window in play, for a window that nothing has left proves
    nothing; engines that run every id again get 64 tokens only.
    """
    model = engine.model
    count = max(_SHORT, engine.widest_window + 2 * _STEPS if engine.widest_window else 0)
    count = min(count, model.config.context - _FREE)
    ids = list(prompt_ids)[:count]
    if len(ids) < count:
        ids += text_ids(model, count, None)[: count - len(ids)]
    report = engine.policy.contract.check(engine, ids, max(1, count - _STEPS), _FREE)
    return {
        "name": report.contract,
        "verdict": str(report.verdict),
        "ok": report.ok,
        "reason": report.reason,
        "tokens": count,
        "steps": report.teacher_forced.steps,
        "max_kl": report.teacher_forced.max_kl,
        "mean_kl": report.teacher_forced.mean_kl,
        "top1_agreement": report.teacher_forced.top1_agreement,
        "noise_floor_max_kl": report.noise_floor.max_kl,
        "first_divergence": report.first_divergence,
    }


def stages_of(engine: KvEngine, prompt_ids: Sequence[int], steps: int) -> dict[str, float]:
    """Mean microseconds a decode step by stage; the stages sum to `total`, the whole token.

    A run of its own, after the timed ones: the timers cost a little. `other` is what no stage claims, the
    choice of the id included.
    """
    token = int(engine.logits(engine.prefill(prompt_ids)).argmax())
    token = int(engine.logits(engine.decode_step(token)).argmax())
    engine.profile(True)
    begin = time.perf_counter()
    for _ in range(steps):
        token = int(engine.logits(engine.decode_step(token)).argmax())
    total = 1e6 * (time.perf_counter() - begin) / steps
    summary = engine.stage_summary()
    engine.profile(False)
    assert summary is not None
    stages = {stage: spent for stage, spent in summary.microseconds.items() if stage != "other"}
    return {**stages, "other": total - sum(stages.values()), "total": total}
