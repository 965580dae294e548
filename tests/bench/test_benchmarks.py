"""The scripts in benchmarks/ run: the microbenchmarks on tiny shapes, the peers' contest on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.models import installed
from tests.tiny_models import model_dir

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_micro_quick(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "micro" / "run.py"), "--quick", "--json", str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "m").read_text())["results"]
    assert {result["bench"] for result in found} == {"gemv", "attention", "gemm", "startup"}
    assert all(result["microseconds"] > 0 for result in found)


def test_micro_refuses_an_unknown_bench() -> None:
    command = [sys.executable, str(BENCHMARKS / "micro" / "run.py"), "gemw"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "unknown: gemw" in done.stderr


@pytest.mark.skipif(not installed("transformers"), reason="needs the parity extra")
def test_contest_of_two_systems_on_a_tiny_model(importable: None) -> None:
    from contest import REFERENCE, Settings, System, contest, grid, larql_system

    path = str(model_dir("llama"))
    peer = System(REFERENCE, ("--system=transformers", f"--model={path}", "--dtype=float32"))
    absent = System("llama.cpp", ("--system=llama.cpp", f"--model={path}"))
    result = contest(
        path, [larql_system(path, "markov-rs", "float32"), peer, absent], Settings(12, 24, new=6, repeats=2)
    )
    ours, theirs, missing = result["rows"]
    assert ours["ids"] == theirs["ids"]
    assert ours["decode_vs_f32"]["rows"] == 201
    assert ours["decode_vs_f32"]["max_kl"] < 1e-6
    assert ours["prefill_vs_f32"]["top1"] == 1
    assert ours["peak_rss"] > 50e6
    assert "error" in missing
    assert len(grid(result, REFERENCE).plain().splitlines()) == 5


def test_logits_are_compared_as_the_contract_does(importable: None, tmp_path: Path) -> None:
    import torch
    from harness import compare_logits

    from larql_kv.policy import divergence

    random = np.random.default_rng(0)
    a = random.normal(size=(40, 50)).astype(np.float32)
    b = a + 0.1 * random.normal(size=a.shape).astype(np.float32)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b[5:-1])
    found = compare_logits(tmp_path / "a.npy", tmp_path / "b.npy", 5, -1)
    expected = divergence(torch.from_numpy(a[5:-1]), torch.from_numpy(b[5:-1]))
    assert found["mean_kl"] == pytest.approx(expected.mean_kl)
    assert found["max_kl"] == pytest.approx(expected.max_kl)
    assert found["top1"] == pytest.approx(expected.top1_agreement)
    with pytest.raises(ValueError, match="shape"):
        compare_logits(tmp_path / "a.npy", tmp_path / "b.npy", 0, None)


def test_forms_judges_by_the_bound(importable: None) -> None:
    import forms

    def row(form: str, kl: float, rate: float) -> dict:
        return {
            "system": f"larql standard {form}",
            "decode_vs_f32": {"mean_kl": kl},
            "prefill_vs_f32": {"mean_kl": kl},
            "prefill_512_tok_per_s": rate,
            "decode_tok_per_s": rate,
        }

    settings = {"long_prompt": 512, "new": 64}
    fast = {"settings": settings, "rows": [row("float32", 0.0, 10.0), row("bfloat16", 1e-3, 20.0)]}
    assert forms.verdict(fast)["fastest"] == "bfloat16"
    loose = {"settings": settings, "rows": [row("float32", 0.0, 10.0), row("bfloat16", 2e-3, 20.0)]}
    assert forms.verdict(loose)["fastest"] == "float32"
    assert forms.picked() in forms.FORMS
