"""Timing and made-up weights for the microbenchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from larql_kv.backends.cpu import ops
from larql_kv.backends.cpu.linear import PackedLinear
from larql_kv.backends.cpu.unpack import STORED_BLOCK
from larql_kv.bench.table import Grid
from larql_kv.model.tensors import RawTensor

# Where the float16 scales of a stored block lie: random bytes there could be inf or nan.
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


@dataclass
class Result:
    """One figure of a microbenchmark: what was timed, how long, and the rate that says how good it is."""

    bench: str
    case: str
    microseconds: float
    rate: float | None = None
    unit: str = ""
    of_roof: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def grid(results: Sequence[Result]) -> Grid:
    made = Grid(
        "Microbenchmarks (median)", ["bench", "case", "us", "rate", "of roof"], left=frozenset({0, 1})
    )
    for result in results:
        rate = "-" if result.rate is None else f"{result.rate:.1f} {result.unit}"
        roof = "-" if result.of_roof is None else f"{result.of_roof:.0%}"
        made.rows.append([result.bench, result.case, f"{result.microseconds:.1f}", rate, roof])
    return made


def median_seconds(call: Callable[[int], object], budget: float, least: int = 5) -> float:
    """Median time of `call(index)`, run for about `budget` seconds after two warm-up calls."""
    call(0)
    call(1)
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or time.perf_counter() < end:
        begin = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def random_raw(kind: str, out: int, inner: int, seed: int = 0) -> RawTensor:
    """A stored matrix (out, inner) of random codes with small scales: the time does not depend on values."""
    random = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        values = random.standard_normal((out, inner)).astype(np.float32)
        if kind == "BF16":
            data = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint8)
        else:
            data = (values.astype(np.float16) if kind == "F16" else values).view(np.uint8)
        return RawTensor("random", kind, (out, inner), data.reshape(out, -1))
    weights, size = STORED_BLOCK[kind]
    data = random.integers(0, 256, (out, inner // weights, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for at in _SCALES[kind]:
        data[:, :, at : at + 2] = scale
    return RawTensor("random", kind, (out, inner), data.reshape(out, -1))


def copies(kind: str, out: int, inner: int, total_bytes: int, gemm_bf16: bool = False) -> list[PackedLinear]:
    """Packed copies of one matrix, `total_bytes` or more together: used in turns, they come from memory."""
    raw = random_raw(kind, out, inner)
    first = ops.pack_linear([raw], gemm_bf16=gemm_bf16)
    count = max(1, -(-total_bytes // first.nbytes))
    return [first, *(ops.pack_linear([raw], gemm_bf16=gemm_bf16) for _ in range(count - 1))]
