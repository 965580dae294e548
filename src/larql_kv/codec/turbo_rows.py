"""Whole rows in turbo codes: blocks of the row are vectors with a scale each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from larql_kv.codec.outliers import BYTES_EACH, kept, put_outliers, take_outliers
from larql_kv.codec.rows import RowCodec, from_bytes, register, to_bytes
from larql_kv.codec.turbo import TurboCode

MOST_BLOCK = 128
OUTLIERS = 8


@dataclass(frozen=True)
class TurboRows(RowCodec):
    """Blocks of up to 128 channels, the largest power of two that divides the width, are rotated and coded.

    A row is outliers (codec/outliers.py) | one float32 scale a block | the codes, block by block.
    """

    name: str
    bits: int

    def code(self, width: int) -> TurboCode:
        """The code of one block. Raises SpecError unless 16 divides the width."""
        return TurboCode(self.bits, "lloyd", min(width & -width, MOST_BLOCK) if width % 16 == 0 else width)

    def bytes_per_row(self, width: int) -> int:
        code = self.code(width)
        return BYTES_EACH * kept(width, OUTLIERS) + width // code.dim * code.vector_bytes

    def _encode(self, rows: Tensor) -> Tensor:
        code = self.code(rows.shape[1])
        rows, packed = take_outliers(rows, kept(rows.shape[1], OUTLIERS))
        codes, scales = code.encode(code.rotate(rows.unflatten(1, (rows.shape[1] // code.dim, code.dim))))
        return torch.cat((packed, to_bytes(scales), codes.flatten(1)), 1)

    def _decode(self, codes: Tensor, width: int) -> Tensor:
        code, at = self.code(width), BYTES_EACH * kept(width, OUTLIERS)
        blocks = width // code.dim
        packed, scales, planes = codes.split((at, 4 * blocks, blocks * code.code_bytes), 1)
        vectors = code.decode(
            planes.unflatten(1, (blocks, code.code_bytes)), from_bytes(scales, torch.float32)
        )
        return put_outliers(code.rotate(vectors).flatten(1), packed)


for _bits in (4, 3, 2):
    register(TurboRows(f"turbo{_bits}", _bits))
