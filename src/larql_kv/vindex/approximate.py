"""An approximate index of one layer's gate rows (usearch's HNSW graph), measured against the exact one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from larql_kv.errors import StoreError
from larql_kv.vindex.index import Knn, VectorIndex, strongest

if TYPE_CHECKING:
    from usearch.index import Index


@dataclass(frozen=True)
class GraphSettings:
    """Links of a node, and the width of the search when building and when asking."""

    connectivity: int = 16
    expansion_add: int = 128
    expansion_search: int = 128


class ApproximateIndex:
    """Gate rows of one layer in an HNSW graph. The edits of the moment it is made are in it.

    The largest |score| is the largest inner product with x or with -x, so the graph is asked twice.
    """

    def __init__(self, index: VectorIndex, layer: int, settings: GraphSettings | None = None) -> None:
        """Raises StoreError without the package usearch."""
        settings = settings or GraphSettings()
        self._rows = _gate_rows(index, layer)
        self._graph = _graph(index.hidden, settings)
        self._graph.add(np.arange(len(self._rows)), self._rows, threads=1)
        self.settings = settings

    def knn(self, x: torch.Tensor, top_k: int) -> Knn:
        """The `top_k` features of x (hidden,) by |score|, as far as the graph finds them."""
        query = x.reshape(-1).numpy()
        k = min(top_k, len(self._rows))
        # Below the count asked for, a search cannot return that many.
        self._graph.expansion_search = max(self.settings.expansion_search, k)
        keys = np.concatenate([self._graph.search(sign * query, k, threads=1).keys for sign in (1, -1)])
        ids = np.unique(keys.astype(np.int64))
        scores = torch.from_numpy(self._rows[ids] @ query)
        found = strongest(scores, k)
        return Knn(torch.from_numpy(ids)[found.features], found.scores)


def _gate_rows(index: VectorIndex, layer: int) -> np.ndarray:
    rows = np.array(index.gate(layer).dequantize(), dtype=np.float32)
    for feature, edit in index.overrides_at(layer).items():
        if edit.gate is not None:
            rows[feature] = edit.gate.numpy()
    return rows


def _graph(width: int, settings: GraphSettings) -> Index:
    try:
        from usearch.index import Index
    except ImportError as error:
        raise StoreError(
            "an approximate index needs the package usearch: pip install 'larql-kv[knn]'"
        ) from error
    return Index(
        ndim=width,
        metric="ip",
        dtype="f32",
        connectivity=settings.connectivity,
        expansion_add=settings.expansion_add,
        expansion_search=settings.expansion_search,
    )


@dataclass(frozen=True)
class Recall:
    """How much of the exact top k an approximate index finds, and the time of both per query."""

    layer: int
    top_k: int
    queries: int
    recall: float  # mean share of the exact features found
    worst: float
    exact_us: float
    approximate_us: float
    build_s: float

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def measure_recall(
    index: VectorIndex, layer: int, queries: torch.Tensor, top_k: int, settings: GraphSettings | None = None
) -> Recall:
    """Ask both for the top k of each row of `queries` (n, hidden) float32. Raises StoreError for none."""
    import time

    if not len(queries):
        raise StoreError("recall needs at least one query")
    began = time.perf_counter()
    graph = ApproximateIndex(index, layer, settings)
    build_s = time.perf_counter() - began
    index.gate_knn(layer, queries[0], top_k)  # kernels compiled, rows packed
    shares, seconds = [], [0.0, 0.0]
    for x in queries:
        began = time.perf_counter()
        exact = index.gate_knn(layer, x, top_k)
        between = time.perf_counter()
        found = graph.knn(x, top_k)
        seconds[0] += between - began
        seconds[1] += time.perf_counter() - between
        shares.append(float(torch.isin(exact.features, found.features).float().mean()))
    exact_us, approximate_us = (1e6 * value / len(queries) for value in seconds)
    mean = sum(shares) / len(shares)
    return Recall(layer, top_k, len(queries), mean, min(shares), exact_us, approximate_us, build_s)
