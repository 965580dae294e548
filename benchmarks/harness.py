"""What the benchmarks share: worker processes, the reference weights, and comparing logits on disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from larql_kv.bench.machine import machine_facts
from larql_kv.bench.report import write_text
from larql_kv.model.catalog import resolve

HERE = Path(__file__).parent
CACHE = HERE.parent / ".cache" / "peers"
MODELS = ("smollm2-135m", "gemma3-270m")
KL_BOUND = 1.5e-3  # what `dtype=None` promises: mean KL against float32, nats
_ROWS = 16  # logit rows compared at once: bounds memory for large vocabularies


class WorkerError(RuntimeError):
    """A worker process died or refused; its last words are in the message."""


class Worker:
    """One system in a process of its own (`peer_worker.py`), so that its memory is its own."""

    def __init__(self, label: str, arguments: list[str], python: str = sys.executable) -> None:
        self.label = label
        self._errors = (CACHE / f"{re.sub(r'[^a-z0-9.]+', '-', label.lower())}.log").open("w+")
        self._process = subprocess.Popen(
            [python, str(HERE / "peer_worker.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.loaded = self._answer()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command, wait for its answer. Raises WorkerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.label}: {answer['error']}")
        return answer

    def _fail(self) -> None:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-3:]
        raise WorkerError(f"{self.label}: exit code {code}: {' | '.join(last)}")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)
        self._errors.close()


def reference_directory(name: str) -> Path:
    """The model's GGUF dequantised to float32 by transformers, saved once: that load takes 12-36 s."""
    target = CACHE / f"{name}-float32"
    if not (target / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM

        print(f"dequantising {name} for transformers (once) ...", file=sys.stderr)
        path = Path(str(resolve(name)))
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        config = (
            loaded.config
        )  # says that it is quantised, which it no longer is, and then refuses to be saved
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(CACHE / f"{name}-part")
        os.replace(CACHE / f"{name}-part", target)
    return target


def compare_logits(reference: Path, candidate: Path, first: int, stop: int | None) -> dict[str, float]:
    """Mean and max KL (nats, reference first), top-1 agreement of .npy logits (rows, vocab) float32;
    rows first..stop-1 of the reference against all rows of the candidate."""
    expected, given = (np.load(path, mmap_mode="r") for path in (reference, candidate))
    expected = expected[first:stop]
    if expected.shape != given.shape:
        raise ValueError(f"logits of shape {given.shape}, the reference has {expected.shape}")
    divergences, agreed = [], 0
    for start in range(0, len(given), _ROWS):
        a, b = (_log_softmax(rows[start : start + _ROWS].astype(np.float64)) for rows in (expected, given))
        divergences += np.maximum((np.exp(a) * (a - b)).sum(1), 0).tolist()
        agreed += int((a.argmax(1) == b.argmax(1)).sum())
    return {
        "mean_kl": float(np.mean(divergences)),
        "max_kl": float(np.max(divergences)),
        "top1": agreed / len(divergences),
        "rows": len(divergences),
    }


def _log_softmax(rows: np.ndarray) -> np.ndarray:
    rows = rows - rows.max(1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(1, keepdims=True))


def save_results(kind: str, payload: dict[str, Any], path: Path | None = None) -> Path:
    """Write results as JSON; by default to results/<date>-<machine>-<kind>.json."""
    facts = machine_facts()
    if path is None:
        name = re.sub(r"[^a-z0-9]+", "-", str(facts["cpu"]).split("(")[0].lower()).strip("-")
        model = re.search(r"model (\d+)", str(facts["cpu"]))
        suffix = f"-m{model[1]}" if model else ""
        day = datetime.now(UTC).date().isoformat()
        path = HERE / "results" / f"{day}-{name}{suffix}-{facts['cores']}c-{kind}.json"
    stamped = {"kind": kind, "timestamp": str(int(time.time())), "machine": facts, **payload}
    write_text(path, json.dumps(stamped, indent=1) + "\n")
    return path
