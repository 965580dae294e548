"""The walk's and the caches' benchmarks, on sizes that take seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import model_dir

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_ffn_cache(tmp_path):
    out = tmp_path / "r.json"
    words = ("--model", model_dir("llama"), "--iters", 4, "--hit-ks", "0.5", "--output-file", out)
    done = run("ffn_cache.py", *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["top_k"], report["features"]) == (75, 96)
    lanes = {item["lane"]: item for item in report["latency"]}
    for mode in ("features", "exact"):
        assert lanes[f"warm, {mode}"]["hit_rate"] == 1
        assert lanes[f"cold, {mode}"]["hit_rate"] < 0.2
    repeats = report["hit_rates"][0]
    assert repeats["scenario"] == "repeats"
    assert repeats["exact"]["l2"] == repeats["features"]["l2"] == 1
    assert "Hit rates" in done.stdout


def test_ffn_cache_refuses_a_k_that_cannot_fire(tmp_path):
    done = run("ffn_cache.py", "--model", model_dir("llama"), "--top-k", 77)
    assert done.returncode == 2
    assert "no cache is asked; give 1 to 76" in done.stderr


def test_walk_speed(tmp_path):
    out = tmp_path / "r.json"
    done = run("walk_speed.py", "--model", model_dir("llama"), "--rounds", 3, "--output-file", out)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(out.read_text())["results"]
    assert result["k"] == 10
    assert result["ceiling"] == pytest.approx(
        result["dense_bytes_per_layer"] / result["walk_bytes_per_layer"], rel=1e-3
    )
    assert "FFN of one row" in done.stdout
