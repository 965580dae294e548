"""Turbo codes on the CPU: rotation, encoding, and decoding into tiles. The format: codec/turbo.py.

The bits are those of the format: no multiply-add is fused. `dim` is a multiple of 16; `block` is the largest
power of two that divides it.
"""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import cgutils
from numba.np.ufunc import get_thread_id

from larql_kv.backends.cpu.runtime import kernel
from larql_kv.backends.cpu.simd import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    VF,
    VI,
    Emit,
    has_avx512,
    intrinsic,
    outlined,
    peek_f32,
    poke_f32,
    void_op,
)
from larql_kv.codec.turbo import SIGN_SEED, TINY_NORM, planes

Value = Any
_VOID = ir.VoidType()
_V_BYTES = ir.VectorType(I8, LANES)
_TINY = np.float32(TINY_NORM)


def _each_vector(e: Emit, count: Value, step: Callable[[Value, Value | None], None]) -> None:
    """step(first lane, mask) over `count` lanes: whole vectors with mask None, then the masked rest."""
    with e.loop(e.b.lshr(count, e.i64(4))) as v:
        step(e.times(v, LANES), None)
    rest = e.b.and_(count, e.i64(LANES - 1))
    with e.b.if_then(e.b.icmp_signed("!=", rest, e.i64(0))):
        step(e.b.sub(count, rest), e.mask_below(rest))


def _load_bytes(e: Emit, at: Value, mask: Value | None) -> Value:
    """16 bytes as int32; lanes outside the mask are zero and their memory is not touched."""
    pointer = e.b.inttoptr(at, _V_BYTES.as_pointer())
    if mask is None:
        return e.b.zext(e.b.load(pointer, align=1), VI)
    kind = ir.FunctionType(_V_BYTES, [pointer.type, I32, mask.type, _V_BYTES])
    function = cgutils.get_or_insert_function(e.b.module, kind, "llvm.masked.load.v16i8.p0")
    loaded = e.b.call(function, [pointer, ir.Constant(I32, 1), mask, ir.Constant(_V_BYTES, [0] * LANES)])
    return e.b.zext(loaded, VI)


def _store_bytes(e: Emit, at: Value, words: Value, mask: Value | None) -> None:
    narrow = e.b.trunc(words, _V_BYTES)
    pointer = e.b.inttoptr(at, _V_BYTES.as_pointer())
    if mask is None:
        e.b.store(narrow, pointer, align=1)
    else:
        e._masked_store("v16i8", narrow, pointer, mask, 1)


def _levels_of(e: Emit, codes: Value, bits: int, coefficients: list[Value]) -> Value:
    """The levels of 16 codes (int32)."""
    c1, c3, c5 = coefficients
    x = e.sub(e.b.sitofp(codes, VF), e.const(((1 << bits) - 1) / 2))
    square = e.mul(x, x)
    return e.mul(x, e.add(c1, e.mul(square, e.add(c3, e.mul(square, c5)))))


def _look_up(e: Emit, table: Value, index: Value) -> Value:
    """table[index mod 16] (AVX512)."""
    kind = ir.FunctionType(VF, [VF, VI])
    function = cgutils.get_or_insert_function(e.b.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return e.b.call(function, [table, index])


# --- decoding ----------------------------------------------------------------------------------------


def _decode_body(bits: int, has_mean: bool) -> Callable[..., None]:
    """A row is `parts` runs of dim / parts coordinates, each at one bit position of its plane's bytes."""
    parts = 8 if bits == 3 else 8 // bits

    def body(
        e: Emit, codes: Value, code_stride: Value, scales: Value, count: Value, dim: Value, tile: Value,
        mean: Value, *numbers: Value,
    ) -> None:  # fmt: skip
        coefficients = [e.splat(c) for c in numbers]
        last = (1 << bits) - 1
        table = _levels_of(e, e.b.and_(e.iota(), e.ints(last)), bits, coefficients)
        part = e.b.udiv(dim, e.i64(parts))
        row_bytes = e.times(e.b.lshr(e.plus(dim, 15), e.i64(4)), 64)
        padding = e.b.sub(e.b.lshr(row_bytes, e.i64(2)), dim)

        with e.loop(count) as r:
            row, out = e.plus(codes, e.times(r, code_stride)), e.plus(tile, e.times(r, row_bytes))
            scale = e.splat_load(scales, e.times(r, 4))
            scaled = e.mul(table, scale)

            def value(index: Value) -> Value:
                """The decoded values of indices whose bits past bits + 1 (2 bits: any) may be set."""
                if has_avx512():
                    return _look_up(e, scaled, index)
                return e.mul(_levels_of(e, e.b.and_(index, e.ints(last)), bits, coefficients), scale)

            def run(first: Value, mask: Value | None) -> None:
                low = [_load_bytes(e, e.plus(row, first), mask)]
                high = low[0]
                if bits == 3:
                    low.append(_load_bytes(e, e.plus(row, e.plus(first, part)), mask))
                    high = _load_bytes(e, e.plus(row, e.plus(first, e.times(part, 2))), mask)
                for i in range(parts):
                    if bits == 3:
                        two = e.b.lshr(low[i % 2], e.ints(i // 2 * 2))
                        one = e.b.shl(high, e.ints(2 - i)) if i < 2 else e.b.lshr(high, e.ints(i - 2))
                        index = e.b.or_(e.b.and_(two, e.ints(3)), e.b.and_(one, e.ints(~3)))
                    else:
                        index = e.b.lshr(low[0], e.ints(bits * i))
                    off = e.times(e.plus(e.times(part, i), first), 4)
                    v = value(index)
                    if has_mean:
                        at = e.plus(mean, off)
                        v = e.add(v, e.load(at) if mask is None else e.load_masked(at, mask))
                    if mask is None:
                        e.store(out, v, off)
                    else:
                        e.store_masked(e.plus(out, off), v, mask)

            _each_vector(e, part, run)
            with e.b.if_then(e.b.icmp_signed("!=", padding, e.i64(0))):
                e.store_masked(e.plus(out, e.times(dim, 4)), e.const(0.0), e.mask_below(padding))

    return body


@intrinsic
def decode_run(_typing, bits, codes, code_stride, scales, count, dim, tile, mean, c1, c3, c5):
    """tile = `count` decoded rows, float32, each padded with zeros to a multiple of 16 values.

    codes: address of the first row's codes, `code_stride` bytes apart; scales: contiguous float32; mean:
    address of `dim` float32 that are added to every row, or 0; bits in 2, 3, 4; dim: a multiple of 8.
    """

    def body(e: Emit, bits: Value, *args: Value) -> None:
        done = e.b.append_basic_block("done")
        has_mean = e.b.zext(e.b.icmp_signed("!=", args[6], e.i64(0)), I64)
        switch = e.b.switch(e.plus(e.times(bits, 2), has_mean), done)
        for b in (2, 3, 4):
            for m in (0, 1):
                name = f"turbo_decode_{b}_{m}"
                function = outlined(e.b, name, [I64] * 7 + [F32] * 3, _decode_body(b, bool(m)), _VOID)
                block = e.b.append_basic_block(name)
                switch.add_case(e.i64(2 * b + m), block)
                with e.b.goto_block(block):
                    e.b.call(function, args)
                    e.b.branch(done)
        e.b.position_at_end(done)

    return void_op(body, 8, 3)


@kernel(ints=9, floats=3)
def decode_rows_kernel(bits, codes, code_stride, scales, count, dim, tile, mean, run, c1, c3, c5):
    """`decode_run` of many rows, `run` a task."""
    row_bytes = ((dim + 15) >> 4) * 64
    for task in prange((count + run - 1) // run):
        r = task * run
        decode_run(
            bits, codes + r * code_stride, code_stride, scales + 4 * r, min(run, count - r), dim,
            tile + r * row_bytes, mean, np.float32(c1), np.float32(c3), np.float32(c5),
        )  # fmt: skip


# --- rotation ----------------------------------------------------------------------------------------


def _flips(e: Emit, vector: Value) -> Value:
    """The sign bits of D for the 16 coordinates of a vector."""
    b = e.b
    h = b.add(e.iota(), e.splat_int(b.trunc(e.times(vector, LANES), I32)))
    h = b.add(h, ir.Constant(VI, [SIGN_SEED] * LANES))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = b.mul(b.xor(h, b.lshr(h, e.ints(shift))), ir.Constant(VI, [factor] * LANES))
    return b.shl(b.xor(h, b.lshr(h, e.ints(16))), e.ints(31))


def _flip(e: Emit, v: Value, flips: Value) -> Value:
    return e.b.bitcast(e.b.xor(e.b.bitcast(v, VI), flips), VF)


def _rotate_body(e: Emit, x: Value, dim: Value, stages: Value, factor: Value) -> None:
    vectors = e.b.lshr(dim, e.i64(4))
    with e.loop(vectors) as v:
        y = _flip(e, e.load(x, e.times(v, 64)), _flips(e, v))
        for h in (1, 2, 4, 8):  # upper lanes b of a pair: a - b, as a + (-b)
            partner = e.shuffle(y, y, [lane ^ h for lane in range(LANES)])
            upper = ir.Constant(VI, [-(1 << 31) if lane & h else 0 for lane in range(LANES)])
            y = e.add(partner, _flip(e, y, upper))
        e.store(x, y, e.times(v, 64))
    with e.loop(stages) as stage:
        apart = e.b.shl(e.i64(1), stage)
        with e.loop(e.b.lshr(vectors, e.i64(1))) as pair:
            low = e.b.and_(pair, e.plus(apart, -1))
            first = e.plus(e.times(e.b.sub(pair, low), 2), low)
            at_a, at_b = e.times(first, 64), e.times(e.plus(first, apart), 64)
            a, b = e.load(x, at_a), e.load(x, at_b)
            e.store(x, e.add(a, b), at_a)
            e.store(x, e.sub(a, b), at_b)
    scale = e.splat(factor)
    with e.loop(vectors) as v:
        e.store(x, _flip(e, e.mul(e.load(x, e.times(v, 64)), scale), _flips(e, v)), e.times(v, 64))


@intrinsic
def _rotate_vector(_typing, x, dim, stages, factor):
    def body(e: Emit, *args: Value) -> None:
        e.b.call(outlined(e.b, "turbo_rotate", [I64] * 3 + [F32], _rotate_body, _VOID), list(args))

    return void_op(body, 3, 1)


@njit(inline="never", error_model="numpy")
def rotate_vector(x, dim):
    """In place: the rotation of `dim` float32 at x."""
    block = dim & -dim
    stages = 0
    while (16 << stages) < block:
        stages += 1
    _rotate_vector(x, dim, stages, np.float32(1.0 / np.sqrt(np.float64(block))))


@kernel(ints=3)
def rotate_rows_kernel(x, rows, dim):
    for row in prange(rows):
        rotate_vector(x + row * dim * 4, dim)


@kernel(ints=3, parallel=False)
def rotate_rows_kernel_serial(x, rows, dim):
    for row in range(rows):
        rotate_vector(x + row * dim * 4, dim)


# --- encoding ----------------------------------------------------------------------------------------


def _store_square_sum(e: Emit, sums: Value, vector: Value, v: Value) -> None:
    """sums[vector] = the sum of the 16 squares, neighbours first."""
    total = e.mul(v, v)
    for h in (1, 2, 4, 8):
        total = e.add(total, e.shuffle(total, total, [lane ^ h for lane in range(LANES)]))
    one = e.b.extract_element(total, ir.Constant(I32, 0))
    e.b.store(one, e.b.inttoptr(e.plus(sums, e.times(vector, 4)), F32.as_pointer()), align=4)


def _centre_body(e: Emit, x: Value, mean: Value, dim: Value, out: Value, sums: Value) -> None:
    has_mean = e.b.icmp_signed("!=", mean, e.i64(0))
    with e.loop(e.b.lshr(dim, e.i64(4))) as v:
        off = e.times(v, 64)
        value = e.var(e.load(x, off))
        with e.b.if_then(has_mean):
            e.set(value, e.sub(e.get(value), e.load(mean, off)))
        e.store(out, e.get(value), off)
        _store_square_sum(e, sums, v, e.get(value))


@intrinsic
def _centre(_typing, x, mean, dim, out, sums):
    """out = x, less the mean where that is no 0; sums: of the squares of every 16 values."""

    def body(e: Emit, *args: Value) -> None:
        e.b.call(outlined(e.b, "turbo_centre", [I64] * 5, _centre_body, _VOID), list(args))

    return void_op(body, 5)


def _quantise_body(bits: int) -> Callable[..., None]:
    def body(e: Emit, x: Value, dim: Value, sums: Value, factor: Value, *numbers: Value) -> None:
        coefficients = [e.splat(c) for c in numbers]
        levels = [_levels_of(e, e.ints(code), bits, coefficients) for code in range(1 << bits)]
        boundaries = [e.mul(e.add(upper, lower), e.const(0.5)) for lower, upper in itertools.pairwise(levels)]
        by = e.splat(factor)
        with e.loop(e.b.lshr(dim, e.i64(4))) as v:
            y = e.mul(e.load(x, e.times(v, 64)), by)
            codes = e.ints(0)
            for boundary in boundaries:
                codes = e.b.add(codes, e.b.zext(e.b.fcmp_ordered("<=", boundary, y), VI))
            _store_square_sum(e, sums, v, _levels_of(e, codes, bits, coefficients))
            _store_bytes(e, e.plus(x, e.times(v, LANES)), codes, None)  # never ahead of what is read

    return body


def _pack_body(bits: int) -> Callable[..., None]:
    def body(e: Emit, source: Value, dim: Value, codes: Value) -> None:
        out = codes
        for width, low in planes(bits):
            part = e.b.udiv(dim, e.i64(8 // width))
            target = out

            def run(
                first: Value, mask: Value | None, width: int = width, low: int = low, part: Value = part,
                target: Value = target,
            ) -> None:  # fmt: skip
                packed = e.ints(0)
                for i in range(8 // width):
                    field = _load_bytes(e, e.plus(source, e.plus(e.times(part, i), first)), mask)
                    field = e.b.and_(e.b.lshr(field, e.ints(low)), e.ints((1 << width) - 1))
                    packed = e.b.or_(packed, e.b.shl(field, e.ints(width * i)))
                _store_bytes(e, e.plus(target, first), packed, mask)

            _each_vector(e, part, run)
            out = e.plus(out, part)

    return body


def _by_bits(
    e: Emit, name: str, make: Callable[[int], Any], bits: Value, kinds: list[Any], args: Any
) -> None:
    done = e.b.append_basic_block("done")
    switch = e.b.switch(bits, done)
    for b in (2, 3, 4):
        block = e.b.append_basic_block(f"{name}_{b}")
        switch.add_case(e.i64(b), block)
        with e.b.goto_block(block):
            e.b.call(outlined(e.b, f"{name}_{b}", kinds, make(b), _VOID), list(args))
            e.b.branch(done)
    e.b.position_at_end(done)


@intrinsic
def _quantise(_typing, bits, x, dim, sums, factor, c1, c3, c5):
    """The codes of x * factor, a byte each, over the start of x; sums: of the squares of 16 levels each."""

    def body(e: Emit, bits: Value, *args: Value) -> None:
        _by_bits(e, "turbo_quantise", _quantise_body, bits, [I64] * 3 + [F32] * 4, args)

    return void_op(body, 4, 4)


@intrinsic
def _pack(_typing, bits, source, dim, codes):
    """Codes, a byte each, into planes."""

    def body(e: Emit, bits: Value, *args: Value) -> None:
        _by_bits(e, "turbo_pack", _pack_body, bits, [I64] * 3, args)

    return void_op(body, 4)


@njit(inline="never", error_model="numpy")
def _norm(sums, dim):
    """Square root of all the sums; neighbours first within a block, then the blocks in order."""
    per_block = (dim & -dim) >> 4
    count = dim >> 4
    width = 1
    while width < per_block:
        for i in range(0, count, 2 * width):
            poke_f32(sums + 4 * i, peek_f32(sums + 4 * i) + peek_f32(sums + 4 * (i + width)))
        width *= 2
    total = peek_f32(sums)
    for i in range(per_block, count, per_block):
        total = total + peek_f32(sums + 4 * i)
    return np.float32(np.sqrt(total))


@njit(inline="never", error_model="numpy")
def encode_vector(bits, x, dim, mean, codes, scale_at, scratch, c1, c3, c5):
    """Code one rotated vector of `dim` float32 (less the mean at `mean`, if that is no 0).

    Writes dim * bits / 8 bytes at `codes` and a float32 at `scale_at`; scratch: `dim` + dim / 16 floats.
    """
    sums = scratch + 4 * dim
    _centre(x, mean, dim, scratch, sums)
    norm = _norm(sums, dim)
    is_tiny = norm <= _TINY
    factor = np.float32(0.0) if is_tiny else np.float32(np.float32(np.sqrt(np.float64(dim))) / norm)
    _quantise(bits, scratch, dim, sums, factor, c1, c3, c5)
    _pack(bits, scratch, dim, codes)
    poke_f32(scale_at, np.float32(0.0) if is_tiny else np.float32(norm / _norm(sums, dim)))


@njit(inline="never", error_model="numpy")
def _encode_one(index, bits, x, heads, dim, mean, codes, scales, scratch, c1, c3, c5):
    """x, codes, scales: (address, bytes to the next row, bytes to the next head)."""
    row, head = index // heads, index % heads
    encode_vector(
        bits, x[0] + row * x[1] + head * x[2], dim, mean + head * dim * 4 if mean != 0 else 0,
        codes[0] + row * codes[1] + head * codes[2], scales[0] + row * scales[1] + head * scales[2],
        scratch, np.float32(c1), np.float32(c3), np.float32(c5),
    )  # fmt: skip


@kernel(ints=16, floats=3)
def encode_rows_kernel(
    bits, x, x_row, x_head, rows, heads, dim, mean, codes, codes_row, codes_head,
    scales, scales_row, scales_head, scratch, scratch_bytes, c1, c3, c5,
):  # fmt: skip
    """Code `heads` vectors of `rows` rows; strides in bytes; mean: (heads, dim) or 0.

    Scratch: `scratch_bytes` a thread, see `encode_vector`.
    """
    for index in prange(rows * heads):
        _encode_one(
            index, bits, (x, x_row, x_head), heads, dim, mean, (codes, codes_row, codes_head),
            (scales, scales_row, scales_head), scratch + get_thread_id() * scratch_bytes, c1, c3, c5,
        )  # fmt: skip


@kernel(ints=16, floats=3, parallel=False)
def encode_rows_kernel_serial(
    bits, x, x_row, x_head, rows, heads, dim, mean, codes, codes_row, codes_head,
    scales, scales_row, scales_head, scratch, _scratch_bytes, c1, c3, c5,
):  # fmt: skip
    for index in range(rows * heads):
        _encode_one(
            index, bits, (x, x_row, x_head), heads, dim, mean, (codes, codes_row, codes_head),
            (scales, scales_row, scales_head), scratch, c1, c3, c5,
        )  # fmt: skip
