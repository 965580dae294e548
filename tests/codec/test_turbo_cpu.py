"""The CPU kernels give the bits of the format's torch reference, wherever the rows lie."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from larql_kv.backends.cpu import turbo
from larql_kv.backends.cpu.runtime import sync_threads, thread_scratch
from larql_kv.backends.cpu.turbo_kernels import decode_rows_kernel
from larql_kv.codec.turbo import KINDS, TurboCode, unpack_codes

GUARD = 77


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bits, or NaN in both."""
    broken = a.isnan() & b.isnan()
    return bool(((a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)) | broken).all())


def check(code: TurboCode, x: Tensor, mean: Tensor | None) -> None:
    """x (rows, heads, dim) through rotation, encoding into guarded strided places, and decoding."""
    rows, heads, _ = x.shape
    rotated = code.rotate(x)
    assert same_bits(turbo.rotate_(code, x.clone()), rotated)
    codes, scales = code.encode(rotated, mean)
    store = torch.full((heads, rows, code.code_bytes + 5), GUARD, dtype=torch.uint8)
    scale_store = torch.full((heads, rows + 1), float(GUARD))
    places = store[..., :-5].transpose(0, 1)
    turbo.encode_into(code, rotated, places, scale_store[:, :-1].t(), mean)
    assert torch.equal(places, codes)
    assert same_bits(scale_store[:, :-1].t(), scales)
    assert bool((store[..., -5:] == GUARD).all())
    assert bool((scale_store[:, -1] == GUARD).all())
    decoded = code.decode(codes, scales, mean)
    for head in range(heads):
        head_mean = None if mean is None else mean[head]
        got = turbo.decode_rows(code, places[:, head], scale_store[head, :-1], head_mean)
        assert same_bits(got, decoded[:, head])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((2, 3, 4)), st.sampled_from(KINDS), st.sampled_from((16, 48, 64, 80, 96, 128, 256, 576)),
    st.integers(0, 2**31), st.floats(-20, 20), st.integers(1, 4), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_bits_of_the_reference(
    bits: int, kind: str, dim: int, seed: int, magnitude: float, rows: int, heads: int, has_mean: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, dim, generator=generator) * 2.0**magnitude
    x[0, 0, seed % dim] *= 300
    mean = torch.randn(heads, dim, generator=generator) if has_mean else None
    check(TurboCode(bits, kind, dim), x, mean)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_with_zero_tiny_and_broken_ones(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(300, 2, 64)  # enough for the parallel kernels
        x[3], x[4, 1] = 0, 1e-14
        x[5, 0, 3], x[6, 1, 2], x[7, 0, 9] = math.nan, math.inf, 3e38
        check(TurboCode(3, "lloyd", 64), x, None)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("bits", "dim"), itertools.product((2, 3, 4), (8, 24, 40, 120)))
def test_tiles_are_padded_with_zeros(bits: int, dim: int) -> None:
    """dim no multiple of 16: not a TurboCode's, but a tile's rows are whole vectors all the same."""
    code = TurboCode(bits, "lloyd", 16)  # for its levels
    planes = torch.randint(0, 256, (5, dim * bits // 8), dtype=torch.uint8)
    scales, mean = torch.rand(5), torch.randn(dim)
    width = -(-dim // 16) * 16
    tile = torch.full((5 * width + 8,), float(GUARD))
    sync_threads()
    decode_rows_kernel(
        bits, planes.data_ptr(), planes.stride(0), scales.data_ptr(), 5, dim, tile.data_ptr(),
        mean.data_ptr(), 2, *code.coefficients,
    )  # fmt: skip
    values = torch.from_numpy(code.levels)[unpack_codes(planes, bits).long()] * scales[:, None] + mean
    rows = tile[: 5 * width].view(5, width)
    assert torch.equal(rows[:, :dim], values)
    assert bool((rows[:, dim:] == 0).all())
    assert bool((tile[5 * width :] == GUARD).all())


def test_scratch_is_kept_between_calls() -> None:
    code, x = TurboCode(4, "lloyd", 64), torch.randn(2, 1, 64)
    codes, scales = torch.empty(2, 1, 32, dtype=torch.uint8), torch.empty(2, 1)
    turbo.encode_into(code, x, codes, scales)
    at = thread_scratch("turbo", 1)
    turbo.encode_into(code, x, codes, scales)
    assert thread_scratch("turbo", 1) == at


def test_nothing_to_do() -> None:
    code = TurboCode(4, "lloyd", 64)
    none = torch.empty(0, 2, 64)
    turbo.rotate_(code, none)
    turbo.encode_into(code, none, torch.empty(0, 2, 32, dtype=torch.uint8), torch.empty(0, 2))
    assert turbo.decode_rows(code, torch.empty(0, 32, dtype=torch.uint8), torch.empty(0)).shape == (0, 64)


def test_wrong_tensors_are_refused() -> None:
    code = TurboCode(4, "lloyd", 64)
    x, codes, scales = torch.zeros(2, 1, 64), torch.zeros(2, 1, 32, dtype=torch.uint8), torch.zeros(2, 1)
    with pytest.raises(ValueError, match="x must be contiguous float32"):
        turbo.rotate_(code, torch.zeros(64, 3).t())
    with pytest.raises(ValueError, match="x must be float32"):
        turbo.encode_into(code, x.double(), codes, scales)
    with pytest.raises(ValueError, match="last axis contiguous"):
        turbo.encode_into(code, x, torch.zeros(2, 1, 64, dtype=torch.uint8)[..., ::2], scales)
    with pytest.raises(ValueError, match="scales must be float32"):
        turbo.encode_into(code, x, codes, scales[:1])
    with pytest.raises(ValueError, match=r"mean must be contiguous float32 \(1, 64\)"):
        turbo.encode_into(code, x, codes, scales, torch.zeros(2, 64))
    with pytest.raises(ValueError, match="codes must be uint8"):
        turbo.decode_rows(code, torch.zeros(2, 31, dtype=torch.uint8), torch.zeros(2))


@pytest.mark.parametrize("n", [1, 60])  # serial and parallel
def test_turned_heads_are_rotated_ones(n: int) -> None:
    code = TurboCode(4, "lloyd", 64)
    q, k, v, scale = (torch.randn(*shape) for shape in ((n, 4, 64), (n, 2, 64), (n, 2, 64), (2, 64)))
    scaled = q * scale.repeat_interleave(2, 0)  # two query heads share a K/V head
    for by, second in ((None, q), (scale, scaled)):
        got = turbo.turn(q, k, v, code, by)
        for turned, plain in zip(got, (q, second, k, v), strict=True):
            assert same_bits(turned, code.rotate(plain))
    with pytest.raises(ValueError, match="k must be contiguous float32"):
        turbo.turn(q, k[..., :32], v, code)
    with pytest.raises(ValueError, match="scale must be contiguous float32"):
        turbo.turn(q, k, v, code, scale[:1])
