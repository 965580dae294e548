"""The kernels in the tree are those last checked on a card: CI has none and goes by the result file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from larql_kv.backends.cuda.source_hash import backends_cuda_hash

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMMAND = "PYTHONPATH=src python benchmarks/cuda_check.py"
PARTS = {"tests", "closeness", "determinism", "trace", "ledger", "load", "sanitizer"}


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The check that was made last, by its own clock."""
    found = [(path, json.loads(path.read_text())) for path in folder.glob("*cuda-check*.json")]
    return max(found, key=lambda item: (int(item[1]["timestamp"]), item[0].name)) if found else None


def fault(path: Path, result: dict[str, Any], source: str) -> str | None:
    """What is wrong with that result for the tree whose backend has the hash `source`, or None."""
    if result["backends_cuda_hash"] != source:
        return (
            f"the kernels changed since they were last checked on the chip ({path.name}, commit "
            f"{result['commit']}): run `{COMMAND}` on a CUDA machine; its file goes to benchmarks/results/"
        )
    failed = PARTS - {part for part, found in result["parts"].items() if found["ok"]}
    if failed:
        return f"{path.name}: the check on the chip did not pass: {', '.join(sorted(failed))}"
    return None


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="here the result is made that this test reads elsewhere"
)
def test_the_kernels_are_those_that_were_checked() -> None:
    found = newest(RESULTS)
    if found is None:
        pytest.skip(f"no result of a check on the chip in {RESULTS} yet: `{COMMAND}` makes one")
    wrong = fault(*found, backends_cuda_hash())
    assert wrong is None, wrong


def result(**changes: Any) -> dict[str, Any]:
    parts = {part: {"ok": True} for part in PARTS}
    return {"timestamp": "5", "commit": "abc", "backends_cuda_hash": "h", "parts": parts} | changes


def test_a_stale_result_a_failed_part_and_a_missing_one_are_faults() -> None:
    path = Path("2026-12-01-nvidia-h200-cuda-check.json")
    assert fault(path, result(), "h") is None
    stale = fault(path, result(), "other")
    assert stale is not None
    assert stale.startswith("the kernels changed since they were last checked on the chip (2026-12-01-")
    assert COMMAND in stale
    parts = {part: {"ok": part != "ledger"} for part in PARTS - {"load"}}
    assert (
        fault(path, result(parts=parts), "h")
        == f"{path.name}: the check on the chip did not pass: ledger, load"
    )


def test_the_newest_result_counts(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for name, timestamp in (
        ("b-cuda-check.json", "7"),
        ("a-cuda-check-2.json", "12"),
        ("c-cuda-peers.json", "99"),
    ):
        (tmp_path / name).write_text(json.dumps(result(timestamp=timestamp)))
    found = newest(tmp_path)
    assert found is not None
    assert found[0].name == "a-cuda-check-2.json"
