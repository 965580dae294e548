"""A GGUF file's metadata -> ModelConfig, with llama.cpp's defaults where the file is silent.

Keys are those of the GGUF specification and of `gguf.constants`; defaults and exceptions are those of
llama.cpp's `llama-model.cpp` (hyperparameters per architecture).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.config import Activation, LayerSpec, ModelConfig, RopeSpec
from larql_kv.model.gguf_file import GgufArray, GgufFile
from larql_kv.model.rope import MAX_NUMBER, RopeScaling, divide_frequencies, resolve_rope, yarn_mscale
from larql_kv.model.shapes import check_layer_count, check_sizes

SUPPORTED = ("llama", "gemma2", "gemma3", "qwen2", "qwen3")
_GEMMA = ("gemma2", "gemma3")
# Every how-many-th layer is global where the file gives a window but no pattern.
_PATTERN = {"gemma2": 2, "gemma3": 6}
# Gemma 27B scales by sqrt(hidden/heads) instead of sqrt(head_dim); llama.cpp knows it by its layer count.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# Values other than these change the computation in a way that we do not do.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0,),
    "use_parallel_residual": (False,),
}


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Shapes and traits of the model in `file`.

    Raises ModelError for an architecture, a mixture of experts or a trait that is not supported (by
    name), for missing keys and for sizes that contradict each other or the embedding's shape.
    """
    architecture = file.get("general.architecture", str)
    if architecture not in SUPPORTED:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    if file.get("split.count", int, 1) > 1:
        raise ModelError(f"{file.path}: one part of a split model; join it with `llama-gguf-split --merge`")
    keys = _Keys(file, architecture)
    keys.refuse_unsupported()

    layer_count = check_layer_count(keys.integer("block_count"))
    hidden = keys.integer("embedding_length")
    heads = keys.uniform("attention.head_count", layer_count)
    kv_heads = keys.uniform("attention.head_count_kv", layer_count, default=heads)
    head_dim = keys.optional_integer("attention.key_length")
    if heads == 0 or hidden == 0 or head_dim == 0:
        raise ModelError(f"{file.path}: {hidden} elements, {heads} heads of {head_dim} elements")
    if head_dim is None:
        if hidden % heads:
            raise ModelError(f"{file.path}: embedding length {hidden} is no multiple of {heads} heads")
        head_dim = hidden // heads
    value_dim = keys.optional_integer("attention.value_length")
    if value_dim is not None and value_dim != head_dim:
        raise ModelError(
            f"{file.path}: value heads of {value_dim} elements, key heads of {head_dim}; they must be equal"
        )
    gemma = architecture in _GEMMA
    activation: Activation = "gelu_tanh" if gemma else "silu"
    config = ModelConfig(
        architecture=architecture,
        name=file.get("general.name", str, file.path.stem),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=keys.uniform("feed_forward_length", layer_count),
        vocab=_vocabulary(file, keys, hidden),
        context=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        activation=activation,
        layers=(),
        attention_scale=_attention_scale(keys, layer_count, hidden, heads, head_dim),
        # transformers holds the normaliser in the weights' dtype; ours is a float32 model.
        embedding_scale=float(np.float32(hidden**0.5)) if gemma else 1.0,
        attention_softcap=keys.softcap("attn_logit_softcapping", 50.0) if architecture == "gemma2" else None,
        final_softcap=keys.softcap("final_logit_softcapping", 30.0 if architecture == "gemma2" else None),
        qk_norm=architecture in ("gemma3", "qwen3"),
        post_norms=gemma,
        tied="output.weight" not in file.tensors,
    )
    check_sizes(config)
    return replace(config, layers=_layers(file, keys, config, layer_count))


def _vocabulary(file: GgufFile, keys: _Keys, hidden: int) -> int:
    """Rows of the embedding; the tokens array and `vocab_size` may be shorter (padding), not longer."""
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise ModelError(f"{file.path}: the model lacks tensor 'token_embd.weight'")
    if len(embed.shape) != 2 or embed.shape[1] != hidden:
        raise ModelError(
            f"{file.path}: tensor 'token_embd.weight' has shape {embed.shape}, "
            f"expected (vocabulary, {hidden})"
        )
    rows = embed.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    claimed = len(tokens) if isinstance(tokens, GgufArray) else keys.optional_integer("vocab_size")
    if claimed is not None and claimed > rows:
        raise ModelError(
            f"{file.path}: a vocabulary of {claimed} tokens, but 'token_embd.weight' has {rows} rows"
        )
    return rows


def _attention_scale(keys: _Keys, layer_count: int, hidden: int, heads: int, head_dim: int) -> float:
    scale = keys.optional_number("attention.scale")
    if scale:  # llama.cpp writes 0 for "the default"
        if not 0 < scale < math.inf:
            raise ModelError(f"{keys.file.path}: attention.scale must be positive, got {scale}")
        return scale
    if layer_count == _GEMMA_27B_LAYERS.get(keys.architecture):
        return (hidden // heads) ** -0.5
    return head_dim**-0.5


def _layers(file: GgufFile, keys: _Keys, config: ModelConfig, count: int) -> tuple[LayerSpec, ...]:
    windows = _windows(keys, count)
    head_dim = config.head_dim
    for key in (
        "rope.dimension_count",
        "rope.dimension_count_swa",
        "attention.key_length_swa",
        "attention.value_length_swa",
    ):
        if keys.optional_integer(key) not in (None, head_dim):
            raise ModelError(
                f"{file.path}: {keys.architecture}.{key} = {keys.value(key)}, expected the head's "
                f"{head_dim}: heads are rotated whole and are of one size"
            )
    base = keys.optional_number("rope.freq_base") or (1e6 if keys.architecture == "gemma3" else 1e4)
    rope = resolve_rope(base, head_dim, _scaling(keys, config.context))
    rope = _with_factors(file, rope)
    local = rope
    if keys.architecture == "gemma3":
        # Sliding layers have a base of their own and are never stretched (llama.cpp: freq_scale_swa 1).
        local = resolve_rope(keys.optional_number("rope.freq_base_swa") or 1e4, head_dim)
    elif keys.optional_number("rope.freq_base_swa") not in (None, 0.0, base):
        raise ModelError(f"{file.path}: rope.freq_base_swa is not supported for {keys.architecture}")
    return tuple(LayerSpec(rope if window is None else local, window) for window in windows)


def _windows(keys: _Keys, count: int) -> list[int | None]:
    """The window of each layer, None for a global one.

    The pattern is an integer n (every n-th layer is global) or one flag per layer (true: sliding). A
    window without a pattern: Gemma's own pattern; all layers for llama (Mistral); none for Qwen, whose
    converters copy the key from a config that does not use it (llama.cpp ignores it too).
    """
    window = keys.optional_integer("attention.sliding_window")
    if not window:
        if keys.architecture == "gemma2":
            window = 4096
        else:
            return [None] * count
    pattern = keys.value("attention.sliding_window_pattern")
    if isinstance(pattern, GgufArray):
        flags = pattern.tolist()
        if len(flags) != count or not all(flag in (0, 1) for flag in flags):
            raise ModelError(
                f"{keys.file.path}: attention.sliding_window_pattern has {len(flags)} entries, "
                f"expected {count} booleans"
            )
        return [window if flag else None for flag in flags]
    if pattern is not None and (isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 0):
        raise ModelError(
            f"{keys.file.path}: attention.sliding_window_pattern must be a non-negative integer or a "
            f"boolean array, got {pattern!r}"
        )
    if pattern is None:
        if keys.architecture in ("qwen2", "qwen3"):
            return [None] * count
        pattern = _PATTERN.get(keys.architecture, 0)
    return [window if pattern == 0 or (index + 1) % pattern else None for index in range(count)]


def _scaling(keys: _Keys, context: int) -> RopeScaling:
    kind = keys.text("rope.scaling.type")
    legacy = keys.optional_number("rope.scale_linear")
    if kind is None:
        kind = "linear" if legacy else "none"
    # 0 in either key means "not set" (llama.cpp), i.e. nothing is stretched.
    factor = keys.optional_number("rope.scaling.factor") or legacy or 1.0
    attention = keys.optional_number("rope.scaling.attn_factor") or 1.0
    if kind != "yarn":
        if attention != 1.0:
            raise ModelError(f"{keys.file.path}: rope.scaling.attn_factor {attention} without yarn scaling")
        return RopeScaling(kind=kind, factor=factor)
    attention *= keys.optional_number("rope.scaling.yarn_attn_factor") or 1.0
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=keys.optional_integer("rope.scaling.original_context_length") or context,
        beta_fast=keys.optional_number("rope.scaling.yarn_beta_fast") or 32.0,
        beta_slow=keys.optional_number("rope.scaling.yarn_beta_slow") or 1.0,
        # llama.cpp multiplies the file's factor by the paper's (ggml `rope_yarn`).
        attention_factor=yarn_mscale(factor) * attention,
    )


def _with_factors(file: GgufFile, rope: RopeSpec) -> RopeSpec:
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise ModelError(f"{file.path}: tensor {name!r}: RoPE scaling 'longrope' is not supported")
    factors = file.tensors.get("rope_freqs.weight")
    return rope if factors is None else divide_frequencies(rope, factors.dequantize())


class _Keys:
    """The metadata of one architecture, by the key's tail and of a checked type."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def value(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str) -> int:
        return self._sane(key, self.file.get(f"{self.architecture}.{key}", int))

    def optional_integer(self, key: str) -> int | None:
        value = self.file.get(f"{self.architecture}.{key}", int, None)
        return None if value is None else self._sane(key, value)

    def _sane(self, key: str, value: int) -> int:
        if not 0 <= value < MAX_NUMBER:
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} = {value}, expected 0 to 2^48")
        return value

    def number(self, key: str) -> float:
        return self.file.get(f"{self.architecture}.{key}", float)

    def optional_number(self, key: str) -> float | None:
        return self.file.get(f"{self.architecture}.{key}", float, None)

    def text(self, key: str) -> str | None:
        return self.file.get(f"{self.architecture}.{key}", str, None)

    def uniform(self, key: str, count: int, default: int | None = None) -> int:
        """An integer, or an array of one per layer whose entries are all equal."""
        value = self.value(key)
        if isinstance(value, GgufArray):
            entries = value.tolist()
            if len(entries) != count or len(set(entries)) != 1 or not isinstance(entries[0], int):
                raise ModelError(
                    f"{self.file.path}: {self.architecture}.{key} differs by layer, which is not supported"
                )
            return self._sane(key, entries[0])
        if value is None and default is not None:
            return default
        return self.integer(key)

    def softcap(self, key: str, default: float | None) -> float | None:
        """A soft cap in logits; 0 in the file means none."""
        value = self.optional_number(key)
        value = default if value is None else value
        if value is not None and not 0 <= value < float("inf"):
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} must be positive, got {value}")
        return value or None

    def refuse_unsupported(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self.value(key)
            if value is not None and value not in neutral:
                what = "mixtures of experts are" if key == "expert_count" else "this trait is"
                raise ModelError(
                    f"{self.file.path}: {self.architecture}.{key} = {value!r}: {what} not supported; "
                    f"supported: dense models of {', '.join(SUPPORTED)}"
                )
        if self.architecture == "gemma3" and self.value("attn_logit_softcapping"):
            raise ModelError(f"{self.file.path}: gemma3 has no attention soft cap, the file gives one")
