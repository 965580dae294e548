"""Codec kernels against the formats' torch reference: the same codes, the same scales, the same values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from larql_kv.codec import channel_weights, row_codec
from larql_kv.codec.rows import RowCodec
from larql_kv.codec.turbo import KINDS, TurboCode
from larql_kv.errors import BackendUnavailable

codec = pytest.importorskip("larql_kv.backends.cuda.codec")

# The interpreter's warnings where NaN and inf are meant.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

GUARD = 77
ROW_CODECS = (
    "float32",
    "bf16",
    "int8",
    "int8-clip3",
    "int4",
    "int4-g64",
    "int4-g128",
    "turbo4",
    "turbo3",
    "turbo2",
)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bits, or NaN in both."""
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def vectors(rows: int, heads: int, dim: int) -> Tensor:
    x = torch.randn(rows, heads, dim) * torch.logspace(-6, 6, rows)[:, None, None]
    x[0, 0, dim // 3] *= 300
    return x


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate(device: str, dim: int, dtype: torch.dtype) -> None:
    code = TurboCode(4, "lloyd", dim)
    x = vectors(5, 1, dim)[:, 0].to(dtype)
    assert same_bits(codec.rotate(code, x.to(device)), code.rotate(x.float()))
    assert codec.rotate(code, x[:0].to(device)).shape == (0, dim)


@pytest.mark.parametrize(("dim", "bits"), [(16, 3), (64, 2), *itertools.product((80, 256), (2, 3, 4))])
def test_vectors(device: str, dim: int, bits: int) -> None:
    code = TurboCode(bits, KINDS[dim // 80 % 2], dim)
    x = vectors(5, 2, dim)
    x[1, 1], x[2, 0] = 0, 1e-14
    x[3, 0, 3], x[3, 1, 2] = math.nan, math.inf
    mean = torch.randn(2, dim) if bits == 3 else None
    is_rotated = bits != 4
    rotated = x if is_rotated else code.rotate(x)
    codes, scales = code.encode(rotated, mean)
    store = torch.full((2, 5, code.code_bytes + 3), GUARD, dtype=torch.uint8, device=device)
    scale_store = torch.full((2, 6), float(GUARD), device=device)
    places, scale_places = store[..., :-3].transpose(0, 1), scale_store[:, :-1].t()
    on_card = None if mean is None else mean.to(device)
    codec.encode_into(code, x.to(device), places, scale_places, on_card, is_rotated)
    assert torch.equal(places.cpu(), codes)
    assert same_bits(scale_places, scales)
    assert bool((store[..., -3:] == GUARD).all() and (scale_store[:, -1] == GUARD).all())
    assert same_bits(codec.decode(code, places, scale_places, on_card), code.decode(codes, scales, mean))


def test_bf16_vectors_are_the_values_they_hold(device: str) -> None:
    code, x = TurboCode(4, "lloyd", 64), vectors(4, 1, 64).bfloat16()
    codes, scales = torch.zeros(4, 1, 32, dtype=torch.uint8, device=device), torch.zeros(4, 1, device=device)
    codec.encode_into(code, x.to(device), codes, scales)
    expected, expected_scales = code.encode(x.float())
    assert torch.equal(codes.cpu(), expected)
    assert same_bits(scales, expected_scales)


def rows_of(n: int, width: int) -> Tensor:
    rows = torch.randn(n, width) * torch.logspace(-3, 3, n)[:, None]
    rows[torch.arange(n), torch.randint(0, width, (n,))] *= 1000
    rows[0] = 0
    rows[1] = 0.1  # constant: every value is the largest
    return rows


@pytest.mark.parametrize("name", ROW_CODECS)
def test_rows(device: str, name: str) -> None:
    reference = row_codec(name)
    for width in (48, 272) if name.startswith("turbo") else (1, 65, 300):
        rows = rows_of(3, width)
        weight = channel_weights(torch.randn(width) * 8) if width < 100 else None
        on_card = None if weight is None else weight.to(device)
        expected = reference.encode(rows, weight)
        store = torch.full((3, expected.shape[1] + 3), GUARD, dtype=torch.uint8, device=device)
        codec.encode_rows(reference, rows.to(device), on_card, out=store[:, :-3])
        assert torch.equal(store[:, :-3].cpu(), expected)
        assert bool((store[:, -3:] == GUARD).all())
        decoded = codec.decode_rows(reference, store[:, :-3], width, on_card)
        assert torch.equal(decoded.cpu(), reference.decode(expected, width, weight))
        halves = rows[2:].bfloat16()
        got = codec.encode_rows(reference, halves.to(device), on_card)
        assert torch.equal(got.cpu(), reference.encode(halves.float(), weight))


@pytest.mark.parametrize("name", ROW_CODECS)
def test_what_a_codec_cannot_hold_is_not_finite_again(device: str, name: str) -> None:
    rows = torch.randn(5, 48)
    for row, value in enumerate((math.nan, math.inf, -math.inf, 3.2e38)):
        rows[row, 17] = value
    coded = codec.encode_rows(row_codec(name), rows.to(device))
    decoded = codec.decode_rows(row_codec(name), coded, 48).cpu()
    if name in ("float32", "bf16"):
        assert torch.equal(decoded.isnan(), rows.isnan())
    else:
        assert bool(decoded[:4].isnan().all())
    assert bool(decoded[4].isfinite().all())


def test_nothing_to_do(device: str) -> None:
    code = TurboCode(4, "lloyd", 64)
    codes, scales = torch.empty(0, 2, 32, dtype=torch.uint8, device=device), torch.empty(0, 2, device=device)
    codec.encode_into(code, torch.empty(0, 2, 64, device=device), codes, scales)
    assert codec.decode(code, codes, scales).shape == (0, 2, 64)
    for name in ROW_CODECS:
        coded = codec.encode_rows(row_codec(name), torch.empty(0, 48, device=device))
        assert codec.decode_rows(row_codec(name), coded, 48).shape == (0, 48)


def test_what_does_not_fit_is_refused(device: str) -> None:
    code = TurboCode(4, "lloyd", 64)
    x, scales = torch.zeros(2, 1, 64, device=device), torch.zeros(2, 1, device=device)
    codes = torch.zeros(2, 1, 32, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="x must be contiguous float32 or bfloat16"):
        codec.rotate(code, x[:, 0, :32])
    with pytest.raises(ValueError, match="codes must be uint8"):
        codec.encode_into(code, x, codes[..., :31], scales)
    with pytest.raises(ValueError, match="scales must be float32"):
        codec.decode(code, codes, scales.double())
    with pytest.raises(ValueError, match="x must be float32 or bfloat16"):
        codec.encode_into(code, x.double(), codes, scales)
    with pytest.raises(ValueError, match="mean must be"):
        codec.encode_into(code, x, codes, scales, torch.zeros(2, 64, device=device))
    int8 = row_codec("int8")
    with pytest.raises(ValueError, match="rows must be"):
        codec.encode_rows(int8, torch.zeros(2, 64, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match="weight must be"):
        codec.encode_rows(int8, x[:, 0], torch.ones(3, device=device))
    with pytest.raises(ValueError, match="out must be"):
        codec.encode_rows(int8, x[:, 0], out=codes[:, 0])
    with pytest.raises(ValueError, match="codes must be"):
        codec.decode_rows(int8, codes[:, 0], 64)

    class Other(RowCodec):
        name = "other"

        def bytes_per_row(self, width: int) -> int:
            return width

        _encode = _decode = None  # type: ignore[assignment]

    with pytest.raises(BackendUnavailable, match="no kernel for codec other"):
        codec.encode_rows(Other(), x[:, 0])
