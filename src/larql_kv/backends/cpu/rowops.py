"""Norms, rotary embedding, activations and rounding: float32 rows in, float32 rows out, each row by
itself."""

from __future__ import annotations

import torch
from torch import Tensor

from larql_kv.backends.cpu.linear import check_rows
from larql_kv.backends.cpu.rowop_kernels import (
    ACTIVATION_CODES,
    PARALLEL_FLOATS,
    gated_kernel,
    gated_kernel_serial,
    norm_kernel,
    norm_kernel_serial,
    rope_kernel,
    rope_kernel_serial,
    round_kernel,
)
from larql_kv.backends.cpu.runtime import sync_threads


def _check_weight(weight: Tensor, size: int) -> int:
    if weight.dtype is not torch.float32 or weight.shape != (size,) or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous float32 ({size},), got {weight.dtype} {tuple(weight.shape)}"
        )
    return weight.data_ptr()


def _norm(x: Tensor, out: Tensor, n: int, size: int, weight: Tensor, eps: float, mode: int) -> None:
    at = _check_weight(weight, size)
    if n * size >= PARALLEL_FLOATS:
        sync_threads()
        norm_kernel(x.data_ptr(), out.data_ptr(), n, size, at, mode, eps)
    else:  # a launch over threads costs more than it saves
        norm_kernel_serial(x.data_ptr(), out.data_ptr(), n, size, at, mode, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, round_input: bool = False) -> Tensor:
    """(x / sqrt(mean(x^2) + eps)) * weight by rows: x (n, H), weight (H,) float32 -> (n, H) float32.

    round_input: every x is first rounded to bf16 (nearest even), as a bf16 residual stream would hold it.
    """
    size = x.shape[-1]
    n = check_rows(x, size)
    out = torch.empty_like(x)
    _norm(x, out, n, size, weight, eps, 1 if round_input else 0)
    return out


def add_normed_(h: Tensor, y: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """h += rms_norm(y, weight), or h += y without a weight; in place, (n, H) float32. Returns h."""
    if h.shape != y.shape or h.dim() != 2:
        raise ValueError(f"h {tuple(h.shape)} and y {tuple(y.shape)} must be the same (n, H)")
    size = h.shape[1]
    n = check_rows(h, size, "h")
    if weight is None:
        return h.add_(y)
    check_rows(y, size, "y")
    _norm(y, h, n, size, weight, eps, 2)
    return h


def rope_qk_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """In place on q (n, Hq, hd) and k (n, Hkv, hd) float32: RMS norm of every head (where a weight (hd,) is
    given),
    then the half-split rotation of the first rot dimensions, cos and sin (n, rot/2) float32:
    x1*cos - x2*sin, x2*cos + x1*sin with x1 the first and x2 the second half of them (Hugging Face's
    rotate_half).
    """
    for name, t in (("q", q), ("k", k)):
        if t.dtype is not torch.float32 or t.dim() != 3 or not t.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 (n, heads, hd), got {t.dtype} {tuple(t.shape)}"
            )
    n, heads, hd = q.shape
    if k.shape[0] != n or k.shape[2] != hd:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit together")
    half = cos.shape[-1]
    for name, t in (("cos", cos), ("sin", sin)):
        if t.dtype is not torch.float32 or t.shape != (n, half) or not t.is_contiguous() or 2 * half > hd:
            raise ValueError(
                f"{name} must be contiguous float32 ({n}, rot/2), got {t.dtype} {tuple(t.shape)}"
            )
    args = (
        q.data_ptr(), k.data_ptr(), n, heads, k.shape[1], hd, cos.data_ptr(), sin.data_ptr(), half,
        0 if q_norm is None else _check_weight(q_norm, hd), 0 if k_norm is None else _check_weight(k_norm,
        hd),
    )  # fmt: skip
    if q.numel() >= PARALLEL_FLOATS:
        sync_threads()
        rope_kernel(*args, eps)
    else:
        rope_kernel_serial(*args, eps)


def round_bf16_(x: Tensor) -> Tensor:
    """Round every value to the nearest bf16 (ties to even), in place, float32 storage. Returns x."""
    if x.dtype is not torch.float32 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous float32, got {x.dtype} {tuple(x.shape)}")
    round_kernel(x.data_ptr(), x.numel())
    return x


def _activation(name: str) -> int:
    try:
        return ACTIVATION_CODES[name]
    except KeyError:
        raise ValueError(f"activation must be one of {sorted(ACTIVATION_CODES)}, got {name!r}") from None


def gated_act(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up: gate_up (n, 2F) float32, gate first -> (n, F). activation: "silu" or "gelu_tanh"."""
    code = _activation(activation)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be (n, 2F), got {tuple(gate_up.shape)}")
    n = check_rows(gate_up, gate_up.shape[1], "gate_up")
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(n, size)
    if out.numel() >= PARALLEL_FLOATS:
        sync_threads()
        gated_kernel(gate_up.data_ptr(), out.data_ptr(), n, size, code)
    else:
        gated_kernel_serial(gate_up.data_ptr(), out.data_ptr(), n, size, code)
    return out
