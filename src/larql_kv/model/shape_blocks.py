"""Random stored blocks of every format: what a quantiser could have written, at the speed of the generator.

The quants of a block are raw random bytes. Its scales are drawn from 256 scale sets a tensor, so that the
dequantised values have the standard deviation asked for and a mean of zero (a mean would become one huge
common direction: all logits alike).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from larql_kv.errors import ModelError

_CHUNK_BYTES = 1 << 20  # filled and patched while it is in the cache
_SETS = 256  # scale sets a tensor; a byte picks one
_SPREAD = (0.75, 1.25)  # of a set's scale around its mean

# (std, random) -> (_SETS, width) uint8: the scale bytes of a block
_MakeSets = Callable[[float, np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Block:
    """A quantised block: sizes, and where its scale bytes lie (they are consecutive in every format)."""

    elements: int
    nbytes: int
    scales_at: int
    sets: _MakeSets


def random_blocks(kind: str, rows: int, columns: int, std: float, random: np.random.Generator) -> np.ndarray:
    """A matrix (rows, columns) as stored bytes (rows, row_bytes) uint8; the values' mean is near 0, their
    standard deviation near `std`.

    Raises ModelError for a format that has no generator, or whose blocks do not divide `columns`.
    """
    if kind in ("F32", "F16", "BF16"):
        return _random_floats(kind, rows, columns, std, random)
    block = _BLOCKS.get(kind)
    if block is None or columns % block.elements:
        raise ModelError(f"no random rows of {columns} elements in {kind}; known: {', '.join(block_kinds())}")
    count = rows * columns // block.elements
    data = np.empty((rows, row_bytes(kind, columns)), np.uint8)
    blocks = data.reshape(count, block.nbytes)
    sets = block.sets(std, random).view(np.uint16)
    step = _CHUNK_BYTES // block.nbytes & ~7  # whole uint64 words; every block is an even number of bytes
    for start in range(0, count, step):
        part = blocks[start : start + step]
        part[...] = _random_bytes(random, part.size).reshape(part.shape)
        picked = part[:, block.scales_at]  # still a random byte
        words = part.view(np.uint16)
        words[:, block.scales_at // 2 : block.scales_at // 2 + sets.shape[1]] = sets[picked]
        if kind == "Q8_0":  # a quantiser's codes are symmetric: -128 never occurs
            codes = part.view(np.int8)[:, 2:]
            np.maximum(codes, -127, out=codes)
    return data


def block_kinds() -> list[str]:
    """The formats that `random_blocks` can make."""
    return ["F32", "F16", "BF16", *_BLOCKS]


def row_bytes(kind: str, columns: int) -> int:
    """Stored bytes of one row."""
    if kind in _FLOAT_BYTES:
        return _FLOAT_BYTES[kind] * columns
    block = _BLOCKS[kind]
    return columns // block.elements * block.nbytes


def _random_bytes(random: np.random.Generator, count: int) -> np.ndarray:
    words = random.bit_generator.random_raw(-(-count // 8))  # twice as fast as `Generator.bytes`
    return words.view(np.uint8)[:count]


def _random_floats(kind: str, rows: int, columns: int, std: float, random: np.random.Generator) -> np.ndarray:
    if kind == "F32":
        values = random.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(std)
        return values.view(np.uint8)
    # Codes are looked up in a table of normal values: the generator's own normals take five times as long.
    scaled = _normal_table() * np.float32(std)
    codes = scaled.astype(np.float16).view(np.uint16) if kind == "F16" else _to_bf16(scaled)
    data = np.empty((rows, 2 * columns), np.uint8)
    flat = data.view(np.uint16).reshape(-1)
    step = _CHUNK_BYTES // 2
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        np.take(codes, _random_bytes(random, 2 * part.size).view(np.uint16), out=part, mode="wrap")
    return data


@cache
def _normal_table() -> np.ndarray:
    return np.random.Generator(np.random.SFC64(1)).standard_normal(1 << 16, dtype=np.float32)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _spread(random: np.random.Generator) -> np.ndarray:
    factors = random.uniform(*_SPREAD, _SETS)
    return factors / np.sqrt(np.mean(factors**2))


def _half(*columns: np.ndarray) -> np.ndarray:
    """Columns of numbers -> (_SETS, 2 * columns) uint8 of float16."""
    return np.stack(columns, 1).astype("<f2").view(np.uint8)


def _centred(low: int, high: int) -> _MakeSets:
    """value = d * code with codes low..high; d takes either sign, since the codes' own mean is not zero."""
    rms = float(np.sqrt(np.mean(np.arange(low, high + 1.0) ** 2)))

    def sets(std: float, random: np.random.Generator) -> np.ndarray:
        return _half(std / rms * _spread(random) * random.permuted(np.resize([1, -1], _SETS)))

    return sets


def _affine(bits: int) -> _MakeSets:
    """value = d * code + m with codes 0..2^bits - 1, m about the middle code's negative."""
    codes = np.arange(2.0**bits)

    def sets(std: float, random: np.random.Generator) -> np.ndarray:
        d = std / codes.std() * _spread(random)
        return _half(d, -d * codes.mean() * random.uniform(0.95, 1.05, _SETS))

    return sets


def _k_affine(bits: int) -> _MakeSets:
    """value = d * sc * code - dmin * m, for eight groups of 32; sc and m have 6 bits and lie close together,
    as dmin is d times the middle code."""
    codes = np.arange(2.0**bits)

    def sets(std: float, random: np.random.Generator) -> np.ndarray:
        scales = random.integers(32, 62, (_SETS, 8), dtype=np.uint8)
        mins = scales + random.integers(-2, 3, (_SETS, 8), dtype=np.int8).astype(np.uint8)
        d = std / codes.std() / np.sqrt(np.mean(scales.astype(float) ** 2)) * _spread(random)
        low, high = (part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, mins))
        both = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
        return np.concatenate([_half(d, d * codes.mean()), low, high, both], 1)

    return sets


def _q6_k(std: float, random: np.random.Generator) -> np.ndarray:
    """value = d * sc * (code - 32), for sixteen groups of 16; sc is a signed byte."""
    scales = random.integers(32, 128, (_SETS, 16)) * random.choice([-1, 1], (_SETS, 16))
    rms = np.sqrt(np.mean(np.arange(-32.0, 32.0) ** 2) * np.mean(scales.astype(float) ** 2))
    return np.concatenate([scales.astype(np.int8).view(np.uint8), _half(std / rms * _spread(random))], 1)


_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_BLOCKS = {
    "Q4_0": Block(32, 18, 0, _centred(-8, 7)),
    "Q4_1": Block(32, 20, 0, _affine(4)),
    "Q5_0": Block(32, 22, 0, _centred(-16, 15)),
    "Q5_1": Block(32, 24, 0, _affine(5)),
    "Q8_0": Block(32, 34, 0, _centred(-127, 127)),
    "Q4_K": Block(256, 144, 0, _k_affine(4)),
    "Q5_K": Block(256, 176, 0, _k_affine(5)),
    "Q6_K": Block(256, 210, 192, _q6_k),
}
