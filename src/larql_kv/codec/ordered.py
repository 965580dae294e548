"""Float32 operations whose every bit is part of a format: the same on each backend."""

from __future__ import annotations

import torch
from torch import Tensor


def neighbour_sum(x: Tensor) -> Tensor:
    """Sums over the last axis, (..., n) -> (...), neighbours first: (x0 + x1) + (x2 + x3) ..

    A length that is no power of two counts as filled up with zeros.
    """
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)


def nearest_root(x: Tensor) -> Tensor:
    """The float32 nearest to the square root; torch's own on the CPU is at times its neighbour."""
    return x.double().sqrt().float()


def bf16_above(x: Tensor) -> Tensor:
    """The least bfloat16 value that is not below x, as float32; x >= 0."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
