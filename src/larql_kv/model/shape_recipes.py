"""The shapes of well-known models, and which format llama.cpp's quantiser gives each of their tensors.

Sizes are those of the models' public config.json files; formats follow `llama-quant.cpp` (`quantize` without
an importance matrix).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from larql_kv.errors import ModelError

DEFAULT_MIX = "q4_k_m"


@dataclass(frozen=True)
class Mix:
    """A quantisation recipe: the format of most matrices, of the sensitive ones, and of the head."""

    base: str
    sensitive: str  # value and down projections, on the layers that `_is_sensitive` names
    head: str  # the head, or the embedding where the head is tied to it
    file_type: int  # llama.cpp's LLAMA_FTYPE_*


MIXES = {
    "q4_k_m": Mix("Q4_K", "Q6_K", "Q6_K", 15),
    "q5_k_m": Mix("Q5_K", "Q6_K", "Q6_K", 17),
    "q8_0": Mix("Q8_0", "Q8_0", "Q8_0", 7),
    "q4_0": Mix("Q4_0", "Q4_0", "Q6_K", 2),
    "q4_1": Mix("Q4_1", "Q4_1", "Q6_K", 3),
    "bf16": Mix("BF16", "BF16", "BF16", 32),
    "f16": Mix("F16", "F16", "F16", 1),
}
# What stands in for a super-block of 256 where rows are no multiple of it.
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer and its quantisation mix. `replace` fields for a smaller one."""

    name: str
    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_base: float
    window: int | None = None  # tokens of the sliding layers
    linear_factor: float = 1.0  # positions of the global layers are divided by it
    llama3_factor: float = 1.0  # llama3 RoPE scaling (original context 8192, frequency factors 1 and 4)
    tied: bool = True
    mix: str = DEFAULT_MIX

    @property
    def label(self) -> str:
        """`gemma3-4b:q4_k_m`: what `parse_shape` reads."""
        return f"{self.name}:{self.mix}"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            *("gemma3-4b", "gemma3", 34, 2560, 10240, 8, 4, 256, 262144, 131072, 1e-6, 1e6),
            window=1024,
            linear_factor=8.0,
        ),
        Shape(
            *("gemma3-270m", "gemma3", 18, 640, 2048, 4, 1, 256, 262144, 32768, 1e-6, 1e6),
            window=512,
        ),
        Shape("qwen3-4b", "qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e-6, 1e6),
        Shape(
            *("llama3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5),
            llama3_factor=8.0,
            tied=False,
        ),
    )
}


def parse_shape(text: str) -> Shape:
    """`gemma3-4b` or `gemma3-4b:q8_0` -> the shape. Raises ModelError naming the known ones."""
    name, colon, mix = text.strip().lower().partition(":")
    if name not in SHAPES:
        raise ModelError(f"unknown shape {name[:80]!r}{_near(name, SHAPES)} known: {', '.join(SHAPES)}")
    if not colon:
        return SHAPES[name]
    if mix not in MIXES:
        raise ModelError(
            f"unknown quantisation mix {mix[:80]!r}{_near(mix, MIXES)} known: {', '.join(MIXES)}"
        )
    return replace(SHAPES[name], mix=mix)


def _near(name: str, known: dict) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else ";"


def tensor_table(shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF tensor name -> (ggml type, shape as (out, in) or (n,)), in file order; `rope_freqs` is not among
    them."""
    mix = MIXES[shape.mix]
    head = (shape.vocab, shape.hidden)
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": (_stored(mix.head if shape.tied else mix.base, shape.hidden), head)
    }
    if not shape.tied:
        table["output.weight"] = (_stored(mix.head, shape.hidden), head)
    table["output_norm.weight"] = ("F32", (shape.hidden,))
    for layer in range(shape.layers):
        for tail, size in _layer_tensors(shape):
            kind = "F32"
            if len(size) == 2:
                picked = tail in ("attn_v", "ffn_down") and _is_sensitive(layer, shape.layers)
                kind = _stored(mix.sensitive if picked else mix.base, size[1])
            table[f"blk.{layer}.{tail}.weight"] = (kind, size)
    return table


def _layer_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head_dim = shape.hidden, shape.intermediate, shape.head_dim
    q_dim, kv_dim = shape.heads * head_dim, shape.kv_heads * head_dim
    gemma = shape.architecture == "gemma3"
    yield "attn_norm", (hidden,)
    yield from (("attn_q", (q_dim, hidden)), ("attn_k", (kv_dim, hidden)), ("attn_v", (kv_dim, hidden)))
    yield "attn_output", (hidden, q_dim)
    if shape.architecture in ("gemma3", "qwen3"):
        yield from (("attn_q_norm", (head_dim,)), ("attn_k_norm", (head_dim,)))
    if gemma:
        yield "post_attention_norm", (hidden,)
    yield "ffn_norm", (hidden,)
    yield from (("ffn_gate", (inner, hidden)), ("ffn_up", (inner, hidden)), ("ffn_down", (hidden, inner)))
    if gemma:
        yield "post_ffw_norm", (hidden,)


def _is_sensitive(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third one between (`use_more_bits`)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _stored(kind: str, columns: int) -> str:
    """The format of rows of `columns` elements that should become `kind`."""
    if columns % 256:
        kind = _FALLBACK.get(kind, kind)
    return kind if kind in ("F16", "BF16") or columns % 32 == 0 else "F16"
