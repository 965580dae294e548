"""Writing one safetensors file a chunk of rows at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from larql_kv.model.vindex_files import FileEntry
from larql_kv.model.vindex_rows import Rows
from larql_kv.vindex.store import named_errors

_ALIGNMENT = 64
_PLAIN = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2}  # kinds that safetensors knows -> bytes a value
_HASH_CHUNK = 4 << 20


@dataclass(frozen=True)
class Written:
    """A finished file, and for each tensor that was rounded its relative error (root of the mean square)."""

    entry: FileEntry
    errors: dict[str, float]


def write_tensors(
    path: Path, tensors: Sequence[tuple[str, Rows]], wrote: Callable[[int], None] = lambda count: None
) -> Written:
    """Write the tensors in order of falling alignment, synced to disk; `wrote` hears of every chunk's bytes.

    Memory: a chunk. Raises StoreError when the disk is full or the file cannot be written.
    """
    tensors = sorted(tensors, key=lambda item: -_alignment(item[1].kind))
    header, at = {}, 0
    for name, rows in tensors:
        plain = rows.kind in _PLAIN
        header[name] = {
            "dtype": rows.kind if plain else "U8",
            "shape": list(rows.shape) if plain else [rows.row_count, rows.row_bytes],
            "data_offsets": [at, at + rows.nbytes],
        }
        at += rows.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    hashed, errors = hashlib.blake2b(digest_size=32), {}
    with named_errors(path), path.open("wb") as file:
        size = 0
        for part in (len(text).to_bytes(8, "little"), text):
            size += file.write(part)
            hashed.update(part)
        for name, rows in tensors:
            error = _Error()
            for source, stored in rows.chunks():
                data = np.ascontiguousarray(stored).reshape(-1).data
                size += file.write(data)
                hashed.update(data)
                wrote(len(data))
                if not rows.lossless:
                    error.add(source, stored, rows.kind)
            if not rows.lossless:
                errors[name] = error.relative
        file.flush()
        os.fsync(file.fileno())
    return Written(FileEntry(size, hashed.hexdigest()), errors)


def file_checksum(path: Path) -> str:
    """BLAKE2b of a file (64 hex digits)."""
    hashed = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while block := file.read(_HASH_CHUNK):
            hashed.update(block)
    return hashed.hexdigest()


def _alignment(kind: str) -> int:
    return _PLAIN.get(kind, 1)


class _Error:
    """Relative error over the chunks seen."""

    def __init__(self) -> None:
        self._difference = self._whole = 0.0

    def add(self, source: np.ndarray, stored: np.ndarray, kind: str) -> None:
        from larql_kv.model.dequant import dequantize

        values = np.ascontiguousarray(source).view(np.float32)
        difference = dequantize(kind, stored).reshape(values.shape) - values
        self._difference += float(np.square(difference, dtype=np.float64).sum())
        self._whole += float(np.square(values, dtype=np.float64).sum())

    @property
    def relative(self) -> float:
        return (self._difference / self._whole) ** 0.5 if self._whole else 0.0
