"""Turbo codes: a seeded Hadamard rotation, then 2, 3 or 4 bits a coordinate and one float32 scale a vector.

The format (docs/codecs.md), float32 throughout, no fused multiply-add; every backend gives the same bits:

    rotation   R = D H D / sqrt(block), its own inverse; block = the largest power of two that divides dim;
               D = signs by `signs`; H by butterflies h = 1, 2, 4 ..: (a, b) h apart become (a + b, a - b)
    norm       sqrt of the sum of squares, the sum being element 0 of the same butterflies over a block,
               blocks added in order
    code       how many of the midpoints of neighbouring levels are <= y, y = x * (float32(sqrt(dim)) / norm);
               so a tie goes up, and NaN is code 0
    levels     level(code) = x * (c1 + x^2 * (c3 + x^2 * c5)) with x = code - (2^bits - 1) / 2
    scale      norm / norm of the levels; norm <= 1e-12: scale 0. A decoded coordinate is level * scale
    planes     w bits a coordinate in n = dim * w / 8 bytes: coordinate i * n + j is bits w*i .. of byte j.
               4 bits: one plane of 4; 3: a plane of 2 (low bits), then one of 1; 2: one plane of 2

A vector with a NaN or an infinity decodes to values that are not finite: the scale is not.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from larql_kv.codec.ordered import nearest_root, neighbour_sum
from larql_kv.errors import SpecError

SIGN_SEED = 0x9E3779B9
LEAST_BLOCK = 16
TINY_NORM = 1e-12
KINDS = ("lloyd", "uniform")

# (c1, c3, c5) of least mean squared error on N(0, 1), rounded to float16: half-precision kernels evaluate
# the same polynomial. tests/codec/test_turbo.py finds them again in float64.
_COEFFICIENTS: dict[tuple[str, int], tuple[float, float, float]] = {
    ("lloyd", 2): (0.89306640625, 0.050689697265625, 0.0),
    ("lloyd", 3): (0.49072265625, 0.004787445068359375, 0.00043654441833496094),
    ("lloyd", 4): (0.2626953125, 0.00012922286987304688, 2.956390380859375e-05),
    ("uniform", 2): (0.99560546875, 0.0, 0.0),
    ("uniform", 3): (0.5859375, 0.0, 0.0),
    ("uniform", 4): (0.335205078125, 0.0, 0.0),
}


def signs(dim: int) -> np.ndarray:
    """The diagonal of D, (dim,) float32: -1 where bit 0 of a 32-bit hash of `SIGN_SEED` + index is set."""
    h = np.arange(dim, dtype=np.uint32) + np.uint32(SIGN_SEED)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return np.where((h ^ (h >> np.uint32(16))) & np.uint32(1), -1.0, 1.0).astype(np.float32)


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """(bits a value, lowest bit of the code that it holds) of every plane, in their order in memory."""
    return ((2, 0), (1, 2)) if bits == 3 else ((bits, 0),)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., dim) uint8, one a byte -> their planes (..., dim * bits / 8); dim a multiple of 8."""
    parts = []
    for width, low in planes(bits):
        fields = ((codes >> low) & ((1 << width) - 1)).unflatten(
            -1, (8 // width, codes.shape[-1] * width // 8)
        )
        parts.append(sum(field << (width * i) for i, field in enumerate(fields.unbind(-2))))
    return torch.cat(parts, -1)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`."""
    dim = packed.shape[-1] * 8 // bits
    sizes = [dim * width // 8 for width, _ in planes(bits)]
    codes = torch.zeros((), dtype=torch.uint8, device=packed.device)
    for (width, low), part in zip(planes(bits), packed.split(sizes, -1), strict=True):
        fields = [(part >> (width * i)) & ((1 << width) - 1) for i in range(8 // width)]
        codes = codes | (torch.cat(fields, -1) << low)
    return codes


@dataclass(frozen=True)
class TurboCode:
    """How vectors of `dim` float32 values become codes. Raises SpecError for what has no format."""

    bits: int  # 2, 3 or 4
    kind: str  # "lloyd": levels of least error on a normal law; "uniform": equal steps, faster to decode
    dim: int  # a multiple of 16

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise SpecError(f"turbo codes have 2, 3 or 4 bits a value, got bits={self.bits}")
        if self.kind not in KINDS:
            raise SpecError(f"the levels of a turbo code are {' or '.join(KINDS)}, got {self.kind!r}")
        if self.dim <= 0 or self.dim % LEAST_BLOCK:
            raise SpecError(
                f"a turbo code rotates blocks of at least {LEAST_BLOCK} values, a power of two: dim "
                f"{self.dim} is not a multiple of {LEAST_BLOCK}; take another codec for these vectors"
            )

    @property
    def block(self) -> int:
        """Values that are rotated together."""
        return self.dim & -self.dim

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one vector."""
        return self.dim * self.bits // 8

    @property
    def vector_bytes(self) -> int:
        """Bytes of one coded vector with its scale."""
        return self.code_bytes + 4

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(c1, c3, c5) of the levels; float32 and float16 hold them exactly."""
        return _COEFFICIENTS[self.kind, self.bits]

    @property
    def levels(self) -> np.ndarray:
        """(2^bits,) float32, rising, symmetric about zero."""
        c1, c3, c5 = (np.float32(c) for c in self.coefficients)
        x = np.arange(1 << self.bits, dtype=np.float32) - np.float32(((1 << self.bits) - 1) / 2)
        square = x * x
        return x * (c1 + square * (c3 + square * c5))

    @property
    def boundaries(self) -> np.ndarray:
        """(2^bits - 1,) float32: the midpoints of neighbouring levels."""
        return (self.levels[1:] + self.levels[:-1]) * np.float32(0.5)

    def rotate(self, x: Tensor) -> Tensor:
        """R x over the last axis, (..., dim) float32; twice is the identity, to rounding."""
        self._check("x", x, self.dim, torch.float32)
        diagonal = _signs_on(self.dim, x.device)
        y = (x * diagonal).reshape(x.numel() // self.block, self.block)
        h = 1
        while h < self.block:
            a, b = y.view(y.numel() // (2 * h), 2, h).unbind(1)
            y = torch.stack((a + b, a - b), 1)
            h *= 2
        return (y.reshape(x.shape) * float(np.float32(1 / math.sqrt(self.block)))) * diagonal

    def encode(self, x: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotated x (..., dim) float32 -> codes (..., code_bytes) uint8, scales (...) float32.

        mean: rotated, broadcastable to x; x - mean is what is coded.
        """
        self._check("x", x, self.dim, torch.float32)
        levels, boundaries = _levels_on(self, x.device)
        if mean is not None:
            x = x - mean
        norm = self._norm(x)
        is_tiny = norm <= TINY_NORM
        # As a tensor: a number over a tensor would be the number times the rounded reciprocal.
        factor = torch.where(is_tiny, 0.0, torch.full_like(norm, math.sqrt(self.dim)) / norm)
        y = torch.nan_to_num(x * factor.unsqueeze(-1), nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        codes = torch.bucketize(y, boundaries, right=True)
        scale = torch.where(is_tiny, 0.0, norm / self._norm(levels[codes]))
        return pack_codes(codes.to(torch.uint8), self.bits), scale

    def decode(self, codes: Tensor, scale: Tensor, mean: Tensor | None = None) -> Tensor:
        """Codes (..., code_bytes) uint8 and scales (...) float32 -> rotated vectors (..., dim) float32."""
        self._check("codes", codes, self.code_bytes, torch.uint8)
        x = _levels_on(self, codes.device)[0][unpack_codes(codes, self.bits).long()] * scale.unsqueeze(-1)
        return x if mean is None else x + mean

    def _norm(self, x: Tensor) -> Tensor:
        total, *others = neighbour_sum((x * x).unflatten(-1, (self.dim // self.block, self.block))).unbind(-1)
        for other in others:
            total = total + other
        return nearest_root(total)

    def _check(self, name: str, tensor: Tensor, size: int, dtype: torch.dtype) -> None:
        if tensor.dtype is not dtype or tensor.dim() == 0 or tensor.shape[-1] != size:
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(f"{name} must be {kind} (..., {size}), got {tensor.dtype} {tuple(tensor.shape)}")


@functools.cache
def _signs_on(dim: int, device: torch.device) -> Tensor:
    return torch.from_numpy(signs(dim)).to(device)


@functools.cache
def _levels_on(code: TurboCode, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(code.levels).to(device), torch.from_numpy(code.boundaries).to(device)
