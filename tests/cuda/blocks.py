"""Random stored blocks of any ggml type, with scales that make weights of about unit size."""

from __future__ import annotations

import numpy as np

from larql_kv.backends.cuda.formats import FORMATS
from larql_kv.model.tensors import RawTensor

# Byte offsets of the float16 fields in a block.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_raw(kind: str, rows: int, columns: int, seed: int = 0, name: str = "w") -> RawTensor:
    """Blocks of random bytes; scales between 0.5 and 1.5 over the code range."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        if kind == "F16":
            data = values.astype(np.float16)
        elif kind == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            data = values
        return RawTensor(name, kind, (rows, columns), data.view(np.uint8).reshape(rows, -1))
    fmt = FORMATS[kind]
    count = rows * columns // fmt.block
    blocks = rng.integers(0, 256, (count, fmt.block_bytes), dtype=np.uint8)
    size = {4: 16, 5: 32, 6: 64, 8: 256}[fmt.code_bits] * (48 if fmt.scale >= 2 else 1)
    for offset in _HALVES[kind]:
        scale = rng.uniform(0.5, 1.5, count) / size
        blocks[:, offset : offset + 2] = scale.astype(np.float16).view(np.uint8).reshape(count, 2)
    return RawTensor(name, kind, (rows, columns), blocks.reshape(rows, -1))
