"""A GGUF file, mapped: metadata and tensors as views, every claim of the header checked first."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.gguf_header import GgufArray, HeaderReader, TensorEntry
from larql_kv.model.tensors import RawTensor

__all__ = ["GgufArray", "GgufFile"]

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
_T = TypeVar("_T")
_REQUIRED: Any = object()


@cache
def tensor_types() -> dict[int, tuple[str, int, int]]:
    """ggml type id -> (name, elements per block, bytes per block), as the `gguf` package has them."""
    import gguf

    return {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}


class GgufFile:
    """An open GGUF file. The tensors' arrays are views of the mapping and keep it alive.

    The file must not be shortened while it is open: the operating system answers a read of a mapped
    page that is gone with SIGBUS.
    """

    def __init__(
        self,
        path: Path,
        version: int,
        alignment: int,
        metadata: dict[str, Any],
        tensors: dict[str, RawTensor],
        data_offset: int,
        size: int,
    ) -> None:
        self.path = path
        self.version = version
        self.alignment = alignment
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors = tensors
        self.data_offset = data_offset
        self.size = size

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map the file and check its header.

        Raises ModelError when the file is missing, unreadable, truncated, of another format, or when
        the header claims anything that the file cannot hold.
        """
        where = Path(path)
        reader = HeaderReader(_map(where), str(where))
        version, tensor_count, key_count = reader.prologue()
        metadata = reader.metadata(key_count)
        alignment = _alignment(reader, metadata)
        entries = [reader.tensor_entry(index) for index in range(tensor_count)]
        data_offset = -(-reader.position // alignment) * alignment
        tensors = _tensors(reader, entries, data_offset, alignment)
        return cls(where, version, alignment, metadata, tensors, data_offset, reader.size)

    @overload
    def get(self, key: str, kind: type[_T]) -> _T: ...
    @overload
    def get(self, key: str, kind: type[_T], default: _T) -> _T: ...
    @overload
    def get(self, key: str, kind: type[_T], default: None) -> _T | None: ...
    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The metadata value of `key` as `kind` (str, int, float, bool or GgufArray).

        An int does for a float, a bool does not do for an int. Raises ModelError when the value is of
        another type, or missing with no default given.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise ModelError(f"{self.path}: the metadata lack {key!r}")
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ModelError(
                f"{self.path}: {key!r} is of type {type(value).__name__}, expected {kind.__name__}"
            )
        return value

    def describe(self) -> dict[str, Any]:
        """A summary for `larql info`; a field that the file lacks is None."""
        architecture = self._shown("general.architecture", str)
        types: dict[str, dict[str, int]] = {}
        for tensor in self.tensors.values():
            entry = types.setdefault(tensor.kind, {"count": 0, "bytes": 0})
            entry["count"] += 1
            entry["bytes"] += tensor.nbytes
        return {
            "path": str(self.path),
            "size": self.size,
            "format": f"GGUF v{self.version}",
            "architecture": architecture,
            "name": self._shown("general.name", str),
            "licence": self._shown("general.license", str),
            "tensor_count": len(self.tensors),
            "tensor_types": types,
            "parameters": sum(prod(tensor.shape) for tensor in self.tensors.values()),
            "context": self._shown(f"{architecture}.context_length", int),
            "tokenizer": self._shown("tokenizer.ggml.model", str),
            "pre_tokenizer": self._shown("tokenizer.ggml.pre", str),
            "chat_template": self._shown("tokenizer.chat_template", str) is not None,
        }

    def _shown(self, key: str, kind: type[_T]) -> _T | None:
        value = self.metadata.get(key)
        return value if type(value) is kind else None

    def __repr__(self) -> str:
        return f"GgufFile({str(self.path)!r}, {len(self.tensors)} tensors, {len(self.metadata)} keys)"


def metadata_bytes(path: Path) -> tuple[int, int, bytes]:
    """(version, number of keys, the keys and values as the file has them). Raises ModelError."""
    reader = HeaderReader(_map(path), str(path))
    version, _, key_count = reader.prologue()
    start = reader.position
    reader.metadata(key_count)
    return version, key_count, reader.data[start : reader.position]


def _map(path: Path) -> mmap.mmap:
    """The file's bytes, mapped. The kind is checked before opening: a pipe would block for ever."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelError(f"{path}: a directory, expected a GGUF file")
        if not stat.S_ISREG(mode):
            raise ModelError(f"{path}: not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ModelError(f"{path}: {size} bytes are too few for a GGUF header (24)")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _alignment(reader: HeaderReader, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        shown = value if isinstance(value, int | float) else type(value).__name__
        reader.fail(f"general.alignment is {shown}, expected a power of two from 8 to {MAX_ALIGNMENT}")
    return value


def _tensors(
    reader: HeaderReader, entries: list[TensorEntry], data_offset: int, alignment: int
) -> dict[str, RawTensor]:
    """Views of the data section, after checking type, size, place and overlap of each entry."""
    whole = np.frombuffer(reader.data, np.uint8)
    types = tensor_types()
    tensors: dict[str, RawTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for entry in entries:
        if entry.name in tensors:
            reader.fail(f"tensor {entry.name!r} occurs twice", entry.at)
        if entry.type_id not in types:
            known = ", ".join(f"{name} ({number})" for number, (name, _, _) in types.items())
            reader.fail(
                f"tensor {entry.name!r} has the unknown type {entry.type_id}; supported: {known}", entry.at
            )
        kind, block, block_bytes = types[entry.type_id]
        if entry.dims[0] % block:
            reader.fail(
                f"tensor {entry.name!r}: rows of {entry.dims[0]}, {kind} wants a multiple of {block}",
                entry.at,
            )
        row_bytes = entry.dims[0] // block * block_bytes
        rows = prod(entry.dims[1:])
        start = data_offset + entry.offset
        end = start + rows * row_bytes  # Python's integers do not overflow
        if entry.offset % alignment:
            reader.fail(
                f"tensor {entry.name!r}: offset {entry.offset} is no multiple of the alignment {alignment}",
                entry.at,
            )
        if end > reader.size:
            reader.fail(
                f"truncated: tensor {entry.name!r} ({kind}, dimensions {list(entry.dims)}, offset "
                f"{entry.offset}) ends at byte {end}",
                entry.at,
            )
        data = whole[start:end].reshape(rows, row_bytes)
        tensors[entry.name] = RawTensor(entry.name, kind, entry.dims[::-1], data)
        spans.append((start, end, entry.name))
    spans.sort()
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            reader.fail(f"tensors {first!r} and {second!r} overlap", start)
    return tensors
