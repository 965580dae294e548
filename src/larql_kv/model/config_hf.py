"""A Hugging Face `config.json` -> ModelConfig, as transformers 5.24 reads it.

Defaults, windows and rope conventions follow `configuration_*.py` and `modeling_*.py` of each family
there; `modeling_rope_utils.py` for the old `rope_scaling` and the new `rope_parameters`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.config import Activation, LayerSpec, ModelConfig, RopeSpec
from larql_kv.model.hf_source import canonical_names, head_equals_embedding
from larql_kv.model.rope import MAX_NUMBER, resolve_rope, scaling_from_hf
from larql_kv.model.safetensors_file import open_tensors, read_json
from larql_kv.model.shapes import BIASES, check_layer_count, check_sizes

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3")
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
# What the configuration classes assume for absent keys; published files rely on it (gemma-3-4b-it gives
# neither its vocabulary nor its head counts).
_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = _COMMON | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "gemma2": _GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3": _GEMMA | {"vocab_size": 262208, "max_position_embeddings": 131072},
}


def config_from_directory(directory: str | os.PathLike[str]) -> ModelConfig:
    """Shapes and traits of the model in `directory` (config.json and the headers of its safetensors).

    Raises ModelError for a model type or trait that is not supported (by name), for sizes that
    contradict each other and for broken files. Code in the directory (`auto_map`) is never run: the
    families here are computed by this package.
    """
    where = Path(directory)
    if not where.is_dir():
        raise ModelError(f"{where}: no such directory")
    outer = read_json(where / "config.json")
    keys = _keys(where, outer)
    return _with_tensors(keys, _from_keys(keys, outer), outer)


def config_from_json(values: Mapping[str, Any], where: str | os.PathLike[str]) -> ModelConfig:
    """As `config_from_directory`, from the parsed config.json alone: `tied` is then only what it claims.

    `where` is for messages and names the model.
    """
    keys = _keys(Path(where), values)
    return replace(_from_keys(keys, values), tied=_claims_tied(keys, values))


def _keys(where: Path, outer: Mapping[str, Any]) -> _Keys:
    """The text model's own settings, after refusing what is not supported."""
    model_type = outer.get("model_type")
    if model_type not in SUPPORTED:
        code = " (its own code is never run)" if "auto_map" in outer else ""
        raise ModelError(
            f"{where}: model type {model_type!r} is not supported{code}; supported: {', '.join(SUPPORTED)}"
        )
    given, family = outer, model_type
    if model_type == "gemma3_text":
        family = "gemma3"
    elif model_type == "gemma3":
        given = outer.get("text_config")
        if not isinstance(given, dict) or given.get("model_type", "gemma3_text") != "gemma3_text":
            raise ModelError(f"{where}: gemma3 without a gemma3_text text_config")
    keys = _Keys(where, family, given)
    keys.refuse_unsupported(outer)
    return keys


def _from_keys(keys: _Keys, outer: Mapping[str, Any]) -> ModelConfig:
    name = outer.get("_name_or_path")
    config = _config(keys, name if isinstance(name, str) and name else keys.where.resolve().name)
    check_sizes(config)
    config = replace(config, layers=_layers(keys, config.head_dim, config.context))
    check_sizes(config)
    return config


def _claims_tied(keys: _Keys, outer: Mapping[str, Any]) -> bool:
    # The multimodal wrapper's flag is its own, not its text model's.
    wrapper = outer.get("model_type") == "gemma3"
    return bool(outer.get("tie_word_embeddings", True) if wrapper else keys.value("tie_word_embeddings"))


def _config(keys: _Keys, name: str) -> ModelConfig:
    gemma = keys.family.startswith("gemma")
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.optional_integer("head_dim")
    if hidden == 0 or heads == 0 or head_dim == 0:
        raise ModelError(f"{keys.where}: hidden_size {hidden}, {heads} heads of {head_dim} elements")
    if head_dim is None:
        if hidden % heads:
            raise ModelError(f"{keys.where}: hidden_size {hidden} is no multiple of {heads} heads")
        head_dim = hidden // heads
    kv_heads = keys.optional_integer("num_key_value_heads")
    scale = keys.number("query_pre_attn_scalar") if gemma else float(head_dim)
    if scale <= 0:
        raise ModelError(f"{keys.where}: query_pre_attn_scalar must be positive, got {scale}")
    return ModelConfig(
        architecture=keys.family,
        name=name,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        intermediate=keys.integer("intermediate_size"),
        vocab=keys.integer("vocab_size"),
        context=keys.integer("max_position_embeddings"),
        norm_eps=keys.number("rms_norm_eps"),
        activation=_activation(keys, "hidden_activation" if gemma else "hidden_act"),
        layers=(),
        attention_scale=scale**-0.5,
        # transformers holds the normaliser in the weights' dtype; ours is a float32 model.
        embedding_scale=float(np.float32(hidden**0.5)) if gemma else 1.0,
        attention_softcap=keys.softcap("attn_logit_softcapping") if keys.family == "gemma2" else None,
        final_softcap=keys.softcap("final_logit_softcapping") if gemma else None,
        qk_norm=keys.family in ("gemma3", "qwen3"),
        post_norms=gemma,
    )


def _with_tensors(keys: _Keys, config: ModelConfig, outer: Mapping[str, Any]) -> ModelConfig:
    """Settles what only the files can say: whether the head is tied, and that the biases are there."""
    tensors = open_tensors(keys.where)
    names, _ = canonical_names(tensors, config.post_norms)
    # The wrapper's flag is its own, not its text model's.
    tie = (
        outer.get("tie_word_embeddings", True)
        if "text_config" in outer
        else keys.value("tie_word_embeddings")
    )
    has_head = "head" in names
    if not has_head and not tie:
        raise ModelError(f"{keys.where}: tie_word_embeddings is false, but there is no 'lm_head.weight'")
    # transformers unties where both are there and differ.
    config = replace(config, tied=not has_head or (tie and head_equals_embedding(tensors, names)))
    wanted = {bias: keys.has_bias(bias) for bias in BIASES}
    for index in range(config.layer_count):
        for bias, wants in wanted.items():
            if wants != (f"layers.{index}.{bias}" in names):
                state = "lacks" if wants else "has"
                raise ModelError(f"{keys.where}: layer {index} {state} {bias}, against the configuration")
    return config


def _activation(keys: _Keys, key: str) -> Activation:
    value = keys.value(key)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ModelError(
            f"{keys.where}: activation {value!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def _layers(keys: _Keys, head_dim: int, context: int) -> tuple[LayerSpec, ...]:
    count = check_layer_count(keys.integer("num_hidden_layers"))
    sliding = _sliding(keys, count)
    window = keys.optional_integer("sliding_window")
    if any(sliding) and window is None:
        raise ModelError(f"{keys.where}: layers are sliding_attention, but sliding_window is not given")
    globals_, locals_ = _ropes(keys, head_dim, context)
    return tuple(LayerSpec(locals_, window) if slides else LayerSpec(globals_) for slides in sliding)


def _sliding(keys: _Keys, count: int) -> list[bool]:
    """Which layers slide, by the rule of each family's configuration class."""
    family = keys.family
    if family == "llama":
        return [False] * count
    if family == "mistral":  # its model code windows all layers or none, whatever layer_types say
        return [keys.optional_integer("sliding_window") is not None] * count
    types = keys.value("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != count or any(kind not in known for kind in types):
            raise ModelError(
                f"{keys.where}: layer_types must be {count} of full_attention and sliding_attention, "
                f"got {types!r:.200}"
            )
        slides = [kind == "sliding_attention" for kind in types]
        if family.startswith("qwen") and not keys.value("use_sliding_window") and any(slides):
            raise ModelError(f"{keys.where}: layer_types slide, but use_sliding_window is false")
        return slides
    if family.startswith("qwen"):
        on = bool(keys.value("use_sliding_window")) and keys.value("sliding_window") is not None
        return [on and index >= keys.integer("max_window_layers") for index in range(count)]
    pattern = 2
    if family == "gemma3":
        pattern = keys.integer("sliding_window_pattern", 6)
        if pattern <= 0:
            raise ModelError(f"{keys.where}: sliding_window_pattern must be positive, got {pattern}")
    return [bool((index + 1) % pattern) for index in range(count)]


def _ropes(keys: _Keys, head_dim: int, context: int) -> tuple[RopeSpec, RopeSpec]:
    """The rope of global and of sliding layers (one and the same outside Gemma 3)."""
    old, new = keys.mapping("rope_scaling"), keys.mapping("rope_parameters")
    layer_kinds = ("full_attention", "sliding_attention")
    if keys.family != "gemma3":
        parameters = dict(old or new or {})  # transformers prefers the old name where both are given
        if any(kind in parameters for kind in layer_kinds):
            raise ModelError(f"{keys.where}: {keys.family} takes no rope parameters by layer type")
        parameters.setdefault("rope_theta", keys.number("rope_theta", 10_000.0))
        parameters.setdefault("partial_rotary_factor", keys.value("partial_rotary_factor"))
        rope = _rope(keys, parameters, head_dim, context, parameters.get("truncate", True))
        return rope, rope
    if set(new) - set(layer_kinds) or any(kind in old for kind in layer_kinds):
        raise ModelError(
            f"{keys.where}: gemma3 rope_parameters must be given by layer type, got {new or old}"
        )
    ropes = []
    for kind, theta_key, theta in zip(
        layer_kinds, ("rope_theta", "rope_local_base_freq"), (1_000_000.0, 10_000.0), strict=True
    ):
        parameters = new.get(kind) or {}
        if not isinstance(parameters, dict):
            raise ModelError(
                f"{keys.where}: rope_parameters of {kind} are {parameters!r}, expected an object"
            )
        parameters = dict(parameters)
        if kind == "full_attention":
            parameters |= old
        parameters.setdefault("rope_theta", keys.number(theta_key, theta))
        # transformers looks for `truncate` beside the layer types, where it never is
        ropes.append(_rope(keys, parameters, head_dim, context, True))
    return ropes[0], ropes[1]


def _rope(keys: _Keys, parameters: Mapping[str, Any], head_dim: int, context: int, truncate: Any) -> RopeSpec:
    theta = parameters["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not abs(theta) < MAX_NUMBER:
        raise ModelError(f"{keys.where}: rope_theta must be a number below 2^48, got {theta!r}")
    original = keys.optional_integer("original_max_position_embeddings")
    try:
        return resolve_rope(theta, head_dim, scaling_from_hf(parameters, context, original, truncate))
    except ModelError as error:
        raise ModelError(f"{keys.where}: {error}") from error


class _Keys:
    """The configuration with its family's defaults, read by checked type. null counts as absent only
    where the configuration class takes None."""

    def __init__(self, where: Path, family: str, given: Mapping[str, Any]) -> None:
        self.where = where
        self.family = family
        self._values = _DEFAULTS[family] | dict(given)

    def value(self, key: str) -> Any:
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_NUMBER:
            raise ModelError(f"{self.where}: {key} must be an integer from 0 to 2^48, got {value!r:.80}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.value(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
            raise ModelError(f"{self.where}: {key} must be a number below 2^48, got {value!r:.80}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.value(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ModelError(f"{self.where}: {key} must be an object, got {value!r:.80}")
        return value

    def softcap(self, key: str) -> float | None:
        """A soft cap in logits, None where the configuration says null."""
        if self.value(key) is None:
            return None
        value = self.number(key)
        if value <= 0:
            raise ModelError(f"{self.where}: {key} must be positive, got {value}")
        return float(value)

    def has_bias(self, bias: str) -> bool:
        """Whether the family's linear layers have that bias under this configuration."""
        if bias in ("gate_bias", "up_bias", "down_bias"):
            return self.family == "llama" and bool(self.value("mlp_bias"))
        if self.family == "qwen2":
            return bias != "o_bias"
        return self.family != "mistral" and bool(self.value("attention_bias"))

    def refuse_unsupported(self, outer: Mapping[str, Any]) -> None:
        """Traits that would change the computation in a way that we do not do, by name."""
        for key in ("quantization_config", "compression_config"):
            if outer.get(key) is not None or self.value(key) is not None:
                raise ModelError(f"{self.where}: {key} is not supported; use float weights or a GGUF file")
        if self.value("use_bidirectional_attention"):
            raise ModelError(f"{self.where}: use_bidirectional_attention is not supported")
        if self.family == "gemma3" and self.value("attn_logit_softcapping") is not None:
            raise ModelError(f"{self.where}: gemma3 has no attention soft cap, the configuration gives one")
        for key in ("num_local_experts", "num_experts"):
            if self.value(key):
                raise ModelError(f"{self.where}: {key}: mixtures of experts are not supported")
