"""RoPE tables on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from larql_kv.model.rope import RopeTable

_FIRST = 4096  # positions of the first table


class DeviceRope:
    """cos and sin of a `RopeTable`, the same bits, grown by doubling. Growing makes new tensors: whoever
    holds the old ones (a captured graph) must look at `capacity`."""

    def __init__(self, source: RopeTable, device: torch.device) -> None:
        self._source, self._device = source, device
        self.cos, self.sin = torch.empty(0, 0), torch.empty(0, 0)
        self.capacity = 0

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    def grow(self, positions: int) -> None:
        """Tables of at least `positions` rows."""
        if positions <= self.capacity:
            return
        capacity = max(_FIRST, 1 << (positions - 1).bit_length())
        cos, sin = (table.to(self._device, copy=True) for table in self._source.rows(0, capacity))
        self.cos, self.sin, self.capacity = cos, sin, capacity  # last: memory may have run out above

    def rows(self, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions first .. first + n - 1, float32 (n, head_dim / 2), contiguous."""
        self.grow(first + n)
        return self.cos[first : first + n], self.sin[first : first + n]
