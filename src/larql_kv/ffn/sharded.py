"""`LayerShardedBackend`: several FFN servers, each of which owns a range of layers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from larql_kv.errors import RemoteError, SpecError
from larql_kv.ffn.base import FfnBackend, LayerPath
from larql_kv.ffn.remote import RemoteWalkBackend
from larql_kv.ffn.wire import DEFAULT_TOP_K

if TYPE_CHECKING:
    from larql_kv.model.model import Model

_SHARD = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?=(.+)")


def names_shards(endpoint: str) -> bool:
    """Whether `endpoint` is `a-b=URL,...` rather than one URL."""
    return bool(_SHARD.match(endpoint.strip()))


def parse_shards(text: str, layer_count: int) -> list[tuple[range, str]]:
    """`0-14=URL,15-29=URL` (inclusive; `7=URL` is one layer) -> [(layers, URL), ...] in order of layers.

    Raises SpecError for anything else, and for layers that no shard has, that two have, or that are not among
    the model's 0 to layer_count - 1.
    """
    shards = []
    for piece in text.split(","):
        match = _SHARD.fullmatch(piece.strip())
        if match is None:
            raise SpecError(
                f"shard {piece.strip()[:200]!r} is not FIRST-LAST=URL, as in 0-14=http://host:8080"
            )
        first, last, url = match.groups()
        layers = range(int(first), int(last or first) + 1)
        if not layers:
            raise SpecError(f"shard {piece.strip()[:200]!r}: {last} comes before {first}")
        if layers[-1] >= layer_count:
            raise SpecError(
                f"shard {piece.strip()[:200]!r}: the model has no layer {layers[-1]} (0-{layer_count - 1})"
            )
        shards.append((layers, url))
    shards.sort(key=lambda shard: shard[0].start)
    reached = 0
    for layers, url in shards:
        if layers.start > reached:
            raise SpecError(
                f"no shard has layers {_span(range(reached, layers.start))} of 0-{layer_count - 1}"
            )
        if layers.start < reached:
            both = range(layers.start, min(reached, layers.stop))
            raise SpecError(f"two shards have layers {_span(both)}: the second is {url}")
        reached = layers.stop
    if reached < layer_count:
        raise SpecError(f"no shard has layers {_span(range(reached, layer_count))} of 0-{layer_count - 1}")
    return shards


def _span(layers: range) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])


class LayerShardedBackend(FfnBackend):
    """Each layer's FFN at the server that has it. A layer nobody owns is a RemoteError, never zeros."""

    def __init__(self, shards: Sequence[tuple[range, RemoteWalkBackend]]) -> None:
        self.shards = list(shards)
        self.name = "sharded(" + ", ".join(f"{_span(layers)}={ffn.name}" for layers, ffn in shards) + ")"
        self._by_layer = {layer: ffn for layers, ffn in shards for layer in layers}

    @classmethod
    def parse(
        cls,
        text: str,
        layer_count: int,
        timeout: float = 60.0,
        wire: str = "f32",
        api_key: str | None = None,
        top_k: int | None = DEFAULT_TOP_K,
    ) -> LayerShardedBackend:
        """The shards that `text` names (see `parse_shards`), not connected yet. Raises SpecError."""
        shards = parse_shards(text, layer_count)
        return cls(
            [(layers, RemoteWalkBackend(url, timeout, wire, api_key, top_k)) for layers, url in shards]
        )

    def connect(self, model: Model | None = None) -> LayerShardedBackend:
        """Connect every shard, all serving the same model; returns self. Raises RemoteError."""
        for layers, ffn in self.shards:
            ffn.connect(model, layers)
        prints = {ffn.served.base_print: ffn.endpoint.url for _, ffn in self.shards if ffn.served}
        if len(prints) > 1:
            raise RemoteError(
                "shards serve different models: " + ", ".join(f"{u}: {p[:16]}" for p, u in prints.items())
            )
        return self

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._owner(layer).forward(layer, x)

    def forward_layers(self, layers: Sequence[int], x: torch.Tensor) -> list[torch.Tensor]:
        """The FFN of each of `layers` on the same `x`: one round trip a shard, all shards at once. Exact only
        for rows that are the input of every layer; see `RemoteWalkBackend.forward_layers`."""
        groups: dict[int, list[int]] = {}
        for layer in layers:
            groups.setdefault(id(self._owner(layer)), []).append(layer)
        with ThreadPoolExecutor(max(1, len(groups))) as pool:
            calls = [pool.submit(self._owner(own[0]).forward_layers, own, x) for own in groups.values()]
            found = {
                layer: output
                for own, call in zip(groups.values(), calls, strict=True)
                for layer, output in zip(own, call.result(), strict=True)
            }
        return [found[layer] for layer in layers]

    def path(self, layer: int) -> LayerPath:
        return self._owner(layer).path(layer)

    @property
    def mark(self) -> Hashable:
        marks = tuple(ffn.mark for _, ffn in self.shards)
        return marks if any(mark is not None for mark in marks) else None

    def wire_facts(self) -> list[dict[str, Any]]:
        return [facts for _, ffn in self.shards for facts in ffn.wire_facts()]

    def stats(self) -> dict[str, Any]:
        """The sums over shards, and each shard's own."""
        each = {_span(layers): ffn.stats() for layers, ffn in self.shards}
        summed = ("calls", "round_trips", "retries", "failures", "bytes_sent", "bytes_received", "seconds")
        return {**{name: sum(one[name] for one in each.values()) for name in summed}, "shards": each}

    def close(self) -> None:
        for _, ffn in self.shards:
            ffn.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerShardedBackend) and other.shards == self.shards

    def __hash__(self) -> int:
        return hash(tuple(self.shards))

    def _owner(self, layer: int) -> RemoteWalkBackend:
        if layer not in self._by_layer:
            owned = ", ".join(f"{_span(layers)} at {ffn.endpoint.url}" for layers, ffn in self.shards)
            raise RemoteError(f"no shard owns layer {layer}; owned: {owned}")
        return self._by_layer[layer]
