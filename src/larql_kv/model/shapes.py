"""Which tensors a configuration asks for, and in which shapes: one check for every file format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from larql_kv.errors import ModelError
from larql_kv.model.config import ModelConfig

BIASES = ("q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias")
# Far above any model in existence, far below what would hurt: a hostile header must not cost memory.
MAX_LAYERS = 1024
MAX_DIMENSION = 1 << 24
MAX_HEAD_DIM = 256  # what the attention kernels hold in registers and scratch


def check_sizes(config: ModelConfig) -> None:
    """Refuses sizes that no decoder can have. Raises ModelError naming the field and its value."""
    sizes = {
        "hidden size": config.hidden,
        "head count": config.heads,
        "key/value head count": config.kv_heads,
        "head dimension": config.head_dim,
        "feed-forward size": config.intermediate,
        "vocabulary": config.vocab,
        "context length": config.context,
    }
    for what, value in sizes.items():
        limit = MAX_DIMENSION * (64 if what == "context length" else 1)
        if not 0 < value <= limit:
            raise ModelError(f"{what} must be positive and at most {limit}, got {value}")
    if config.head_dim > MAX_HEAD_DIM or config.head_dim % 2:
        raise ModelError(
            "head dimension must be even (RoPE rotates pairs) and at most "
            f"{MAX_HEAD_DIM}, got {config.head_dim}"
        )
    if config.heads % config.kv_heads:
        raise ModelError(
            f"head count {config.heads} is not a multiple of the key/value head count {config.kv_heads}"
        )
    if not 0 < config.norm_eps < 1:
        raise ModelError(f"norm epsilon must lie between 0 and 1, got {config.norm_eps!r}")
    for index, layer in enumerate(config.layers):
        if layer.window is not None and layer.window <= 0:
            raise ModelError(f"layer {index}: sliding window must be positive, got {layer.window}")


def check_layer_count(count: int) -> int:
    """`count`, or ModelError where it is no sane number of layers (checked before layers are built)."""
    if not 0 < count <= MAX_LAYERS:
        raise ModelError(f"layer count must lie between 1 and {MAX_LAYERS}, got {count}")
    return count


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that every layer must have, by canonical suffix (`q`, `ffn_norm`, ...)."""
    hidden, inner = config.hidden, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (config.q_dim, hidden),
        "k": (config.kv_dim, hidden),
        "v": (config.kv_dim, hidden),
        "o": (hidden, config.q_dim),
        "ffn_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.post_norms:
        shapes |= {"post_attn_norm": (hidden,), "post_ffn_norm": (hidden,)}
    return shapes


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Checks a source's tensors against the configuration, before any data is read.

    `found`: canonical name -> (name in the file, shape). Biases are optional, but all layers or none
    must have a given one. Raises ModelError naming the tensor and, for a shape, both shapes.
    """
    expected: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab, config.hidden),
        "final_norm": (config.hidden,),
    }
    if not config.tied:
        expected["head"] = (config.vocab, config.hidden)
    per_layer = layer_shapes(config)
    for bias in BIASES:
        if any(f"layers.{index}.{bias}" in found for index in range(config.layer_count)):
            per_layer[bias] = per_layer[bias.removesuffix("_bias")][:1]
    for index in range(config.layer_count):
        expected |= {f"layers.{index}.{suffix}": shape for suffix, shape in per_layer.items()}
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"the model lacks tensor {name!r}, expected with shape {shape}")
        file_name, actual = found[name]
        if actual != shape:
            raise ModelError(f"tensor {file_name!r} ({name}) has shape {actual}, expected {shape}")
    refuse_unknown(sorted(set(found) - expected.keys()))


def refuse_unknown(names: Iterable[str]) -> None:
    """A tensor nobody would use means another computation than ours: refuse rather than ignore it."""
    names = list(names)
    if names:
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise ModelError(
            f"the model has tensors that its architecture does not use here: {listed} "
            "(experts, adapters and quantisation side tensors are not supported)"
        )
