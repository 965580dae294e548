"""numba set-up for the CPU kernels: threading layer, thread count and a cache that knows every source file.

torch is imported before numba, so that both share one OpenMP runtime (two of them in a process would keep
2 x cores threads spinning). The omp layer is preferred: a launch costs about 1.5 us there.
"""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # before numba: see the module's docstring

# isort: split
import numba
from numba import njit
from numba.core import types

config: Any = importlib.import_module("numba").config  # its attributes are set at run time

if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    # Only an order: where omp is absent, numba goes on to the next one.
    config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

MAX_THREADS: int = config.NUMBA_NUM_THREADS
_I64 = types.int64
_KERNELS: list[tuple[Any, tuple[Any, ...]]] = []
_thread_state = threading.local()


@functools.cache
def _source_digest(name: str) -> str:
    """Digest of a file of this folder and of those that it imports from here. numba itself only looks at the
    file that holds the kernel, so a change in `simd.py` would leave stale machine code in the cache."""
    source = (Path(__file__).parent / f"{name}.py").read_bytes()
    digest = hashlib.sha256(source)
    for imported in sorted(set(_IMPORT.findall(source.decode()))):
        digest.update(_source_digest(imported).encode())
    return digest.hexdigest()


_IMPORT = re.compile(r"from larql_kv\.backends\.cpu\.(\w+) import")


def _is_thread_safe() -> bool:
    """Whether several Python threads may launch at once: not on numba's own workqueue, which aborts the
    process."""
    if config.THREADING_LAYER in ("default", "threadsafe", "safe", "forksafe", "omp", "tbb"):
        for pool in ("omppool", "tbbpool"):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"numba.np.ufunc.{pool}")
                return True
    return False


_launch_lock = None if _is_thread_safe() else threading.Lock()


def region(function: Callable[..., None]) -> Any:
    """Decorator: a parallel loop that several kernels call; compiled into each of them."""
    return njit(parallel=True, nogil=True, fastmath=False, boundscheck=False, error_model="numpy")(function)


def kernel(
    *, ints: int, floats: int = 0, parallel: bool = True, regions: bool = False
) -> Callable[[Callable[..., None]], Any]:
    """Decorator: compile a function of `ints` int64 arguments then `floats` float32 ones, without the GIL,
    cached.

    Addresses travel as int64. The signature is fixed and known to `precompile`. `regions`: not parallel
    itself, it launches threads through the `region`s that it calls.
    """

    def wrap(function: Callable[..., None]) -> Any:
        dispatcher = njit(
            parallel=parallel and not regions,
            nogil=True,
            cache=True,
            fastmath=False,
            boundscheck=False,
            error_model="numpy",
        )(function)
        cache_file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
        if cache_file is not None and hasattr(
            cache_file, "_source_stamp"
        ):  # private: without it the cache only follows one file
            digest = _source_digest(function.__module__.rpartition(".")[2])
            cache_file._source_stamp = (digest, cache_file._source_stamp[-1])
        _KERNELS.append((dispatcher, (_I64,) * ints + (types.float64,) * floats))
        lock = _launch_lock
        if lock is None or not parallel:
            return dispatcher

        @functools.wraps(function)
        def locked(*args: Any) -> None:
            with lock:
                dispatcher(*args)

        return locked

    return wrap


def precompile_all() -> int:
    """Compile every kernel, or load it from the cache. Returns how many kernels there are."""
    for dispatcher, signature in _KERNELS:
        dispatcher.compile(signature)
    return len(_KERNELS)


def cache_hits() -> int:
    """How many kernels of this process came from numba's cache instead of being compiled."""
    return sum(sum(dispatcher.stats.cache_hits.values()) > 0 for dispatcher, _ in _KERNELS)


def sync_threads() -> int:
    """Make numba use `torch.get_num_threads()` threads in this Python thread; returns that number."""
    wanted = torch.get_num_threads()
    if getattr(_thread_state, "count", None) != wanted:
        numba.set_num_threads(min(wanted, MAX_THREADS))
        if torch.get_num_threads() != wanted:  # numba's first launch resizes the OpenMP pool that torch asks
            torch.set_num_threads(wanted)
        _thread_state.count = wanted
    return wanted


def thread_scratch(name: str, floats: int) -> int:
    """Address of scratch for `floats` float32, kept between calls and grown when needed.

    Every Python thread has its own, so that concurrent callers cannot write into each other's.
    """
    held = getattr(_thread_state, name, None)
    if held is None or held[0] < floats:
        buffer = torch.empty(floats, dtype=torch.float32)
        held = (floats, buffer.data_ptr(), buffer)
        setattr(_thread_state, name, held)
    return held[1]


def scratch_bytes() -> int:
    """Bytes of scratch that the calling Python thread holds (for a ledger)."""
    return sum(4 * held[0] for held in vars(_thread_state).values() if isinstance(held, tuple))
