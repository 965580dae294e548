"""The binary forms: their layout by hand, round trips, bounds, and bytes that nobody meant."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from larql_kv.ffn import wire
from larql_kv.ffn.wire import MARKER, FfnRequest, FfnResponse

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 17)), elements=FINITE)
LAYERS = st.lists(st.integers(0, 100), min_size=1, max_size=6).map(tuple)


def test_the_layout_of_requests() -> None:
    rows = np.array([[1, -2], [3, 0.5]], np.float32)
    one = wire.encode_request(FfnRequest((7,), rows, 99))
    assert one == struct.pack("<IIIIffff", 7, 2, 1, 99, 1, -2, 3, 0.5)
    several = wire.encode_request(FfnRequest((7, 3), rows, 99, False, True))
    assert several == struct.pack("<IIIIIIIffff", MARKER, 2, 7, 3, 2, 0, 99, 1, -2, 3, 0.5)


def test_the_layout_of_responses() -> None:
    rows = np.array([[1, -2]], np.float32)
    one = FfnResponse((7,), (rows,), 1.5)
    assert wire.encode_response(one, "f32") == struct.pack("<IIfff", 7, 1, 1.5, 1, -2)
    assert wire.encode_response(one, "f16") == struct.pack("<IIfee", 7, 1, 1.5, 1, -2)
    scale = np.float32(2) / np.float32(127)
    assert wire.encode_response(one, "i8") == struct.pack("<IIfffbb", 7, 1, 1.5, scale, 0, 64, -127)
    several = FfnResponse((7, 8), (rows, 2 * rows), 1.5, True)
    head = struct.pack("<IIf", MARKER, 2, 1.5)
    parts = struct.pack("<IIIff", 7, 1, 2, 1, -2) + struct.pack("<IIIff", 8, 1, 2, 2, -4)
    assert wire.encode_response(several, "f32") == head + parts


@given(LAYERS, ROWS, st.integers(0, wire.UNLIMITED), st.booleans(), st.booleans())
def test_requests_come_back(
    layers: tuple[int, ...], rows: np.ndarray, top_k: int, full: bool, several: bool
) -> None:
    layers = layers if several else layers[:1]
    sent = FfnRequest(layers, rows, top_k, full, several)
    got = wire.decode_request(wire.encode_request(sent), rows.shape[1], 100)
    assert (got.layers, got.top_k, got.full_output, got.several) == (layers, top_k, full, several)
    assert np.array_equal(got.rows, rows)


@given(LAYERS, ROWS, st.booleans())
def test_responses_come_back(layers: tuple[int, ...], rows: np.ndarray, several: bool) -> None:
    layers = layers if several else layers[:1]
    asked = FfnRequest(layers, rows, several=several)
    outputs = tuple(rows + np.float32(i) for i in range(len(layers)))
    sent = FfnResponse(layers, outputs, 0.25, several)
    got = wire.decode_response(wire.encode_response(sent, "f32"), "f32", asked)
    assert (got.layers, got.milliseconds) == (layers, 0.25)
    assert all(map(np.array_equal, got.outputs, outputs))
    body = wire.encode_response(sent, "i8")
    for back, output in zip(wire.decode_response(body, "i8", asked).outputs, outputs, strict=True):
        step = np.abs(output).max(1, keepdims=True) / 127
        assert (np.abs(back - output.astype(np.float64)) <= 0.501 * step + 1e-37).all()


@given(hnp.arrays(np.float32, (3, 8), elements=st.floats(-60000, 60000, width=32)))
def test_f16_is_numpys_half(rows: np.ndarray) -> None:
    asked = FfnRequest((1,), rows)
    body = wire.encode_response(FfnResponse((1,), (rows,), 0), "f16")
    (got,) = wire.decode_response(body, "f16", asked).outputs
    assert np.array_equal(got, rows.astype(np.float16).astype(np.float32))


def test_f16_refuses_what_it_cannot_hold() -> None:
    rows = np.array([[1.0, 70000.0]], np.float32)
    with pytest.raises(ValueError, match=r"reaches 70000, which f16 cannot hold"):
        wire.encode_response(FfnResponse((1,), (rows,), 0), "f16")


def test_i8_of_nothing_and_of_next_to_nothing() -> None:
    rows = np.array([[0, 0], [1e-45, -1e-45]], np.float32)
    back = wire.decode_rows(wire.encode_rows(rows, "i8"), 2, 2, "i8")
    assert np.array_equal(back[0], [0, 0])
    assert np.abs(back[1]).max() < 1e-43


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ends within its head, after 0 bytes"),
        (struct.pack("<III", 0, 1, 1), "ends within its head, after 12 bytes"),
        (struct.pack("<II", MARKER, 0), "names 0 layers, expected 1 to 4"),
        (struct.pack("<II", MARKER, MARKER), "names 4294967295 layers"),
        (struct.pack("<IIII", MARKER, 3, 0, 0), "ends within its 3 layers"),
        (struct.pack("<IIIII", MARKER, 1, 0, 1, 1), "ends within its head, after 20 bytes"),
        (struct.pack("<IIIIff", 0, 1, 3, 9, 0, 0), "unknown flags 0x3"),
        (struct.pack("<IIII", 0, 0, 1, 9), "has 0 bytes, expected 0: seq 0"),
        (struct.pack("<IIIIf", 0, 1, 1, 9, 0), "has 4 bytes, expected 8: seq 1 x hidden 2"),
        (struct.pack("<IIIIfff", 0, 1, 1, 9, 0, 0, 0), "has 12 bytes, expected 8"),
        (struct.pack("<IIII", 0, MARKER, 1, 9), "expected 34359738360"),
        (struct.pack("<IIIIff", 0, 1, 1, 9, 0, float("nan")), r"residual\[1\] is nan"),
        (struct.pack("<IIIIff", 0, 1, 1, 9, float("-inf"), 0), r"residual\[0\] is -inf"),
    ],
)
def test_bad_requests(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wire.decode_request(body, 2, 4)


_ASKED = FfnRequest((3,), np.zeros((1, 2), np.float32))
_SEVERAL = FfnRequest((3, 4), np.zeros((1, 2), np.float32), several=True)


@pytest.mark.parametrize(
    ("asked", "form", "body", "message"),
    [
        (_ASKED, "f32", struct.pack("<IIff", 3, 1, 0, 0), "has 16 bytes, expected 20"),
        (_ASKED, "f32", struct.pack("<IIfff", 4, 1, 0, 0, 0), "begins with 4, 1, expected 3, 1"),
        (_ASKED, "f32", struct.pack("<IIfff", 3, 2, 0, 0, 0), "begins with 3, 2, expected 3, 1"),
        (_ASKED, "f32", struct.pack("<IIfff", 3, 1, 0, 0, float("nan")), r"output\[1\] is nan"),
        (_ASKED, "f16", struct.pack("<IIfee", 3, 1, 0, float("inf"), 0), r"output\[0\] is inf"),
        (_ASKED, "i8", struct.pack("<IIfffbb", 3, 1, 0, float("inf"), 0, 1, 1), "is inf"),
        (_ASKED, "i8", struct.pack("<IIfffbb", 3, 1, 0, 3e38, 0, 127, 1), "is inf"),
        (_ASKED, "i8", struct.pack("<IIfffbb", 3, 1, 0, 1, 2, 1, 1), "zero point"),
        (
            _SEVERAL,
            "f32",
            struct.pack("<IIf", MARKER, 2, 0)
            + struct.pack("<IIIff", 3, 1, 2, 0, 0)
            + struct.pack("<IIIff", 3, 1, 2, 0, 0),
            r"values \(3, 1, 2\), expected \(4, 1, 2\)",
        ),
        (
            _SEVERAL,
            "f32",
            struct.pack("<IIf", MARKER, 3, 0) + 2 * struct.pack("<IIIff", 3, 1, 2, 0, 0),
            "begins with 4294967295, 3",
        ),
    ],
)
def test_bad_answers(asked: FfnRequest, form: str, body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wire.decode_response(body, form, asked)


@settings(max_examples=300)
@given(st.binary(max_size=120), st.integers(1, 6), st.integers(1, 8))
def test_any_bytes_are_a_request_or_a_value_error(body: bytes, hidden: int, most: int) -> None:
    try:
        got = wire.decode_request(body, hidden, most)
    except ValueError:
        return
    assert got.rows.shape[1] == hidden
    assert np.isfinite(got.rows).all()
    if got.rows.tobytes() == wire.encode_request(got)[-got.rows.nbytes :]:
        assert wire.encode_request(got) == body  # nothing in the bytes was ignored


@settings(max_examples=300)
@given(st.binary(max_size=80), st.sampled_from(["f32", "f16", "i8"]), st.booleans())
def test_any_bytes_are_an_answer_or_a_value_error(body: bytes, form: str, several: bool) -> None:
    asked = _SEVERAL if several else _ASKED
    for data in (body, wire.encode_response(_zeros(asked), form)[:12] + body):
        try:
            got = wire.decode_response(data, form, asked)
        except ValueError:
            continue
        assert all(np.isfinite(output).all() and output.shape == (1, 2) for output in got.outputs)


def _zeros(asked: FfnRequest) -> FfnResponse:
    return FfnResponse(asked.layers, (asked.rows,) * len(asked.layers), 0, asked.several)


@pytest.mark.parametrize("form", ["f32", "f16", "i8"])
def test_the_cost_is_what_the_bodies_weigh(form: str) -> None:
    rows = np.ones((1, 576), np.float32)
    asked = FfnRequest((3,), rows)
    cost = wire.WireCost(30, 576, form)
    answer = wire.encode_response(FfnResponse((3,), (rows,), 0), form)
    assert cost.sent == 30 * len(wire.encode_request(asked))
    assert cost.received == 30 * len(answer)
    assert str(cost).endswith(f"= {cost.sent + cost.received} bytes a token")
