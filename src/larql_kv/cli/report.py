"""What is said about a run: the closing line, the ledger and stage tables, the JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from larql_kv.bench.machine import device_facts
from larql_kv.bench.stats import format_bytes, id_hash
from larql_kv.cli.answer import Answer
from larql_kv.cli.console import add_row, console, note, table
from larql_kv.ffn.base import path_table

if TYPE_CHECKING:
    from larql_kv.engine import KvEngine
    from larql_kv.model.clock import StageSummary
    from larql_kv.state.ledger import Ledger

_ROLES = ("canonical", "derivative", "workspace")
_FINISH = {
    "length": "stopped at the token limit (-n)",
    "context": "stopped: the model's context is full",
    "interrupted": "interrupted",
}


def summary_line(engine: KvEngine, answer: Answer) -> str:
    """`standard [cpu] · 34 tokens · 142.1 tok/s · prefill 61 ms (37 tokens) · state 1.9 MB (...)`"""
    count = len(answer.token_ids)
    rate = answer.tokens_per_second
    run = answer.prompt_tokens - answer.reused_tokens
    prefill = f"{run} tokens" if not answer.reused_tokens else f"{run} of {answer.prompt_tokens} tokens"
    parts = [
        engine.info.summary,
        *([f"ffn {engine.ffn.name}"] if engine.ffn.name != "dense" else []),
        f"{count} token{'' if count == 1 else 's'}",
        *([f"{rate:.1f} tok/s"] if rate else []),
        f"prefill {1000 * answer.prefill_s:.0f} ms ({prefill})",
        state_summary(engine.ledger()),
        *([_FINISH[answer.finish]] if answer.finish in _FINISH else []),
    ]
    return " · ".join(parts)


def state_summary(ledger: Ledger) -> str:
    """Live bytes, by role, and what is allocated for them."""
    roles = ", ".join(f"{role} {format_bytes(ledger.total(role=role))}" for role in _ROLES)
    return f"state {format_bytes(ledger.live)} ({roles}; capacity {format_bytes(ledger.capacity)})"


def reuse_line(answer: Answer) -> str:
    """`reused N of M prompt tokens`, for every turn of a chat."""
    return f"reused {answer.reused_tokens} of {answer.prompt_tokens} prompt tokens"


def print_ledger(ledger: Ledger) -> None:
    """The ledger as a table on stderr."""
    shown = table(
        "Ledger", ("name", "place", "role", "tier", "live", "allocated"), right=("live", "allocated")
    )
    for row in ledger.rows():
        sizes = (format_bytes(row["live"]), format_bytes(row["capacity"]))
        add_row(shown, row["name"], row["place"], row["role"], row["tier"], *sizes)
    shown.add_section()
    add_row(shown, "total", "", "", "", format_bytes(ledger.live), format_bytes(ledger.capacity))
    console(stderr=True).print(shown)


def print_wire(facts: list[dict[str, Any]]) -> None:
    """What each FFN server costs in bytes a token, by formula and as measured, on stderr."""
    for one in facts:
        note(
            f"wire {one['wire']} to {one['endpoint']}: {one['formula']}; measured "
            f"{one['measured_bytes_per_token']:,.0f} a token over {one['tokens']:,.0f}"
        )


def print_stages(summary: StageSummary | None) -> None:
    """Mean time of a forward call by stage, on stderr; nothing when the timers were off."""
    if summary is None:
        return
    shown = table(f"Stages, mean of {summary.steps} calls", ("stage", "µs", "share"), right=("µs", "share"))
    for stage, spent in summary.microseconds.items():
        if spent:
            add_row(shown, stage, f"{spent:,.0f}", f"{spent / summary.total:.0%}" if summary.total else "")
    shown.add_section()
    add_row(shown, "total", f"{summary.total:,.0f}", "")
    console(stderr=True).print(shown)


def print_top(answer: Answer) -> None:
    """The best first tokens with their probabilities, on stderr."""
    for rank, (token, text, probability) in enumerate(answer.top, 1):
        note(f"{rank:>3}. {probability:7.2%}  {text!r} ({token})")


def ffn_dict(engine: KvEngine) -> dict[str, Any]:
    """{ffn, ffn_paths, ffn_caches, ffn_wire}: the FFN's name, how each layer was computed, its caches'
    counters, and what its servers cost in bytes a token."""
    ffn = engine.ffn
    paths = path_table(ffn, range(engine.model.config.layer_count))
    return {
        "ffn": ffn.name,
        "ffn_paths": paths,
        "ffn_caches": ffn.cache_stats(),
        "ffn_wire": ffn.wire_facts(),
    }


def run_dict(engine: KvEngine, answer: Answer, warnings: list[str]) -> dict[str, Any]:
    """The object that `larql run --json` prints."""
    stages = engine.stage_summary()
    rate = answer.tokens_per_second
    return {
        "model": engine.model.source,
        "engine": engine.spec.text,
        "summary": engine.info.summary,
        "policy": engine.policy.to_dict(),
        "capture": engine.info.capture,
        "note": engine.info.note,
        **ffn_dict(engine),
        **device_facts(engine.model),
        "kv_dtype": str(engine.model.kv_dtype).removeprefix("torch."),
        "text": answer.text,
        "token_ids": answer.token_ids,
        "token_hash": id_hash(answer.token_ids),
        "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "generated_tokens": len(answer.token_ids),
        "tokens_per_second": None if rate is None else round(rate, 2),
        "prefill_ms": round(1000 * answer.prefill_s, 3),
        "first_token_s": None if answer.first_token_s is None else round(answer.first_token_s, 3),
        "ledger": engine.ledger().to_dict(),
        **({"stages": stages.to_dict()} if stages else {}),
        **(
            {"top": [dict(zip(("id", "text", "p"), item, strict=True)) for item in answer.top]}
            if answer.top
            else {}
        ),
        "warnings": warnings,
    }
