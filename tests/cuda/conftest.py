"""Kernel tests: on a CUDA card where there is one, else in Triton's interpreter on the CPU.

`TRITON_INTERPRET` has to be set before triton is imported: tests/conftest.py does that.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in float64; NaN never passes a comparison."""
    difference = actual.double().cpu() - expected.double().cpu()
    return float(difference.norm() / expected.double().cpu().norm().clamp_min(1e-30))
