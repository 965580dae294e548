"""benchmarks/cuda_check.py and what belongs to it, on tiny models, before they cost time on a card."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from larql_kv.backends.cuda.source_hash import backends_cuda_hash
from larql_kv.model.shape_gguf import write_random_gguf
from larql_kv.model.shape_recipes import SHAPES
from tests.cuda.test_chip_results import PARTS
from tests.tiny_models import model_dir

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a card the check itself runs")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL: dict[str, Any] = {"hidden": 32, "intermediate": 32, "heads": 1, "kv_heads": 1, "head_dim": 32}
TINY = replace(
    SHAPES["gemma3-270m"], name="tiny", layers=1, vocab=288, context=256, window=16, mix="q8_0", **SMALL
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("LARQL_CUDA_SLOW"), reason="minutes: set LARQL_CUDA_SLOW=1")
def test_every_part_on_a_tiny_model(tiny_file: Path, tmp_path: Path) -> None:
    import cuda_check

    settings = cuda_check.Settings(
        {"tiny": tiny_file, "absent": None},
        tokens=2, prompt=20, steps=2, ahead=2, answer=1, workers=1, jobs=2, allow_missing=True,
        tests=("tests/cuda/test_source_hash.py",),
    )  # fmt: skip
    output = tmp_path / "out" / "check.json"
    result = cuda_check.Check(settings, output).run()
    assert json.loads(output.read_text()) == result
    assert set(result["parts"]) == PARTS
    assert len(result["backends_cuda_hash"]) == len(backends_cuda_hash())
    for key in ("card", "driver", "torch", "triton", "commit", "command", "timestamp"):
        assert key in result
    parts = result["parts"]
    assert parts["tests"]["passed"] == 3, parts["tests"]
    assert parts["closeness"]["models"]["absent"] == {"ok": True, "missing": True}
    for part in ("tests", "closeness", "determinism", "trace", "ledger", "sanitizer"):
        assert parts[part]["ok"], parts[part]

    close = parts["closeness"]["models"]["tiny"]
    assert close["bound"]["activations"] in close["rows"]
    for row in close["rows"].values():
        assert (row["prefill"]["rows"], row["decode"]["rows"], row["graph_steps"]) == (22, 2, 2)
        assert 0 < row["decode"]["mean_kl"] <= row["decode"]["max_kl"] < 1e-3
    assert close["rows"]["int16"]["decode"]["mean_kl"] < close["rows"]["int8"]["decode"]["mean_kl"]
    same = parts["determinism"]["models"]["tiny"]
    assert same["positions"] == [15, 17]  # across the window of 16
    assert len({row["ids"] for row in same["masks"]}) == 1
    assert same["ahead_logits_max_difference"] < 1e-5
    events = parts["trace"]["models"]["tiny"]["events"]
    assert [event["event"] for event in events] == ["enqueued", "token", "token"]
    for row in parts["ledger"]["models"]["tiny"]["rows"].values():
        assert row["ledger_bytes"] > 0
        assert abs(row["allocator_bytes"] - row["ledger_bytes"]) < 512
        assert abs(row["left_when_deleted"]) < 512
    # In the interpreter the "device" is host memory, so that this bound cannot be kept here.
    assert parts["load"]["models"]["tiny"]["again"]["peak_bytes"] >= 0
    text = cuda_check.grid(result).plain()
    assert len(text.splitlines()) == 2 + len(PARTS)
    assert "2 of 2 steps before the first token" in text


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    import cuda_check

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    settings = cuda_check.Settings(
        {"absent": None, "broken": broken}, tests=("tests/cuda/none_of_that_name.py",), workers=1, jobs=2
    )
    output = tmp_path / "check.json"
    first = cuda_check.Check(settings, output, ["tests", "trace", "closeness"]).run()
    assert first["parts"]["tests"]["exit_code"] == 4
    assert first["parts"]["trace"]["models"]["absent"] == {"ok": False, "missing": True}
    assert "ModelError" in first["parts"]["trace"]["models"]["broken"]["error"]
    close = first["parts"]["closeness"]["models"]["broken"]
    assert not close["ok"]
    assert all("ModelError" in row["error"] for row in close["rows"].values())
    assert "int8 RuntimeError: closeness: exit code 1: larql_kv" in cuda_check.grid(first).plain()
    kept = cuda_check.Check(settings, tmp_path / "second.json", ["load"], keep=output).run()
    same_source = kept["backends_cuda_hash"] == first["backends_cuda_hash"]  # nobody is at work in it
    assert set(kept["parts"]) == ({"tests", "trace", "closeness", "load"} if same_source else {"load"})
    assert not kept["ok"]


def test_the_time_limit_ends_what_runs(tmp_path: Path) -> None:
    import cuda_check

    begin = time.perf_counter()
    settings = cuda_check.Settings({}, tests=("tests/cuda/test_source_hash.py",), workers=1, seconds=0.2)
    late = cuda_check.Check(settings, tmp_path / "out.json", ["tests"]).run()
    assert late["parts"]["tests"]["error"].startswith("TimeoutExpired")
    assert time.perf_counter() - begin < 20


def test_those_who_wait_for_the_reference_hear_that_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda_check

    check = cuda_check.Check(cuda_check.Settings({}), tmp_path / "out.json")
    check.folder, check._begin = tmp_path, time.perf_counter()
    monkeypatch.setattr(
        cuda_check, "_words", lambda *words: [sys.executable, "-c", "import sys; sys.exit('no')"]
    )
    with pytest.raises(RuntimeError, match="reference: exit code 1: no"):
        check._reference("tiny", tmp_path / "tiny.gguf")
    assert (tmp_path / "tiny.failed").read_text() == "reference: exit code 1: no"  # its last words first


@pytest.mark.parametrize(
    ("code", "said", "ok", "status"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", True, "clean"),
        (99, "Invalid __global__ read\n========= ERROR SUMMARY: 2 errors", False, "2 errors, exit code 99"),
        (1, "========= ERROR SUMMARY: 0 errors", False, "0 errors, exit code 1"),
        (1, "Device not supported\n= ERROR SUMMARY: 1 error", True, "not available: it does not work here"),
        (1, "libsanitizer is missing", True, "not available: it does not work here"),
    ],
)  # fmt: skip
def test_what_compute_sanitizer_said(code: int, said: str, ok: bool, status: str) -> None:
    from cuda_check_report import sanitizer_verdict

    found = sanitizer_verdict(code, said)
    assert (found["ok"], found["status"]) == (ok, status)


@pytest.mark.slow
def test_the_sanitizer_runs_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that only pretends: it runs what it is given, and finds nothing."""
    import cuda_check

    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\nwhile [ $1 != steps ]; do shift; done\n"
        'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING"; echo "========= ERROR SUMMARY: 0 errors"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(cuda_check, "_SANITIZERS", (str(tool),))
    check = cuda_check.Check(cuda_check.Settings({}), tmp_path / "out.json", ["sanitizer"])
    found = check.run()["parts"]["sanitizer"]
    assert (found["ok"], found["status"]) == (True, "clean"), found


def test_models_are_found_by_file_then_by_name(tmp_path: Path) -> None:
    import cuda_check

    file = tmp_path / "smollm2-135m.gguf"
    file.write_bytes(b"")
    assert cuda_check.find_model("smollm2-135m", tmp_path) == file
    assert cuda_check.find_model("no-such-model", tmp_path) is None


def test_w10_parity_on_a_tiny_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import w10_parity

    words = ["w10_parity.py", "--model", str(model_dir("llama")), "--prompt", "20", "--steps", "4"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        w10_parity.main()
    assert end.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(w10_parity.VARIANTS)

    def other_bits(run: Any, first: Any) -> dict[str, Any]:
        if run.mask == "h_only":
            run.logits[2] = run.logits[2] + 1.0
        return against(run, first)

    against = w10_parity.Run.against
    monkeypatch.setattr(w10_parity.Run, "against", other_bits)
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    with pytest.raises(SystemExit) as end:
        w10_parity.main()
    assert end.value.code == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["first_difference"] for row in rows if not row["same_logits"]} == {2}
    assert {row["mask"] for row in rows if not row["same_logits"]} == {"h_only"}
    assert all(row["same_tokens"] for row in rows)


def test_models_arrive_in_pieces_whatever_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import carry_models

    monkeypatch.setattr(carry_models, "_BLOCK", 1 << 12)
    content = {
        "one": torch.randint(0, 256, (900_000,)),
        "two": torch.zeros(5, dtype=torch.int64),
        "three": torch.arange(300_000) % 251,
    }
    models = {}
    for name, values in content.items():
        models[name] = tmp_path / f"{name}.bin"
        models[name].write_bytes(bytes(values.tolist()))
    sent, there, target = tmp_path / "sent", tmp_path / "there", tmp_path / "models"
    pieces = carry_models.split(models, sent, 400_000)
    assert len(pieces) >= 3
    assert all(piece.stat().st_size < 400_000 for piece in pieces)
    there.mkdir()
    for index, piece in enumerate(reversed(pieces)):
        for old in there.iterdir():
            old.unlink()
        (there / piece.name).write_bytes(piece.read_bytes())
        lines = carry_models.join(there, target)
        assert lines == carry_models.join(there, target)  # a piece that comes twice counts once
        assert all(line.endswith("complete") for line in lines) == (index == len(pieces) - 1)
    for name, path in models.items():
        assert (target / f"{name}.gguf").read_bytes() == path.read_bytes()
    assert not list(target.glob("*.partial"))


def test_a_damaged_piece_is_refused(tmp_path: Path) -> None:
    import carry_models

    path = tmp_path / "one.bin"
    path.write_bytes(b"a" * 1000)
    (piece,) = carry_models.split({"one": path}, tmp_path / "sent", 40_000_000)
    header, body = piece.read_bytes().split(b"\n", 1)
    wrong = json.loads(header)
    wrong["files"]["one.gguf"]["sha256"] = "0" * 64
    piece.write_bytes(json.dumps(wrong).encode() + b"\n" + body)
    with pytest.raises(ValueError, match="carry every piece again"):
        carry_models.join(tmp_path / "sent", tmp_path / "models")
    assert not (tmp_path / "models" / "one.gguf").exists()
