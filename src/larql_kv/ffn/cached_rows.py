"""Single rows through the caches of a walk: exact tiers first, then gate scores, then tiers by features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from larql_kv.ffn.cache.check import relative_error
from larql_kv.ffn.cache.keys import KeyFields, LayerKeys, Mode
from larql_kv.ffn.cache.memory import FfnCache, Hit

if TYPE_CHECKING:
    from larql_kv.backends.cpu.sparse import SparseLayer
    from larql_kv.ffn.walk import WalkFfn


class Cache(Protocol):
    """`FfnCache` or `TierCache`."""

    mode: Mode
    secret: bytes | None

    def get(self, layer: int, key: bytes, features: bytes = b"") -> Hit | None: ...

    def put(self, layer: int, key: bytes, output: torch.Tensor, features: bytes = b"") -> None: ...

    def bypass(self, why: str) -> None: ...

    def stats(self) -> dict[str, Any]: ...


class _Missed(NamedTuple):
    """A cache that did not have a row, and what to keep it under."""

    cache: Cache
    key: bytes
    features: bytes


class _Attached:
    """A cache with a tenant's keys for one walk."""

    def __init__(self, cache: Cache, tenant: str) -> None:
        self.cache, self.tenant = cache, tenant
        self._keys: dict[int, LayerKeys] = {}

    def key(self, walk: WalkFfn, layer: int, payload: bytes | memoryview) -> bytes:
        keys = self._keys.get(layer)
        if keys is None:
            known = KeyFields(
                self.tenant,
                walk.index.base_print,
                0,  # base weights: a layer with overrides never gets here
                layer,
                walk.count(layer),
                walk.model.config.activation,
                self.cache.mode,
                walk.index.down_kind(layer),
            )
            keys = self._keys[layer] = LayerKeys(known, self.cache.secret)
        return keys.key(payload)


class CachedRows:
    """The caches of one `WalkFfn`. What is computed for a key is computed with the key's own K, on the base
    weights alone, so no request can put a wrong output under another one's key."""

    def __init__(self, walk: WalkFfn) -> None:
        self._walk = walk
        self._exact: list[_Attached] = []  # asked first: they need no gate scores, and their hits are exact
        self._by_features: list[_Attached] = []

    @property
    def active(self) -> bool:
        return bool(self._exact or self._by_features)

    @property
    def exact(self) -> bool:
        """Whether every answer is what would be computed."""
        return not self._by_features

    def attach(self, cache: Cache, tenant: str) -> None:
        (self._exact if cache.mode == "exact" else self._by_features).append(_Attached(cache, tenant))

    def bypass(self, why: str) -> None:
        """Rows that are not looked up: count them in every cache."""
        for attached in (*self._exact, *self._by_features):
            attached.cache.bypass(why)

    def stats(self) -> list[dict[str, Any]]:
        return [attached.cache.stats() for attached in (*self._exact, *self._by_features)]

    def row(self, layer: int, rows: SparseLayer, x: torch.Tensor, count: int) -> torch.Tensor:
        """The walk of one row x (1, hidden) over `count` features, from a cache that has it, or computed."""
        missed: list[_Missed] = []
        if self._exact:
            payload = x.numpy().data.cast("B")
            for attached in self._exact:
                key = attached.key(self._walk, layer, payload)
                hit = attached.cache.get(layer, key)
                if hit is not None:
                    _fill(layer, missed, hit.output)
                    return hit.output
                missed.append(_Missed(attached.cache, key, b""))
        chosen = rows.score_and_select(x, count)
        for attached in self._by_features:
            cache = attached.cache
            key = attached.key(self._walk, layer, chosen.bitmap)
            hit = cache.get(layer, key, chosen.bitmap)
            if hit is None:
                missed.append(_Missed(cache, key, chosen.bitmap))
            elif not hit.check:
                # An approximation: tiers whose keys promise the exact output must not get it.
                _fill(layer, [tier for tier in missed if tier.cache.mode == "features"], hit.output)
                return hit.output
            else:
                output = rows.walk(x, chosen.ids, chosen.gates)
                assert isinstance(cache, FfnCache)
                cache.accept(key, relative_error(hit.output, output))
                _fill(layer, missed, output)
                return output
        output = rows.walk(x, chosen.ids, chosen.gates)
        _fill(layer, missed, output)
        return output


def _fill(layer: int, missed: list[_Missed], output: torch.Tensor) -> None:
    for cache, key, features in missed:
        cache.put(layer, key, output, features)
