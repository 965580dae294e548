"""What `larql serve --ffn-only` loads: the FFN weights of the layers it owns, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from larql_kv.backends.cpu.decoder import CpuDecoder
from larql_kv.errors import ModelError
from larql_kv.model.config import LayerSpec, RopeSpec
from larql_kv.model.load import is_exact
from larql_kv.model.model import Model
from larql_kv.model.rope import RopeTable
from larql_kv.model.tensors import RawTensor

if TYPE_CHECKING:
    from larql_kv.model.config import ModelConfig
    from larql_kv.model.load import ModelFiles
    from larql_kv.model.tensors import TensorSource

T = TypeVar("T")
_FFN = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def load_ffn_only(files: ModelFiles, layers: range, dtype: Any = None) -> Model:
    """A model on the CPU of which only the FFN of `layers` can run, the same bits as in the whole one."""
    decoder = FfnDecoder(files.config, files.tensors, layers, is_exact(dtype))
    return Model(files.config, files.tokenizer(), decoder, str(files.path), files.tensors)


class FfnDecoder(CpuDecoder):
    """A decoder of which `dense_ffn` of some layers is all that works: attention, embeddings and head are
    not loaded."""

    def __init__(self, config: ModelConfig, tensors: TensorSource, layers: range, exact: bool) -> None:
        rope = RopeSpec(10_000.0, (1.0,))
        small = dataclasses.replace(
            config,
            heads=1,
            kv_heads=1,
            head_dim=2,
            vocab=1,
            layers=tuple(LayerSpec(rope) for _ in layers),
            qk_norm=False,
            post_norms=False,
            tied=True,
        )
        table = RopeTable(rope)
        super().__init__(small, _FfnTensors(small, tensors, layers), [table] * len(layers), exact)
        self.config, self._source = config, tensors
        self._layers = _Owned(layers, self._layers)
        self._row_steps = _Owned(layers, self._row_steps)


class _Owned(list[T]):
    """What belongs to the layers of a range, by the model's own layer numbers."""

    def __init__(self, layers: range, items: list[T]) -> None:
        super().__init__(items)
        self._range = layers

    def __getitem__(self, layer: Any) -> Any:
        if layer not in self._range:
            raise ModelError(
                f"the FFN of layer {layer} is not loaded, only {self._range[0]}–{self._range[-1]}"
            )
        return super().__getitem__(layer - self._range.start)


class _FfnTensors:
    """A source whose FFN tensors are those of some layers of another one, and whose others are next to
    nothing: what the decoder wants to have without ever computing with it."""

    def __init__(self, small: ModelConfig, tensors: TensorSource, layers: range) -> None:
        ones, hidden = (small.hidden,), small.hidden
        self._shapes = {
            "embed": (1, hidden),
            "final_norm": ones,
            "attn_norm": ones,
            "ffn_norm": ones,
            **dict.fromkeys(("q", "k", "v"), (2, hidden)),
            "o": (hidden, 2),
        }
        self._tensors, self._layers = tensors, layers

    def get(self, name: str) -> RawTensor:
        real = self._real(name)
        if real is not None:
            return self._tensors.get(real)
        shape = self._shapes[name.rpartition(".")[2]]
        data = np.zeros((shape[0], 4 * shape[1]) if len(shape) == 2 else (1, 4 * shape[0]), np.uint8)
        return RawTensor(name, "F32", shape, data)

    def __contains__(self, name: object) -> bool:
        real = self._real(str(name))
        return real in self._tensors if real is not None else str(name).rpartition(".")[2] in self._shapes

    def _real(self, name: str) -> str | None:
        """The other source's name of an FFN tensor."""
        prefix, _, last = name.rpartition(".")
        if last not in _FFN:
            return None
        return f"layers.{self._layers[int(prefix.rpartition('.')[2])]}.{last}"
