"""Elementwise functions on 16-lane vectors, each lane's bits a function of that lane's input only."""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

from typing import Any

from larql_kv.backends.cpu.simd import VF, VI, Emit

Value = Any

# exp(r) on |r| <= ln(2)/2: minimax polynomial of Cephes `expf` (1/2 + r/6 ... as r^2*P(r) + r + 1).
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# tanh(x) = x + x^3 * P(x^2) on |x| < 0.625 (Cephes `tanhf`).
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # high part exact in 9 bits (Cody and Waite)
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits


def emit_exp(e: Emit, x: Value) -> Value:
    """exp(x) to about 1 ulp; 0 below -87.33 (also for -inf), held at exp(88.37) above 88.37; NaN stays
    NaN."""
    y = e.min(x, e.const(88.3762626647949))
    shifted = e.fma(y, e.const(1.4426950408889634), e.const(_ROUND))
    n = e.sub(shifted, e.const(_ROUND))
    r = e.fma(n, e.const(-_LN2_LOW), e.fma(n, e.const(-_LN2_HIGH), y))
    p = e.const(_EXP[0])
    for coefficient in _EXP[1:]:
        p = e.fma(p, r, e.const(coefficient))
    p = e.add(e.fma(e.mul(r, r), p, r), e.const(1.0))
    # 2^n by the exponent bits: the low bits of `shifted` are n (two's complement).
    exponent = e.b.shl(e.b.bitcast(shifted, VI), e.ints(23))
    scaled = e.b.bitcast(e.b.add(e.b.bitcast(p, VI), exponent), VF)
    return e.pick(e.less(x, e.const(-87.33654)), e.const(0.0), scaled)


def emit_tanh(e: Emit, x: Value) -> Value:
    """tanh(x) to a relative error of about 2e-7."""
    size = e.abs(x)
    z = e.mul(x, x)
    p = e.const(_TANH[0])
    for coefficient in _TANH[1:]:
        p = e.fma(p, z, e.const(coefficient))
    small = e.fma(e.mul(x, z), p, x)
    grown = emit_exp(e, e.add(size, size))
    big = e.sub(e.const(1.0), e.div(e.const(2.0), e.add(grown, e.const(1.0))))
    sign = e.b.and_(e.b.bitcast(x, VI), e.ints(-(1 << 31)))
    signed = e.b.bitcast(e.b.or_(e.b.bitcast(big, VI), sign), VF)
    return e.pick(e.less(size, e.const(0.625)), small, signed)


def emit_activation(e: Emit, gate: Value, name: str) -> Value:
    """silu(g) = g / (1 + exp(-g)); gelu_tanh(g) = g / (1 + exp(-2u)), u = sqrt(2/pi) (g + 0.044715 g^3)
    (= 0.5 g (1 + tanh u), without its cancellation)."""
    if name == "silu":
        argument = e.neg(gate)
    else:
        cubed = e.mul(e.mul(gate, gate), gate)
        inner = e.fma(cubed, e.const(0.044715), gate)
        argument = e.mul(inner, e.const(-2.0 * 0.7978845608028654))
    return e.div(gate, e.add(e.const(1.0), emit_exp(e, argument)))
