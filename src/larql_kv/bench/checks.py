"""Beside the speed: does the engine keep its promise, and where does a step's time go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from larql_kv.bench.text import text_ids
from larql_kv.policy import StateKind

if TYPE_CHECKING:
    from larql_kv.engine import KvEngine

_SHORT, _LONGEST, _STEPS, _FREE = 64, 1024, 24, 24


def contract_of(engine: KvEngine, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """The verdict of a short check: 24 teacher-forced steps and 24 free ones.

    The text is made long enough to pass the widest window in play, for a window that nothing has left proves
    nothing; engines that run every id again get 64 tokens only.
    """
    model = engine.model
    windows = [layer.window for layer in model.config.layers] + [engine.window_tokens or None]
    count = _SHORT
    if engine.policy.canonical != StateKind.TOKEN_IDS:
        count = max([_SHORT, *(window + 2 * _STEPS for window in windows if window is not None)])
    count = min(count, _LONGEST, model.config.context - _FREE)
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

    A run of its own, after the timed ones: the timers cost a little. The engine's clock ends with its last
    layer, so the head and the choice of the id are timed here; `other` is what no stage claims.
    """
    model = engine.model
    token = int(model.logits(engine.prefill(prompt_ids)).argmax())
    token = int(model.logits(engine.decode_step(token)).argmax())
    engine.profile(True)
    head = 0.0
    begin = time.perf_counter()
    for _ in range(steps):
        hidden = engine.decode_step(token)
        head_begin = time.perf_counter()
        token = int(model.logits(hidden).argmax())
        head += time.perf_counter() - head_begin
    whole = time.perf_counter() - begin
    summary = engine.stage_summary()
    engine.profile(False)
    assert summary is not None
    stages = {stage: spent for stage, spent in summary.microseconds.items() if stage != "other"}
    stages["head"] = stages.get("head", 0.0) + 1e6 * head / steps
    total = 1e6 * whole / steps
    return {**stages, "other": total - sum(stages.values()), "total": total}
