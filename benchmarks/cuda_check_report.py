"""How cuda_check.py says what it ran, and what came of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from larql_kv.backends.cuda.source_hash import backends_cuda_hash
from larql_kv.bench.machine import machine_facts
from larql_kv.bench.table import Grid

RESULTS = Path(__file__).parent / "results"
_NO_DEVICE = re.compile(
    r"device not supported|unable to (?:find|attach)|not supported on this", re.IGNORECASE
)


def sanitizer_verdict(code: int, said: str) -> dict[str, Any]:
    """Clean, errors (with the first of them), or a machine on which the tool does not work."""
    totals = re.search(r"ERROR SUMMARY: (\d+) error", said)
    if _NO_DEVICE.search(said) or totals is None:
        return {"ok": True, "status": "not available: it does not work here", "tail": said[-600:]}
    if int(totals[1]) or code:
        return {"ok": False, "status": f"{totals[1]} errors, exit code {code}", "said": said[:3000]}
    return {"ok": True, "status": "clean"}


def header(settings: dict[str, Any]) -> dict[str, Any]:
    """What was run, with what, and of which source."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none (Triton's interpreter)"
    driver = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        driver = said[0] if said else None
    machine = machine_facts()
    commit = os.environ.get("LARQL_COMMIT") or machine["commit"]
    return {
        "kind": "cuda-check",
        "timestamp": str(int(time.time())),
        "command": "python " + " ".join(sys.argv),
        "commit": commit,
        "backends_cuda_hash": backends_cuda_hash(),
        "card": card,
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "machine": machine,
        "settings": settings,
        "ok": False,
        "parts": {},
    }


def default_output() -> Path:
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return RESULTS / f"{datetime.now(UTC).date().isoformat()}-{name}-cuda-check.json"


def grid(result: dict[str, Any]) -> Grid:
    """One line a part."""
    rows = [
        [part, "passed" if found["ok"] else "FAILED", f"{found['after_seconds']:.1f}", summary(found)]
        for part, found in result["parts"].items()
    ]
    title = f"{result['card']}, backends/cuda {result['backends_cuda_hash'][:12]}"
    return Grid(title, ["part", "", "after s", "found"], rows, frozenset({0, 1, 3}))


def summary(found: dict[str, Any]) -> str:
    """The figures of a part, or of one model in it, in a line."""
    if "models" in found:
        return "; ".join(f"{name}: {summary(row)}" for name, row in found["models"].items())
    if "error" in found:
        return found["error"].splitlines()[0][:200]
    if "missing" in found:
        return "MISSING"
    if "passed" in found:
        return f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
    if "bound" in found and "rows" in found:  # closeness
        return ", ".join(f"{name} {_apart(row)}" for name, row in found["rows"].items())
    if "masks_same" in found:
        wrong = [key for key, value in found.items() if value is False and key != "ok"]
        return "differ: " + ", ".join(wrong) if wrong else "same bits"
    if "events" in found:
        return f"{found['events'][0]['steps_enqueued']} of {found['steps']} steps before the first token"
    if "rows" in found:  # ledger
        return ", ".join(
            f"{spec} off {row['allocator_bytes'] - row['ledger_bytes']:+,} of {row['ledger_bytes']:,}"
            + ("" if row["ok"] else f" (left {row['left_when_deleted']:,})")
            for spec, row in found["rows"].items()
        )
    if "peak_over_file" in found:
        return f"{found['peak_over_file']} x file"
    return found.get("status", "")


def _apart(row: dict[str, Any]) -> str:
    if "error" in row:
        return summary(row)
    return ", ".join(
        f"{kind} KL {row[kind]['mean_kl']:.1e} top-1 {row[kind]['top1']:.1%}"
        for kind in ("prefill", "decode")
    )
