"""A decoder in float64 numpy, straight from a ModelConfig and a TensorSource: slow, short, obvious.

It checks that configuration and tensors mean what transformers means by them, without the package's own
forward pass or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from larql_kv.model.config import LayerSpec, ModelConfig
from larql_kv.model.tensors import TensorSource


def logits(config: ModelConfig, source: TensorSource, ids: Sequence[int]) -> np.ndarray:
    """Logits (n, vocab) float64 of all positions."""

    def get(name: str) -> np.ndarray:
        return source.get(name).dequantize().astype(np.float64)

    h = get("embed")[list(ids)] * config.embedding_scale
    for index, spec in enumerate(config.layers):
        h = _layer(config, spec, source, f"layers.{index}.", h)
    h = _norm(h, get("final_norm"), config.norm_eps)
    out = h @ get("embed" if config.tied else "head").T
    return out if config.final_softcap is None else np.tanh(out / config.final_softcap) * config.final_softcap


def _layer(config: ModelConfig, spec: LayerSpec, source: TensorSource, at: str, h: np.ndarray) -> np.ndarray:
    def get(name: str) -> np.ndarray:
        return source.get(at + name).dequantize().astype(np.float64)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        y = x @ get(name).T
        return y + get(f"{name}_bias") if f"{at}{name}_bias" in source else y

    n, eps = len(h), config.norm_eps
    x = _norm(h, get("attn_norm"), eps)
    q = linear("q", x).reshape(n, config.heads, config.head_dim)
    k = linear("k", x).reshape(n, config.kv_heads, config.head_dim)
    v = linear("v", x).reshape(n, config.kv_heads, config.head_dim)
    if config.qk_norm:
        q, k = _norm(q, get("q_norm"), eps), _norm(k, get("k_norm"), eps)
    q, k = _rotate(q, spec), _rotate(k, spec)
    group = config.heads // config.kv_heads
    scores = np.einsum("qhd,khd->hqk", q, k.repeat(group, 1)) * config.attention_scale
    if config.attention_softcap is not None:
        scores = np.tanh(scores / config.attention_softcap) * config.attention_softcap
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    allowed = (distance >= 0) & (distance < (spec.window or n))
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", weights, v.repeat(group, 1)).reshape(n, -1)
    out = linear("o", attended)
    h = h + (_norm(out, get("post_attn_norm"), eps) if config.post_norms else out)
    x = _norm(h, get("ffn_norm"), eps)
    out = linear("down", _activate(config, linear("gate", x)) * linear("up", x))
    return h + (_norm(out, get("post_ffn_norm"), eps) if config.post_norms else out)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, spec: LayerSpec) -> np.ndarray:
    angles = np.arange(len(x))[:, None, None] * np.array(spec.rope.inv_freq)
    cos, sin = np.cos(angles) * spec.rope.attention_factor, np.sin(angles) * spec.rope.attention_factor
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _activate(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
