"""What the forward pass must know of a model, whichever file format it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer (half-split, as Hugging Face computes it).

    `inv_freq` holds the final inverse frequencies, (dim/2,), after any scaling (linear, llama3,
    yarn); `attention_factor` multiplies cos and sin (yarn; 1.0 elsewhere). The pair is what the
    kernels need, so every scaling rule is resolved once, at load.
    """

    base: float
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    scaling: str = "none"  # for `larql info`: none, linear, llama3, yarn


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: `window` is the sliding window in tokens, the query's own included."""

    rope: RopeSpec
    window: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and traits of a decoder-only transformer. All sizes in elements or tokens."""

    architecture: str  # as the file names it: llama, gemma3, qwen3, ...
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    norm_eps: float
    activation: Activation
    layers: tuple[LayerSpec, ...]
    attention_scale: float  # multiplies q.k
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    qk_norm: bool = False
    post_norms: bool = False  # Gemma: norms after attention and FFN, before the residual add
    tied: bool = False
    # What a layer's K/V are a function of. A family with more inputs (shared K/V, relative positions)
    # says so here, and engines that keep residual rows refuse it.
    kv_inputs: frozenset[str] = frozenset({"residual", "position"})

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def kv_dim(self) -> int:
        """Elements of one K (or V) row: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim
