"""float32 and bf16 rows: a value at a time, little end first. Weights would change nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from larql_kv.codec.rows import RowCodec, from_bytes, register, to_bytes


@dataclass(frozen=True)
class PlainRows(RowCodec):
    """Values of one floating type; what is not finite stays so."""

    name: str
    dtype: torch.dtype
    largest: ClassVar[float] = math.inf

    def bytes_per_row(self, width: int) -> int:
        return width * self.dtype.itemsize

    def encode(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        return super().encode(rows)

    def decode(self, codes: Tensor, width: int, weight: Tensor | None = None) -> Tensor:
        return super().decode(codes, width)

    def _encode(self, rows: Tensor) -> Tensor:
        return to_bytes(rows.to(self.dtype))

    def _decode(self, codes: Tensor, width: int) -> Tensor:
        return from_bytes(codes, self.dtype).float()


register(PlainRows("float32", torch.float32))
register(PlainRows("bf16", torch.bfloat16))
