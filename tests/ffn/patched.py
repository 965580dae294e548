"""Indexes over tiny models, with and without patches, and a float64 FFN that applies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from larql_kv.model.model import Model
from larql_kv.model.vindex_edits import Patch, PatchOp
from larql_kv.vindex.index import VectorIndex


def index_of(model: Model) -> VectorIndex:
    return VectorIndex.of_model(model)


def edit(op: str, layer: int, feature: int, **vectors: np.ndarray) -> PatchOp:
    """Vectors by name: gate, up, down."""
    return PatchOp(op, layer, feature, {name: value.astype(np.float32) for name, value in vectors.items()})


def patch(index: VectorIndex, *ops: PatchOp, name: str = "p") -> None:
    index.apply(Patch(name, ops))


def vector(hidden: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(hidden)).astype(np.float32)


def reference(
    model: Model,
    layer: int,
    x: torch.Tensor,
    top_k: int | None,
    ops: Mapping[int, dict[str, np.ndarray]] | None = None,
) -> np.ndarray:
    """The formula in float64, row by row, from the stored tensors; `ops`: feature -> its new vectors."""

    def get(name: str) -> np.ndarray:
        return model.tensors.get(f"layers.{layer}.{name}").dequantize().astype(np.float64)

    def bias(name: str) -> Any:
        full = f"layers.{layer}.{name}_bias"
        return model.tensors.get(full).dequantize().astype(np.float64) if full in model.tensors else 0.0

    gate, up, down = get("gate"), get("up"), get("down").T.copy()
    for feature, vectors in (ops or {}).items():
        for name, values in vectors.items():
            {"gate": gate, "up": up, "down": down}[name][feature] = values
    rows = []
    for row in x.double().numpy():
        g = gate @ row + bias("gate")
        u = up @ row + bias("up")
        k = len(g) if top_k is None else min(top_k, len(g))
        chosen = np.lexsort((np.arange(len(g)), -np.abs(g)))[:k]
        if model.config.activation == "silu":
            a = g / (1 + np.exp(-g)) * u
        else:
            a = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
        rows.append(a[chosen] @ down[chosen] + bias("down"))
    return np.array(rows)
