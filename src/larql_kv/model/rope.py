"""Rotary position embedding: every scaling rule resolved to inverse frequencies, and the cos/sin table.

Formulas and their float32 order of operations are those of `modeling_rope_utils.py` in transformers
5.24 (`ROPE_INIT_FUNCTIONS` and `compute_default_rope_parameters`), so the bits agree with it; the
GGUF keys and their defaults are those of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from larql_kv.errors import ModelError
from larql_kv.model.config import RopeSpec

SUPPORTED_SCALING = ("none", "linear", "llama3", "yarn")
# Above every number of a configuration; keeps integers of a hostile one out of float arithmetic.
MAX_NUMBER = 1 << 48
# Rows of the cos/sin table are computed in blocks at absolute positions, so the bits of a row depend
# neither on who asked for it first nor on how many rows were asked for.
_BLOCK = 256


@dataclass(frozen=True)
class RopeScaling:
    """One scaling rule with its parameters; fields that a rule does not use are ignored.

    `attention_factor` None means the paper's default for yarn, 0.1 ln(factor) + 1.
    """

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def resolve_rope(base: float, dim: int, scaling: RopeScaling | None = None) -> RopeSpec:
    """The final inverse frequencies, (dim/2,) float32 values, and attention factor of one rule.

    `dim` is the rotated width, in elements (here always the whole head). Raises ModelError for a rule
    that is not supported (dynamic and longrope change with the length of the text, so a row once
    written would go stale), for an odd `dim` and for parameters that are no usable numbers.
    """
    scaling = scaling or RopeScaling()
    if scaling.kind not in SUPPORTED_SCALING:
        raise ModelError(
            f"RoPE scaling {scaling.kind!r} is not supported; supported: {', '.join(SUPPORTED_SCALING)}"
        )
    if dim <= 0 or dim % 2:
        raise ModelError(f"RoPE needs an even, positive head dimension, got {dim}")
    if not (math.isfinite(base) and base > 1):
        raise ModelError(f"RoPE base must be a finite number above 1, got {base!r}")
    _check_scaling(scaling)
    # The integer ladder is exact in float32, so the two spellings in transformers give equal bits.
    pos_freqs = base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    inv_freq = 1.0 / pos_freqs
    attention_factor = 1.0
    if scaling.kind == "linear":
        inv_freq /= scaling.factor
    elif scaling.kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling)
    elif scaling.kind == "yarn":
        inv_freq, attention_factor = _yarn(pos_freqs, base, dim, scaling)
    if not bool(torch.isfinite(inv_freq).all()):
        raise ModelError(f"RoPE scaling {scaling} gives inverse frequencies that are not finite")
    return RopeSpec(float(base), tuple(inv_freq.tolist()), attention_factor, scaling.kind)


def divide_frequencies(spec: RopeSpec, factors: np.ndarray) -> RopeSpec:
    """`spec` with each inverse frequency divided by its factor, (dim/2,) float32, as `rope_freqs.weight`
    of a GGUF file asks (this is how llama.cpp's converter stores llama3 scaling)."""
    if factors.shape != (len(spec.inv_freq),):
        raise ModelError(
            f"tensor rope_freqs.weight has shape {tuple(factors.shape)}, expected ({len(spec.inv_freq)},)"
        )
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError("tensor rope_freqs.weight holds factors that are not positive numbers")
    inv_freq = np.asarray(spec.inv_freq, dtype=np.float32) / factors.astype(np.float32)
    kind = spec.scaling
    if kind == "none" and bool((factors != 1).any()):
        kind = "llama3"
    return replace(spec, inv_freq=tuple(inv_freq.tolist()), scaling=kind)


def _check_scaling(scaling: RopeScaling) -> None:
    if scaling.kind == "none":
        return
    if not (math.isfinite(scaling.factor) and scaling.factor > 0):
        raise ModelError(f"RoPE scaling {scaling.kind!r}: factor must be positive, got {scaling.factor!r}")
    if scaling.kind == "linear":
        return
    if scaling.original_context <= 0:
        raise ModelError(
            f"RoPE scaling {scaling.kind!r}: original context must be positive, "
            f"got {scaling.original_context}"
        )
    if scaling.kind == "llama3" and not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise ModelError(
            "RoPE scaling 'llama3': needs 0 < low_freq_factor < high_freq_factor, "
            f"got {scaling.low_freq_factor} and {scaling.high_freq_factor}"
        )
    if scaling.kind == "yarn" and not (scaling.beta_fast > 0 and scaling.beta_slow > 0):
        raise ModelError(
            f"RoPE scaling 'yarn': betas must be positive, got {scaling.beta_fast} and {scaling.beta_slow}"
        )


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    low_wavelen = scaling.original_context / low
    high_wavelen = scaling.original_context / high
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_wavelen, inv_freq / scaling.factor, inv_freq)
    smooth = (scaling.original_context / wavelen - low) / (high - low)
    smoothed = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_medium = ~(wavelen < high_wavelen) * ~(wavelen > low_wavelen)
    return torch.where(is_medium, smoothed, scaled)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention factor: 0.1 * mscale * ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(pos_freqs: torch.Tensor, base: float, dim: int, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, extrapolate fast ones, ramp between."""
    factor = scaling.factor
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        if scaling.mscale and scaling.mscale_all_dim:
            attention_factor = yarn_mscale(factor, scaling.mscale) / yarn_mscale(
                factor, scaling.mscale_all_dim
            )
        else:
            attention_factor = yarn_mscale(factor)

    def correction(rotations: float) -> float:
        wave = scaling.original_context / (rotations * 2 * math.pi)
        return (dim * math.log(wave)) / (2 * math.log(base))

    low, high = correction(scaling.beta_fast), correction(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # else the ramp divides by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    extrapolated = 1 - ramp
    inv_freq = (1.0 / (factor * pos_freqs)) * (1 - extrapolated) + (1.0 / pos_freqs) * extrapolated
    return inv_freq, float(attention_factor)


def scaling_from_hf(
    parameters: Mapping[str, Any], context: int, original_context: int | None = None, truncate: Any = True
) -> RopeScaling:
    """The rule in one flat Hugging Face `rope_parameters` (or old `rope_scaling`) dict.

    `original_context` is a top-level `original_max_position_embeddings`, which transformers prefers;
    `context` stands in where neither is given. `truncate` is a separate argument since transformers
    reads it from the outer dict even when the parameters are nested by layer type.
    Raises ModelError for missing or non-numeric parameters and for partial rotary factors below 1.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "none" if kind in ("default", None) else str(kind)
    partial = parameters.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial!r} is not supported; only whole heads are rotated")
    if kind not in SUPPORTED_SCALING or kind == "none":
        return RopeScaling(kind=kind)

    def number(key: str, default: float | None = None) -> float:
        value = parameters.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
            raise ModelError(f"RoPE scaling {kind!r}: {key} must be a number, got {value!r:.80}")
        return value

    if kind == "linear":
        return RopeScaling(kind=kind, factor=number("factor"))
    original = int(number("original_max_position_embeddings", context))
    original = original_context or original
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=number("factor"),
            original_context=original,
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    optional = {
        key: number(key)
        for key in ("attention_factor", "mscale", "mscale_all_dim")
        if parameters.get(key) is not None
    }
    return RopeScaling(
        kind=kind,
        factor=number("factor", context / original if original > 0 else None),
        original_context=original,
        beta_fast=number("beta_fast", 32) or 32,
        beta_slow=number("beta_slow", 1) or 1,
        truncate=bool(truncate),
        **optional,
    )


class RopeTable:
    """cos and sin of every position seen so far, grown by doubling; rows already there never change.

    Computed as transformers does (float32 position x float32 inv_freq, cos and sin in float32, times
    the attention factor), in fixed blocks of absolute positions, so a row's bits do not depend on the
    chunk it was asked for in. Threads may share a table: growing swaps both arrays at once.
    """

    def __init__(self, spec: RopeSpec) -> None:
        self.spec = spec
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32)
        empty = torch.empty(0, len(spec.inv_freq))
        self._tables = (empty, empty.clone())

    @property
    def nbytes(self) -> int:
        """Bytes held: both tables and the inverse frequencies."""
        return sum(table.nbytes for table in self._tables) + self._inv_freq.nbytes

    def rows(self, first_position: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions first_position .. first_position + n - 1, each float32 (n, dim/2).

        Both are views of the table: do not write to them. Raises ValueError for negative arguments.
        """
        if first_position < 0 or n < 0:
            raise ValueError(f"positions must not be negative, got first {first_position} and count {n}")
        end = first_position + n
        cos, sin = self._grown(end)
        return cos[first_position:end], sin[first_position:end]

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of an int64 tensor of positions, each float32 (*positions.shape, dim/2); copies."""
        if positions.numel() == 0:
            empty = torch.empty(*positions.shape, self._inv_freq.numel())
            return empty, empty.clone()
        if int(positions.min()) < 0:
            raise ValueError(f"positions must not be negative, got {int(positions.min())}")
        cos, sin = self._grown(int(positions.max()) + 1)
        return cos[positions], sin[positions]

    def _grown(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of at least `count` rows."""
        tables = self._tables
        have = tables[0].shape[0]
        if count <= have:
            return tables
        want = max(-(-count // _BLOCK) * _BLOCK, 2 * have)
        cos = torch.empty(want, self._inv_freq.numel())
        sin = torch.empty_like(cos)
        cos[:have], sin[:have] = tables
        for start in range(have, want, _BLOCK):
            positions = torch.arange(start, start + _BLOCK, dtype=torch.int64).float()
            angles = positions[:, None] * self._inv_freq
            cos[start : start + _BLOCK] = angles.cos() * self.spec.attention_factor
            sin[start : start + _BLOCK] = angles.sin() * self.spec.attention_factor
        self._tables = (cos, sin)
        return cos, sin
