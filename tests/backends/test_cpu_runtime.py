"""The compiled kernels as a whole: cached across processes, safe in threads, honest about bandwidth."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from larql_kv.backends.cpu import ops, runtime

_SCRIPT = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
from larql_kv.backends.cpu import ops, runtime
count = ops.precompile()
view = ops.KvStore(torch.empty(0, dtype=torch.int64))
x = torch.randn(12, 2, 16)
expected = ops.attend(x, x, x, view, 0, None, 0.1)
with ThreadPoolExecutor(4) as pool:
    results = list(pool.map(lambda _: ops.attend(x, x, x, view, 0, None, 0.1), range(200)))
assert all(torch.equal(r, expected) for r in results)
print(runtime.numba.threading_layer(), count - runtime.cache_hits())
"""


def run_script(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_second_process_compiles_nothing() -> None:
    # A process that still runs older sources may have written its own index: then the first child repairs it.
    assert "0" in (run_script().split()[1], run_script().split()[1])


def test_without_openmp_threads_take_turns() -> None:
    assert run_script(NUMBA_THREADING_LAYER="workqueue").split()[0] == "workqueue"


def test_scratch_is_not_shared_between_python_threads() -> None:
    addresses = set()
    with ThreadPoolExecutor(1) as pool:
        addresses.add(pool.submit(runtime.thread_scratch, "test", 100).result())
    addresses.add(runtime.thread_scratch("test", 100))
    assert len(addresses) == 2
    assert runtime.thread_scratch("test", 50) in addresses
    assert runtime.scratch_bytes() >= 400


def test_thread_count_follows_torch() -> None:
    torch.set_num_threads(2)
    assert runtime.sync_threads() == 2
    assert runtime.numba.get_num_threads() == min(2, runtime.config.NUMBA_NUM_THREADS)


def test_stream_bandwidth_is_plausible() -> None:
    assert 0.1 < ops.stream_bandwidth(0.05) < 5000


@pytest.mark.parametrize("threads", ["1", "2"])
def test_torchs_thread_count_is_kept_and_followed(threads: str) -> None:
    """numba's first launch must not raise the count that the user asked torch for."""
    code = (
        "import torch, numba\nfrom larql_kv.backends.cpu import runtime\n"
        "def run():\n    runtime.sync_threads()\n"
        "    return torch.get_num_threads(), numba.get_num_threads()\n"
        "first = run()\ntorch.set_num_threads(1)\nprint(first, run())"
    )
    env = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == f"({threads}, {threads}) (1, 1)"
