"""Streams that are closed or full, and values out of range: one named line, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LARQL = f"{sys.executable} -m larql_kv.cli.main"


def _shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, env=env)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_closed_streams(closed: str) -> None:
    done = _shell(f"{LARQL} engines {closed}")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output() -> None:
    done = _shell(f"{LARQL} engines --json > /dev/full")
    assert done.returncode == 1
    assert "the output cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cache_directory_of_nobody() -> None:
    done = _shell(f"{LARQL} info gemma3-270m", LARQL_CACHE="~nosuchuser/x")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--seed 99999999999999999999", "--repetition-penalty 1e-320"])
def test_numbers_out_of_range(option: str) -> None:
    done = _shell(f"{LARQL} run hi --temperature 1 {option}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
