"""What a number was measured on: a figure without its machine and commit cannot be compared."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from larql_kv import __version__

if TYPE_CHECKING:
    from larql_kv.model.model import Model


def machine_facts() -> dict[str, Any]:
    """CPU model and cores, threads, torch and Python versions, package version, git commit (or None)."""
    import torch

    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),  # others on the machine: read small differences with care
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "larql_kv": __version__,
        "commit": git_commit(),
    }


def device_facts(model: Model) -> dict[str, Any]:
    """{device, card, activations}: where the model runs, the card's name there, and the precision that meets
    quantised weights in a step; null where there is no such thing."""
    import torch

    decoder, device = model.decoder, model.device
    where = str(device) if decoder.name == device.type else f"{decoder.name} (interpreted on {device})"
    return {
        "device": where,
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "activations": getattr(decoder, "activations", None),
    }


def cpu_model() -> str:
    """The processor's name with what tells its generation apart (clouds hide the model number)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        pairs = (line.partition(":") for line in lines)
        fields = {name.strip(): value.strip() for name, _, value in pairs}
    except OSError:
        return platform.processor() or "unknown"
    flags = fields.get("flags", "").split()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    family = f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return f"{fields.get('model name', 'unknown')} ({family}; {' '.join(f for f in wanted if f in flags)})"


def git_commit(directory: Path | None = None) -> str | None:
    """Short commit of the checkout this package runs from, `+` where files differ; None outside of one."""
    where = directory or Path(__file__).parent
    try:
        commit = _git(where, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(where, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(where: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


class OtherLoad:
    """What other processes used of the machine since this was made; timings taken meanwhile show it."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """(wall seconds, CPU seconds of every process, CPU seconds of this one); None without /proc/stat."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()

    def cores(self) -> float | None:
        """Mean number of cores that others kept busy (stolen time included), None where unknown."""
        begin, now = self._begin, self._now()
        if begin is None or now is None or now[0] <= begin[0]:
            return None
        wall, busy, own = (after - before for after, before in zip(now, begin, strict=True))
        return max(0.0, busy - own) / wall
