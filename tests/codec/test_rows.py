"""Row codecs: errors within their bounds, bytes to the formula, rows alone, layouts as documented."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from larql_kv.codec import RowCodec, channel_weights, codec_names, row_codec
from larql_kv.codec.rows import register
from larql_kv.errors import BackendFailure, SpecError

NAMES = [name for name in codec_names() if name != "int4-g32"]  # that is int4
TURBO = ("turbo2", "turbo3", "turbo4")
GROUPED = {"int8": (8, 64, 4), "int4": (4, 32, 8), "int4-g64": (4, 64, 8), "int4-g128": (4, 128, 8)}


def widths(name: str) -> list[int]:
    return [16, 48, 576, 640] if name in TURBO else [1, 3, 7, 33, 65, 576, 641]


def rows_of(n: int, width: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, each with a massive activation."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, width, generator=generator) * torch.logspace(-3, 3, n)[:, None]
    rows[torch.arange(n), torch.randint(0, width, (n,), generator=generator)] *= 1000
    return rows


def expected_bytes(name: str, width: int) -> int:
    """The formulas of docs/codecs.md."""
    if name in GROUPED:
        bits, group, outliers = GROUPED[name]
        return 4 * min(width, outliers) + 2 * math.ceil(width / group) + math.ceil(width * bits / 8)
    if name in TURBO:
        bits, block = int(name[-1]), min(128, max(1 << k for k in range(17) if width % (1 << k) == 0))
        return 4 * min(width, 8) + 4 * (width // block) + width * bits // 8
    return {"float32": 4 * width, "bf16": 2 * width, "int8-clip3": 4 + width}[name]


def test_the_names() -> None:
    assert set(NAMES) == {"float32", "bf16", "int8-clip3", *GROUPED, *TURBO}
    assert row_codec("int4-g32") is row_codec("int4")
    assert all(row_codec(name).name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_shapes(name: str) -> None:
    codec = row_codec(name)
    for width in widths(name):
        codes = codec.encode(rows_of(3, width))
        assert codes.dtype is torch.uint8
        assert codes.shape == (3, codec.bytes_per_row(width)) == (3, expected_bytes(name, width))
        assert codec.decode(codes, width).shape == (3, width)
        assert codec.encode(rows_of(0, width)).shape == (0, codes.shape[1])
        assert codec.decode(codes[:0], width).shape == (0, width)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_rows_are_alone_and_zeros_are_exact(name: str, data: st.DataObject) -> None:
    width = data.draw(st.sampled_from(widths(name)))
    rows = rows_of(5, width, data.draw(st.integers(0, 1000)))
    rows[2] = 0
    codec = row_codec(name)
    codes = codec.encode(rows)
    decoded = codec.decode(codes, width)
    assert bool((decoded[2] == 0).all())
    for i in range(5):
        assert torch.equal(codec.encode(rows[i : i + 1]), codes[i : i + 1])
        assert torch.equal(codec.decode(codes[i : i + 1], width), decoded[i : i + 1])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_plain_rows(values: list[float]) -> None:
    rows = torch.tensor([values])
    assert torch.equal(row_codec("float32").decode(row_codec("float32").encode(rows), len(values)), rows)
    got = row_codec("bf16").decode(row_codec("bf16").encode(rows), len(values))
    bits = np.array(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    assert torch.equal(got[0], torch.from_numpy(nearest))
    normal = rows.abs().clamp(1.2e-38, 3.38e38) == rows.abs()
    assert bool(((got - rows).abs()[normal] <= rows.abs()[normal] * 2.0**-8).all())


def test_plain_rows_hold_what_is_not_finite() -> None:
    rows = torch.tensor([[math.inf, -math.inf, math.nan, 1.0]])
    for name in ("float32", "bf16"):
        got = row_codec(name).decode(row_codec(name).encode(rows), 4)
        assert torch.equal(got.nan_to_num(nan=7.0), rows.nan_to_num(nan=7.0))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from((1, 3, 64, 577)), st.floats(-12, 12))
def test_clipped_rows_are_the_frame_format(seed: int, width: int, magnitude: float) -> None:
    """Facts 6.1: scale = 3 sigma / 127, round to signed bytes, |error| <= scale / 2 inside the clip."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, width, generator=generator) * 10.0**magnitude + (seed % 3)
    codes = row_codec("int8-clip3").encode(rows)
    decoded = row_codec("int8-clip3").decode(codes, width).double()
    for row, raw, got in zip(rows.double(), codes, decoded, strict=True):
        scale = struct.unpack("<f", bytes(raw[:4].tolist()))[0]
        sigma = float(row.std(unbiased=False))
        if bool((row == row[0]).all()):
            sigma = 1.0
        assert scale == pytest.approx(3 * sigma / 127, rel=1e-5 + 1e-6 * float(row.abs().mean()) / sigma)
        inside = row.abs() <= 127 * scale
        assert bool(((got - row).abs()[inside] <= scale * (0.5 + 1e-5)).all())
        assert torch.allclose(got[~inside], 127 * scale * row[~inside].sign(), rtol=1e-6, atol=0)


def test_a_constant_row_has_the_deviation_one() -> None:
    rows = torch.full((1, 7), 0.1)  # whose sum over 7 is not 7 times it in float32
    codec = row_codec("int8-clip3")
    assert torch.allclose(codec.decode(codec.encode(rows), 7), rows, rtol=0, atol=1.5 / 127)


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_grouped_rows_to_the_byte(name: str, data: st.DataObject) -> None:
    """A second decoder, written from the documented layout, and the error bound of a group."""
    bits, group, outliers = GROUPED[name]
    width = data.draw(st.sampled_from(widths(name)))
    rows = rows_of(4, width, data.draw(st.integers(0, 1000)))
    codes = row_codec(name).encode(rows)
    decoded = row_codec(name).decode(codes, width)
    count, groups, half = min(width, outliers), -(-width // group), 1 << (bits - 1)
    for row, raw, got in zip(rows.tolist(), codes.tolist(), decoded.tolist(), strict=True):
        channels = struct.unpack(f"<{count}H", bytes(raw[: 2 * count]))
        assert list(channels) == sorted(range(width), key=lambda i: (-abs(row[i]), i))[:count]
        values = [bf16(raw, 2 * count + 2 * i) for i in range(count)]
        scales = [bf16(raw, 4 * count + 2 * g) for g in range(groups)]
        plane = raw[4 * count + 2 * groups :]
        for i in range(width):
            if i in channels:
                value = values[channels.index(i)]
                assert abs(value - row[i]) <= abs(row[i]) * 2.0**-8
            else:
                scale = scales[i // group]
                field = (plane[i * bits // 8] >> (i * bits % 8)) & ((1 << bits) - 1)
                value = (field - half) * scale
                members = [
                    abs(row[j])
                    for j in range(i // group * group, min(width, (i // group + 1) * group))
                    if j not in channels
                ]
                assert max(members) / half <= abs(scale) <= max(members) / half * (1 + 2.0**-7)
                at_the_end = field == (1 << bits) - 1
                assert abs(value - row[i]) <= abs(scale) * ((1 if at_the_end else 0.5) + 1e-5)
            assert value == got[i]


def bf16(raw: list[int], at: int) -> float:
    return struct.unpack("<f", bytes([0, 0, raw[at], raw[at + 1]]))[0]


@pytest.mark.parametrize(
    ("name", "most"), [("int8", 0.007), ("int4", 0.085), ("int4-g64", 0.1), ("int4-g128", 0.11)]
)
def test_massive_activations_do_not_cost_the_others(name: str, most: float) -> None:
    rows = torch.randn(50, 640)
    rows[:, [3, 100, 101, 600]] *= 3000
    plain = torch.ones(640, dtype=torch.bool)
    plain[[3, 100, 101, 600]] = False
    decoded = row_codec(name).decode(row_codec(name).encode(rows), 640)
    assert float((decoded - rows)[:, plain].norm() / rows[:, plain].norm()) < most
    assert bool(((decoded - rows).abs()[:, ~plain] <= rows.abs()[:, ~plain] * 2.0**-8).all())
    clipped = row_codec("int8-clip3")
    assert clipped.measure(rows).rms > 0.5  # what the frame format does to such rows


@pytest.mark.parametrize(("name", "most"), [("turbo4", 0.1), ("turbo3", 0.19), ("turbo2", 0.35)])
def test_turbo_rows(name: str, most: float) -> None:
    rows = torch.randn(50, 576)
    codec = row_codec(name)
    assert 0.7 * most < codec.measure(rows).rms < most
    rows[:, 7] *= 3000
    decoded = codec.decode(codec.encode(rows), 576)
    others = torch.arange(576) != 7
    assert float((decoded - rows)[:, others].norm() / rows[:, others].norm()) < most
    with pytest.raises(SpecError, match="dim 100 is not a multiple of 16"):
        codec.bytes_per_row(100)


def test_measured() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])

    class Halves(type(row_codec("float32"))):  # type: ignore[misc]
        def _decode(self, codes: Tensor, width: int) -> Tensor:
            return super()._decode(codes, width) * torch.tensor([0.5, 1.0])

    measured = Halves("halves", torch.float32).measure(rows)
    assert measured.rms == pytest.approx(1.5 / 5)
    assert measured.largest == 1.5
    assert measured.cosine == pytest.approx((4.5 + 16) / (5 * math.hypot(1.5, 4)))
    assert row_codec("int4").measure(torch.zeros(2, 4)) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_weights_move_the_error_to_the_channels_of_small_weight(name: str) -> None:
    rows = torch.randn(40, 576)
    weight = channel_weights(torch.where(torch.arange(576) < 288, 64.0, 1.0))
    assert sorted(set(weight.tolist())) == [1.0, 8.0]
    codec = row_codec(name)
    error = codec.decode(codec.encode(rows, weight), 576, weight) - rows
    if name in ("float32", "bf16"):
        assert torch.equal(codec.encode(rows, weight), codec.encode(rows))
    elif name != "int8-clip3":
        expected = (codec.decode(codec.encode(rows * weight), 576) / weight) - rows
        assert torch.equal(error, expected)
        plain = (codec.decode(codec.encode(rows), 576) - rows)[:, :288].norm()
        assert error[:, :288].norm() < (1.05 if name.startswith("int") else 1.0) * plain


def test_channel_weights_are_powers_of_two_within_bounds() -> None:
    weights = channel_weights(torch.tensor([0.0, 1e-9, -4.0, 4.0, 100.0, 1.0]))
    assert weights.tolist() == [0.25, 0.25, 2.0, 2.0, 8.0, 1.0]
    assert bool(channel_weights(torch.zeros(3)).isfinite().all())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("float32", "bf16")])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(name: str, value: float) -> None:
    rows = rows_of(3, 48)
    rows[1, 17] = value
    with pytest.raises(BackendFailure, match=f"row 1 holds {value} at channel 17; codec {name}"):
        row_codec(name).encode(rows)


def test_extreme_rows() -> None:
    largest = 3e38
    rows = torch.tensor([[largest, -largest, 1.0, 1e-40] * 12, [1e-42, -1e-44, 0.0, -0.0] * 12])
    for name in GROUPED:
        assert bool(row_codec(name).decode(row_codec(name).encode(rows), 48).isfinite().all())
    big = torch.full((1, 48), 9e15)
    for name in (*TURBO, "int8-clip3"):
        codec = row_codec(name)
        assert bool(codec.decode(codec.encode(big), 48).isfinite().all())
        with pytest.raises(BackendFailure, match=r"holds 2e\+16 at channel 0; .* holds values up to 1e\+16"):
            codec.encode(torch.full((1, 48), 2e16))


def test_bad_arguments() -> None:
    with pytest.raises(SpecError, match=r"unknown codec 'int3' \(did you mean 'int[48]'\?\); known: bf16, "):
        row_codec("int3")
    with pytest.raises(SpecError, match="unknown codec 'zzzzzz'; known"):
        row_codec("zzzzzz")
    codec = row_codec("int8")
    with pytest.raises(ValueError, match="rows must be float32"):
        codec.encode(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"codes of 5 values in int8 are uint8 \(n, 23\)"):
        codec.decode(torch.zeros(2, 5, dtype=torch.uint8), 5)
    with pytest.raises(SpecError, match="a row of 65537 values is too wide"):
        codec.bytes_per_row(65537)
    taken: RowCodec = type(codec)("bf16", 8, 64, 0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="'bf16' is taken"):
        register(taken)
