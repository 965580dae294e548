"""Stored tensors of every kind with sane values, for the tests of the packed linear."""

from __future__ import annotations

import gguf
import numpy as np

from larql_kv.model.tensors import RawTensor

K_QUANTS = {
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}  # bytes; where f16 scales lie
SIMPLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
ALL_KINDS = (*SIMPLE, *K_QUANTS)


def make_raw(kind: str, outputs: int, inputs: int, seed: int = 0) -> RawTensor:
    """A matrix (outputs, inputs) stored as `kind`. K-quants: random bytes with f16 scales of both signs."""
    rng = np.random.default_rng(seed)
    if kind in K_QUANTS:
        size, scales = K_QUANTS[kind]
        data = rng.integers(0, 256, (outputs, inputs // 256, size), dtype=np.uint8)
        for at in scales:
            values = (rng.standard_normal((outputs, inputs // 256)) * 0.02).astype(np.float16)
            data[:, :, at : at + 2] = values[..., None].view(np.uint8)
        return RawTensor("w", kind, (outputs, inputs), data.reshape(outputs, -1))
    values = rng.standard_normal((outputs, inputs)).astype(np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return RawTensor(
        "w", kind, (outputs, inputs), np.ascontiguousarray(stored).view(np.uint8).reshape(outputs, -1)
    )


def as_float32(raw: RawTensor) -> RawTensor:
    """The reference dequantisation of a tensor, stored as F32."""
    values = np.ascontiguousarray(raw.dequantize(), dtype=np.float32)
    return RawTensor(raw.name, "F32", raw.shape, values.view(np.uint8).reshape(raw.shape[0], -1))
