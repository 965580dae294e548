"""Integer rows: groups of channels with a scale each, and the one-scale form of the boundary frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from larql_kv.codec.ordered import bf16_above, nearest_root, neighbour_sum
from larql_kv.codec.outliers import BYTES_EACH, kept, put_outliers, take_outliers
from larql_kv.codec.rows import RowCodec, from_bytes, register, to_bytes


@dataclass(frozen=True)
class GroupedRows(RowCodec):
    """`group` neighbouring channels share a bf16 scale; the row's `outliers` largest values are kept apart.

    The scale is the group's value of largest size over -2^(bits-1), its size rounded up: that value has the
    lowest integer, and all 2^bits integers are used. Error of a value: half a scale; up to a whole one at
    the other end, where the highest integer falls short.

    A row is outliers (codec/outliers.py) | scales, bf16 | integers plus 2^(bits-1), in order of the
    channels; of 4 bits two to a byte, the even channel low.
    """

    name: str
    bits: int  # 4 or 8
    group: int
    outliers: int
    largest: ClassVar[float] = 3e38  # so that what the scale's rounding adds does not overflow

    def bytes_per_row(self, width: int) -> int:
        return (
            BYTES_EACH * kept(width, self.outliers) + 2 * -(-width // self.group) + -(-width * self.bits // 8)
        )

    def _encode(self, rows: Tensor) -> Tensor:
        n, width = rows.shape
        rows, packed = take_outliers(rows, kept(width, self.outliers))
        groups = torch.nn.functional.pad(rows, (0, -width % self.group)).view(
            n, -(-width // self.group), self.group
        )
        high, low = groups.amax(-1), groups.amin(-1)
        half = 1 << (self.bits - 1)
        size = bf16_above(torch.maximum(high, -low) / half)
        scale = torch.where(size == 0, 0.0, torch.where(high >= -low, -size, size))  # and never -0
        values = torch.where(scale[..., None] == 0, 0.0, torch.round(groups / scale[..., None]))
        codes = (values.clamp(-half, half - 1) + half).to(torch.uint8).flatten(1)[:, :width]
        if self.bits == 4:
            codes = torch.nn.functional.pad(codes, (0, width % 2))
            codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return torch.cat((packed, to_bytes(scale.to(torch.bfloat16)), codes), 1)

    def _decode(self, codes: Tensor, width: int) -> Tensor:
        start = BYTES_EACH * kept(width, self.outliers)
        packed, scales, fields = codes.tensor_split((start, start + 2 * -(-width // self.group)), 1)
        if self.bits == 4:
            fields = torch.stack((fields & 15, fields >> 4), -1).flatten(1)
        values = fields[:, :width].float() - (1 << (self.bits - 1))
        scale = from_bytes(scales, torch.bfloat16).float()
        rows = values * scale.repeat_interleave(self.group, 1)[:, :width]
        return put_outliers(rows, packed)


@dataclass(frozen=True)
class ClippedRows(RowCodec):
    """One scale for a row, at three standard deviations; what lies beyond is clipped.

    A row is one float32, the scale, then signed bytes; a value is byte * scale. The deviation is the
    population's, around the mean (1 for a constant row), and the clip lies around zero. Massive activations
    are lost: grouped int8 keeps them. This is the form of the boundary frames.
    """

    name: str = "int8-clip3"

    def bytes_per_row(self, width: int) -> int:
        return 4 + width

    def _encode(self, rows: Tensor) -> Tensor:
        width = torch.full((len(rows), 1), float(rows.shape[1]), device=rows.device)
        rest = rows - rows[:, :1]  # exactly 0 for a constant row
        deviations = rest - neighbour_sum(rest)[:, None] / width
        sigma = nearest_root(neighbour_sum(deviations * deviations)[:, None] / width)
        scale = 3.0 * torch.where(sigma == 0, 1.0, sigma) / torch.full_like(sigma, 127.0)
        codes = torch.round(rows / scale).clamp(-127, 127).to(torch.int8)
        return torch.cat((to_bytes(scale), to_bytes(codes)), 1)

    def _decode(self, codes: Tensor, width: int) -> Tensor:
        scale = from_bytes(codes[:, :4], torch.float32)
        return from_bytes(codes[:, 4:], torch.int8).float() * scale


# Outlier counts and groups by measurement: docs/codecs.md, "How the defaults were chosen".
register(GroupedRows("int8", 8, 64, 4))
register(ClippedRows())
register(GroupedRows("int4", 4, 32, 8), "int4-g32")
register(GroupedRows("int4-g64", 4, 64, 8))
register(GroupedRows("int4-g128", 4, 128, 8))
