"""Every kernel variant that the backend launches compiles for sm_90, which the interpreter does not tell.

`python -m tests.cuda.test_compiles` compiles and reports; an argument picks the scenes whose names hold it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TIMEOUT = 300  # seconds
MOST_STACK = 256  # bytes a thread that a step's kernel may spill
STEP_KERNELS = ("packed_linear", "float_linear", "attention_step", "last_norm", "quantise_row")
IDS = [token % 900 + 5 for token in range(1200)]


_MORE = pytest.mark.skipif(
    not os.environ.get("LARQL_CUDA_SLOW"), reason="another minute: set LARQL_CUDA_SLOW=1"
)


@pytest.mark.parametrize("group", ["core", pytest.param("more", marks=_MORE)])
def test_every_launched_variant_compiles_for_the_card(group: str) -> None:
    root = Path(__file__).parents[2]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.cuda.test_compiles", f"{group}:"]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if done.returncode:
        _, fault, rest = done.stdout.partition("\nFAULT")
        pytest.fail(f"{fault}{rest}\n{done.stderr[-4000:]}", pytrace=False)


# -- what is driven --------------------------------------------------------------------------------------


def steps(model: Any, spec: str = "standard", capture: str | None = None) -> Any:
    """A prompt, steps that end in each way, and the logits of one row."""
    import larql_kv as lk

    engine = lk.build_engine(spec, model)
    if capture is not None:
        engine.set_capture(capture)
    engine.prefill(IDS[:20])
    engine.logits(engine.decode_step(7))
    list(engine.decode_ahead(2, 7))
    list(engine.generate(IDS[:20], 3, temperature=1.0, seed=1))
    return engine


def kept_steps(model: Any) -> None:
    """Plain steps, and those that write residual rows, on the device and for the host."""
    steps(model)
    steps(model, "markov-rs", "full")


def every_state(model: Any) -> None:
    """Whatever a step may keep and stage besides K/V."""
    for spec in ("standard", "standard:window=100", "no-cache", "markov-rs:rows=none"):
        steps(model, spec)
    for capture in ("none", "h_only", "full"):
        steps(model, "markov-rs", capture)
    for capture in ("h_only", "full"):
        steps(model, "markov-rs:rows=host", capture)
    windowed = steps(model, "standard:window=100").reference()  # masks what a ring would have dropped
    windowed.prefill(IDS[:20])
    windowed.decode_step(7)


def every_path(model: Any) -> None:
    """Prompts of all sizes, pieces of them, one row, rows dropped and derived again, logits of many rows."""
    engine = steps(model)
    engine.prefill(IDS)  # on what is held, and past a ring
    engine.reset()
    engine.prefill(IDS[:1])
    engine.logits(engine.prefill_rows(IDS[:3]))
    engine.profile()
    engine.decode_step(7)  # layer by layer
    dropped = steps(model, "markov-rs")
    dropped.drop_derivative()
    dropped.decode_step(7)


def standalone(model: Any) -> None:
    """Kernels that only checks and benches launch."""
    import torch

    from larql_kv.backends.cuda import rowops
    from larql_kv.backends.cuda.kernels.bandwidth import read_words

    hidden = model.config.hidden
    table, rows = torch.zeros(8, dtype=torch.int64), torch.zeros(20, hidden)
    rowops.write_rows(rows, table, 0, 0, 0)
    rowops.read_rows(table, 0, 0, 20, hidden)
    words = torch.zeros(1024, dtype=torch.int32)
    read_words[(1,)](words, words, CHUNKS=64, SIZE=1024, num_warps=8)  # type: ignore[call-arg]


class Scene(NamedTuple):
    name: str
    shape: Any  # model/shape_recipes.py
    drive: Callable[[Any], object]
    traits: Any = None
    activations: str | None = None  # None: the default
    capacity: int = 1024  # positions that the step's buffers have room for


def scenes() -> Iterator[Scene]:
    from larql_kv.model.shape_recipes import SHAPES, Shape
    from tests.cuda.compile_only import Traits

    real = replace(SHAPES["gemma3-4b"], layers=3, vocab=4096)
    # Wide rows take long to compile (in Triton's coalescing pass): once is enough. The narrow model has the
    # attention of the real one.
    narrow: dict[str, Any] = {"hidden": 512, "intermediate": 512, "vocab": 4096}
    gemma = replace(real, layers=6, **narrow)  # the sixth layer sees the whole past
    llama = replace(SHAPES["llama3.1-8b"], layers=3, **narrow)
    qwen3 = replace(SHAPES["qwen3-4b"], layers=3, **narrow)
    smollm2 = Shape("smollm2-135m", "llama", 3, 576, 1536, 9, 3, 64, 4096, 8192, 1e-5, 1e5)
    norms = ("q_norm", "k_norm")
    caps = {"attention_softcap": 50.0, "final_softcap": 30.0, "qk_norm": False}

    yield Scene("core: gemma3-4b", real, kept_steps)
    yield Scene("core: prompts", gemma, every_path)
    yield Scene("core: long", gemma, kept_steps, capacity=8192)
    yield Scene("core: bf16", replace(gemma, layers=2, mix="bf16"), kept_steps)

    yield Scene("more: states", gemma, every_state)
    yield Scene("more: int8", gemma, steps, activations="int8")
    yield Scene("more: int16", gemma, kept_steps, activations="int16")
    yield Scene("more: gemma2", gemma, steps, Traits(without=norms, config=caps))
    yield Scene("more: llama", llama, kept_steps)
    yield Scene("more: llama, long", llama, steps, capacity=8192)
    yield Scene("more: qwen3", qwen3, steps)
    biases = Traits(without=norms, biases=("q", "k", "v"), config={"qk_norm": False})
    yield Scene("more: qwen2", qwen3, steps, biases)
    yield Scene("more: smollm2-135m", smollm2, steps)
    for mix in ("q5_k_m", "q8_0", "q4_0", "q4_1"):
        shape = replace(gemma, layers=3, mix=mix)
        for activations in ("int8", "int16"):
            yield Scene(f"more: {mix}, {activations}", shape, steps, activations=activations)
    yield Scene("more: f16", replace(gemma, layers=2, mix="f16"), kept_steps)
    yield Scene("more: standalone", real, standalone)


def main(pick: str = "") -> int:
    """Drive the scenes, compile, print a line a variant and then the faults; the exit code."""
    from larql_kv.backends.cuda import step
    from tests.cuda.compile_only import SHARED_BYTES, Launches, Traits, build_model, compile_all

    begin = time.perf_counter()
    launches = Launches().install()
    for scene in scenes():
        if pick in scene.name:
            launches.scene, step._LEAST_CAPACITY = scene.name, scene.capacity
            scene.drive(build_model(scene.shape, scene.traits or Traits(), scene.activations))
    variants = list(launches.variants.values())
    driven = time.perf_counter() - begin
    faults: dict[str, list[str]] = {}  # what is wrong -> with which variants
    for outcome in compile_all(variants, len(os.sched_getaffinity(0))):
        print(outcome, flush=True)
        if fault := _fault(outcome, SHARED_BYTES):
            faults.setdefault(fault, []).append(outcome.label)
    print(
        f"{len(variants)} variants; driven in {driven:.0f} s, compiled by {time.perf_counter() - begin:.0f} s"
    )
    for fault, labels in faults.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        print(f"\nFAULT in {labels[0]}{more}\n{fault}")
    return 1 if faults else 0


def _fault(outcome: Any, most_shared: int) -> str:
    """What keeps a variant from running well; empty when nothing does."""
    if outcome.shared > most_shared:
        return f"{outcome.shared} bytes of shared memory, at most {most_shared}"
    if outcome.kernel in STEP_KERNELS and outcome.stack > MOST_STACK:
        return f"{outcome.stack} bytes of stack a thread, at most {MOST_STACK}: registers are spilt"
    return outcome.error


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
