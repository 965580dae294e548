"""`larql --device cuda`: which path ran, on what, in which precision."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from larql_kv.backends.cuda import step
from larql_kv.bench.table import heading, remarks
from larql_kv.cli.main import app
from tests.cuda import micro


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_LEAST_CAPACITY", 64)


def larql(command: str, *words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [command, str(micro.directory()), *words, "--device", "cuda", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_run(device: str) -> None:
    said = larql("run", "a b", "-n", "3", "--activations", "int8", "--raw")
    assert len(said["token_ids"]) == 3
    assert said["summary"] == ("standard [cuda graph]" if device == "cuda" else "standard [cuda interpreter]")
    assert said["device"].startswith("cuda")
    assert (said["card"] is not None) == (device == "cuda")
    assert said["activations"] == "int8"
    assert said["warnings"] == []
    assert said["ledger"]["roles"]["workspace"] > 0
    slow = larql("run", "a b", "-n", "2", "--raw", "-v")
    assert slow["summary"] == "standard [cuda eager]"
    assert slow["warnings"] == [
        "-v times the stages: steps run layer by layer, slower than the captured ones"
    ]
    assert slow["stages"]["attention"] > 0


def test_bench(device: str) -> None:
    report = larql("bench", "-e", "standard", "--prompt-tokens", "4", "-n", "2", "--warmup", "1",
                   "--repeats", "1", "--no-check", "--profile")  # fmt: skip
    (result,) = report["results"]
    assert result["backend"] == ("cuda graph" if device == "cuda" else "cuda interpreter")
    assert result["n_steps"] == 2
    assert result["ids"]["count"] == 4
    assert result["ids"]["equals_standard"]
    assert result["kv_ratio"] < 3, "the model's workspace is no state"
    assert result["stages"]["total"] > 0
    assert remarks(report)[0].startswith("standard: stages are of steps run layer by layer (cuda eager)")
    assert (report["activations"], report["card"] is not None) == ("mixed", device == "cuda")
    assert (report["bandwidth_gb_per_s"] is not None) == (device == "cuda")
    if device == "cuda":
        assert report["card"] in heading(report)
