"""Shared set-up: one thread a worker (tests run in parallel), and the per-file coverage floor."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidia0").exists():  # Triton's kernels are then run by its interpreter; read at import
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Every test draws its own numbers, and the same ones each time: a tolerance met once is met always."""
    import torch

    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


COVERAGE_FLOOR = 90.0  # percent of lines, in every file
# Files that say so in a comment are not traced, or not always: listed in CONTRIBUTING.md.
UNTRACED = ("# coverage: compiled", "# coverage: types")
_BELOW: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a full covered run in which a source file is under the floor."""
    plugin = session.config.pluginmanager.get_plugin("_cov")
    whole = not session.config.option.keyword and not session.config.option.markexpr
    whole = whole and session.config.args_source is not pytest.Config.ArgsSource.ARGS
    if hasattr(session.config, "workerinput") or not whole or plugin is None or plugin.cov_controller is None:
        return
    _BELOW.extend(_files_below_floor(plugin.cov_controller.cov))
    if _BELOW and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _files_below_floor(coverage) -> Iterator[str]:
    for name in sorted(coverage.get_data().measured_files()):
        if any(line.startswith(UNTRACED) for line in Path(name).read_text().splitlines()[:40]):
            continue
        _, statements, _, missing, where = coverage.analysis2(name)
        if statements and 100 * (1 - len(missing) / len(statements)) < COVERAGE_FLOOR:
            share = 100 * (1 - len(missing) / len(statements))
            yield f"{Path(name).relative_to(Path.cwd())}: {share:.0f} % of lines covered, missing {where}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _BELOW:
        terminalreporter.section(f"files under {COVERAGE_FLOOR:.0f} % line coverage")
        for line in _BELOW:
            terminalreporter.write_line(line)
