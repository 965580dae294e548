"""A matrix packed for the decode kernels: tiles of rows x groups, each plane contiguous in a tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from larql_kv.backends.cuda.formats import FORMATS, PAIR, PackFormat, code_words, unpack_blocks

if TYPE_CHECKING:
    from larql_kv.model.tensors import RawTensor

_SLICE_CODES = 1 << 25  # weights unpacked at once: bounds the memory of packing
_GROUP_TILES = (64, 32, 16, 8, 4)


@dataclass(frozen=True)
class Tile:
    """How a matrix is cut and run: `rows` x `groups` a tile, `warps`, chunks loaded `ahead` of the wait, and
    the most `registers` a thread may take (so that more programs run at once)."""

    rows: int
    groups: int
    warps: int
    ahead: int
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.rows * self.groups < 128 * self.warps or self.groups % 4:
            raise ValueError(f"a thread owns four neighbouring groups: {self} has too few for its warps")

    @staticmethod
    def default(groups: int, rows: int = 64) -> Tile:
        """A tile that pads `groups` by at most an eighth (one group more where nothing divides)."""
        for wide in _GROUP_TILES:
            if wide <= groups and -(-groups // wide) * wide * 8 <= groups * 9:
                break
        else:
            wide = 4
        rows = max(rows, 128 // wide)
        warps = min(8, rows * wide // 128)
        return Tile(rows, wide, warps, min(5, -(-groups // wide)))


@dataclass(frozen=True)
class PackedMatrix:
    """Rows of one format. `codes` int32 (tiles, chunks, words, tile rows, tile groups); `small` and `super`
    (or None) are (tiles, chunks, tile rows, tile groups) and (..., tile groups / 8)."""

    fmt: PackFormat
    tile: Tile
    rows: int
    columns: int
    codes: torch.Tensor
    small: torch.Tensor
    super: torch.Tensor | None

    @property
    def tiles(self) -> int:
        return self.codes.shape[0]

    @property
    def groups(self) -> int:
        """Groups of a row, padding included."""
        return self.codes.shape[1] * self.tile.groups

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.small.nbytes + (0 if self.super is None else self.super.nbytes)


@dataclass(frozen=True)
class FloatTile:
    """How a matrix of floats is run: `rows` a program, `step` columns at once, `warps`, so many chunks of
    columns loaded `ahead`, and the most `registers` a thread may take."""

    rows: int
    step: int
    warps: int
    ahead: int
    registers: int | None = None


DEFAULT_FLOAT_TILE = FloatTile(8, 256, 4, 4)


@dataclass(frozen=True)
class FloatMatrix:
    """Rows as stored: `data` (rows, columns) float32, float16 or bfloat16."""

    data: torch.Tensor
    tile: FloatTile

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tile.rows)

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


Matrix = PackedMatrix | FloatMatrix


def pack_rows(
    raws: Sequence[RawTensor],
    device: torch.device,
    tile: Tile | None = None,
    order: np.ndarray | None = None,
    float_tile: FloatTile = DEFAULT_FLOAT_TILE,
) -> Matrix:
    """The rows of `raws` (one ggml type, one width), one below the other, permuted by `order`, on `device`.

    A type without a packed form becomes bfloat16. Files' rows go to the device a slice at a time.
    """
    kind, columns = raws[0].kind, raws[0].shape[1]
    rows = sum(raw.shape[0] for raw in raws) if order is None else len(order)
    fmt = FORMATS.get(kind)
    if fmt is None:
        return FloatMatrix(_float_rows(raws, device, order), float_tile)
    groups = columns // 32
    tile = Tile.default(groups) if tile is None else tile
    wide = -(-groups // tile.groups)
    tall = -(-rows // tile.rows)
    codes = torch.zeros(tall, wide, fmt.code_bits, tile.rows, tile.groups, dtype=torch.int32, device=device)
    small_type = torch.int32 if fmt.scale == PAIR else torch.int16
    small = torch.zeros(tall, wide, tile.rows, tile.groups, dtype=small_type, device=device)
    supers = (
        torch.zeros(tall, wide, tile.rows, tile.groups // 8, dtype=torch.int32, device=device)
        if fmt.has_super
        else None
    )
    step = max(1, _SLICE_CODES // (tile.rows * columns)) * tile.rows
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        raw = _raw_rows(raws, first, stop, order).to(device)
        part = unpack_blocks(fmt, raw)
        begin, end = first // tile.rows, -(-stop // tile.rows)
        codes[begin:end] = _tiled(code_words(fmt, part.codes), tile.rows, tile.groups, wide).permute(
            0, 2, 4, 1, 3
        )
        small[begin:end] = _tiled(part.small[..., None], tile.rows, tile.groups, wide)[..., 0].permute(
            0, 2, 1, 3
        )
        if supers is not None and part.super is not None:
            supers[begin:end] = _tiled(part.super[..., None], tile.rows, tile.groups // 8, wide)[
                ..., 0
            ].permute(0, 2, 1, 3)
    return PackedMatrix(fmt, tile, rows, columns, codes, small, supers)


def _tiled(values: torch.Tensor, high: int, across: int, wide: int) -> torch.Tensor:
    """(rows, groups, n) -> (tiles, high, wide chunks, across, n), zero padded."""
    rows, groups, _ = values.shape
    tall = -(-rows // high)
    padding = (0, 0, 0, wide * across - groups, 0, tall * high - rows)
    if any(padding):
        values = torch.nn.functional.pad(values, padding)
    return values.unflatten(0, (tall, high)).unflatten(2, (wide, across))


def _raw_rows(raws: Sequence[RawTensor], first: int, stop: int, order: np.ndarray | None) -> torch.Tensor:
    """Rows first..stop-1 of the (permuted) stack as uint8; -1 in `order` is a row of zero bytes."""
    if order is None and len(raws) == 1:
        return _tensor(raws[0].data[first:stop])
    wanted = np.arange(first, stop) if order is None else order[first:stop]
    result = np.zeros((stop - first, raws[0].data.shape[1]), dtype=np.uint8)
    begin = 0
    for raw in raws:
        inside = (wanted >= begin) & (wanted < begin + raw.shape[0])
        result[inside] = raw.data[wanted[inside] - begin]
        begin += raw.shape[0]
    return torch.from_numpy(result)


def _tensor(data: np.ndarray) -> torch.Tensor:
    if not data.flags.writeable:  # a mapped file: torch warns, though nobody here writes
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(data)
    return torch.from_numpy(data)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _float_rows(raws: Sequence[RawTensor], device: torch.device, order: np.ndarray | None) -> torch.Tensor:
    """Float rows as stored; other types dequantised and rounded to bfloat16."""
    parts = []
    for raw in raws:
        dtype = _FLOATS.get(raw.kind)
        if dtype is None:
            parts.append(torch.from_numpy(raw.dequantize()).to(device).bfloat16())
        else:
            parts.append(_tensor(np.ascontiguousarray(raw.data)).to(device).view(dtype))
    data = torch.cat(parts) if len(parts) > 1 else parts[0]
    if order is None:
        return data
    index = torch.from_numpy(order).to(device)
    return data[index.clamp_min(0)] * (index >= 0).to(data.dtype)[:, None]
