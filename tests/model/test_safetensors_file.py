"""Hostile safetensors headers: every claim is checked before it is believed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from larql_kv.errors import ModelError
from larql_kv.model.safetensors_file import map_file


def _file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def _tensor(begin: object, end: object, shape: object = (4,), dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": _tensor(0, 16), "b": _tensor(8, 24)}, "'a' and 'b' overlap"),
        ({"a": _tensor(0, 16), "b": _tensor(0, 16)}, "overlap"),
        ({"a": _tensor(32, 48)}, "lies at 32 to 48 of 32"),
        ({"a": _tensor(16, 0)}, "lies at 16 to 0"),
        ({"a": _tensor(-16, 0)}, "expected two integers"),
        ({"a": _tensor(0, 16.0)}, "expected two integers"),
        ({"a": _tensor(0, True)}, "expected two integers"),
        ({"a": _tensor(0, 16, (5,))}, r"shape \(5,\)\) needs 20 bytes, the header gives it 16"),
        ({"a": _tensor(0, 16, (1 << 62, 1 << 62))}, "needs"),
        ({"a": _tensor(0, 0, (0,))}, "positive sizes"),
        ({"a": _tensor(0, 16, (1,) * 9)}, "positive sizes"),
        ({"a": _tensor(0, 16, "4")}, "positive sizes"),
        ({"a": _tensor(0, 16, dtype="F4")}, "dtype 'F4'"),
        ({"a": _tensor(0, 16, dtype=["F32"])}, "dtype"),
        ({"a": 3}, "no description"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b"[]", "JSON list"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
    ],
)
def test_hostile_headers(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        map_file(_file(tmp_path / "x.safetensors", header, bytes(32)))


@pytest.mark.parametrize(
    ("length", "message"), [(1 << 63, "limit is"), (100_000_001, "limit is"), (100, "truncated")]
)
def test_header_length_is_bounded(tmp_path: Path, length: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        map_file(_file(tmp_path / "x.safetensors", {}, length=length))


@pytest.mark.parametrize("size", [0, 3, 7])
def test_too_short_files(tmp_path: Path, size: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    with pytest.raises(ModelError, match=r"too few|cannot be read"):
        map_file(tmp_path / "x.safetensors")
