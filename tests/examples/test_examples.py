"""Every example runs, in a process of its own, and says what it promises to show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {
    "run_engine.py": "same bits in every logit",
    "fork_and_trim.py": "all three say the same",
    "check_contract.py": "broken",
    "new_engine.py": "contract Exact: holds: same bits",
    "custom_ffn.py": "refused: ",
    "vindex_patch.py": "removed: the answers from before",
    "ffn_cache_demo.py": "a patch on layer 10: 11 of 12 layers hit",
}


def test_none_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SHOWN, "tiny_model.py"}


@pytest.mark.parametrize("name", SHOWN)
def test_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout
