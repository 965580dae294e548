"""Turbo codes against float64 formulas: the rotation, the levels, the errors they promise, the bytes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from larql_kv.codec.turbo import KINDS, TurboCode, pack_codes, signs, unpack_codes
from larql_kv.errors import SpecError

BITS = (2, 3, 4)
DIMS = (16, 48, 64, 80, 96, 128, 256, 576)


def hadamard(size: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def rotation(dim: int) -> Tensor:
    """R, (dim, dim) float64, from its definition."""
    block = next(1 << k for k in range(20, -1, -1) if dim % (1 << k) == 0)
    diagonal = np.diag([-1.0 if sign_hash(i) & 1 else 1.0 for i in range(dim)])
    blocks = np.kron(np.eye(dim // block), hadamard(block) / math.sqrt(block))
    return torch.from_numpy(diagonal @ blocks @ diagonal)


def sign_hash(index: int) -> int:
    """The documented hash, in Python's integers."""
    h, mask = (index + 0x9E3779B9) & 0xFFFFFFFF, 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
    h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
    return h ^ (h >> 16)


def unit_vectors(n: int, dim: int) -> Tensor:
    x = torch.randn(n, dim, dtype=torch.float64)
    return (x / x.norm(dim=1, keepdim=True)).float()


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_the_matrix_and_its_own_inverse(dim: int) -> None:
    x = unit_vectors(50, dim)
    code = TurboCode(4, "lloyd", dim)
    y = code.rotate(x)
    assert torch.allclose(y.double(), x.double() @ rotation(dim).T, rtol=0, atol=1e-6)
    assert (code.rotate(y) - x).abs().max() <= 1e-6
    assert code.rotate(x.view(5, 10, dim)).shape == (5, 10, dim)


def test_signs_are_mixed() -> None:
    for first in range(0, 4096, 64):  # a constant diagonal would send a constant vector to one coordinate
        assert 16 < int((signs(4096)[first : first + 64] > 0).sum()) < 48


def gaussian_error(levels: np.ndarray) -> float:
    """Mean squared error of the nearest level on N(0, 1), in closed form."""
    edges = np.concatenate(([-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]))
    density = np.exp(-np.square(edges) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * (1 + math.erf(edge / math.sqrt(2))) for edge in edges])
    moment = np.where(np.isinf(edges), 0.0, edges) * density
    mass, first = np.diff(below), -np.diff(density)
    return float((mass - np.diff(moment) - 2 * levels * first + levels**2 * mass).sum())


def lloyd_max(count: int) -> np.ndarray:
    levels = np.linspace(-2, 2, count)
    for _ in range(3000):
        edges = np.concatenate(([-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]))
        density = np.exp(-np.square(edges) / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * (1 + math.erf(edge / math.sqrt(2))) for edge in edges])
        levels = -np.diff(density) / np.diff(below)
    return levels


@pytest.mark.parametrize(("bits", "least"), [(2, 0.11748), (3, 0.034548), (4, 0.009501)])
def test_the_levels_are_the_best_for_a_normal_law(bits: int, least: float) -> None:
    best = gaussian_error(lloyd_max(1 << bits))
    assert best == pytest.approx(least, rel=1e-4)  # Max 1960, table I
    lloyd, uniform = TurboCode(bits, "lloyd", 64), TurboCode(bits, "uniform", 64)
    assert gaussian_error(lloyd.levels.astype(float)) < 1.002 * best
    for code in (lloyd, uniform):  # no small change of a coefficient helps
        reached = gaussian_error(code.levels.astype(float))
        x = np.arange(1 << bits) - ((1 << bits) - 1) / 2
        used = [i for i, c in enumerate(code.coefficients) if c]
        for i, by in itertools.product(used, (0.99, 1.01)):
            c = np.array(code.coefficients)
            c[i] *= by
            assert gaussian_error(x * (c[0] + x**2 * (c[1] + x**2 * c[2]))) > reached
    steps = np.diff(uniform.levels)
    assert np.allclose(steps, steps[0], rtol=1e-6)


@pytest.mark.parametrize(("bits", "kind"), itertools.product(BITS, KINDS))
def test_half_precision_holds_the_coefficients(bits: int, kind: str) -> None:
    code = TurboCode(bits, kind, 64)
    assert all(float(np.float16(c)) == c for c in code.coefficients)
    assert np.array_equal(code.levels, -code.levels[::-1])
    assert bool((np.diff(code.levels) > 0).all())


@pytest.mark.parametrize(("bits", "cosine"), [(4, 0.9953), (3, 0.9828), (2, 0.9399)])
def test_cosine_on_unit_vectors(bits: int, cosine: float) -> None:
    x, code = unit_vectors(5000, 256), TurboCode(bits, "lloyd", 256)
    codes, scale = code.encode(code.rotate(x))
    y = code.rotate(code.decode(codes, scale))
    assert torch.cosine_similarity(x, y).mean().item() == pytest.approx(cosine, abs=5e-4)
    assert (y.norm(dim=1) - 1).abs().max() < 1e-6  # nothing shrinks
    assert codes.shape == (5000, 32 * bits)
    assert code.vector_bytes == 32 * bits + 4


def expected(code: TurboCode, x: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes a value, which are too near a boundary to tell, decoded) of x (n, dim) in float64."""
    v = x.double().numpy()
    norm = np.linalg.norm(v, axis=1, keepdims=True)
    y = v * math.sqrt(code.dim) / norm
    levels = code.levels.astype(float)
    boundaries = (levels[1:] + levels[:-1]) / 2
    codes = (y[..., None] >= boundaries).sum(-1)
    near = (np.abs(y[..., None] - boundaries) < 1e-5).any(-1)
    decoded = levels[codes]
    return codes, near, decoded * norm / np.linalg.norm(decoded, axis=1, keepdims=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("bits", "kind"), itertools.product(BITS, KINDS))
def test_codes_scales_and_values_are_the_formulas(dim: int, bits: int, kind: str) -> None:
    code = TurboCode(bits, kind, dim)
    x = torch.randn(40, dim) * torch.logspace(-8, 8, 40)[:, None]
    planes, scale = code.encode(x)
    assert planes.dtype is torch.uint8
    assert planes.shape == (40, dim * bits // 8)
    codes, near, decoded = expected(code, x)
    got = unpack_codes(planes, bits).numpy()
    assert bool(((got == codes) | near).all())
    same = (got == codes).all(1)
    assert same.sum() > 30
    values = code.decode(planes, scale).numpy()
    assert np.allclose(values[same], decoded[same], rtol=1e-5, atol=0)
    assert torch.equal(pack_codes(unpack_codes(planes, bits), bits), planes)


@pytest.mark.parametrize("bits", BITS)
def test_planes_in_memory(bits: int) -> None:
    """Coordinate i * n + j is bits w * i .. of byte j of a plane of n bytes."""
    codes = torch.randint(0, 1 << bits, (48,), dtype=torch.uint8)
    planes = pack_codes(codes, bits).tolist()
    for c in range(48):
        value = int(codes[c])
        if bits == 3:
            low, high = planes[:12], planes[12:]
            assert (low[c % 12] >> (2 * (c // 12))) & 3 == value & 3
            assert (high[c % 6] >> (c // 6)) & 1 == value >> 2
        else:
            n = 48 * bits // 8
            assert (planes[c % n] >> (bits * (c // n))) & ((1 << bits) - 1) == value


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(BITS), st.sampled_from(KINDS), st.sampled_from(DIMS), st.integers(0, 2**31),
    st.floats(-30, 30), st.integers(1, 5),
)  # fmt: skip
def test_norms_survive_and_rows_are_alone(
    bits: int, kind: str, dim: int, seed: int, magnitude: float, n: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator) * 2.0**magnitude
    x[0, seed % dim] *= 1000  # a massive activation
    code = TurboCode(bits, kind, dim)
    codes, scale = code.encode(code.rotate(x))
    y = code.decode(codes, scale)
    assert torch.allclose(y.norm(dim=1), x.norm(dim=1), rtol=1e-5)
    for i in range(n):
        one, one_scale = code.encode(code.rotate(x[i]))
        assert torch.equal(one, codes[i])
        assert torch.equal(one_scale, scale[i])


def test_a_mean_is_taken_off_and_added_again() -> None:
    code, mean = TurboCode(4, "lloyd", 64), 10 * torch.randn(3, 64)
    x = mean + torch.randn(20, 3, 64)
    codes, scale = code.encode(x, mean)
    centred, centred_scale = code.encode(x - mean)
    assert torch.equal(codes, centred)
    assert torch.equal(scale, centred_scale)
    assert torch.equal(code.decode(codes, scale, mean), code.decode(codes, scale) + mean)
    error = (code.decode(codes, scale, mean) - x).norm() / x.norm()
    plain = (code.decode(*code.encode(x)) - x).norm() / x.norm()
    assert error < 0.2 * plain


def test_zero_tiny_and_broken_vectors() -> None:
    code = TurboCode(3, "lloyd", 32)
    x = torch.zeros(6, 32)
    x[1, 5] = 1e-13  # below the least norm
    x[2, 5] = -0.0
    x[3, 5], x[4, 5], x[5, 5] = math.nan, math.inf, 3e38
    codes, scale = code.encode(x)
    assert unpack_codes(codes[:3], 3).eq(4).all()  # the middle
    assert scale[:3].eq(0).all()
    assert code.decode(codes[:3], scale[:3]).eq(0).all()
    assert not code.decode(codes[3:], scale[3:]).isfinite().any()


def test_a_tie_takes_the_upper_code() -> None:
    code = TurboCode(2, "uniform", 16)
    y = torch.tensor([0.0, -0.0, *code.boundaries.tolist()])
    x = torch.zeros(16)
    x[:5] = y
    x[5:] = math.sqrt((16 - float(y.square().sum())) / 11)  # norm 4: coordinates are what is compared
    codes, _ = code.encode(x)
    if float(x.square().sum().sqrt()) == 4.0:
        assert unpack_codes(codes, 2)[:5].tolist() == [2, 2, 1, 2, 3]
    assert unpack_codes(codes, 2)[:2].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("bits", "kind", "dim", "said"),
    [
        (5, "lloyd", 64, "bits=5"),
        (1, "lloyd", 64, "bits=1"),
        (4, "gauss", 64, "'gauss'"),
        (4, "lloyd", 72, "dim 72"),
        (4, "lloyd", 8, "dim 8"),
        (4, "lloyd", 0, "dim 0"),
    ],
)
def test_what_has_no_format_is_refused(bits: int, kind: str, dim: int, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        TurboCode(bits, kind, dim)


def test_wrong_tensors_are_refused() -> None:
    code = TurboCode(4, "lloyd", 64)
    with pytest.raises(ValueError, match=r"x must be float32 \(..., 64\)"):
        code.encode(torch.zeros(3, 32))
    with pytest.raises(ValueError, match="x must be float32"):
        code.rotate(torch.zeros(3, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"codes must be uint8 \(..., 32\)"):
        code.decode(torch.zeros(3, 31, dtype=torch.uint8), torch.zeros(3))
