"""`VectorIndex`: gate, up and down vectors by layer and feature, with the edits of patches laid over them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from larql_kv.backends.cpu.ops import PackedLinear, pack_linear
from larql_kv.errors import ModelError, StoreError
from larql_kv.model.tensors import RawTensor, TensorSource
from larql_kv.model.vindex_edits import FeatureEdit, Overlay, Patch
from larql_kv.model.vindex_rows import DOWN_FORMS, Rows, feature_major_kind

if TYPE_CHECKING:
    import os

    from larql_kv.model.config import ModelConfig
    from larql_kv.model.model import Model

TopTokens = Callable[[int, int], list[tuple[int, float]]]


class Knn(NamedTuple):
    """Features by |score|, the largest first; of equals the lower id first."""

    features: torch.Tensor  # int64 (k,)
    scores: torch.Tensor  # float32 (k,), signed


class VectorIndex:
    """Gate, up and down vectors by layer and feature: from a vindex directory, or over a loaded model's own
    tensors. `gate`, `up` and `down` are the base's rows, without edits: these come from `overrides_at`."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: TensorSource,
        base_print: Callable[[], str],
        overlay: Overlay | None = None,
        top_tokens: TopTokens | None = None,
        down_form: str = "f32",
    ) -> None:
        """`tensors` may answer to `layers.N.down_features`; else the down matrix is turned at first use and
        kept, in `down_form` (f32, bf16 or q8_0) unless it is a float matrix."""
        if down_form not in DOWN_FORMS:
            raise ModelError(f"down rows cannot be held as {down_form!r}; choose {', '.join(DOWN_FORMS)}")
        self.config = config
        self.overlay = Overlay(config.hidden) if overlay is None else overlay
        self._tensors = tensors
        self._base_print = base_print
        self._top_tokens = top_tokens
        self._down_form = down_form
        self._down: dict[int, RawTensor] = {}
        self._scorers: dict[int, PackedLinear] = {}
        self._edited: dict[int, tuple[int, torch.Tensor, PackedLinear | None]] = {}

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> VectorIndex:
        """A vindex on disk, mapped, its applied patches laid over it. Raises StoreError, ModelError."""
        from larql_kv.vindex.store import open_index

        return open_index(directory)

    @classmethod
    def of_model(
        cls, model: Model, directory: str | os.PathLike[str] | None = None, down_form: str = "f32"
    ) -> VectorIndex:
        """An index over the model's own tensors, or the vindex in `directory` that was made of it.

        `down_form`: how feature-major down rows of a quantised model are held: f32 (same values), bf16, q8_0.
        Raises StoreError when the vindex in `directory` is of another model.
        """
        from larql_kv.vindex.store import index_of_model

        return index_of_model(model, directory, down_form)

    @property
    def layer_count(self) -> int:
        return self.config.layer_count

    @property
    def hidden(self) -> int:
        return self.config.hidden

    @property
    def print(self) -> str:
        """BLAKE2b of config and tensor checksums (64 hex digits), and of the edits where there are any:
        equal prints mean equal answers of the model; of a walk, see `walk_print`."""
        return self.overlay.print_with(self._base_print())

    @property
    def base_print(self) -> str:
        """The print without patches."""
        return self._base_print()

    @property
    def walk_print(self) -> str:
        """The print, with the formats of the down rows hashed in: equal ones mean equal walks."""
        kinds = " ".join(self.down_kind(layer) for layer in range(self.layer_count))
        return hashlib.blake2b(f"{self.print} {kinds}".encode(), digest_size=32).hexdigest()

    @property
    def epoch(self) -> int:
        """Goes up with every patch applied or removed."""
        return self.overlay.epoch

    def features(self, layer: int) -> int:
        """Features of a layer. Raises ModelError for a layer that the model lacks."""
        self._check_layer(layer)
        return self.config.intermediate

    def gate(self, layer: int) -> RawTensor:
        """(features, hidden), a row a feature, in the stored format; without edits."""
        return self._matrix(layer, "gate")

    def up(self, layer: int) -> RawTensor:
        """(features, hidden), a row a feature, in the stored format; without edits."""
        return self._matrix(layer, "up")

    def down(self, layer: int) -> RawTensor:
        """(features, hidden), a row a feature; without edits."""
        self._check_layer(layer)
        if layer not in self._down:
            name = f"layers.{layer}.down"
            stored = f"{name}_features"
            if stored in self._tensors:
                self._down[layer] = self._tensors.get(stored)
            else:
                down = self._tensors.get(name)
                self._down[layer] = Rows.of(down, self.down_kind(layer), transposed=True).whole()
        return self._down[layer]

    def down_kind(self, layer: int) -> str:
        """The format of `down`: of a quantised matrix a choice, which may round and is not in the print."""
        self._check_layer(layer)
        name = f"layers.{layer}.down"
        if f"{name}_features" in self._tensors:
            return self._tensors.get(f"{name}_features").kind
        return feature_major_kind(self._tensors.get(name).kind, self._down_form)

    def gate_scores(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x (n, hidden) float32 -> (n, features) float32, edits applied. A row's bits depend on it alone."""
        self._check_layer(layer)
        if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != self.hidden:
            raise ModelError(f"gate scores want float32 (n, {self.hidden}), got {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        if layer not in self._scorers:
            self._scorers[layer] = pack_linear([self.gate(layer)], gemm_bf16=False)
        scores = self._scorers[layer](x, invariant=True)
        features, edited = self._edited_gates(layer)
        if edited is not None:
            scores[:, features] = edited(x, invariant=True)
        return scores

    def gate_knn(self, layer: int, x: torch.Tensor, top_k: int) -> Knn:
        """The `top_k` features (all, where the layer has fewer) of x (hidden,) by |gate score|, exactly."""
        if top_k < 1:
            raise ModelError(f"top_k must be at least 1, got {top_k}")
        return strongest(self.gate_scores(layer, x.reshape(1, -1))[0], top_k)

    def has_overrides_at(self, layer: int) -> bool:
        return bool(self.overlay.at(layer))

    def override(self, layer: int, feature: int) -> FeatureEdit | None:
        return self.overlay.at(layer).get(feature)

    def overrides_at(self, layer: int) -> Mapping[int, FeatureEdit]:
        """Feature -> what patches made of it."""
        return MappingProxyType(dict(self.overlay.at(layer)))

    def top_tokens(self, layer: int, feature: int) -> list[tuple[int, float]]:
        """(token id, score) of the tokens that a feature writes, the strongest first; [] when not known."""
        self._check_feature(layer, feature)
        edit = self.override(layer, feature)
        if edit is not None and (edit.down is not None or edit.tokens is not None):
            return list(edit.tokens or ())
        return [] if self._top_tokens is None else self._top_tokens(layer, feature)

    def apply(self, patch: Patch) -> Patch:
        """Lay one more patch over this index, in memory: nothing on disk changes. Returns it with a feature
        for every insert. Raises StoreError when one of its name is applied."""
        placed = self.placed(patch)
        self.overlay = self.overlay.applied(placed)
        return placed

    def remove(self, name: str) -> None:
        """Take a patch away again, in memory. Raises StoreError when there is none of that name."""
        self.overlay = self.overlay.removed(name)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The patches in force, in order."""
        return self.overlay.patches

    def placed(self, patch: Patch) -> Patch:
        """`patch` with a feature for every insert: the weakest of its layer (smallest gate norm) that no
        patch uses."""
        weakest: dict[int, Iterator[int]] = {}  # by layer: features not looked at yet, the weakest first
        ops, taken = [], {(layer, f) for layer, edits in self.overlay.edits.items() for f in edits}
        taken |= {(op.layer, op.feature) for op in patch.operations if op.feature is not None}
        for op in patch.operations:
            feature = op.feature
            if feature is None:
                if op.layer not in weakest:
                    order = torch.argsort(self.gate_norms(op.layer), stable=True)
                    weakest[op.layer] = iter(order.tolist())
                feature = next((f for f in weakest[op.layer] if (op.layer, f) not in taken), None)
                if feature is None:
                    raise StoreError(
                        f"patch {patch.name!r}: layer {op.layer} has no feature left to insert into"
                    )
                taken.add((op.layer, feature))
            ops.append(replace(op, feature=feature))
        return replace(patch, operations=tuple(ops))

    def gate_norms(self, layer: int) -> torch.Tensor:
        """Lengths of the base's gate rows, float32 (features,)."""
        raw = self.gate(layer)
        norms = [
            torch.from_numpy(np.linalg.norm(raw.dequantize(slice(first, first + 1024)), axis=1))
            for first in range(0, self.features(layer), 1024)
        ]
        return torch.cat(norms)

    def _matrix(self, layer: int, name: str) -> RawTensor:
        self._check_layer(layer)
        return self._tensors.get(f"layers.{layer}.{name}")

    def _edited_gates(self, layer: int) -> tuple[torch.Tensor, PackedLinear | None]:
        """The features whose gate was edited, (m,) int64, and their new rows."""
        known = self._edited.get(layer)
        if known is None or known[0] != self.epoch:
            gates = {feature: edit.gate for feature, edit in self.overlay.at(layer).items()}
            rows = {feature: gate for feature, gate in gates.items() if gate is not None}
            linear = None
            if rows:
                data = torch.stack(list(rows.values())).numpy().view(np.uint8)
                raw = RawTensor("edited gates", "F32", (len(rows), self.hidden), data)
                linear = pack_linear([raw], gemm_bf16=False)
            known = (self.epoch, torch.tensor(list(rows), dtype=torch.int64), linear)
            self._edited[layer] = known
        return known[1], known[2]

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layer_count:
            raise ModelError(f"layer {layer} is not in the model's layers 0 to {self.layer_count - 1}")

    def _check_feature(self, layer: int, feature: int) -> None:
        if not 0 <= feature < self.features(layer):
            raise ModelError(
                f"feature {feature} is not in layer {layer}'s features 0 to {self.features(layer) - 1}"
            )


def strongest(scores: torch.Tensor, top_k: int) -> Knn:
    """The `top_k` of scores (features,) by magnitude; of equals the lower id first."""
    size = scores.abs()
    k = min(top_k, len(scores))
    floor = torch.topk(size, k, sorted=False).values.min()
    found = torch.nonzero(size >= floor)[:, 0]  # ascending ids; more than k where the last ones tie
    order = torch.sort(size[found], descending=True, stable=True).indices[:k]
    features = found[order]
    return Knn(features, scores[features])
