"""`larql bench --shape`: random weights of a well-known shape."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from larql_kv.cli import bench as cli
from larql_kv.cli.main import app


@pytest.fixture(autouse=True)
def no_bandwidth_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "measured_bandwidth", lambda model: 10.0)


def bench(*words: str) -> Result:
    return CliRunner().invoke(app, ["bench", *words])


@pytest.mark.slow
def test_a_shape_is_measured_and_says_that_its_weights_are_random() -> None:
    result = bench("--shape", "gemma3-270m:q4_k_m", "--engine", "standard", "--prompt-tokens", "8",
                   "--tokens", "2", "--repeats", "1", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"] == "gemma3-270m:q4_k_m (random weights)"
    (row,) = report["results"]
    assert row["tok_per_s"] > 0
    assert row["contract"]["ok"]
    assert row["ids"]["equals_standard"]
    assert row["kv_bytes_of_standard"] == 18 * 13 * 2 * 256 * 2  # layers, tokens, K and V of one head in bf16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--shape", "gemma3-27b"),
            "unknown shape 'gemma3-27b'; did you mean 'gemma3-270m'? known: gemma3-4b",
        ),
        (("--shape", "qwen3-4b:q3_k"), "unknown quantisation mix 'q3_k'"),
        (("smollm2-135m", "--shape", "qwen3-4b"), "name one of them"),
    ],
)
def test_what_cannot_be_asked_exits_2(words: tuple[str, ...], message: str) -> None:
    result = bench(*words)
    assert result.exit_code == 2
    assert message in result.stderr
