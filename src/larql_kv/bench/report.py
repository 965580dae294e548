"""A bench report as JSON. One schema, `larql-bench/1`:

    schema      "larql-bench/1"
    timestamp   unix seconds, as text
    model       the name given; dtype: the execution form; facts: bytes_per_step, kv_dtype, ...
    device      where the model ran; card: its name, or null; activations: int8, mixed or int16, or null
    ffn         {name, paths [{layers, path, k, features, why}]}: how each layer's FFN was computed
    machine     {cpu, cores, threads, load_1min, system, python, torch, larql_kv, commit}
    bandwidth_gb_per_s   read bandwidth measured in this run, or null
    other_cores   cores that other processes kept busy during the timed part, mean; null where unknown
    prompt, prompt_tokens, tokens, warmup, repeats, contexts
    results[]   one per engine:
      engine       canonical spec text; backend: the path that ran; policy {canonical, derivative, contract}
      capture      the capture mask in force: full, h_only or none is staged to the host each step
      masks        {full, best} each {mask, tok_per_s, hot_bytes {device, host}, ids_hash}, or null;
                    hot_bytes: canonical and derivative state of the hot tier after the last step
      prefill_ms   median, prompt to first id; prefill_tok_per_s
      ms_per_tok   {mean, p50, p99} over all timed steps, whole tokens
      tok_per_s    median repeat; tok_per_s_range [lowest, highest repeat]
      n_steps      timed steps, all repeats
      bytes_per_step   {weights, state}; state null where a step runs the text again
      gb_per_s     those bytes over the median repeat's time; bandwidth_share: of bandwidth_gb_per_s
      memory       after the last step: {tokens, live, capacity, roles {canonical, derivative, workspace},
                    rows[]}
      kv_bytes_of_standard   K/V of `standard` at that length, sliding layers at their window
      kv_ratio     canonical + derivative bytes / kv_bytes_of_standard (below 1: smaller than standard)
      contract     {name, verdict, ok, reason, tokens, steps, max_kl, mean_kl, top1_agreement,
                    noise_floor_max_kl, first_divergence} or null
      ids          {hash, count, same_in_every_repeat, equals_standard}; hash: 12 hex of sha256 over "1,2,3"
      recomputed_tokens_per_step   ids run again beside the new one, mean
      stages       {embed, ..., head, other, total} microseconds a step, or null; of steps that run layer by
                    layer, which a backend with captured steps does for them alone (note)
      sweep        {points [{context, ms_per_token, steps}], us_per_context_token, intercept_ms, r2} or null
      note         what the reader should know, or ""
      error        {kind, message, recoverable} or null; the fields above are null or empty with it

A field that could not be measured is null, never 0.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from larql_kv.bench.plan import Report, Row
from larql_kv.bench.runner import median_rate
from larql_kv.bench.stats import gigabytes_per_second, id_hash, plain_json
from larql_kv.errors import StoreError

SCHEMA = "larql-bench/1"


def report_dict(report: Report) -> dict[str, Any]:
    """The report as plain data, ready for `json.dumps`."""
    plan = report.plan
    return {
        "schema": SCHEMA,
        "timestamp": str(report.timestamp),
        "model": report.model,
        "dtype": report.dtype,
        "facts": report.facts,
        **report.device,
        "ffn": report.ffn,
        "machine": report.machine,
        "bandwidth_gb_per_s": report.bandwidth,
        "other_cores": report.other_cores,
        "prompt": plan.prompt,
        "prompt_tokens": len(plan.prompt_ids),
        "tokens": plan.tokens,
        "warmup": plan.warmup,
        "repeats": plan.repeats,
        "contexts": list(plan.contexts),
        "results": [row_dict(row, report.bandwidth, len(plan.prompt_ids)) for row in report.rows],
    }


def row_dict(row: Row, bandwidth: float | None, prompt_tokens: int) -> dict[str, Any]:
    """One engine's result; see the module's docstring."""
    rate, spread = median_rate(row), row.spread
    prefill = statistics.median(row.prefill_seconds) if row.prefill_seconds else None
    speed = None
    if rate is not None and row.state_bytes_read is not None:
        speed = gigabytes_per_second(row.weight_bytes, row.state_bytes_read, 1 / rate)
    roles = row.ledger.get("roles", {})
    state = roles.get("canonical", 0) + roles.get("derivative", 0)
    return {
        "engine": row.spec,
        "backend": row.backend,
        "policy": row.policy,
        "capture": row.capture or None,
        "masks": _masks_dict(row),
        "prefill_ms": None if prefill is None else 1e3 * prefill,
        "prefill_tok_per_s": None if prefill is None else prompt_tokens / prefill,
        "ms_per_tok": None if spread is None else {"mean": spread.mean, "p50": spread.p50, "p99": spread.p99},
        "tok_per_s": rate,
        "tok_per_s_range": [min(row.rates), max(row.rates)] if row.rates else None,
        "n_steps": len(row.all_steps),
        "bytes_per_step": {"weights": row.weight_bytes, "state": row.state_bytes_read} if rate else None,
        "gb_per_s": speed,
        "bandwidth_share": speed / bandwidth if speed is not None and bandwidth else None,
        "memory": row.ledger or None,
        "kv_bytes_of_standard": row.kv_bytes_of_standard or None,
        "kv_ratio": state / row.kv_bytes_of_standard if state and row.kv_bytes_of_standard else None,
        "contract": row.contract,
        "ids": {
            "hash": id_hash(row.ids) if row.ids else None,
            "count": len(row.ids),
            "same_in_every_repeat": row.same_in_every_repeat,
            "equals_standard": row.equals_standard,
        },
        "recomputed_tokens_per_step": statistics.fmean(row.recomputed) if row.recomputed else None,
        "stages": row.stages,
        "sweep": _sweep_dict(row),
        "note": "; ".join(row.notes),
        "error": None if row.failure is None else row.failure.to_dict(),
    }


def _masks_dict(row: Row) -> dict[str, Any] | None:
    if row.full_mask is None:
        return None
    return {
        name: {
            "mask": run.capture or None,
            "tok_per_s": median_rate(run),
            "hot_bytes": _hot_bytes(run),
            "ids_hash": id_hash(run.ids) if run.ids else None,
        }
        for name, run in (("full", row.full_mask), ("best", row))
    }


def _hot_bytes(row: Row) -> dict[str, int] | None:
    lines = [
        line for line in row.ledger.get("rows", []) if line["tier"] == "hot" and line["role"] != "workspace"
    ]
    places = ("device", "host")
    return (
        {place: sum(line["live"] for line in lines if line["place"] == place) for place in places}
        if row.ledger
        else None
    )


def _sweep_dict(row: Row) -> dict[str, Any] | None:
    if not row.sweep:
        return None
    line = row.sweep_line
    return {
        "points": [
            {"context": point.context, "ms_per_token": point.ms_per_token, "steps": point.steps}
            for point in row.sweep
        ],
        "us_per_context_token": None if line is None else 1e3 * line.slope,
        "intercept_ms": None if line is None else line.intercept,
        "r2": None if line is None else line.r2,
    }


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises StoreError naming the path when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error


def to_json(report: Mapping[str, Any]) -> str:
    """The text of `report_dict`'s result; numbers that JSON lacks become null."""
    return json.dumps(plain_json(report), indent=1, allow_nan=False) + "\n"
