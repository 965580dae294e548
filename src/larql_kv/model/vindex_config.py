"""`ModelConfig` as JSON and back, every value checked: what a vindex's index.json holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from larql_kv.errors import ModelError
from larql_kv.model.config import Activation, LayerSpec, ModelConfig, RopeSpec
from larql_kv.model.rope import SUPPORTED_SCALING
from larql_kv.model.shapes import check_layer_count, check_sizes

_LARGEST = 1e30  # of a scale, a soft cap or a base: far above any in use
_TEXTS = ("architecture", "name")
_INTEGERS = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context")
_NUMBERS = ("norm_eps", "attention_scale", "embedding_scale")
_CAPS = ("attention_softcap", "final_softcap")
_FLAGS = ("qk_norm", "post_norms", "tied")


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Every field of `config`; layers refer to their RoPE tables by number."""
    ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values["layers"] = [{"rope": ropes.index(layer.rope), "window": layer.window} for layer in config.layers]
    values["kv_inputs"] = sorted(config.kv_inputs)
    return values | {"ropes": [asdict(rope) for rope in ropes]}


def config_from_json(value: Any, where: str) -> ModelConfig:
    """The config of `config_to_json`. Raises ModelError for what is missing, mistyped or out of range."""
    read = _Reader(value, where)
    ropes = [_rope(read.inside(f"ropes[{index}]", item)) for index, item in enumerate(read.list("ropes", 64))]
    items = read.list("layers", check_layer_count(len(read.list("layers"))))
    layers = tuple(_layer(read.inside(f"layers[{index}]", item), ropes) for index, item in enumerate(items))
    activation = read.text("activation")
    if activation not in get_args(Activation):
        read.fail("activation", activation, f"one of {', '.join(get_args(Activation))}")
    inputs = read.list("kv_inputs", 16)
    if not all(isinstance(item, str) for item in inputs):
        read.fail("kv_inputs", inputs, "names")
    values: dict[str, Any] = {name: read.text(name) for name in _TEXTS}
    values |= {name: read.integer(name) for name in _INTEGERS}
    values |= {name: read.number(name) for name in _NUMBERS}
    values |= {name: None if read.value(name) is None else read.number(name) for name in _CAPS}
    values |= {name: read.flag(name) for name in _FLAGS}
    values |= {"activation": activation, "layers": layers, "kv_inputs": frozenset(inputs)}
    config = ModelConfig(**values)
    check_sizes(config)
    for index, layer in enumerate(config.layers):
        if 2 * len(layer.rope.inv_freq) != config.head_dim:
            raise ModelError(
                f"{where}: layer {index} has {len(layer.rope.inv_freq)} RoPE frequencies, "
                f"expected {config.head_dim // 2}"
            )
    return config


def config_print(config: ModelConfig) -> str:
    """BLAKE2b of everything but the name (hex)."""
    values = config_to_json(config)
    del values["name"]
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=32).hexdigest()


class _Reader:
    """Values of one JSON object by name and type."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where}: expected an object, found {type(values).__name__}")
        self._values, self._where = values, where

    def fail(self, name: str, value: Any, expected: str) -> None:
        raise ModelError(f"{self._where}: {name} is {str(value)[:80]!r}, expected {expected}")

    def inside(self, name: str, value: Any) -> _Reader:
        return _Reader(value, f"{self._where}: {name}")

    def value(self, name: str) -> Any:
        if name not in self._values:
            raise ModelError(f"{self._where}: {name} is missing")
        return self._values[name]

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str) or len(value) > 1000:
            self.fail(name, value, "a short text")
        return value

    def integer(self, name: str) -> int:
        value = self.value(name)
        if type(value) is not int:
            self.fail(name, value, "an integer")
        return value

    def number(self, name: str) -> float:
        value = self.value(name)
        if not _usable(value):
            self.fail(name, value, "a finite number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if type(value) is not bool:
            self.fail(name, value, "true or false")
        return value

    def list(self, name: str, most: int = 1 << 20) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list) or len(value) > most:
            self.fail(name, value, f"a list of at most {most}")
        return value


def _usable(value: Any) -> bool:
    # A comparison with NaN is false.
    return type(value) in (int, float) and abs(value) <= _LARGEST


def _rope(read: _Reader) -> RopeSpec:
    scaling = read.text("scaling")
    if scaling not in SUPPORTED_SCALING:
        read.fail("scaling", scaling, f"one of {', '.join(SUPPORTED_SCALING)}")
    inv_freq = read.list("inv_freq", 1024)
    if not all(map(_usable, inv_freq)):
        read.fail("inv_freq", inv_freq, "finite numbers")
    return RopeSpec(
        base=read.number("base"),
        inv_freq=tuple(map(float, inv_freq)),
        attention_factor=read.number("attention_factor"),
        scaling=scaling,
    )


def _layer(read: _Reader, ropes: list[RopeSpec]) -> LayerSpec:
    rope = read.integer("rope")
    if not 0 <= rope < len(ropes):
        read.fail("rope", rope, f"a number below {len(ropes)}")
    return LayerSpec(ropes[rope], None if read.value("window") is None else read.integer("window"))
