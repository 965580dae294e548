"""The CPU backend's operations, in one place."""

from __future__ import annotations

import time

import torch

from larql_kv.backends.cpu.attention import KV_BLOCK_ROWS, KvStore, RowAttention, append_rows, attend
from larql_kv.backends.cpu.bandwidth_kernel import read_kernel
from larql_kv.backends.cpu.linear import EmbeddingTable, PackedLinear, pack_linear
from larql_kv.backends.cpu.rowops import (
    add_normed_,
    gated_act,
    rms_norm,
    rope_qk_,
    round_bf16_,
)
from larql_kv.backends.cpu.runtime import precompile_all, sync_threads
from larql_kv.backends.cpu.turbo import encode_into, rotate_, turn


def precompile() -> int:
    """Compile every kernel (about a minute on a new machine) or load it from numba's cache (a fraction of a
    second).

    Returns the number of kernels.
    """
    return precompile_all()


def stream_bandwidth(seconds: float = 0.5) -> float:
    """Read bandwidth in GB/s (1e9 bytes): the median pass over 512 MiB by the kernels' own threads."""
    threads = sync_threads()
    floats = 1 << 27
    data = torch.ones(floats)
    sums = torch.zeros(threads * 64)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        read_kernel(data.data_ptr(), floats // threads // 64, threads, sums.data_ptr())
        times.append(time.perf_counter() - start)
    return 4 * (floats // threads // 64 * 64 * threads) / sorted(times)[len(times) // 2] / 1e9


__all__ = [
    "KV_BLOCK_ROWS",
    "EmbeddingTable",
    "KvStore",
    "PackedLinear",
    "RowAttention",
    "add_normed_",
    "append_rows",
    "attend",
    "encode_into",
    "gated_act",
    "pack_linear",
    "precompile",
    "rms_norm",
    "rope_qk_",
    "rotate_",
    "round_bf16_",
    "stream_bandwidth",
    "turn",
]
