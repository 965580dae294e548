"""The ledger against the operating system: a state of more than 256 MB, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_models

_PROGRAM = """
import ctypes, gc, json, sys
import larql_kv as lk

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps of freed workspace is nobody's state
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])

model = lk.load_model(sys.argv[1], dtype="float32")
engine = lk.build_engine(sys.argv[2], model)
ids = [3 + i % 100 for i in range(1088)]
warm = lk.build_engine(sys.argv[2], model)  # what a first call allocates for good is not state
for start in range(0, 192, 64):
    warm.prefill(ids[start : start + 64])
del warm
before = resident()
for start in range(0, len(ids), 64):
    engine.prefill(ids[start : start + 64])
full, ledger = resident(), engine.ledger()
dropped = engine.drop_derivative()
after_drop = resident()
engine.reset()
print(json.dumps({
    "grown": full - before, "capacity": ledger.capacity, "live": ledger.live, "dropped": dropped,
    "fell": full - after_drop, "left": resident() - before,
}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("spec", ["standard", "markov-rs"])
def test_resident_memory_grows_by_what_the_ledger_says(spec: str, tmp_path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=32, head_dim=256, max_position_embeddings=2048,
    )  # fmt: skip
    tiny_models.save(transformers.LlamaForCausalLM(config), tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), spec],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    figures = json.loads(run.stdout)
    assert figures["capacity"] > 256e6
    assert figures["live"] == pytest.approx(figures["capacity"], rel=0.02)
    assert figures["grown"] == pytest.approx(figures["capacity"], rel=0.02)
    assert figures["fell"] == pytest.approx(figures["dropped"], abs=0.02 * figures["capacity"])
    assert figures["left"] < 0.02 * figures["capacity"], "reset must give the memory back"
