"""benchmarks/cuda_peers.py on a tiny model, on the CPU, with a llama-bench that only pretends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from larql_kv.model.gguf_file import GgufFile
from larql_kv.model.shape_recipes import Shape, parse_shape
from tests.models import installed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the parity extra")
TINY: Shape = replace(
    parse_shape("gemma3-4b"), layers=7, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=32,
    vocab=300, window=8,
)  # fmt: skip
# Answers as llama-bench does, and keeps its arguments and the file's header beside itself.
FAKE = """#!{python}
import json, pathlib, shutil, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
here = pathlib.Path(__file__).parent
shutil.copy(words["-m"], here / "model.gguf")
with (here / "calls").open("a") as calls:
    print(json.dumps(words), file=calls)
if "{fail}" == "yes":
    sys.exit("no device")
new, prompt = int(words["-n"]), int(words["-p"])
print("ggml_cuda_init: found 1 device")
print(json.dumps([
    {{"n_prompt": prompt, "n_gen": new, "n_depth": int(depth), "avg_ts": 2.0, "samples_ts": [1.0, 2.0, 6.0],
      "build_commit": "abc", "build_number": 7}}
    for depth in words.get("-d", "0").split(",")
]))
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cuda_peers

    return cuda_peers


def fake(folder: Path, fail: str = "no") -> str:
    path = folder / "llama-bench"
    path.write_text(FAKE.format(python=sys.executable, fail=fail))
    path.chmod(0o755)
    return str(path)


def test_every_peer_is_a_row_of_the_file(peers: Any, tmp_path: Path) -> None:
    settings = peers.Settings(prompt=12, new=5, prefill=24, depths=(12, 40), repeats=2)
    output = tmp_path / "out" / "peers.json"
    result = peers.run(TINY, "cpu", settings, fake(tmp_path), output)
    assert json.loads(output.read_text()) == result
    assert result["shape"] == "gemma3-4b:q4_k_m"
    for key in ("transformers", "torch", "commit", "gpu", "driver"):
        assert key in result["machine"]
    eager, static, llama = result["rows"]
    assert not any("error" in row for row in result["rows"])
    assert len(eager["decode"]["12"]["raw"]) == 2
    assert eager["prefill"]["24"]["tok_per_s"] > 0
    assert static["decode"]["12"]["tok_per_s"] > 0
    assert static["decode"]["12"]["ids"] == eager["decode"]["12"]["ids"]  # fast and wrong would be seen
    assert {at: figure["tok_per_s"] for at, figure in llama["decode"].items()} == {"12": 2.0, "40": 2.0}
    assert llama["prefill"]["24"]["range"] == [1.0, 6.0]
    assert llama["build"] == "abc (7)"
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [(call["-p"], call["-n"], call.get("-d")) for call in calls] == [
        ("0", "5", "12,40"),
        ("24", "0", None),
    ]
    assert {(call["-ngl"], call["-fa"], call["-o"], call["-r"]) for call in calls} == {
        ("99", "1", "json", "2")
    }
    written = GgufFile.open(tmp_path / "model.gguf")
    assert written.tensors["token_embd.weight"].shape == (300, 64)
    lines = peers.table(result).splitlines()
    assert lines[0].split("  ")[0] == "tok/s, random weights"
    assert len(lines) == 4
    assert lines[3].split() == ["llama.cpp", "q4_k_m", "2.0", "2.0", "2.0"]


def test_the_model_is_that_shape(peers: Any) -> None:
    import torch

    model = peers.random_hf_model(TINY, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    config = model.config
    assert config._attn_implementation == "sdpa"
    assert config.layer_types.count("full_attention") == 1
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("binary", "note"),
    [(None, "no --llama-bench was given"), ("/no/such/llama-bench", "no llama-bench at /no")],
)
def test_without_llama_bench_its_row_is_empty_and_says_so(peers: Any, binary: str | None, note: str) -> None:
    row = peers.llama_row(binary, TINY, peers.Settings(), 60.0)
    assert row["note"].startswith(note)
    assert not row["decode"]
    assert not row["prefill"]
    settings = {"prompt": 512, "depths": [512], "prefill": 4096}
    shown = peers.table({"settings": settings, "rows": [row]}).splitlines()[1]
    assert shown.split()[:4] == ["llama.cpp", "q4_k_m", "-", "-"]
    assert note in shown


def test_a_peer_that_fails_is_a_row_with_its_error(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no device" in peers.llama_row(fake(tmp_path, "yes"), TINY, peers.Settings(), 60.0)["error"]

    def fails(*_: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(peers, "decode", fails)
    settings = peers.Settings(prompt=4, new=2, prefill=4, repeats=1)
    rows: list[dict[str, Any]] = []
    peers.measure(peers.random_hf_model(TINY, "cpu"), settings, rows.append)
    assert [row["error"] for row in rows] == ["decode: MemoryError: out of memory"] * 2
    assert "tok/s, decode: MemoryError" in peers.summary(rows[0])
    monkeypatch.setattr(peers, "random_hf_model", fails)
    result = peers.run(TINY, "cpu", settings, None, tmp_path / "peers.json")
    assert result["rows"][0]["error"] == "MemoryError: out of memory"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shape", "gemma3-5b"), "unknown shape 'gemma3-5b'"),
        (("--shape", "qwen3-4b"), "the peers run gemma3-4b and gemma3-270m"),
        (("--device", "cuda:99"), "no such CUDA card"),
    ],
)
def test_what_cannot_be_asked_exits_2(
    peers: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["cuda_peers.py", *words])
    with pytest.raises(SystemExit) as caught:
        peers.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_and_shows(
    peers: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "random_hf_model", lambda shape, device: 1 / 0)
    monkeypatch.setenv("LARQL_COMMIT", "0123abc")
    output = tmp_path / "peers.json"
    monkeypatch.setattr("sys.argv", ["cuda_peers.py", "--device", "cpu", "--output", str(output)])
    peers.main()
    written = json.loads(output.read_text())
    assert written["machine"]["commit"] == "0123abc"
    assert written["command"].endswith(f"cuda_peers.py --device cpu --output {output}")
    assert [row["system"] for row in written["rows"]] == ["HF bf16", "llama.cpp q4_k_m"]
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert peers.default_output("cpu").name.endswith("-cpu-cuda-peers.json")
