"""What the card itself can do: the two ceilings of every figure."""

# Triton's annotations do not know launch options.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from larql_kv.backends.cuda.kernels.bandwidth import read_words

_CHUNKS, _SIZE = 64, 1024
WORDS_EACH = _CHUNKS * _SIZE  # that a program reads


def read_all(data: torch.Tensor) -> torch.Tensor:
    """Read int32 words, a multiple of WORDS_EACH; gives one number a program, which hangs on every word."""
    programs = data.numel() // WORDS_EACH
    out = torch.empty(programs, dtype=torch.int32, device=data.device)
    read_words[(programs,)](data, out, CHUNKS=_CHUNKS, SIZE=_SIZE, num_warps=8)
    return out


def milliseconds(run: Callable[[], object], repeats: int = 7) -> float:  # pragma: cuda only
    """Median time of `run` on the current device, by events, after one untimed call."""
    run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def stream_bandwidth(device: torch.device | str, gigabytes: float = 4.0) -> float:  # pragma: cuda only
    """Read bandwidth in GB/s (1e9 bytes): the median pass over data far larger than any cache."""
    words = max(1, int(gigabytes * 1e9) // (4 * WORDS_EACH)) * WORDS_EACH
    data = torch.randint(-(1 << 31), (1 << 31) - 1, (words,), dtype=torch.int32, device=device)
    return 4 * words / milliseconds(lambda: read_all(data)) / 1e6


def matrix_rate(device: torch.device | str, size: int = 8192) -> float:  # pragma: cuda only
    """TFLOP/s of a bfloat16 product of two random (size, size) matrices, by torch."""
    a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    b = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    return 2 * size**3 / milliseconds(lambda: a @ b) / 1e9
