"""The walk: an FFN computed only on the features whose gate scores are the top k.

For a normed row x: gate scores g = G x; the K features of the largest |g|; u_f = up_f . x and
a_f = act(g_f) * u_f; y = sum of a_f * down_f, leaving out |a_f| <= 1e-10; biases where the model has them.
From 4/5 of the features on a layer is computed whole instead, unless patches lie over it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F

from larql_kv.backends.cpu.decoder import CpuDecoder
from larql_kv.backends.cpu.ops import pack_linear
from larql_kv.backends.cpu.sparse import SparseLayer, dense_bytes
from larql_kv.errors import BackendUnavailable, ModelError, SpecError
from larql_kv.ffn.base import DenseFfn, FfnBackend, LayerPath
from larql_kv.ffn.cache import FfnL1Cache, HitCheck
from larql_kv.ffn.cached_rows import Cache, CachedRows
from larql_kv.model.tensors import RawTensor
from larql_kv.model.vindex_source import PatchedTensors

if TYPE_CHECKING:
    from larql_kv.ffn.cache.keys import Mode
    from larql_kv.model.model import Model
    from larql_kv.model.vindex_edits import FeatureEdit, Overlay
    from larql_kv.vindex.index import VectorIndex

Edits = Mapping[int, "FeatureEdit"]
TopK = int | None | Sequence[int | None]
NEGLIGIBLE = 1e-10  # contributions up to this size are left out
_LAYERS: WeakKeyDictionary[VectorIndex, WeakKeyDictionary[Any, dict[int, SparseLayer]]]
_LAYERS = WeakKeyDictionary()  # the rows of an index for one model's decoder, shared by all walks on them


class TracedFeature(NamedTuple):
    """One feature of a walk: its gate score, and what it multiplied its down vector by."""

    feature: int
    score: float
    activation: float


def is_dense(top_k: int | None, features: int) -> bool:
    """Whether `top_k` of that many features are computed whole: at 4/5 of them, or with no limit."""
    return top_k is None or 5 * top_k >= 4 * features


class WalkFfn(FfnBackend):
    """The FFN of `model` on the strongest `top_k` features of each layer of `index`.

    `top_k`: one for all layers, or one a layer; None is all features. One row at a time may be answered by
    caches: see `with_l1_cache` and `with_cache`.
    """

    def __init__(self, model: Model, index: VectorIndex, top_k: TopK = None) -> None:
        """Raises SpecError for a bad top_k, BackendUnavailable on a device without gather kernels, ModelError
        for an index of another shape, or without the patches that a dense layer was loaded with."""
        if not isinstance(model.decoder, CpuDecoder):
            raise BackendUnavailable(
                f"a walk gathers rows on device 'cpu', and the model is on {model.decoder.name!r}: "
                "use ffn 'dense'"
            )
        config = model.config
        mine = (config.layer_count, config.hidden, config.intermediate)
        theirs = (index.layer_count, index.hidden, index.features(0))
        if mine != theirs:
            raise ModelError(
                f"the index has {theirs[0]} layers of {theirs[2]} features of {theirs[1]} values, the model "
                f"{mine[0]} of {mine[2]} of {mine[1]}: it was built from another model"
            )
        self.model, self.index = model, index
        self.top_k = _each_layer(top_k, config.layer_count)
        self._features = config.intermediate
        self._decoder = model.decoder
        self._dense = [is_dense(k, self._features) for k in self.top_k]
        self._layers = _LAYERS.setdefault(index, WeakKeyDictionary()).setdefault(model.decoder, {})
        self._cached = CachedRows(self)
        self._l1: FfnL1Cache | None = None
        self._marked: tuple[Overlay, str | None] | None = None
        self._loaded = model.tensors.overlay.edits if isinstance(model.tensors, PatchedTensors) else {}
        for layer in self._loaded:
            self._check_loaded(layer)

    @property
    def name(self) -> str:  # type: ignore[override]
        """`walk:k=100`; `walk:k=...` where layers differ."""
        ks = set(self.top_k)
        return f"walk:k={'none' if None in ks else ks.pop()}" if len(ks) == 1 else "walk:k=..."

    # -- caches --------------------------------------------------------------------------------------

    def with_l1_cache(
        self, num_layers: int | None = None, mode: Mode = "features", check: HitCheck | None = None
    ) -> WalkFfn:
        """Look into a new L1 cache of its own; returns itself."""
        layers = self.model.config.layer_count if num_layers is None else num_layers
        return self.with_cache(FfnL1Cache(layers, mode=mode, check=check))

    def with_cache(self, cache: Cache, tenant: str = "") -> WalkFfn:
        """Look into `cache`, too (an `FfnL1Cache` becomes its L1); entries of a tenant are its own. Returns
        itself. Raises SpecError for a cache of too few layers, or a second L1."""
        layers = getattr(cache, "num_layers", self.model.config.layer_count)
        if layers < self.model.config.layer_count:
            raise SpecError(
                f"the cache is made for {layers} layers, the model has {self.model.config.layer_count}"
            )
        if isinstance(cache, FfnL1Cache):
            if self._l1 is not None:
                raise SpecError("this walk has an L1 cache already")
            self._l1 = cache
        self._cached.attach(cache, tenant)
        return self

    def l1_cache_stats(self) -> tuple[int, int] | None:
        """(hits, misses) of the L1 cache, or None without one."""
        return None if self._l1 is None else self._l1.counts

    def cache_stats(self) -> list[dict[str, Any]]:
        return self._cached.stats()

    # -- computing -----------------------------------------------------------------------------------

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        edits = self.index.overrides_at(layer) if self.index.has_overrides_at(layer) else None
        if self._dense[layer] and not edits:
            self._check_loaded(layer)
            self._cached.bypass("dense")
            return self._decoder.dense_ffn(layer, x)
        x = x.contiguous()
        if edits:
            self._cached.bypass("overrides")
            return self._edited(layer, x, edits)
        rows, top_k = self.sparse(layer), self.count(layer)
        if len(x) != 1:
            self._cached.bypass("rows")
            return rows.walk_rows(x, rows.scores(x), top_k)
        if self._cached.active:
            return self._cached.row(layer, rows, x, top_k)
        chosen = rows.score_and_select(x, top_k)
        return rows.walk(x, chosen.ids, chosen.gates)

    def _check_loaded(self, layer: int) -> None:
        """Refuse a dense layer whose loaded weights have patches that the index lacks."""
        if self._loaded.get(layer) and self._dense[layer] and not self.index.has_overrides_at(layer):
            raise ModelError(
                f"layer {layer} of {self.model.source} was loaded with patches that the index does not have, "
                "and is computed whole: load the model anew, or walk on its own index"
            )

    def count(self, layer: int) -> int:
        """Features that a sparse walk of that layer takes."""
        top_k = self.top_k[layer]
        return self._features if top_k is None else min(top_k, self._features)

    def sparse(self, layer: int) -> SparseLayer:
        """The base rows of a layer, without edits; made at first use."""
        if layer not in self._layers:
            index = self.index
            self._layers[layer] = SparseLayer.of_decoder(
                self._decoder, layer, index.gate(layer), index.up(layer), index.down(layer)
            )
        return self._layers[layer]

    def _edited(self, layer: int, x: torch.Tensor, edits: Edits) -> torch.Tensor:
        """The sparse walk with edits applied: base features by the kernels, edited ones here."""
        rows = self.sparse(layer)
        scores = self._scores(rows, x, edits)
        out = torch.empty_like(x)
        for i in range(len(x)):
            row = x[i : i + 1].clone()  # aligned as a row alone is, so that it gets the same bits
            chosen = rows.select(scores[i], self.count(layer))
            base = ~np.isin(chosen.ids, np.fromiter(edits, np.uint32, len(edits)))
            out[i] = rows.walk(row, chosen.ids[base], chosen.gates[base])
            ids = chosen.ids[~base]
            if len(ids):
                ups, downs = _vectors(rows, ids, edits)
                out[i] += self._factors(rows, ids, chosen.gates[~base], ups, row[0]) @ downs
        return out

    def _scores(self, rows: SparseLayer, x: torch.Tensor, edits: Edits) -> torch.Tensor:
        """Gate scores (n, features) of x (n, hidden), edits applied."""
        scores = rows.scores(x)
        gates = {feature: edit.gate for feature, edit in edits.items() if edit.gate is not None}
        if gates:
            data = torch.stack(list(gates.values())).numpy().view(np.uint8)
            raw = RawTensor("edited gates", "F32", (len(gates), rows.hidden), data)
            features = list(gates)
            edited = pack_linear([raw], gemm_bf16=False)(x, invariant=True)
            if rows.gate.bias is not None:
                edited += torch.stack([_bias(rows, feature, edits[feature]) for feature in features])
            scores[:, features] = edited
        return scores

    def down_rows(self, layer: int, features: Sequence[int]) -> torch.Tensor:
        """Down vectors (n, hidden) float32 of features, edits applied."""
        ids = np.array(features, np.int64)
        return _vectors(self.sparse(layer), ids, self.index.overrides_at(layer))[1]

    def _factors(
        self, rows: SparseLayer, ids: np.ndarray, gates: np.ndarray, ups: torch.Tensor, row: torch.Tensor
    ) -> torch.Tensor:
        """act(gate) * (up . row) of features `ids` (k,), negligible ones as 0."""
        u = ups @ row
        if rows.up_bias is not None:
            u = u + rows.up_bias[torch.from_numpy(ids.astype(np.int64))]
        g = torch.from_numpy(gates)
        silu = self.model.config.activation == "silu"
        a = (F.silu(g) if silu else F.gelu(g, approximate="tanh")) * u
        return torch.where(a.abs() > NEGLIGIBLE, a, 0.0)

    # -- looking -------------------------------------------------------------------------------------

    def trace(self, layer: int, x: torch.Tensor, count: int = 10) -> list[TracedFeature]:
        """The `count` strongest features that a row x (hidden,) walks, the largest |gate score| first (of
        equals the lower id). Always computed: no cache is asked."""
        rows, edits = self.sparse(layer), self.index.overrides_at(layer)
        scores = self._scores(rows, x.reshape(1, -1).contiguous(), edits)[0]
        chosen = rows.select(scores, min(count, self.count(layer)))
        ups, _ = _vectors(rows, chosen.ids, edits)
        factors = self._factors(rows, chosen.ids, chosen.gates, ups, x.reshape(-1)).tolist()
        found = map(TracedFeature, chosen.ids.tolist(), chosen.gates.tolist(), factors)
        return sorted(found, key=lambda item: (-abs(item.score), item.feature))

    def path(self, layer: int) -> LayerPath:
        top_k, features = self.top_k[layer], self._features
        if self.index.has_overrides_at(layer):
            return LayerPath(
                "sparse with patches", self.count(layer), features, "patches lie over this layer"
            )
        if not self._dense[layer]:
            return LayerPath("sparse", self.count(layer), features)
        why = "" if top_k is None else f"k={top_k} is 4/5 of the features or more"
        return LayerPath("dense", None, features, why)

    def paths(self) -> list[LayerPath]:
        """How each layer is computed now."""
        return [self.path(layer) for layer in range(len(self.top_k))]

    def saved_bytes(self, layer: int) -> int:
        if self.path(layer).path == "dense":
            return 0
        return dense_bytes(self._decoder, layer) - self.sparse(layer).step_bytes(self.count(layer))

    # -- being compared --------------------------------------------------------------------------------

    @property
    def mark(self) -> Hashable:
        """The patches in force, None for none."""
        overlay = self.index.overlay
        if self._marked is None or self._marked[0] is not overlay:
            self._marked = (overlay, overlay.print_with("") or None)
        return self._marked[1]

    def _is_dense(self) -> bool:
        return all(self._dense) and not any(map(self.index.has_overrides_at, range(len(self.top_k))))

    def in_graph(self, decoder: Any) -> bool:
        return self._is_dense() and self._decoder is decoder

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DenseFfn):
            return self._is_dense() and other == DenseFfn(self.model)
        if not isinstance(other, WalkFfn) or other._decoder is not self._decoder:
            return False
        if self is other or (self._is_dense() and other._is_dense()):
            return True
        same_index = self.index is other.index or self.index.walk_print == other.index.walk_print
        # An approximate cache answers by what it has seen: no other walk computes the same.
        exact = self._cached.exact and other._cached.exact
        return same_index and exact and self._work() == other._work()

    def _work(self) -> list[int | None]:
        return [None if path.path == "dense" else path.k for path in self.paths()]

    def __hash__(self) -> int:
        return hash(id(self._decoder))


def _vectors(rows: SparseLayer, ids: np.ndarray, edits: Edits) -> tuple[torch.Tensor, torch.Tensor]:
    """Up and down vectors of features `ids` (k,), float32 (k, hidden) each, edits applied."""
    ups, downs = rows.values(ids)
    for at, feature in enumerate(ids.tolist()):
        edit = edits.get(feature)
        if edit is not None:
            ups[at] = ups[at] if edit.up is None else edit.up
            downs[at] = downs[at] if edit.down is None else edit.down
    return ups, downs


def _bias(rows: SparseLayer, feature: int, edit: FeatureEdit) -> torch.Tensor:
    """The gate bias of an edited feature: none for one that was deleted."""
    assert rows.gate.bias is not None
    return torch.zeros(()) if edit.deleted else rows.gate.bias[feature]


def _each_layer(top_k: TopK, layers: int) -> tuple[int | None, ...]:
    each = (top_k,) * layers if top_k is None or isinstance(top_k, int) else tuple(top_k)
    if len(each) != layers:
        raise SpecError(f"top_k names {len(each)} layers, the model has {layers}")
    for value in each:
        if value is not None and (type(value) is not int or value < 1):
            raise SpecError(f"top_k must be a number of features of at least 1, or none; got {value!r}")
    return each
