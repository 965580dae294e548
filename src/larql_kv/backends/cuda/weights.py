"""A model's matrices on the device, stacked as the launches want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from larql_kv.backends.cuda.formats import FORMATS
from larql_kv.backends.cuda.linear import RowLinear
from larql_kv.backends.cuda.packed import FloatMatrix, Matrix, Tile, pack_rows
from larql_kv.backends.cuda.tiles import choose_float_tile, choose_tile
from larql_kv.errors import BackendUnavailable

if TYPE_CHECKING:
    from larql_kv.model.config import ModelConfig
    from larql_kv.model.tensors import RawTensor, TensorSource

ROLES = ("qkv", "o", "gate_up", "down", "head")
# Bits of the activations that meet a role's quantised weights. docs/cuda.md has the KL and the speed of each.
ACTIVATIONS: dict[str, Mapping[str, int]] = {
    "int8": dict.fromkeys(ROLES, 8),
    "mixed": {"qkv": 16, "o": 8, "gate_up": 8, "down": 8, "head": 16},
    "int16": dict.fromkeys(ROLES, 16),
}
DEFAULT_ACTIVATIONS = "mixed"


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms are float32; `gate_up` rows are interleaved by `glu_order`."""

    attn_norm: torch.Tensor
    qkv: RowLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: RowLinear
    post_attn_norm: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: RowLinear
    down: RowLinear
    post_ffn_norm: torch.Tensor | None

    @property
    def linears(self) -> tuple[RowLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class Weights:
    """All of a model that a step reads. Tensors go to the device one at a time, from the mapped file."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        device: torch.device,
        activations: str = DEFAULT_ACTIVATIONS,
        tiles: Mapping[str, Tile] | None = None,
    ) -> None:
        """`tiles` overrides the tile of a role (for tuning). Raises BackendUnavailable for unknown
        `activations`."""
        if activations not in ACTIVATIONS:
            raise BackendUnavailable(
                f"activations {activations!r} are not offered on cuda; offered: {', '.join(ACTIVATIONS)}"
            )
        self._source, self._device = source, device
        self._bits, self._tiles = ACTIVATIONS[activations], tiles or {}
        self._inner = config.intermediate
        self.converted: set[str] = set()  # tensors that are held in another precision than the file's
        self.layers = [self._layer(f"layers.{index}.") for index in range(config.layer_count)]
        self.final_norm = self._vector("final_norm")
        self.head = self._linear("head", ["embed" if config.tied else "head"])
        self.embedding: Matrix = (
            self.head.matrices[0] if config.tied else self._linear("head", ["embed"]).matrices[0]
        )

    def _layer(self, prefix: str) -> LayerWeights:
        return LayerWeights(
            attn_norm=self._vector(prefix + "attn_norm"),
            qkv=self._linear("qkv", [prefix + "q", prefix + "k", prefix + "v"]),
            q_norm=self._optional(prefix + "q_norm"),
            k_norm=self._optional(prefix + "k_norm"),
            o=self._linear("o", [prefix + "o"]),
            post_attn_norm=self._optional(prefix + "post_attn_norm"),
            ffn_norm=self._vector(prefix + "ffn_norm"),
            gate_up=self._linear("gate_up", [prefix + "gate", prefix + "up"], glu_order(self._inner)),
            down=self._linear("down", [prefix + "down"]),
            post_ffn_norm=self._optional(prefix + "post_ffn_norm"),
        )

    def _linear(self, role: str, names: Sequence[str], order: np.ndarray | None = None) -> RowLinear:
        raws = [self._source.get(name) for name in names]
        runs = [list(run) for _, run in groupby(raws, key=lambda raw: raw.kind)]
        one_run = len(runs) == 1
        if not one_run and (order is not None or not all(raw.kind in FORMATS for raw in raws)):
            runs = [[self._as_float(raw) for raw in raws]]
        self.converted |= {raw.name for raw in raws if raw.kind not in (*FORMATS, "F32", "F16", "BF16")}
        groups = raws[0].shape[1] // 32
        tile = self._tiles.get(role) or choose_tile(role, groups, raws[0].kind)
        floats = choose_float_tile(role)
        matrices = [pack_rows(run, self._device, tile, order, floats) for run in runs]
        plain = self._bias(names, raws)
        bias = plain
        if plain is not None and order is not None:
            index = torch.from_numpy(order).to(self._device)
            bias = torch.where(index >= 0, plain[index.clamp_min(0)], 0.0)
        return RowLinear(matrices, bias, self._bits[role], plain)

    def _as_float(self, raw: RawTensor) -> RawTensor:
        """A tensor whose stack mates have another type than one launch can hold: bfloat16."""
        if raw.kind != "BF16":
            self.converted.add(raw.name)
        values = torch.from_numpy(raw.dequantize().copy()).bfloat16()
        data = values.view(torch.uint8).numpy().reshape(raw.shape[0], -1)
        return replace(raw, kind="BF16", data=data)

    def _bias(self, names: Sequence[str], raws: Sequence[RawTensor]) -> torch.Tensor | None:
        """The stack's bias in the order of the model's rows, float32."""
        biases = [self._optional(f"{name}_bias") for name in names]
        if all(bias is None for bias in biases):
            return None
        parts = [
            torch.zeros(raw.shape[0], device=self._device) if bias is None else bias
            for raw, bias in zip(raws, biases, strict=True)
        ]
        return torch.cat(parts)

    def _vector(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._source.get(name).dequantize().copy()).to(self._device)

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._vector(name) if name in self._source else None

    @property
    def linears(self) -> list[RowLinear]:
        return [linear for layer in self.layers for linear in layer.linears] + [self.head]

    @property
    def step_bytes(self) -> int:
        """Packed bytes that one step reads: all but an untied embedding table."""
        return sum(linear.nbytes for linear in self.linears)

    @property
    def resident_bytes(self) -> int:
        """Packed bytes on the device."""
        tied = self.embedding is self.head.matrices[0]
        return self.step_bytes + (0 if tied else self.embedding.nbytes)


def glu_order(inner: int) -> np.ndarray:
    """Row order of stacked [gate | up] in tiles of 32 gate rows and their 32 up rows; -1 is a zero row."""
    tall = -(-inner // 32) * 32
    gate = np.where(np.arange(tall) < inner, np.arange(tall), -1)
    up = np.where(gate >= 0, gate + inner, -1)
    return np.concatenate((gate.reshape(-1, 32), up.reshape(-1, 32)), 1).reshape(-1)


def is_float(linear: RowLinear) -> bool:
    """Whether the matrices are stored as floats (activations then stay float32)."""
    return isinstance(linear.matrices[0], FloatMatrix)
