"""What a walk went through: features by gate score, and the tokens that each of them writes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from larql_kv.ffn.base import FfnBackend, LayerPath
from larql_kv.ffn.walk import TracedFeature, WalkFfn
from larql_kv.vindex import down_meta

if TYPE_CHECKING:
    from larql_kv.backends.base import Decoder
    from larql_kv.model.model import Model


class WrittenToken(NamedTuple):
    """A token that a down vector writes; `score` as `vindex.down_meta.written_tokens` has it."""

    id: int
    score: float


class RecordingFfn(FfnBackend):
    """Another FFN that keeps the last row that each layer was given."""

    def __init__(self, ffn: FfnBackend) -> None:
        self.ffn = ffn
        self.inputs: dict[int, torch.Tensor] = {}  # layer -> (hidden,) float32

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.ffn.name

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        self.inputs[layer] = x[-1].clone()
        return self.ffn.forward(layer, x)

    @property
    def mark(self) -> Hashable:
        return self.ffn.mark

    def path(self, layer: int) -> LayerPath:
        return self.ffn.path(layer)

    def saved_bytes(self, layer: int) -> int:
        return self.ffn.saved_bytes(layer)

    def cache_stats(self) -> list[dict[str, Any]]:
        return self.ffn.cache_stats()

    def wire_facts(self) -> list[dict[str, Any]]:
        return self.ffn.wire_facts()

    def in_graph(self, decoder: Decoder) -> bool:
        return False  # a captured step would not come by here

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordingFfn) and other.ffn == self.ffn

    def __hash__(self) -> int:
        return hash(self.ffn)


def layer_trace(
    walk: WalkFfn, layer: int, x: torch.Tensor, count: int, tokens: int
) -> list[tuple[TracedFeature, list[WrittenToken]]]:
    """The `count` strongest features of row x (hidden,) on that layer, each with the `tokens` tokens that it
    writes: as the vindex has them, else computed through the head."""
    features = walk.trace(layer, x, count)
    known = [walk.index.top_tokens(layer, item.feature)[:tokens] for item in features]
    missing = [at for at, written in enumerate(known) if not written and tokens]
    found = [[WrittenToken(*pair) for pair in written] for written in known]
    if missing:
        downs = walk.down_rows(layer, [features[at].feature for at in missing])
        for at, written in zip(missing, written_tokens(walk.model, layer, downs, tokens), strict=True):
            found[at] = written
    return list(zip(features, found, strict=True))


def written_tokens(model: Model, layer: int, downs: torch.Tensor, count: int) -> list[list[WrittenToken]]:
    """The `count` tokens that each of down vectors (n, hidden) writes, the largest first: those that the
    down-meta of a vindex would hold."""
    best = down_meta.written_tokens(model.config, model.tensors, layer, downs, count)
    pairs: Sequence[tuple[list[int], list[float]]] = list(
        zip(best.ids.tolist(), best.scores.tolist(), strict=True)
    )
    return [[WrittenToken(*pair) for pair in zip(ids, scores, strict=True)] for ids, scores in pairs]
