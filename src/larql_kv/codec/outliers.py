"""The largest values of a row, kept apart from its codes: one massive activation would otherwise set the
scale of everything that is coded with it."""

from __future__ import annotations

import torch
from torch import Tensor

from larql_kv.codec.rows import from_bytes, to_bytes
from larql_kv.errors import SpecError

BYTES_EACH = 4  # uint16 channel, bf16 value
MOST_CHANNELS = 1 << 16
_LARGEST = torch.finfo(torch.bfloat16).max


def kept(width: int, count: int) -> int:
    """How many values of a row are kept apart. Raises SpecError where 16 bits do not name a channel."""
    if count and width > MOST_CHANNELS:
        raise SpecError(f"a row of {width} values is too wide: outliers name one of {MOST_CHANNELS} channels")
    return min(width, count)


def take_outliers(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(rows with 0 at their `count` largest values, those values as bytes (n, 4 * count)).

    Bytes: the channels as uint16, the largest value first and of equals the first channel, then the values
    as bf16, to nearest even.
    """
    # Size, then channel: no two keys are equal, so the order is certain (and a sort would take 13 x longer).
    key = rows.abs().contiguous().view(torch.int32).long() << 16
    key |= (MOST_CHANNELS - 1) - torch.arange(rows.shape[1], device=rows.device)
    channels = (MOST_CHANNELS - 1) - (key.topk(count, 1).values & (MOST_CHANNELS - 1))
    values = rows.gather(1, channels).clamp(-_LARGEST, _LARGEST).to(torch.bfloat16)
    names = channels.to(torch.int32)  # as two bytes: torch's uint16 lacks operations
    packed = torch.stack((names & 0xFF, names >> 8), -1).to(torch.uint8).flatten(1)
    return rows.scatter(1, channels, 0.0), torch.cat((packed, to_bytes(values)), 1)


def put_outliers(rows: Tensor, packed: Tensor) -> Tensor:
    """The inverse: `rows` with the kept values in their places."""
    count = packed.shape[1] // BYTES_EACH
    names = packed[:, : 2 * count].reshape(len(packed), count, 2).long()
    values = from_bytes(packed[:, 2 * count :], torch.bfloat16).float()
    return rows.scatter(1, names[..., 0] | (names[..., 1] << 8), values)
