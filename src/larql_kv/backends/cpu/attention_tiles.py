"""Microkernels of attention: scores of key tiles, softmax of a row of scores, weighted sums of value rows.

What fixes the bits: a score is a function of its query and key row only (lanes d mod 16, then one tree); the
softmax denominator sums in lanes p mod 16 of the absolute position p; a weighted sum runs over p one after
the
other. So neither the place a row was read from nor the shape of the call can change a result.
"""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from larql_kv.backends.cpu.simd import F32, I64, LANES, Emit, intrinsic, outlined, void_op
from larql_kv.backends.cpu.vmath import emit_exp, emit_tanh

Value = Any
_VOID = ir.VoidType()


def _tree(e: Emit, sums: list[Value]) -> Value:
    """Lane i = the sum over the lanes of sums[i], for 16 vectors; the same tree for every i."""
    for step in (8, 4, 2, 1):
        first = [lane if lane % (2 * step) < step else lane - step + 16 for lane in range(LANES)]
        second = [lane + step if lane % (2 * step) < step else lane + 16 for lane in range(LANES)]
        sums = [
            e.add(e.shuffle(a, b, first), e.shuffle(a, b, second))
            for a, b in zip(sums[:step], sums[step : 2 * step], strict=True)
        ]
    return sums[0]


def _scores_body(is_bf16: bool) -> Callable[..., None]:
    def body(e: Emit, k: Value, k_stride: Value, count: Value, vectors: Value, *ends: Value) -> None:
        queries, scores = ends[:4], ends[4:]
        load, size = (e.load_bf16, 32) if is_bf16 else (e.load, 64)
        last = e.plus(count, -1)
        tiles = e.b.lshr(e.plus(count, 3), e.i64(2))
        with e.loop(tiles) as tile:
            keys = []
            for j in range(4):
                index = e.plus(e.times(tile, 4), j)
                index = e.b.select(e.b.icmp_signed("<", index, last), index, last)
                keys.append(e.plus(k, e.times(index, k_stride)))
            acc = [e.var(e.const(0.0)) for _ in range(16)]
            with e.loop(vectors) as v:
                kv = [load(key, e.times(v, size)) for key in keys]
                for i in range(4):
                    qv = e.load(queries[i], e.times(v, 64))
                    for j in range(4):
                        e.set(acc[4 * i + j], e.fma(qv, kv[j], e.get(acc[4 * i + j])))
            result = _tree(e, [e.get(slot) for slot in acc])
            left = e.b.sub(count, e.times(tile, 4))
            with e.b.if_else(e.b.icmp_signed(">=", left, e.i64(4))) as (full, partial):
                with full:
                    for i in range(4):
                        quarter = e.shuffle(result, result, range(4 * i, 4 * i + 4))
                        at = e.plus(scores[i], e.times(tile, 16))
                        e.b.store(quarter, e.b.inttoptr(at, quarter.type.as_pointer()), align=4)
                with partial:  # nothing past the end: another thread may own the next keys
                    for i in range(4):
                        for j in range(3):
                            one = e.b.extract_element(result, ir.Constant(ir.IntType(32), 4 * i + j))
                            at = e.plus(scores[i], e.plus(e.times(tile, 16), 4 * j))
                            with e.b.if_then(e.b.icmp_signed(">", left, e.i64(j))):
                                e.b.store(one, e.b.inttoptr(at, F32.as_pointer()), align=4)

    return body


@intrinsic
def scores_run(_typing, is_bf16, k, k_stride, count, vectors, q0, q1, q2, q3, s0, s1, s2, s3):
    """s_i[0..count) = dot(q_i, key row) for 4 queries.

    k: first key row (bf16 or float32), stride in bytes; vectors = padded head size / 16.
    """

    def body(e: Emit, is_bf16: Value, *args: Value) -> None:
        plain = outlined(e.b, "scores_f32", [I64] * 12, _scores_body(False), _VOID)
        half = outlined(e.b, "scores_bf16", [I64] * 12, _scores_body(True), _VOID)
        with e.b.if_else(e.b.icmp_signed("!=", is_bf16, e.i64(0))) as (then, other):
            with then:
                e.b.call(half, args)
            with other:
                e.b.call(plain, args)

    return void_op(body, 13)


def _sums_body(is_bf16: bool, queries: int, width: int) -> Callable[..., None]:
    def body(e: Emit, v: Value, v_stride: Value, count: Value, *ends: Value) -> None:
        weights, outs = ends[:queries], ends[queries:]
        load, size = (e.load_bf16, 32) if is_bf16 else (e.load, 64)
        acc = [[e.var(e.load(outs[i], 64 * c)) for c in range(width)] for i in range(queries)]
        with e.loop(count) as p:
            row = e.plus(v, e.times(p, v_stride))
            values = [load(row, size * c) for c in range(width)]
            for i in range(queries):
                weight = e.splat_load(weights[i], e.times(p, 4))
                for c in range(width):
                    e.set(acc[i][c], e.fma(weight, values[c], e.get(acc[i][c])))
        for i in range(queries):
            for c in range(width):
                e.store(outs[i], e.get(acc[i][c]), 64 * c)

    return body


def _sums(e: Emit, is_bf16: Value, width: Value, args: list[Value], queries: int) -> None:
    done = e.b.append_basic_block("done")
    switch = e.b.switch(e.plus(e.times(is_bf16, 8), width), done)
    for half in (0, 1):
        for w in (1, 2, 4):
            name = f"sums_{'bf16' if half else 'f32'}_{queries}_{w}"
            function = outlined(
                e.b, name, [I64] * (3 + 2 * queries), _sums_body(bool(half), queries, w), _VOID
            )
            block = e.b.append_basic_block(name)
            switch.add_case(ir.Constant(I64, 8 * half + w), block)
            with e.b.goto_block(block):
                e.b.call(function, args)
                e.b.branch(done)
    e.b.position_at_end(done)


@intrinsic
def sums_run_4(_typing, is_bf16, width, v, v_stride, count, e0, e1, e2, e3, o0, o1, o2, o3):
    """o_i[0..16*width) += sum over p in order of e_i[p] * v[p]; width in 1, 2, 4; is_bf16 in 0, 1."""

    def body(e: Emit, is_bf16: Value, width: Value, *args: Value) -> None:
        _sums(e, is_bf16, width, list(args), 4)

    return void_op(body, 13)


@intrinsic
def sums_run_1(_typing, is_bf16, width, v, v_stride, count, e0, o0):
    """`sums_run_4` for a single query."""

    def body(e: Emit, is_bf16: Value, width: Value, *args: Value) -> None:
        _sums(e, is_bf16, width, list(args), 1)

    return void_op(body, 7)


def _softmax_body(has_cap: bool) -> Callable[..., Value]:
    def body(
        e: Emit, s: Value, first: Value, last: Value, gap: Value, resume: Value, scale: Value, cap: Value
    ) -> Value:
        start = e.b.and_(first, e.i64(-16))
        chunks = e.plus(e.b.lshr(e.b.sub(last, start), e.i64(4)), 1)
        base = e.plus(s, e.times(start, 4))
        scales, caps = e.splat(scale), e.splat(cap)
        low, high, gap, resume = (
            e.splat_int(e.b.trunc(e.b.sub(edge, start), ir.IntType(32)))
            for edge in (first, last, gap, resume)
        )
        infinity = e.const(float("-inf"))
        top = e.var(infinity)
        with e.loop(chunks) as chunk:
            at = e.plus(base, e.times(chunk, 64))
            v = e.mul(e.load(at), scales)
            if has_cap:
                v = e.mul(caps, emit_tanh(e, e.div(v, caps)))
            index = e.b.add(e.iota(), e.splat_int(e.b.trunc(e.times(chunk, 16), ir.IntType(32))))
            inside = e.b.and_(e.b.icmp_signed(">=", index, low), e.b.icmp_signed("<=", index, high))
            outside = e.b.or_(e.b.icmp_signed("<", index, gap), e.b.icmp_signed(">=", index, resume))
            inside = e.b.and_(inside, outside)
            v = e.pick(inside, v, infinity)
            e.store(at, v)
            e.set(top, e.max(e.get(top), v))
        highest = e.splat(e.fold(e.get(top), e.max))
        total = e.var(e.const(0.0))
        with e.loop(chunks) as chunk:
            at = e.plus(base, e.times(chunk, 64))
            weight = emit_exp(e, e.sub(e.load(at), highest))
            e.store(at, weight)
            e.set(total, e.add(e.get(total), weight))
        return e.fold(e.get(total), e.add)

    return body


@intrinsic
def softmax_row(_typing, s, first, last, gap, resume, scale, cap):
    """In place on s[first..last] without s[gap..resume-1] (last inclusive; s[0] at an absolute position that
    is a multiple of 16): exp(x - max x) with x = scale*s, or cap*tanh(scale*s/cap) when cap > 0. Returns the
    sum. The gap and the other lanes of the first and last group of 16 are overwritten with zeros."""
    signature = types.float32(*[types.int64] * 5, types.float32, types.float32)

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kinds = [I64] * 5 + [F32, F32]
        plain = outlined(builder, "softmax", kinds, _softmax_body(False), F32)
        capped = outlined(builder, "softmax_capped", kinds, _softmax_body(True), F32)
        is_capped = builder.fcmp_ordered(">", args[6], ir.Constant(F32, 0.0))
        with builder.if_else(is_capped) as (then, other):
            with then:
                with_cap = builder.call(capped, args)
                then_block = builder.block
            with other:
                without = builder.call(plain, args)
                other_block = builder.block
        phi = builder.phi(F32)
        phi.add_incoming(with_cap, then_block)
        phi.add_incoming(without, other_block)
        return phi

    return signature, codegen


@intrinsic
def divide_vectors(_typing, src, dst, vectors, divisor):
    """dst[0..16*vectors) = src / divisor."""

    def body(e: Emit, src: Value, dst: Value, vectors: Value, divisor: Value) -> None:
        d = e.splat(divisor)
        with e.loop(vectors) as v:
            e.store(dst, e.div(e.load(src, e.times(v, 64)), d), e.times(v, 64))

    return void_op(body, 3, 1)


@intrinsic
def zero_vectors(_typing, dst, vectors):
    """dst[0..16*vectors) = 0."""

    def body(e: Emit, dst: Value, vectors: Value) -> None:
        with e.loop(vectors) as v:
            e.store(dst, e.const(0.0), e.times(v, 64))

    return void_op(body, 2)


@intrinsic
def copy_row(_typing, src, dst, count, src_bf16, dst_bf16):
    """dst[0..count) = src[0..count): float32 -> float32, bf16 -> float32, or float32 -> bf16 (nearest
    even)."""

    def mover(from_bf16: bool, to_bf16: bool) -> Callable[..., None]:
        def body(e: Emit, src: Value, dst: Value, count: Value) -> None:
            with e.loop(e.b.lshr(count, e.i64(4))) as v:
                value = e.load_bf16(src, e.times(v, 32)) if from_bf16 else e.load(src, e.times(v, 64))
                if to_bf16:
                    e.store_bf16(e.plus(dst, e.times(v, 32)), value)
                else:
                    e.store(dst, value, e.times(v, 64))
            done = e.b.and_(count, e.i64(-16))
            with e.loop(e.b.sub(count, done)) as rest:  # hd not a multiple of 16: one by one
                index = e.plus(done, rest)
                _move_one(e, src, dst, index, from_bf16, to_bf16)

        return body

    def body(e: Emit, src: Value, dst: Value, count: Value, src_bf16: Value, dst_bf16: Value) -> None:
        done = e.b.append_basic_block("done")
        switch = e.b.switch(e.plus(e.times(src_bf16, 2), dst_bf16), done)
        for number, (a, b) in enumerate(((False, False), (False, True), (True, False))):
            block = e.b.append_basic_block(f"copy{number}")
            switch.add_case(ir.Constant(I64, number), block)
            with e.b.goto_block(block):
                e.b.call(outlined(e.b, f"copy_{a:d}{b:d}", [I64] * 3, mover(a, b), _VOID), [src, dst, count])
                e.b.branch(done)
        e.b.position_at_end(done)

    return void_op(body, 5)


def _move_one(e: Emit, src: Value, dst: Value, index: Value, from_bf16: bool, to_bf16: bool) -> None:
    b, i16, i32 = e.b, ir.IntType(16), ir.IntType(32)
    if from_bf16:
        bits = b.load(b.inttoptr(e.plus(src, e.times(index, 2)), i16.as_pointer()))
        value = b.bitcast(b.shl(b.zext(bits, i32), ir.Constant(i32, 16)), F32)
    else:
        value = b.load(b.inttoptr(e.plus(src, e.times(index, 4)), F32.as_pointer()))
    if to_bf16:
        one = e.b.bitcast(e.round_bf16(e.splat(value)), ir.VectorType(i32, LANES))
        word = b.extract_element(one, ir.Constant(i32, 0))
        half = b.trunc(b.lshr(word, ir.Constant(i32, 16)), i16)
        b.store(half, b.inttoptr(e.plus(dst, e.times(index, 2)), i16.as_pointer()))
    else:
        b.store(value, b.inttoptr(e.plus(dst, e.times(index, 4)), F32.as_pointer()))
