"""Stored formats -> float32, by the reference routines of the `gguf` package."""

from __future__ import annotations

import numpy as np

from larql_kv.errors import ModelError


def dequantize(kind: str, data: np.ndarray) -> np.ndarray:
    """`data` (rows, row_bytes) uint8 of ggml type `kind` -> (rows, columns) float32.

    Raises ModelError for a type that the `gguf` package cannot dequantise.
    """
    if kind == "F32":
        return np.ascontiguousarray(data).view(np.float32)
    if kind == "F16":
        return np.ascontiguousarray(data).view(np.float16).astype(np.float32)
    if kind == "BF16":
        return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    import gguf

    try:
        return gguf.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[kind])
    except (KeyError, NotImplementedError) as error:
        raise ModelError(f"tensor type {kind!r} cannot be dequantised; {supported_kinds()}") from error


def supported_kinds() -> str:
    """The list of tensor types that can be read, for error messages."""
    from gguf.quants import _type_traits

    kinds = ["F32", "F16", "BF16", *(kind.name for kind in _type_traits)]
    return "supported: " + ", ".join(dict.fromkeys(kinds))
