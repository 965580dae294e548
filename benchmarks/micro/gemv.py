"""One row times a packed matrix: GB/s of the bytes it must read, by stored format and shape."""

from __future__ import annotations

import torch
from common import Result, copies, median_seconds

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q6_K", "Q4_0", "Q4_1", "Q4_K")
# (out, in): SmolLM2's gate+up, Gemma 3 270M's gate+up, a 2560-wide model's FFN, SmolLM2's head.
SHAPES = ((3072, 576), (4096, 640), (10240, 2560), (49152, 576))


def run(quick: bool, roof: float) -> list[Result]:
    """`roof`: read bandwidth in GB/s, measured in the same run."""
    shapes = ((192, 256),) if quick else SHAPES
    results = []
    for kind in KINDS:
        for out, inner in shapes:
            if inner % (256 if kind.endswith("_K") else 32):
                continue
            linears = copies(kind, out, inner, 0 if quick else 256 << 20)
            x = torch.randn(1, inner)
            seconds = median_seconds(
                lambda index, linears=linears, x=x: linears[index % len(linears)](x), 0.02 if quick else 0.3
            )
            rate = linears[0].nbytes / seconds / 1e9
            results.append(Result("gemv", f"{kind} {out}x{inner}", 1e6 * seconds, rate, "GB/s", rate / roof))
    return results
