"""Row codecs: rows of float32 <-> bytes, every row by itself, so that a row is coded once and never again.

A codec registers itself under its names; specs name it (`codec=int8`). What one writes is a stored format:
docs/codecs.md has the layouts.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from larql_kv.errors import BackendFailure, SpecError


class Measured(NamedTuple):
    """How far decoded rows are from the rows that were coded."""

    rms: float  # |decoded - rows| / |rows| over all rows
    largest: float  # the largest error of a value
    cosine: float  # the smallest of a row with its decoded form


class RowCodec(ABC):
    """How rows of float32 are held as bytes.

    `weight` (width,): powers of two by which channels are scaled before they are coded, and back when they
    are decoded: the error of a channel is then divided by its weight. See `channel_weights`.
    """

    name: str
    largest: ClassVar[float] = (
        1e16  # the size of a value that it holds: squares of such are summed in float32
    )

    @abstractmethod
    def bytes_per_row(self, width: int) -> int:
        """Bytes of one coded row. Raises SpecError where the codec has no form for rows of this width."""

    @abstractmethod
    def _encode(self, rows: Tensor) -> Tensor: ...

    @abstractmethod
    def _decode(self, codes: Tensor, width: int) -> Tensor: ...

    def encode(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """Rows (n, width) float32 -> (n, bytes_per_row(width)) uint8.

        Raises BackendFailure naming the first value that the codec cannot hold, as one that is not finite.
        """
        if rows.dtype is not torch.float32 or rows.dim() != 2:
            raise ValueError(f"rows must be float32 (n, width), got {rows.dtype} {tuple(rows.shape)}")
        self.bytes_per_row(rows.shape[1])
        if weight is not None:
            rows = rows * weight
        fits = rows.abs() <= self.largest
        if self.largest < math.inf and not bool(fits.all()):
            row, channel = (~fits).nonzero()[0].tolist()
            raise BackendFailure(
                f"row {row} holds {float(rows[row, channel]):g} at channel {channel}; codec {self.name} "
                f"holds values up to {self.largest:g}: the forward pass that made this row went wrong"
            )
        return self._encode(rows)

    def decode(self, codes: Tensor, width: int, weight: Tensor | None = None) -> Tensor:
        """Coded rows (n, bytes_per_row(width)) uint8 -> (n, width) float32."""
        size = self.bytes_per_row(width)
        if codes.dtype is not torch.uint8 or codes.dim() != 2 or codes.shape[1] != size:
            raise ValueError(
                f"codes of {width} values in {self.name} are uint8 (n, {size}), got {codes.dtype} "
                f"{tuple(codes.shape)}"
            )
        rows = self._decode(codes, width)
        return rows if weight is None else rows / weight

    def measure(self, rows: Tensor, weight: Tensor | None = None) -> Measured:
        """The error of these rows (n, width), n > 0, in float64."""
        decoded = self.decode(self.encode(rows, weight), rows.shape[1], weight).double()
        exact = rows.double()
        error = decoded - exact
        both_zero = (decoded.norm(dim=1) == 0) & (exact.norm(dim=1) == 0)
        cosines = torch.where(both_zero, 1.0, torch.cosine_similarity(decoded, exact, dim=1, eps=1e-300))
        norm = float(exact.norm())
        return Measured(
            float(error.norm()) / norm if norm else 0.0, float(error.abs().max()), float(cosines.min())
        )


_CODECS: dict[str, RowCodec] = {}


def register(codec: RowCodec, *aliases: str) -> None:
    """Make `codec` known under its name and aliases. Raises ValueError for a name that is taken."""
    for name in (codec.name, *aliases):
        if _CODECS.setdefault(name, codec) is not codec:
            raise ValueError(f"the codec name {name!r} is taken")


def row_codec(name: str) -> RowCodec:
    """The codec of this name. Raises SpecError with the nearest name."""
    try:
        return _CODECS[name]
    except KeyError:
        near = difflib.get_close_matches(name, _CODECS, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise SpecError(f"unknown codec {name!r}{hint}; known: {', '.join(codec_names())}") from None


def codec_names() -> list[str]:
    """Every name of a registered codec."""
    return sorted(_CODECS)


def to_bytes(values: Tensor) -> Tensor:
    """The bytes of values (..., n), little end first."""
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def from_bytes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse; the bytes may lie anywhere in a row."""
    return codes.clone(memory_format=torch.contiguous_format).view(dtype)


def channel_weights(norm_weight: Tensor) -> Tensor:
    """Weights for rows that only ever go through an RMS norm with this weight (width,): powers of two near
    the square root of its size.

    What the norm enlarges is coded more finely. Fully following the norm would lose the outliers that it
    shrinks but that the row's own scale depends on. The largest and the least weight are at most 2^5 apart.
    """
    size = norm_weight.float().abs()
    size = size.clamp_min(float(size.max()) * 2.0**-10).clamp_min(2.0**-60)
    return torch.exp2(torch.round(torch.log2(size) / 2))
