"""The report: its JSON schema, its tables, its pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import larql_kv as lk
from larql_kv.bench.plan import Failure, Row
from larql_kv.bench.plot import bar_chart, line_chart, report_chart, ticks
from larql_kv.bench.report import SCHEMA, report_dict, row_dict, to_json, write_text
from larql_kv.bench.runner import run_bench
from larql_kv.bench.table import grids, heading, remarks
from tests.bench.bench_runs import full_report, make_plan, run
from tests.lanes import staging

TOP = {
    "schema", "timestamp", "model", "dtype", "facts", "device", "card", "activations", "ffn", "machine",
    "bandwidth_gb_per_s", "other_cores", "prompt", "prompt_tokens", "tokens", "warmup", "repeats", "contexts",
    "results",
}  # fmt: skip
RESULT = {
    "engine", "backend", "policy", "capture", "masks", "prefill_ms", "prefill_tok_per_s", "ms_per_tok",
    "tok_per_s", "tok_per_s_range", "n_steps", "bytes_per_step", "gb_per_s", "bandwidth_share", "memory",
    "kv_bytes_of_standard", "kv_ratio", "contract", "ids", "recomputed_tokens_per_step", "stages", "sweep",
    "note", "error",
}  # fmt: skip


def _plain() -> dict[str, Any]:
    return json.loads(to_json(report_dict(full_report())))


def test_schema() -> None:
    report = _plain()
    assert set(report) == TOP
    assert report["schema"] == SCHEMA
    assert report["timestamp"].isdigit()
    assert (report["prompt_tokens"], report["tokens"], report["warmup"], report["repeats"]) == (20, 12, 2, 2)
    for result in report["results"]:
        assert set(result) == RESULT
        assert set(result["ms_per_tok"]) == {"mean", "p50", "p99"}
        assert result["n_steps"] == 2 * (8 if result["engine"] == "no-cache" else 12)
        low, high = result["tok_per_s_range"]
        assert low <= result["tok_per_s"] <= high
        assert set(result["memory"]["roles"]) == {"canonical", "derivative", "workspace"}
        assert set(result["sweep"]) == {"points", "us_per_context_token", "intercept_ms", "r2"}
        assert result["error"] is None
        assert result["backend"] == "cpu"
        assert len(result["ids"]["hash"]) == 12


def test_every_field_of_the_schema_is_documented() -> None:
    from larql_kv.bench import report

    assert report.__doc__ is not None
    for name in TOP | RESULT:
        assert name in report.__doc__, name


def test_ratios_are_of_standards_kv() -> None:
    by_engine = {result["engine"]: result for result in _plain()["results"]}
    assert by_engine["standard"]["kv_ratio"] == pytest.approx(1.0, abs=0.05)  # token ids and tables beside
    assert by_engine["standard:window=8"]["kv_ratio"] < 0.5
    assert by_engine["markov-rs"]["kv_ratio"] > 1.5
    assert by_engine["no-cache"]["kv_ratio"] < 0.05


def _failed(recoverable: bool) -> dict[str, Any]:
    row = Row("markov-rs", failure=Failure("BackendUnavailable", "no such kernel", recoverable))
    return row_dict(row, 10.0, 20)


def test_a_failed_row_holds_nothing_but_its_error() -> None:
    row = _failed(True)
    assert set(row) == RESULT
    assert row["error"] == {"kind": "BackendUnavailable", "message": "no such kernel", "recoverable": True}
    measured = (
        "prefill_ms",
        "ms_per_tok",
        "tok_per_s",
        "gb_per_s",
        "memory",
        "kv_ratio",
        "contract",
        "sweep",
    )
    assert all(row[name] is None for name in measured)


def test_tables_are_plain_text_with_a_line_an_engine() -> None:
    report = _plain()
    tables = grids(report)
    assert len(tables) == 5
    for table in tables:
        text = table.plain()
        assert "\x1b" not in text
        assert len(text.splitlines()) == 2 + (11 if text.startswith("Microseconds") else 4)
        table.rich()
    speed, state, promise, sweep, stages = (table.plain() for table in tables)
    assert "mean/p50/p99" in speed
    assert "of K/V" in state
    assert "holds: same bits" in promise
    assert "us/context token" in sweep
    assert "state_append" in stages
    assert "prompt of 20 tokens" in heading(report)
    assert next(line for line in remarks(report) if "O(n^2)" in line).startswith("no-cache: ")


def test_noise_is_said_in_the_heading() -> None:
    assert "NOISY" in heading(_plain() | {"other_cores": 1.4})
    assert "NOISY" not in heading(_plain() | {"other_cores": 0.0})
    assert "not measured" in heading(_plain() | {"bandwidth_gb_per_s": None})


@pytest.mark.parametrize(("recoverable", "label"), [(True, "skipped: "), (False, "FAILED: ")])
def test_a_failed_row_is_labelled(recoverable: bool, label: str) -> None:
    report = _plain()
    report["results"].append(_failed(recoverable))
    assert f"{label}BackendUnavailable" in grids(report)[0].plain().splitlines()[-1]
    assert remarks(report)[-1] == f"markov-rs: {label}BackendUnavailable: no such kernel"


def test_only_what_was_measured_is_shown() -> None:
    report = report_dict(run(["standard"], check=False, repeats=1))
    assert len(grids(report)) == 3
    assert remarks(report) == []
    assert report["results"][0]["sweep"] is None
    assert "<rect" in report_chart(report)


def test_masks_side_by_side() -> None:
    specs = ("standard", "markov-rs", "markov-rs:rows=host")
    plan = make_plan("llama", masks=True, check=False)
    report = run_bench(staging("llama"), [lk.parse_spec(spec) for spec in specs], plan, "llama", 10.0)
    assert {(spec, phase) for _, phase, spec in report.order} >= {
        ("markov-rs", "decode"),
        ("markov-rs (mask full)", "decode"),
    }
    plain = report_dict(report)
    standard, device, host = plain["results"]
    assert (standard["capture"], device["capture"], host["capture"]) == ("none", "none", "h_only")
    assert standard["masks"] is None
    for result in (device, host):
        full, best = result["masks"]["full"], result["masks"]["best"]
        assert full["mask"] == "full"
        assert best["mask"] == result["capture"]
        assert best["tok_per_s"] == result["tok_per_s"]
        assert full["ids_hash"] == best["ids_hash"] == result["ids"]["hash"]
        assert full["hot_bytes"]["host"] > best["hot_bytes"]["host"]
    (grid,) = [grid for grid in grids(plain) if grid.title.startswith("Capture masks")]
    assert [row[:2] + row[-1:] for row in grid.rows] == [
        ["markov-rs", "none", "yes"],
        ["markov-rs:rows=host", "h_only", "yes"],
    ]
    device["masks"]["full"].update(ids_hash=None, tok_per_s=None, hot_bytes=None)  # it failed
    assert grids(plain)[-1].rows[0][2:] == ["-", grid.rows[0][3], "-", "-", grid.rows[0][6], "-"]


def test_masks_where_nothing_can_be_left_out() -> None:
    report = run(["standard", "markov-rs"], masks=True, check=False, repeats=1)
    plain = report_dict(report)
    assert [result["masks"] for result in plain["results"]] == [None, None]
    assert remarks(plain) == [
        "markov-rs: the capture mask is full in any case: there is no other to compare with"
    ]


def test_pictures_are_svg() -> None:
    name = "standard:window=8 & <more>"
    for text in (
        report_chart(_plain()),
        line_chart({name: [(1, 2), (3, 4)]}, "<title>", "x", "y", {name: (1.0, 1.0)}),
        bar_chart({name: 3.0, "b": 0.0}, "<title>", "tok/s"),
        line_chart({}, "nothing", "x", "y"),
        bar_chart({}, "nothing", "y"),
    ):
        assert ElementTree.fromstring(text).tag.endswith("svg")
    assert report_chart(_plain()).count("<polyline") == 4


@pytest.mark.parametrize("top", [0.0, 0.03, 1.0, 7.3, 2048.0, 5e6])
def test_ticks_are_few_and_cover(top: float) -> None:
    found = ticks(top)
    assert found[0] == 0
    assert found[-1] >= top * 0.999
    assert 2 <= len(found) <= 8


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "file.json", "text")
    assert (tmp_path / "new" / "file.json").read_text() == "text"
    (tmp_path / "directory").mkdir()
    with pytest.raises(lk.StoreError, match="cannot write"):
        write_text(tmp_path / "directory", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "new"]
