"""The binary forms in which FFN inputs and outputs travel, for the server and its clients.

Little endian. A request holds float32 rows; a response holds them as f32, f16 or i8:

    request, one layer    layer u32, seq u32, flags u32, top_k u32, f32 x seq * hidden
    request, several      MARKER u32, n u32, layer u32 x n, seq u32, flags u32, top_k u32, f32 x seq * hidden
    response, one layer   layer u32, seq u32, milliseconds f32, rows
    response, several     MARKER u32, n u32, milliseconds f32, n x (layer u32, seq u32, values u32, rows)
    rows                  f32 or f16 values; in i8, per position: scale f32, zero f32 (= 0), hidden x i8

Every count is checked against the bytes that are there before anything is read. Malformed bytes raise
ValueError: for the server that is a bad request, for a client a RemoteError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

MARKER = 0xFFFFFFFF  # in place of a layer: several layers follow
FULL_OUTPUT = 1  # bit of a request's flags
UNLIMITED = 0xFFFFFFFF  # top_k that no model's features reach: the dense product
DEFAULT_TOP_K = 8092
MAX_BODY = 64 << 20  # bytes of a request
# Smallest first: what a server prefers when a client takes any.
MEDIA_TYPES = {
    "i8": "application/x-larql-ffn-i8",
    "f16": "application/x-larql-ffn-f16",
    "f32": "application/x-larql-ffn",
}
WIRES = {media: wire for wire, media in MEDIA_TYPES.items()}
_ONE_REQUEST, _TAIL, _ONE_RESPONSE, _PART = (struct.Struct(f) for f in ("<IIII", "<III", "<IIf", "<III"))


@dataclass(frozen=True)
class FfnRequest:
    """Rows to run through the FFN of one layer or of each of several."""

    layers: tuple[int, ...]
    rows: np.ndarray  # (seq, hidden) float32
    top_k: int = DEFAULT_TOP_K
    full_output: bool = True
    several: bool = False  # the batch form, which may hold a single layer


@dataclass(frozen=True)
class FfnResponse:
    """What the FFN of each layer gave."""

    layers: tuple[int, ...]
    outputs: tuple[np.ndarray, ...]  # each (seq, hidden) float32
    milliseconds: float
    several: bool = False


def encode_request(request: FfnRequest) -> bytes:
    """The bytes of `request`."""
    rows = np.ascontiguousarray(request.rows, "<f4")
    flags = FULL_OUTPUT if request.full_output else 0
    if request.several:
        count = len(request.layers)
        head = struct.pack(f"<II{count}I", MARKER, count, *request.layers)
        return head + _TAIL.pack(len(rows), flags, request.top_k) + rows.tobytes()
    (layer,) = request.layers
    return _ONE_REQUEST.pack(layer, len(rows), flags, request.top_k) + rows.tobytes()


def decode_request(body: bytes, hidden: int, most_layers: int) -> FfnRequest:
    """The request in `body`; raises ValueError unless its rows have `hidden` finite values each and it
    names at most `most_layers` layers."""
    layers, at, several = _request_layers(body, most_layers)
    if len(body) < at + _TAIL.size:
        raise ValueError(f"the request ends within its head, after {len(body)} bytes")
    seq, flags, top_k = _TAIL.unpack_from(body, at)
    at += _TAIL.size
    if flags & ~FULL_OUTPUT:
        raise ValueError(f"unknown flags 0x{flags:x}; known: 1, full output")
    want = seq * hidden * 4
    if seq < 1 or len(body) - at != want:
        raise ValueError(
            f"the residual has {len(body) - at} bytes, expected {want}: seq {seq} x hidden {hidden} x 4"
        )
    rows = np.frombuffer(body, "<f4", seq * hidden, at).reshape(seq, hidden)
    return FfnRequest(layers, check_finite(rows, "residual"), top_k, bool(flags & FULL_OUTPUT), several)


def _request_layers(body: bytes, most_layers: int) -> tuple[tuple[int, ...], int, bool]:
    """The layers of a request, where its tail begins, and whether it is the batch form."""
    if len(body) < 8:
        raise ValueError(f"the request ends within its head, after {len(body)} bytes")
    first, count = struct.unpack_from("<II", body)
    if first != MARKER:
        return (first,), 4, False
    if not 1 <= count <= most_layers:
        raise ValueError(f"the request names {count} layers, expected 1 to {most_layers}")
    if len(body) < 8 + 4 * count:
        raise ValueError(f"the request ends within its {count} layers, after {len(body)} bytes")
    return struct.unpack_from(f"<{count}I", body, 8), 8 + 4 * count, True


def encode_response(response: FfnResponse, wire: str) -> bytes:
    """The bytes of `response` with rows as `wire` (f32, f16, i8). Raises ValueError for values that it
    cannot hold."""
    head = response.milliseconds
    if not response.several:
        (layer,), (rows,) = response.layers, response.outputs
        return _ONE_RESPONSE.pack(layer, len(rows), head) + encode_rows(rows, wire)
    parts = [_ONE_RESPONSE.pack(MARKER, len(response.layers), head)]
    for layer, rows in zip(response.layers, response.outputs, strict=True):
        parts += [_PART.pack(layer, len(rows), rows.size), encode_rows(rows, wire)]
    return b"".join(parts)


def decode_response(body: bytes, wire: str, asked: FfnRequest) -> FfnResponse:
    """The answer to `asked`; raises ValueError for other layers, positions or sizes than were asked for, and
    for values that are not finite."""
    seq, hidden = asked.rows.shape
    bytes_each = rows_bytes(seq, hidden, wire)
    count = len(asked.layers)
    part_head = _PART.size if asked.several else 0
    want = _ONE_RESPONSE.size + count * (part_head + bytes_each)
    if len(body) != want:
        raise ValueError(f"the answer has {len(body)} bytes, expected {want}")
    first, number, milliseconds = _ONE_RESPONSE.unpack_from(body)
    expected = (MARKER, count) if asked.several else (asked.layers[0], seq)
    if (first, number) != expected:
        raise ValueError(f"the answer begins with {first}, {number}, expected {expected[0]}, {expected[1]}")
    at, outputs = _ONE_RESPONSE.size, []
    for layer in asked.layers:
        if asked.several:
            got = _PART.unpack_from(body, at)
            if got != (layer, seq, seq * hidden):
                raise ValueError(
                    f"the answer holds layer, positions, values {got}, expected {(layer, seq, seq * hidden)}"
                )
            at += part_head
        outputs.append(decode_rows(memoryview(body)[at : at + bytes_each], seq, hidden, wire))
        at += bytes_each
    return FfnResponse(asked.layers, tuple(outputs), milliseconds, asked.several)


def rows_bytes(seq: int, hidden: int, wire: str) -> int:
    """Bytes of (seq, hidden) values as `wire`."""
    return seq * (hidden + 8) if wire == "i8" else seq * hidden * {"f32": 4, "f16": 2}[wire]


def encode_rows(rows: np.ndarray, wire: str) -> bytes:
    """(seq, hidden) float32 as `wire`. Raises ValueError for values beyond the range of f16."""
    rows = np.ascontiguousarray(rows, "<f4")
    if wire == "f32":
        return rows.tobytes()
    if wire == "f16":
        with np.errstate(over="ignore"):
            half = rows.astype("<f2")
        if not np.isfinite(half).all():
            raise ValueError(f"the output reaches {np.abs(rows).max():.6g}, which f16 cannot hold")
        return half.tobytes()
    scale = np.abs(rows).max(1, keepdims=True) / np.float32(127)
    packed = np.zeros(
        len(rows), np.dtype([("scale", "<f4"), ("zero", "<f4"), ("codes", "i1", rows.shape[1])])
    )
    packed["scale"] = scale[:, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(scale > 0, np.rint(rows / scale), 0)
    packed["codes"] = np.clip(codes, -127, 127)
    return packed.tobytes()


def decode_rows(body: bytes | memoryview, seq: int, hidden: int, wire: str) -> np.ndarray:
    """(seq, hidden) float32 of as many bytes as `rows_bytes` says. Raises ValueError for values that are
    not finite."""
    if wire != "i8":
        rows = np.frombuffer(body, "<f4" if wire == "f32" else "<f2").astype(np.float32)
        return check_finite(rows.reshape(seq, hidden), "output")
    packed = np.frombuffer(body, np.dtype([("scale", "<f4"), ("zero", "<f4"), ("codes", "i1", hidden)]))
    scale = packed["scale"].astype(np.float32)
    if packed["zero"].any():
        raise ValueError("the answer has an i8 zero point other than 0")
    with np.errstate(over="ignore", invalid="ignore"):
        rows = packed["codes"].astype(np.float32).reshape(seq, hidden) * scale[:, None]
    return check_finite(rows, "output")


def check_finite(rows: np.ndarray, what: str) -> np.ndarray:
    """`rows` as they are. Raises ValueError when a value is nan or infinite."""
    if not np.isfinite(rows).all():
        at = int(np.flatnonzero(~np.isfinite(rows.ravel()))[0])
        raise ValueError(f"{what}[{at}] is {rows.ravel()[at]}: values must be finite")
    return rows


@dataclass(frozen=True)
class WireCost:
    """Bytes that one position costs over the wire, bodies of requests and responses, HTTP heads apart."""

    layers: int
    hidden: int
    wire: str

    @property
    def sent(self) -> int:
        return self.layers * (_ONE_REQUEST.size + 4 * self.hidden)

    @property
    def received(self) -> int:
        return self.layers * (_ONE_RESPONSE.size + rows_bytes(1, self.hidden, self.wire))

    @property
    def total(self) -> int:
        return self.sent + self.received

    def __str__(self) -> str:
        row = {"f32": f"{self.hidden} x 4", "f16": f"{self.hidden} x 2", "i8": f"8 + {self.hidden}"}
        return (
            f"{self.layers} layers x ({_ONE_REQUEST.size} + {self.hidden} x 4 out, "
            f"{_ONE_RESPONSE.size} + {row[self.wire]} back) = {self.total} bytes a token"
        )
