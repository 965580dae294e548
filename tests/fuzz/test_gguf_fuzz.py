"""Mutated GGUF files: no crash, no hang, no memory beyond the bound, nothing but ModelError.

`LARQL_FUZZ_SECONDS` (default 60) sets the time, `LARQL_FUZZ_SEED` the seed. A finding is printed with its
bytes: add their hex to `corpus/NAME.hex` and it is a test from then on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from larql_kv.errors import ModelError
from larql_kv.model.gguf_file import GgufFile
from larql_kv.model.tokenizer import Tokenizer
from tests import tiny_models

HERE = Path(__file__).parent
CORPUS = sorted((HERE / "corpus").glob("*.hex"))


def _run(tmp_path: Path, seed: int, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "gguf_fuzz_worker.py"), str(seed), str(seconds), str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)


@pytest.mark.slow
def test_mutated_headers(tmp_path):
    seconds = float(os.environ.get("LARQL_FUZZ_SECONDS", "60"))
    seed = int(os.environ.get("LARQL_FUZZ_SEED", "20261130"))
    print(f"seed {seed}, {seconds:g} s")
    for family in ("llama", "gemma2", "qwen3"):
        tiny_models.write_tiny_gguf(family, tmp_path / f"tiny-{family}.gguf", "Q8_0")
    done = _run(tmp_path, seed, seconds)
    print(done.stdout[-6000:])
    assert done.returncode == 0, (
        f"seed {seed}: exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    )
    counts = dict(re.findall(r"'([\w ]+)': (\d+)", done.stdout))
    # The run must have got behind the first checks as well as run into them.
    assert int(counts["refused"]) > 10
    assert int(counts["opened"]) > 10


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_the_fuzzer_found(path, tmp_path):
    start = time.perf_counter()
    case = tmp_path / "case.gguf"
    case.write_bytes(bytes.fromhex(path.read_text()))
    try:
        tokenizer = Tokenizer.from_gguf(GgufFile.open(case))
        tokenizer.decode(tokenizer.encode("ab <x> é<s>\0ab  <|endoftext|>"))
    except ModelError:
        pass
    assert time.perf_counter() - start < 2
