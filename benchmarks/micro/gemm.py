"""A prompt's rows times a packed matrix: GFLOP/s of both execution forms, beside torch's own product."""

from __future__ import annotations

import torch
from common import Result, copies, median_seconds

KINDS = ("Q4_1", "Q8_0", "Q4_K")
SHAPES = ((3072, 576), (4096, 640), (10240, 2560))  # (out, in)
ROWS = (128, 512)


def run(quick: bool, roof: float) -> list[Result]:
    """`roof` is not used: large products are bound by arithmetic, not by bytes."""
    results = []
    for out, inner in ((192, 256),) if quick else SHAPES:
        for rows in (16,) if quick else ROWS:
            x = torch.randn(rows, inner)
            weight = torch.randn(out, inner)
            calls = {"torch float32": lambda _, x=x, w=weight: torch.nn.functional.linear(x, w)}
            for kind in KINDS:
                if inner % (256 if kind.endswith("_K") else 32):
                    continue
                exact, fast = (copies(kind, out, inner, 0, gemm_bf16=bf16)[0] for bf16 in (False, True))
                calls[f"{kind} float32, row-invariant"] = lambda _, x=x, f=exact: f(x)
                calls[f"{kind} bfloat16"] = lambda _, x=x, f=fast: f(x)
            for name, call in calls.items():
                seconds = median_seconds(call, 0.02 if quick else 0.3, least=3)
                rate = 2 * rows * out * inner / seconds / 1e9
                results.append(Result("gemm", f"{name} {rows}x{inner}x{out}", 1e6 * seconds, rate, "GFLOP/s"))
    return results
