"""When the command began: the shell's view, so that imports and loading count."""

from __future__ import annotations

import os
import time
from pathlib import Path

_started: float | None = None


def command_started_with_process() -> None:
    """Count from the start of this process, where the system tells (Linux); else from now."""
    global _started
    age = process_age()
    _started = time.perf_counter() - (age or 0.0)


def seconds_since_start(default: float) -> float:
    """Seconds since the command began, or since `default` (perf_counter) inside another process."""
    return time.perf_counter() - (_started if _started is not None else default)


def process_age() -> float | None:
    """Seconds since this process was started, or None where /proc does not say."""
    try:
        # Field 22 of stat, after the parenthesised command name, which may itself hold spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
