"""FFN backends: the second parameter of the forward pass. An engine uses the one it was handed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from larql_kv.backends.base import Decoder
    from larql_kv.model.model import Model


class FfnBackend(ABC):
    """Computes a layer's FFN. Two backends that compute the same must compare equal: K/V rows belong to
    the FFN that the rows before them went through."""

    name: str

    @abstractmethod
    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """`x` (n, hidden) float32, the residual after the pre-FFN norm -> (n, hidden) float32.

        Post-norm and residual add are the caller's. A remote failure is a RemoteError, never zeros.
        """

    def in_graph(self, decoder: Decoder) -> bool:
        """Whether this is `decoder`'s own FFN, which its captured steps have built in."""
        return False


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
        return isinstance(other, DenseFfn) and other._decoder is self._decoder

    def __hash__(self) -> int:
        return hash(id(self._decoder))
