"""Kernels of the row operations. Sums of squares have four vectors of lanes and one tree: one order for
all."""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import types

from larql_kv.backends.cpu.runtime import kernel
from larql_kv.backends.cpu.simd import F32, I64, Emit, intrinsic, outlined, void_op
from larql_kv.backends.cpu.vmath import emit_activation

ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}
PARALLEL_FLOATS = 16384  # below this a parallel launch does not pay
_VOID = ir.VoidType()
Value = Any


def _each_vector(e: Emit, count: Value, step: Callable[[Value, Value | None], None]) -> None:
    """step(byte offset, mask) over `count` floats: whole vectors with mask None, then the masked rest."""
    with e.loop(e.b.lshr(count, e.i64(4))) as v:
        step(e.times(v, 64), None)
    rest = e.b.and_(count, e.i64(15))
    with e.b.if_then(e.b.icmp_signed("!=", rest, e.i64(0))):
        step(e.times(e.b.sub(count, rest), 4), e.mask_below(rest))


def _load(e: Emit, at: Value, off: Value, mask: Value | None) -> Value:
    return e.load(at, off) if mask is None else e.load_masked(e.plus(at, off), mask)


def _store(e: Emit, at: Value, off: Value, v: Value, mask: Value | None) -> None:
    if mask is None:
        e.store(at, v, off)
    else:
        e.store_masked(e.plus(at, off), v, mask)


def _squares_body(rounded: bool) -> Callable[..., Value]:
    def body(e: Emit, x: Value, count: Value) -> Value:
        sums = [e.var(e.const(0.0)) for _ in range(4)]

        def square(off: Value, mask: Value | None, slot: Any) -> None:
            v = _load(e, x, off, mask)
            v = e.round_bf16(v) if rounded else v
            e.set(slot, e.fma(v, v, e.get(slot)))

        with e.loop(e.b.lshr(count, e.i64(6))) as four:
            for j in range(4):
                square(e.plus(e.times(four, 256), 64 * j), None, sums[j])
        done = e.b.and_(count, e.i64(-64))
        _each_vector(
            e, e.b.sub(count, done), lambda off, mask: square(e.plus(e.times(done, 4), off), mask, sums[0])
        )
        pairs = [e.add(e.get(sums[0]), e.get(sums[1])), e.add(e.get(sums[2]), e.get(sums[3]))]
        return e.fold(e.add(*pairs), e.add)

    return body


@intrinsic
def sum_squares(_typing, x, count, rounded):
    """float32 sum of x[0..count)^2; rounded != 0: of the bf16-rounded values."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        plain = outlined(builder, "squares", [I64, I64], _squares_body(False), F32)
        rounded = outlined(builder, "squares_rounded", [I64, I64], _squares_body(True), F32)
        slot = Emit(builder).var(builder.call(plain, args[:2]))
        with builder.if_then(builder.icmp_signed("!=", args[2], ir.Constant(I64, 0))):
            builder.store(builder.call(rounded, args[:2]), slot)
        return builder.load(slot)

    return types.float32(types.int64, types.int64, types.int64), codegen


@intrinsic
def add_row(_typing, x, out, count):
    """out += x over `count` floats."""

    def outer(e: Emit, x: Value, out: Value, count: Value) -> None:
        def step(off: Value, mask: Value | None) -> None:
            _store(e, out, off, e.add(_load(e, out, off, mask), _load(e, x, off, mask)), mask)

        _each_vector(e, count, step)

    def body(e: Emit, *args: Value) -> None:
        e.b.call(outlined(e.b, "add", [I64] * 3, outer, _VOID), list(args))

    return void_op(body, 3)


def _norm_body(e: Emit, x: Value, out: Value, count: Value, weight: Value, mode: Value, inv: Value) -> None:
    """mode 0: out = (x*inv)*w; 1: the same of bf16-rounded x; 2: out += (x*inv)*w."""
    scale = e.splat(inv)
    is_rounded = e.b.icmp_signed("==", mode, e.i64(1))
    is_added = e.b.icmp_signed("==", mode, e.i64(2))

    def step(off: Value, mask: Value | None) -> None:
        v = _load(e, x, off, mask)
        v = e.pick(is_rounded, e.round_bf16(v), v)
        y = e.mul(e.mul(v, scale), _load(e, weight, off, mask))
        y = e.pick(is_added, e.add(_load(e, out, off, mask), y), y)
        _store(e, out, off, y, mask)

    _each_vector(e, count, step)


@intrinsic
def norm_row(_typing, x, out, count, weight, mode, inv):
    def body(e: Emit, *args: Value) -> None:
        e.b.call(outlined(e.b, "norm", [I64] * 5 + [F32], _norm_body, _VOID), list(args))

    return void_op(body, 5, 1)


def _rope_body(e: Emit, x: Value, cos: Value, sin: Value, half: Value) -> None:
    second = e.plus(x, e.times(half, 4))

    def step(off: Value, mask: Value | None) -> None:
        a, b = _load(e, x, off, mask), _load(e, second, off, mask)
        c, s = _load(e, cos, off, mask), _load(e, sin, off, mask)
        _store(e, x, off, e.sub(e.mul(a, c), e.mul(b, s)), mask)
        _store(e, second, off, e.add(e.mul(b, c), e.mul(a, s)), mask)

    _each_vector(e, half, step)


@intrinsic
def rope_row(_typing, x, cos, sin, half):
    def body(e: Emit, *args: Value) -> None:
        e.b.call(outlined(e.b, "rope", [I64] * 4, _rope_body, _VOID), list(args))

    return void_op(body, 4)


def _gated_body(name: str) -> Callable[..., None]:
    def body(e: Emit, gate: Value, up: Value, out: Value, count: Value) -> None:
        def step(off: Value, mask: Value | None) -> None:
            act = emit_activation(e, _load(e, gate, off, mask), name)
            _store(e, out, off, e.mul(act, _load(e, up, off, mask)), mask)

        _each_vector(e, count, step)

    return body


@intrinsic
def gated_row(_typing, gate, up, out, count, activation):
    """out = act(gate) * up over `count` floats."""

    def body(e: Emit, *args: Value) -> None:
        functions = [outlined(e.b, f"gated_{a}", [I64] * 4, _gated_body(a), _VOID) for a in ACTIVATION_CODES]
        with e.b.if_else(e.b.icmp_signed("==", args[4], e.i64(0))) as (silu, gelu):
            with silu:
                e.b.call(functions[0], list(args[:4]))
            with gelu:
                e.b.call(functions[1], list(args[:4]))

    return void_op(body, 5)


@intrinsic
def round_row(_typing, x, count):
    def outer(e: Emit, x: Value, count: Value) -> None:
        _each_vector(
            e, count, lambda off, mask: _store(e, x, off, e.round_bf16(_load(e, x, off, mask)), mask)
        )

    def body(e: Emit, *args: Value) -> None:
        e.b.call(outlined(e.b, "round", [I64] * 2, outer, _VOID), list(args))

    return void_op(body, 2)


@njit(inline="never", error_model="numpy")
def _inverse_rms(x, size, eps, rounded):
    mean = sum_squares(x, size, rounded) / np.float32(size)
    return np.float32(1.0) / np.float32(np.sqrt(mean + np.float32(eps)))


@njit(inline="never", error_model="numpy")
def norm_one(x, out, size, weight, mode, eps):
    norm_row(x, out, size, weight, mode, _inverse_rms(x, size, eps, 1 if mode == 1 else 0))


@kernel(ints=6, floats=1)
def norm_kernel(x, out, n, size, weight, mode, eps):
    for row in prange(n):
        norm_one(x + row * size * 4, out + row * size * 4, size, weight, mode, eps)


@kernel(ints=6, floats=1, parallel=False)
def norm_kernel_serial(x, out, n, size, weight, mode, eps):
    for row in range(n):
        norm_one(x + row * size * 4, out + row * size * 4, size, weight, mode, eps)


@njit(inline="never", error_model="numpy")
def rope_heads(q, k, row, heads, kv_heads, hd, cos, sin, half, q_norm, k_norm, eps):
    c, s = cos + row * half * 4, sin + row * half * 4
    for head in range(heads + kv_heads):
        if head < heads:
            x, weight = q + (row * heads + head) * hd * 4, q_norm
        else:
            x, weight = k + (row * kv_heads + head - heads) * hd * 4, k_norm
        if weight != 0:
            norm_one(x, x, hd, weight, 0, eps)
        rope_row(x, c, s, half)


@kernel(ints=11, floats=1)
def rope_kernel(q, k, n, heads, kv_heads, hd, cos, sin, half, q_norm, k_norm, eps):
    for row in prange(n):
        rope_heads(q, k, row, heads, kv_heads, hd, cos, sin, half, q_norm, k_norm, eps)


@kernel(ints=11, floats=1, parallel=False)
def rope_kernel_serial(q, k, n, heads, kv_heads, hd, cos, sin, half, q_norm, k_norm, eps):
    for row in range(n):
        rope_heads(q, k, row, heads, kv_heads, hd, cos, sin, half, q_norm, k_norm, eps)


@kernel(ints=5)
def gated_kernel(gate_up, out, n, size, activation):
    for row in prange(n):
        at = gate_up + row * size * 8
        gated_row(at, at + size * 4, out + row * size * 4, size, activation)


@kernel(ints=5, parallel=False)
def gated_kernel_serial(gate_up, out, n, size, activation):
    for row in range(n):
        at = gate_up + row * size * 8
        gated_row(at, at + size * 4, out + row * size * 4, size, activation)


@kernel(ints=2, parallel=False)
def round_kernel(x, count):
    round_row(x, count)
