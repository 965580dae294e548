"""What a server computes and knows, without HTTP: the FFN of the layers it owns, caches, patches, facts."""

from __future__ import annotations

import hashlib
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch

from larql_kv.errors import ModelError, StoreError
from larql_kv.ffn.cache import TierCache
from larql_kv.ffn.walk import WalkFfn
from larql_kv.ffn.wire import FfnRequest, FfnResponse
from larql_kv.model.vindex_edits import Patch, patch_from_json
from larql_kv.server.bodies import BadRequest, Served

if TYPE_CHECKING:
    from larql_kv.ffn.base import FfnBackend
    from larql_kv.ffn.cache.l3 import RedisTier
    from larql_kv.model.model import Model
    from larql_kv.vindex.index import VectorIndex


MAX_PATCHES = 64


class FfnService:
    """Not thread-safe: the application calls it from one thread, so that a patch never meets a computation.

    `ffn` answers full outputs in place of the walk that a request's `top_k` asks for (`--ffn`). `name` is
    what clients call the model, by default the name of its file or directory.
    """

    def __init__(
        self,
        model: Model,
        index: VectorIndex,
        owned: range,
        ffn: FfnBackend | None = None,
        l3: RedisTier | None = None,
        weights_load_ms: float = 0.0,
        whole: bool = True,
        name: str | None = None,
    ) -> None:
        self.model, self.index, self.owned = model, index, owned
        self.ffn = ffn
        self._l3 = l3
        tiers = [] if l3 is None else [TierCache(l3, l3.secret, model.config.hidden)]
        self._shared = [model.ffn_l2_cache, *tiers]
        self.whole = whole  # attention, embeddings and head are loaded too
        self.weights_load_ms = weights_load_ms
        config = model.config
        name = PurePath(model.source).name if name is None else name
        self.served = Served(name, config.hidden, config.layer_count, owned)
        self._print: tuple[int, str] | None = None
        if index.patches:
            self._check_patchable()

    @property
    def print(self) -> str:
        """The print of what answers now: of the model with its patches, and of `ffn` where there is one."""
        if self._print is None or self._print[0] != self.index.epoch:
            mark = self.index.print
            if self.ffn is not None:
                text = f"{self.index.walk_print} {self.ffn.name}"
                mark = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
            self._print = (self.index.epoch, mark)
        return self._print[1]

    def walk(self, request: FfnRequest, tenant: str) -> FfnResponse:
        """Full outputs of every layer of a request; entries of the shared caches belong to `tenant`."""
        began = time.perf_counter()
        ffn = self._walk_ffn(request.top_k, tenant) if self.ffn is None else self.ffn
        rows = torch.from_numpy(request.rows.copy()).to(self.model.device)
        outputs = tuple(ffn.forward(layer, rows).cpu().numpy() for layer in request.layers)
        return FfnResponse(request.layers, outputs, 1000 * (time.perf_counter() - began), request.several)

    def _walk_ffn(self, top_k: int, tenant: str) -> WalkFfn:
        """The walk over a request's own `top_k`, with the shared tiers. It is cheap to make: rows and caches
        are the index's and the model's. What a tier keeps is computed with the K of its key."""
        walk = WalkFfn(self.model, self.index, min(top_k, self.index.features(self.owned[0])))
        for cache in self._shared:
            walk.with_cache(cache, tenant)
        return walk

    def features(self, request: FfnRequest) -> tuple[list[tuple[int, list[int], list[float]]], float]:
        """(layer, features, scores) of every layer for a request's one position, and the milliseconds."""
        began = time.perf_counter()
        row = torch.from_numpy(request.rows[0].copy())
        found = []
        for layer in request.layers:
            knn = self.index.gate_knn(layer, row, min(request.top_k, self.index.features(layer)))
            found.append((layer, knn.features.tolist(), knn.scores.tolist()))
        return found, 1000 * (time.perf_counter() - began)

    def warmup(self, layers: list[int] | None, skip_weights: bool) -> dict[str, Any]:
        """Run one row through the FFN of `layers` (default: all that are owned), so that the first request
        finds everything mapped and compiled. Raises ModelError for a layer not owned."""
        began = time.perf_counter()
        layers = list(self.owned) if layers is None else layers
        for layer in layers:
            if layer not in self.owned:
                raise ModelError(
                    f"layer {layer} is not served here (owned: {self.owned[0]}–{self.owned[-1]})"
                )
        if not skip_weights:
            self.model.decoder.prepare()
            row = torch.zeros(1, self.served.hidden)
            for layer in layers:
                self.model.decoder.dense_ffn(layer, row.to(self.model.device))
        prefetched = 1000 * (time.perf_counter() - began)
        return {
            "model": self.served.name,
            "weights_loaded": True,
            "weights_load_ms": round(self.weights_load_ms, 1),
            "layers_prefetched": 0 if skip_weights else len(layers),
            "prefetch_ms": round(prefetched, 1),
            "hnsw_built": False,
            "hnsw_warmup_ms": 0.0,
            "total_ms": round(1000 * (time.perf_counter() - began), 1),
        }

    def stats(self) -> dict[str, Any]:
        """What `GET /v1/stats` answers."""
        config, owned = self.model.config, self.owned
        features = [self.index.features(layer) for layer in range(config.layer_count)]
        return {
            "model": self.served.name,
            "family": config.architecture,
            "layers": config.layer_count,
            "owned": [owned[0], owned[-1]],
            "features": sum(features),
            "intermediate_size": max(features),
            "hidden_size": config.hidden,
            "layer_bands": _layer_bands(config.layer_count),
            "loaded": {"browse": True, "inference": self.whole},
            "ffn": self.ffn.name if self.ffn is not None else "walk",
            "base_print": self.index.base_print,
            "print": self.print,
            "patches": self.patch_names(),
            "weights": self.model.decoder.facts(),
        }

    def cache_stats(self) -> dict[str, dict[str, Any]]:
        """Counters of the shared tiers by name."""
        names = ("l2", "l3")[: len(self._shared)]
        return {name: cache.stats() for name, cache in zip(names, self._shared, strict=True)}

    def patches(self) -> list[dict[str, Any]]:
        """The applied patches, in order."""
        return [_summary(patch) for patch in self.index.patches]

    def patch_names(self) -> list[str]:
        return [patch.name for patch in self.index.patches]

    def patch(self, name: str) -> dict[str, Any]:
        """What an applied patch does, without its vectors. Raises BadRequest."""
        for patch in self.index.patches:
            if patch.name == name:
                return _summary(patch)
        known = ", ".join(self.patch_names()) or "none"
        raise BadRequest(f"no patch named {name[:80]!r} is applied; applied: {known}", 404)

    def apply_patch(self, value: dict[str, Any], name: str | None) -> dict[str, Any]:
        """Lay the `.vlp` object `value` over the index, until the server ends. Raises StoreError."""
        self._check_patchable()
        if len(self.index.patches) >= MAX_PATCHES:
            raise StoreError(f"{MAX_PATCHES} patches are applied already: remove one, or bake them")
        patch = patch_from_json(value, self.model.config, name or f"patch-{self.index.epoch + 1}", "patch")
        wanted = patch.base_checksum
        if wanted is not None and wanted != self.index.base_print:
            raise StoreError(
                f"patch {patch.name!r} was made for print {str(wanted)[:16]}, this is "
                f"{self.index.base_print[:16]}"
            )
        return {**_summary(self.index.apply(patch)), "epoch": self.index.epoch, "print": self.print}

    def _check_patchable(self) -> None:
        """Raises StoreError where layers are not walked, so that a patch would be ignored."""
        device = self.model.device.type
        if device != "cpu":
            raise StoreError(
                f"patches need a walk, which runs on device 'cpu', and the model is on {device!r}"
            )

    def remove_patch(self, name: str) -> dict[str, Any]:
        """Take a patch away again. Raises BadRequest."""
        self.patch(name)
        self.index.remove(name)
        return {"removed": name, "epoch": self.index.epoch, "print": self.print}

    def close(self) -> None:
        """Let go of the shared cache's threads and connections."""
        if self._l3 is not None:
            self._l3.close()


def _summary(patch: Patch) -> dict[str, Any]:
    operations = [
        {"op": op.op, "layer": op.layer, "feature": op.feature, "parts": sorted(op.vectors)}
        for op in patch.operations
    ]
    return {"name": patch.name, "digest": patch.digest, "operations": operations}


def _layer_bands(layers: int) -> dict[str, list[int]]:
    """The seed's bands (0-13, 14-27, 28-33 of 34 layers) in proportion."""
    first, second = round(layers * 14 / 34), round(layers * 28 / 34)
    bands = {"syntax": (0, first), "knowledge": (first, second), "output": (second, layers)}
    return {name: [start, stop - 1] for name, (start, stop) in bands.items() if stop > start}
