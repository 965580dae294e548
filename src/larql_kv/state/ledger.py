"""The ledger: bytes of every tensor an engine holds, by place and role, live and capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Place = Literal["device", "host", "disk"]
Role = Literal["canonical", "derivative", "workspace"]


@dataclass(frozen=True)
class LedgerEntry:
    """One storage. `live` bytes hold rows in use, `capacity` is what is allocated; `storage` tells
    shared storages apart from equal ones, so that what forks share counts once."""

    name: str
    place: Place
    role: Role
    live: int
    capacity: int
    storage: int
    tier: Literal["hot", "cold"] = "hot"


def entry(
    name: str, role: Role, tensor: torch.Tensor, live: int, tier: Literal["hot", "cold"] = "hot"
) -> LedgerEntry:
    """The ledger line of a tensor that owns its storage; `live` in bytes."""
    place: Place = "host" if tensor.device.type == "cpu" else "device"
    storage = tensor.untyped_storage()
    return LedgerEntry(name, place, role, live, storage.nbytes(), storage.data_ptr(), tier)


def shared_entries(decoder: object) -> list[LedgerEntry]:
    """What a backend keeps for all engines on its model: workspace, named so; nothing on most backends."""
    workspaces: dict[str, list[torch.Tensor]] = getattr(decoder, "workspaces", dict)()
    return [
        entry(f"{name} (shared)", "workspace", tensor, tensor.untyped_storage().nbytes())
        for name, tensors in workspaces.items()
        for tensor in tensors
    ]


class Ledger:
    """Entries of one engine, or of several (`combined`), each storage counted once."""

    def __init__(self, entries: Iterable[LedgerEntry]) -> None:
        kept: dict[tuple[str, int], LedgerEntry] = {}
        for item in entries:
            twin = kept.get((item.place, item.storage))
            if twin is None or twin.live < item.live:
                kept[item.place, item.storage] = item
        self.entries = list(kept.values())

    @classmethod
    def combined(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """The ledger of engines taken together: what forks share counts once."""
        return cls(item for ledger in ledgers for item in ledger.entries)

    def total(
        self,
        role: Role | None = None,
        place: Place | None = None,
        tier: str | None = None,
        capacity: bool = False,
    ) -> int:
        """Bytes, live by default, of the entries that match."""
        return sum(
            item.capacity if capacity else item.live
            for item in self.entries
            if (role is None or item.role == role)
            and (place is None or item.place == place)
            and (tier is None or item.tier == tier)
        )

    @property
    def live(self) -> int:
        return self.total()

    @property
    def capacity(self) -> int:
        return self.total(capacity=True)

    def rows(self) -> list[dict[str, Any]]:
        """The entries summed by name, place, role and tier."""
        sums: dict[tuple[str, ...], list[int]] = {}
        for item in self.entries:
            total = sums.setdefault((item.name, item.place, item.role, item.tier), [0, 0])
            total[0] += item.live
            total[1] += item.capacity
        names = ("name", "place", "role", "tier", "live", "capacity")
        return [dict(zip(names, (*group, *total), strict=True)) for group, total in sums.items()]

    def to_dict(self) -> dict[str, Any]:
        """Totals by role (live bytes) beside the summed rows."""
        roles = {role: self.total(role=role) for role in ("canonical", "derivative", "workspace")}
        return {"live": self.live, "capacity": self.capacity, "roles": roles, "rows": self.rows()}

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self.entries)

    def __str__(self) -> str:
        return "\n".join(
            f"{row['name']:<20} {row['place']:<7} {row['role']:<11} {row['tier']:<5}"
            f" {row['live']:>13,} live {row['capacity']:>13,} capacity"
            for row in self.rows()
        )
