"""safetensors files of one directory, mapped: every claim of a header or an index checked first.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON, data).
"""

from __future__ import annotations

import json
import mmap
import stat
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.tensors import RawTensor

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
MAX_JSON_BYTES = 64 << 20
MAX_RANK = 8
# Bytes per element of every whole-byte dtype of the format; which of them can be used is for the reader
# to say (a vision tower's integer buffers must not keep a text model from loading).
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
    "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError for a missing, oversized or malformed file."""
    try:
        # Checked before opening: a pipe would block for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path}: not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if len(raw) > MAX_JSON_BYTES:
        raise ModelError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
    return _object(raw, str(path))


def open_tensors(directory: Path) -> Mapping[str, RawTensor]:
    """Every tensor of the directory's `model.safetensors`, or of the shards that its index names.

    The tensors are views of the mapped files (`kind` is the format's dtype) and keep the mappings alive.
    Raises ModelError for missing files, an index that leads out of the directory or disagrees with its
    shards, and whatever `map_file` refuses.
    """
    if (directory / INDEX).exists():
        return MappingProxyType(_open_shards(directory, read_json(directory / INDEX)))
    if (directory / SINGLE).exists():
        return MappingProxyType(map_file(directory / SINGLE))
    raise ModelError(
        f"{directory}: holds neither {SINGLE} nor {INDEX}; "
        "other formats (pickled .bin or .pt files among them) are never read"
    )


def _open_shards(directory: Path, index: dict[str, Any]) -> dict[str, RawTensor]:
    where = directory / INDEX
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ModelError(f"{where}: has no weight_map")
    shards: dict[str, dict[str, RawTensor]] = {}
    for name, shard in weights.items():
        if not isinstance(shard, str):
            raise ModelError(f"{where}: the shard of {name!r} is {shard!r}, expected a file name")
        if shard in shards:
            continue
        # A plain name cannot leave the directory. The file may be a link: the Hub's cache is made of them.
        if shard != PurePosixPath(shard).name or "\\" in shard or not shard.endswith(".safetensors"):
            raise ModelError(
                f"{where}: shard {shard!r} of {name!r} is not a plain .safetensors file name in the directory"
            )
        if len(shard) > 255 or not (directory / shard).exists():
            raise ModelError(f"{where}: shard {shard!r} is missing")
        shards[shard] = map_file(directory / shard)
    tensors: dict[str, RawTensor] = {}
    for name, shard in weights.items():
        if name not in shards[shard]:
            raise ModelError(f"{where}: tensor {name!r} is not in its shard {shard!r}")
        tensors[name] = shards[shard][name]
    return tensors


def map_file(path: Path) -> dict[str, RawTensor]:
    """The tensors of one safetensors file as views.

    Raises ModelError when the file is unreadable or truncated, when offsets leave the file, overlap or
    disagree with dtype and shape, and, by name, for a dtype that the format does not have.
    """
    data = _map(path)
    size = len(data)
    if size < 8:
        raise ModelError(f"{path}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelError(f"{path}: the header claims {length} bytes, the limit is {MAX_HEADER_BYTES}")
    if length > size - 8:
        raise ModelError(f"{path}: truncated: the header claims {length} bytes of a {size}-byte file")
    header = _object(data[8 : 8 + length], str(path))
    whole = np.frombuffer(data, np.uint8)[8 + length :]
    tensors: dict[str, RawTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, begin, end = _entry(path, name, entry, len(whole))
        spans.append((begin, end, name))
        rows = shape[0] if len(shape) > 1 else 1
        tensors[name] = RawTensor(name, kind, shape, whole[begin:end].reshape(rows, -1))
    spans.sort()
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise ModelError(f"{path}: tensors {first!r} and {second!r} overlap")
    return tensors


def _entry(path: Path, name: str, entry: Any, available: int) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and byte range of one header entry, all checked."""
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: tensor {name!r} has no description")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in _ITEM_BYTES:
        raise ModelError(
            f"{path}: tensor {name!r} is of dtype {kind!r}, which is not supported; "
            f"supported: {', '.join(_ITEM_BYTES)}"
        )
    if not _naturals(shape) or len(shape) > MAX_RANK or 0 in shape:
        raise ModelError(
            f"{path}: tensor {name!r} has shape {shape!r}, expected 1 to {MAX_RANK} positive sizes"
        )
    if not _naturals(offsets) or len(offsets) != 2:
        raise ModelError(f"{path}: tensor {name!r} has data_offsets {offsets!r}, expected two integers")
    begin, end = offsets
    if not begin <= end <= available:
        raise ModelError(
            f"{path}: tensor {name!r} lies at {begin} to {end} of {available} data bytes (truncated file?)"
        )
    if end - begin != prod(shape) * _ITEM_BYTES[kind]:  # Python's integers do not overflow
        raise ModelError(
            f"{path}: tensor {name!r} ({kind}, shape {tuple(shape)}) needs "
            f"{prod(shape) * _ITEM_BYTES[kind]} bytes, the header gives it {end - begin}"
        )
    return kind, tuple(shape), begin, end


def _naturals(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _map(path: Path) -> mmap.mmap:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path}: not a regular file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object with unique keys. Deep nesting and bad UTF-8 are ModelErrors too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where}: holds a JSON {type(value).__name__}, expected an object")
    return value
