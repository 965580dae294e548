"""FFN backends: the second parameter of the forward pass. An engine uses the one it was handed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from larql_kv.backends.base import Decoder
    from larql_kv.model.model import Model


@dataclass(frozen=True)
class LayerPath:
    """How one layer's FFN is computed: `k` of `features`, where it is not all of them."""

    path: str  # dense, sparse, sparse with patches, null, remote, ...
    k: int | None = None
    features: int | None = None
    why: str = ""


class FfnBackend(ABC):
    """Computes a layer's FFN. Two backends that compute the same must compare equal: K/V rows belong to
    the FFN that the rows before them went through."""

    name: str

    @abstractmethod
    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """`x` (n, hidden) float32, the residual after the pre-FFN norm -> (n, hidden) float32.

        Post-norm and residual add are the caller's. A remote failure is a RemoteError, never zeros.
        """

    @property
    def mark(self) -> Hashable:
        """What the outputs depend on beside the object itself (patches, what a server serves): rows made
        under one mark are not continued under another. None where nothing can change."""
        return None

    def in_graph(self, decoder: Decoder) -> bool:
        """Whether this is `decoder`'s own FFN, which its captured steps have built in."""
        return False

    def path(self, layer: int) -> LayerPath:
        """How that layer is computed now."""
        return LayerPath(self.name)

    def saved_bytes(self, layer: int) -> int:
        """Weight bytes that a decode step does not read of what the dense FFN of that layer reads."""
        return 0

    def wire_facts(self) -> list[dict[str, Any]]:
        """Bytes a token by formula and as measured, of each server that was asked."""
        return []

    def cache_stats(self) -> list[dict[str, Any]]:
        """The counters of the activation caches that it looks into, the nearest first."""
        return []


class DenseFfn(FfnBackend):
    """The model's own FFN."""

    name = "dense"

    def __init__(self, model: Model) -> None:
        self._decoder = model.decoder

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._decoder.dense_ffn(layer, x)

    def in_graph(self, decoder: Decoder) -> bool:
        return self._decoder is decoder

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DenseFfn):
            return NotImplemented  # another kind may know that it is dense, too
        return other._decoder is self._decoder

    def __hash__(self) -> int:
        return hash(id(self._decoder))


class NullFfn(FfnBackend):
    """No FFN: zeros. What attention alone makes of a text."""

    name = "null"

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullFfn)

    def __hash__(self) -> int:
        return hash(NullFfn)


class LayerFfn(FfnBackend):
    """Another backend for each layer."""

    def __init__(self, by_layer: Sequence[FfnBackend], name: str) -> None:
        self._by_layer = tuple(by_layer)
        self.name = name

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._by_layer[layer].forward(layer, x)

    @property
    def mark(self) -> Hashable:
        marks = tuple(ffn.mark for ffn in self._by_layer)
        return marks if any(mark is not None for mark in marks) else None

    def in_graph(self, decoder: Decoder) -> bool:
        return all(ffn.in_graph(decoder) for ffn in self.backends)

    def path(self, layer: int) -> LayerPath:
        return self._by_layer[layer].path(layer)

    def saved_bytes(self, layer: int) -> int:
        return self._by_layer[layer].saved_bytes(layer)

    def cache_stats(self) -> list[dict[str, Any]]:
        return [stats for ffn in self.backends for stats in ffn.cache_stats()]

    def wire_facts(self) -> list[dict[str, Any]]:
        return [facts for ffn in self.backends for facts in ffn.wire_facts()]

    @property
    def backends(self) -> list[FfnBackend]:
        """Each backend once."""
        return list({id(ffn): ffn for ffn in self._by_layer}.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerFfn) and other._by_layer == self._by_layer

    def __hash__(self) -> int:
        return hash(self._by_layer)


def path_table(ffn: FfnBackend, layers: Iterable[int]) -> list[dict[str, Any]]:
    """The path of every layer, runs of equal ones in one entry: {layers: "0-13", path, k, features, why}."""
    table: list[dict[str, Any]] = []
    runs: list[tuple[LayerPath, int, int]] = []
    for layer in layers:
        path = ffn.path(layer)
        if runs and runs[-1][0] == path and runs[-1][2] == layer - 1:
            runs[-1] = (path, runs[-1][1], layer)
        else:
            runs.append((path, layer, layer))
    for path, first, last in runs:
        entry = {"layers": f"{first}-{last}" if last > first else str(first), "path": path.path}
        facts = {"k": path.k, "features": path.features, "why": path.why or None}
        table.append({**entry, **{name: value for name, value in facts.items() if value is not None}})
    return table
