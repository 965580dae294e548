"""One quantised activation row, as the packed linears read it (layout: kernels/common.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Planes:
    """`bits` is 8 or 16. Groups of 32 values; those past the row's end are zero and stay so."""

    q: torch.Tensor  # int32 (bits, groups)
    scale: torch.Tensor  # float32 (groups,)
    sums: torch.Tensor  # float32 (2, groups)
    bits: int

    @classmethod
    def empty(cls, values: int, bits: int, device: torch.device | str, groups: int | None = None) -> Planes:
        """Zeroed planes for `values` values, `groups` wide (default: just enough)."""
        if bits not in (8, 16):
            raise ValueError(f"activation bits must be 8 or 16, got {bits}")
        wide = -(-values // 32) if groups is None else groups
        return cls(
            torch.zeros(bits, wide, dtype=torch.int32, device=device),
            torch.zeros(wide, device=device),
            torch.zeros(2, wide, device=device),
            bits,
        )

    @property
    def groups(self) -> int:
        return self.scale.shape[0]

    def decoded(self, values: int) -> torch.Tensor:
        """The values as float32 (values,)."""
        dtype = torch.int8 if self.bits == 8 else torch.int16
        per = 32 // self.bits
        q = self.q.t().contiguous().view(dtype).reshape(self.groups, self.bits * per).float()
        return (q * self.scale[:, None]).reshape(-1)[:values]
