"""Bounded reading of a GGUF header: every length is checked before anything is allocated or walked.

The `gguf` package walks whatever the header claims (a 43-byte file with an array length of 2^63 makes
it loop for ever), so the header is parsed here and the package only dequantises.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from larql_kv.errors import ModelError

MAGIC = b"GGUF"
MAX_KEYS = 16_384
MAX_TENSORS = 16_384
MAX_KEY_BYTES = 65_535  # the format's own limit
MAX_NAME_BYTES = 256  # ggml itself stops at 64
MAX_STRING_BYTES = 16 << 20  # one value: a licence text, a chat template
MAX_ELEMENT_BYTES = 65_536  # one entry of a string array: a token, a merge
MAX_STRINGS = 1 << 22  # entries of all string arrays together; bounds the walk to a fraction of a second
MAX_DIM = 1 << 40

STRING, ARRAY, BOOL = 8, 9, 7
# value type id -> (name, struct code, numpy code)
SCALARS: dict[int, tuple[str, str, str]] = {
    0: ("UINT8", "<B", "u1"),
    1: ("INT8", "<b", "i1"),
    2: ("UINT16", "<H", "<u2"),
    3: ("INT16", "<h", "<i2"),
    4: ("UINT32", "<I", "<u4"),
    5: ("INT32", "<i", "<i4"),
    6: ("FLOAT32", "<f", "<f4"),
    7: ("BOOL", "<B", "u1"),
    10: ("UINT64", "<Q", "<u8"),
    11: ("INT64", "<q", "<i8"),
    12: ("FLOAT64", "<d", "<f8"),
}
_STRUCTS = {kind: struct.Struct(code) for kind, (_, code, _) in SCALARS.items()}
_NAMES = {**{kind: name for kind, (name, _, _) in SCALARS.items()}, STRING: "STRING", ARRAY: "ARRAY"}
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


@dataclass(frozen=True, eq=False)
class GgufArray:
    """An array of the metadata, decoded only when asked: it holds a byte range of the mapped file."""

    key: str
    type_name: str  # UINT8 ... FLOAT64, BOOL or STRING
    length: int
    start: int
    end: int
    _map: mmap.mmap = field(repr=False)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    @property
    def is_text(self) -> bool:
        """True for an array of strings."""
        return self.type_name == "STRING"

    def numpy(self) -> np.ndarray:
        """The numbers as a read-only numpy view of the file. Raises ModelError for strings."""
        if self.is_text:
            raise ModelError(f"{self.key} is an array of strings, expected numbers")
        code = next(code for name, _, code in SCALARS.values() if name == self.type_name)
        values = np.frombuffer(self._map, np.dtype(code), self.length, self.start)
        if self.type_name != "BOOL":
            return values
        if self.length and values.max() > 1:
            raise ModelError(f"{self.key}: a boolean of the array is {values.max()}, expected 0 or 1")
        return values.view(np.bool_)

    def bytes_list(self) -> list[bytes]:
        """The strings as the file's bytes. Raises ModelError for numbers."""
        if not self.is_text:
            raise ModelError(f"{self.key} is an array of {self.type_name}, expected strings")
        data = self._map[self.start : self.end]
        unpack = _U64.unpack_from
        out: list[bytes] = []
        position = 0
        for _ in range(self.length):
            begin = position + 8
            position = begin + unpack(data, position)[0]
            out.append(data[begin:position])
        return out

    def strings(self) -> list[str]:
        """The strings as text. Raises ModelError for numbers and for bytes that are no UTF-8."""
        out = self.bytes_list()
        try:
            return [item.decode() for item in out]
        except UnicodeDecodeError:
            for index, item in enumerate(out):
                try:
                    item.decode()
                except UnicodeDecodeError as error:
                    raise ModelError(f"{self.key}[{index}] is not UTF-8: {item[:40]!r}") from error
            raise

    def tolist(self) -> list[Any]:
        """Numbers or strings as a plain list. Raises ModelError as `strings` and `numpy` do."""
        return self.strings() if self.is_text else self.numpy().tolist()


@dataclass(frozen=True)
class TensorEntry:
    """What the header says of one tensor; nothing of it is believed yet."""

    name: str
    dims: tuple[int, ...]  # ggml order: the contiguous dimension first
    type_id: int
    offset: int  # from the start of the data section
    at: int  # where the entry stands in the file, for messages


class HeaderReader:
    """A cursor over the mapped file. Every method raises ModelError rather than read past the end."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.position = 0
        self._strings_left = MAX_STRINGS

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        """Raise ModelError naming the file and the byte offset of the fault."""
        where = self.position if at is None else at
        raise ModelError(f"{self.path}: {what} (at byte {where} of {self.size})")

    def need(self, count: int, what: str) -> int:
        """Claim `count` bytes and return where they start."""
        start = self.position
        if count > self.size - start:
            self.fail(f"truncated: {what} needs {count} bytes, {self.size - start} are left")
        self.position = start + count
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.data, self.need(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.data, self.need(8, what))[0]

    def text(self, limit: int, what: str) -> str:
        """A length-prefixed UTF-8 string of at most `limit` bytes."""
        at = self.position
        length = self.u64(f"the length of {what}")
        if length > limit:
            self.fail(f"{what} claims {length} bytes, the limit is {limit}", at)
        start = self.need(length, what)
        raw = self.data[start : start + length]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8: {raw[:40]!r}", start)

    def prologue(self) -> tuple[int, int, int]:
        """Magic, version and counts -> (version, tensor count, key count)."""
        magic = self.data[:4]
        if magic != MAGIC:
            self.fail(f"not a GGUF file: it starts with {magic!r}, expected {MAGIC!r}", 0)
        self.position = 4
        version = self.u32("the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (1, 2, 3):
                self.fail("the file is big-endian; only little-endian GGUF files are read", 4)
            self.fail(f"GGUF version {version} is not supported; supported: 2, 3", 4)
        tensors, keys = self.u64("the tensor count"), self.u64("the key count")
        # An entry has at least 8 + 4 + 4 + 8 + 8 bytes, a key 8 + 4 + 1: larger counts are lies.
        for count, least, cap, what in ((tensors, 24, MAX_TENSORS, "tensors"), (keys, 13, MAX_KEYS, "keys")):
            if count > cap:
                self.fail(f"the header claims {count} {what}, the limit is {cap}", 8)
            if count * least > self.size:
                self.fail(f"the header claims {count} {what}, more than the file can hold", 8)
        return version, tensors, keys

    def metadata(self, count: int) -> dict[str, Any]:
        """`count` key-value pairs; scalars are read, arrays stay where they are."""
        values: dict[str, Any] = {}
        for index in range(count):
            at = self.position
            key = self.text(MAX_KEY_BYTES, f"key {index}")
            if not key:
                self.fail(f"key {index} is empty", at)
            if key in values:
                self.fail(f"key {key[:100]!r} occurs twice", at)
            kind = self.u32(f"the type of {key[:100]!r}")
            values[key] = self._value(key, kind)
        return values

    def _value(self, key: str, kind: int) -> Any:
        shown = repr(key[:100])
        if kind == STRING:
            return self.text(MAX_STRING_BYTES, f"the value of {shown}")
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            self.fail(f"{shown} has the unknown value type {kind}; known: 0 to 12", self.position - 4)
        packer = _STRUCTS[kind]
        value = packer.unpack_from(self.data, self.need(packer.size, f"the value of {shown}"))[0]
        if kind == BOOL:
            if value > 1:
                self.fail(f"{shown} is a boolean of value {value}, expected 0 or 1", self.position - 1)
            return bool(value)
        return value

    def _array(self, key: str) -> GgufArray:
        shown = repr(key[:100])
        at = self.position
        kind = self.u32(f"the element type of {shown}")
        length = self.u64(f"the length of {shown}")
        if kind == ARRAY:
            self.fail(f"{shown} is an array of arrays, which is not supported", at)
        if kind != STRING and kind not in SCALARS:
            self.fail(f"{shown} has the unknown element type {kind}; known: 0 to 8 and 10 to 12", at)
        left = self.size - self.position
        each = 8 if kind == STRING else _STRUCTS[kind].size
        if length * each > left:
            self.fail(f"{shown} claims {length} elements of type {_NAMES[kind]}, {left} bytes are left", at)
        start = self.position
        self.position = self._walk(shown, length) if kind == STRING else start + length * each
        return GgufArray(key, _NAMES[kind], length, start, self.position, self.data)

    def _walk(self, shown: str, length: int) -> int:
        """Where a string array ends. One comparison per entry: a 262,144-entry vocabulary in 40 ms."""
        self._strings_left -= length
        if self._strings_left < 0:
            self.fail(f"{shown} has {length} strings; the limit for all arrays together is {MAX_STRINGS}")
        data, unpack, position, longest = self.data, _U64.unpack_from, self.position, MAX_ELEMENT_BYTES
        size = 0
        try:
            for _ in range(length):
                size = unpack(data, position)[0]
                if size > longest:
                    break
                position += 8 + size
        except struct.error:
            self.fail(f"truncated: a string of {shown} starts past the end of the file", position)
        if size > longest:
            self.fail(f"a string of {shown} claims {size} bytes, the limit is {longest}", position)
        if position > self.size:
            self.fail(f"truncated: the last string of {shown} ends at byte {position}")
        return position

    def tensor_entry(self, index: int) -> TensorEntry:
        """The header's entry of tensor `index`; dimensions are bounded, the rest is checked later."""
        at = self.position
        name = self.text(MAX_NAME_BYTES, f"the name of tensor {index}")
        if not name:
            self.fail(f"tensor {index} has an empty name", at)
        rank = self.u32(f"the rank of {name!r}")
        if not 1 <= rank <= 4:
            self.fail(f"tensor {name!r} has {rank} dimensions, expected 1 to 4", self.position - 4)
        dims = tuple(self.u64(f"a dimension of {name!r}") for _ in range(rank))
        for dim in dims:
            if not 1 <= dim <= MAX_DIM:
                self.fail(f"tensor {name!r} has a dimension of {dim}, expected 1 to {MAX_DIM}", at)
        type_id = self.u32(f"the type of {name!r}")
        return TensorEntry(name, dims, type_id, self.u64(f"the offset of {name!r}"), at)
