"""Microkernels over stored rows: four rows at a time against one vector, in ggml's own row-major blocks.

Packed weights (`formats`) are made for whole matrices; a walk reads single rows, so it takes them as they are
stored. Lanes are 16 consecutive inputs. A weight has the bits of the reference dequantisation.
"""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from larql_kv.backends.cpu.simd import F16, F32, I8, I16, I32, I64, LANES, VF, VI, Emit, intrinsic, outlined
from larql_kv.backends.cpu.simd import void_op as _void_op
from larql_kv.backends.cpu.unpack import KIND_CODES, STORED_BLOCK

ROWS = 4  # rows a call: so many streams from memory at once, and one pass over the accumulator for all
_VOID = ir.VoidType()
Value = Any
# step(byte offset of the inputs as float32, mask or None, 16 weights a row)
_Step = Callable[[Value, Value | None, list[Value]], None]


class _Blocks:
    """Emits the weights of one stored block, vector by vector."""

    def __init__(self, e: Emit) -> None:
        self.e = e

    def vectors(self, kind: str, *where: Value) -> Iterator[tuple[int, Value]]:
        """(first input, 16 weights) of the block at an address, or of a section of it, in order."""
        yield from getattr(self, "_" + kind.lower())(*where)

    # -- scalars and bytes -----------------------------------------------------------------------------
    def _half(self, at: Value, off: int) -> Value:
        pointer = self.e.b.inttoptr(self.e.plus(at, off), F16.as_pointer())
        return self.e.b.fpext(self.e.b.load(pointer, align=2), F32)

    def _byte(self, at: Value, off: int) -> Value:
        return self.e.b.zext(self.e.b.load(self.e.b.inttoptr(self.e.plus(at, off), I8.as_pointer())), I32)

    def _bytes(self, at: Value, off: int) -> Value:
        """16 bytes as 32-bit integers."""
        kind = ir.VectorType(I8, LANES)
        pointer = self.e.b.inttoptr(self.e.plus(at, off), kind.as_pointer())
        return self.e.b.zext(self.e.b.load(pointer, align=1), VI)

    def _bits(self, words: Value, shift: int, mask: int) -> Value:
        words = self.e.b.lshr(words, self.e.ints(shift)) if shift else words
        return self.e.b.and_(words, self.e.ints(mask))

    def _number(self, words: Value) -> Value:
        return self.e.b.sitofp(words, VF)

    # -- plain numbers ---------------------------------------------------------------------------------
    def _f32(self, at: Value) -> Iterator[tuple[int, Value]]:
        yield 0, self.e.load(at)

    def _bf16(self, at: Value) -> Iterator[tuple[int, Value]]:
        yield 0, self.e.load_bf16(at)

    def _f16(self, at: Value) -> Iterator[tuple[int, Value]]:
        yield 0, self.e.load_f16(at)

    # -- blocks of 32 ----------------------------------------------------------------------------------
    def _q8_0(self, at: Value) -> Iterator[tuple[int, Value]]:
        scale = self.e.splat(self._half(at, 0))
        for first in (0, 16):
            yield first, self.e.mul(self.e.load_i8(at, 2 + first), scale)

    def _nibbles(self, at: Value, header: int, high: int | None) -> Iterator[tuple[int, Value]]:
        """Codes of 16 bytes (low nibbles first), with a fifth bit of the word at offset `high`."""
        packed = self._bytes(at, header)
        for first in (0, 16):
            codes = self._bits(packed, first // 4, 15)
            if high is not None:
                pointer = self.e.b.inttoptr(self.e.plus(at, high), I32.as_pointer())
                word = self.e.splat_int(self.e.b.load(pointer, align=1))
                lanes = self.e.b.add(self.e.iota(), self.e.ints(first))
                fifth = self.e.b.and_(self.e.b.lshr(word, lanes), self.e.ints(1))
                codes = self.e.b.or_(codes, self.e.b.shl(fifth, self.e.ints(4)))
            yield first, codes

    def _centred(self, at: Value, header: int, high: int | None, middle: int) -> Iterator[tuple[int, Value]]:
        scale = self.e.splat(self._half(at, 0))
        for first, codes in self._nibbles(at, header, high):
            yield first, self.e.mul(self._number(self.e.b.sub(codes, self.e.ints(middle))), scale)

    def _affine(self, at: Value, header: int, high: int | None) -> Iterator[tuple[int, Value]]:
        scale, low = self.e.splat(self._half(at, 0)), self.e.splat(self._half(at, 2))
        for first, codes in self._nibbles(at, header, high):
            yield first, self.e.add(self.e.mul(self._number(codes), scale), low)

    def _q4_0(self, at: Value) -> Iterator[tuple[int, Value]]:
        return self._centred(at, 2, None, 8)

    def _q4_1(self, at: Value) -> Iterator[tuple[int, Value]]:
        return self._affine(at, 4, None)

    def _q5_0(self, at: Value) -> Iterator[tuple[int, Value]]:
        return self._centred(at, 6, 2, 16)

    def _q5_1(self, at: Value) -> Iterator[tuple[int, Value]]:
        return self._affine(at, 8, 4)

    # -- blocks of 256: a section of them, by its number (an i64 value) ----------------------------------
    def _k_scale(self, scales: Value, group: Value) -> tuple[Value, Value]:
        """Scale and min (6 bits) of a group of 32, as float32 (ggml's get_scale_min_k4)."""
        b = self.e.b

        def bits(value: Value, shift: int, mask: int) -> Value:
            return b.and_(b.lshr(value, ir.Constant(I32, shift)), ir.Constant(I32, mask))

        def byte(index: Value, off: int) -> Value:
            return self._byte(self.e.plus(scales, index), off)

        late = b.icmp_signed(">=", group, self.e.i64(4))
        third = b.and_(group, self.e.i64(3))
        both, first, second = byte(group, 4), byte(third, 0), byte(third, 4)
        high = [b.shl(bits(value, 6, 3), ir.Constant(I32, 4)) for value in (first, second)]
        scale = b.select(late, b.or_(bits(both, 0, 15), high[0]), bits(first, 0, 63))
        low = b.select(late, b.or_(bits(both, 4, 15), high[1]), bits(second, 0, 63))
        return b.sitofp(scale, F32), b.sitofp(low, F32)

    def _k_affine(
        self, at: Value, pair: Value, codes_at: int, high_at: int | None
    ) -> Iterator[tuple[int, Value]]:
        """Section: the 64 weights whose codes share 32 bytes."""
        e = self.e
        d, dmin = self._half(at, 0), self._half(at, 2)
        packed = e.plus(at, e.times(pair, 32))
        for nibble in (0, 1):
            group = e.plus(e.times(pair, 2), nibble)
            scale, low = self._k_scale(e.plus(at, 4), group)
            scale, low = e.splat(e.b.fmul(d, scale)), e.splat(e.b.fmul(dmin, low))
            for half in (0, 16):
                codes = self._bits(self._bytes(packed, codes_at + half), 4 * nibble, 15)
                if high_at is not None:
                    shift = e.splat_int(e.b.trunc(group, I32))
                    fifth = e.b.and_(e.b.lshr(self._bytes(at, high_at + half), shift), e.ints(1))
                    codes = e.b.or_(codes, e.b.shl(fifth, e.ints(4)))
                yield 32 * nibble + half, e.sub(e.mul(self._number(codes), scale), low)

    def _q4_k(self, at: Value, section: Value) -> Iterator[tuple[int, Value]]:
        return self._k_affine(at, section, 16, None)

    def _q5_k(self, at: Value, section: Value) -> Iterator[tuple[int, Value]]:
        return self._k_affine(at, section, 48, 16)

    def _q6_k(self, at: Value, half: Value) -> Iterator[tuple[int, Value]]:
        """Section: a half of the block, 128 weights."""
        e = self.e
        d = self._half(at, 208)
        lows, highs = e.plus(at, e.times(half, 64)), e.plus(at, e.times(half, 32))
        for quarter in range(4):
            for part in (0, 1):
                codes = self._bits(self._bytes(lows, 32 * (quarter % 2) + 16 * part), 4 * (quarter // 2), 15)
                high = self._bits(self._bytes(highs, 128 + 16 * part), 2 * quarter, 3)
                codes = e.b.or_(codes, e.b.shl(high, e.ints(4)))
                scales = e.plus(at, e.times(half, 8))
                pointer = e.b.inttoptr(e.plus(scales, 192 + 2 * quarter + part), I8.as_pointer())
                scale = e.b.sitofp(e.b.sext(e.b.load(pointer), I32), F32)
                values = self._number(e.b.sub(codes, e.ints(32)))
                yield 32 * quarter + 16 * part, e.mul(values, e.splat(e.b.fmul(d, scale)))


# kind: (sections a block, weights a section) of the blocks that are walked in sections.
_SECTIONS = {"Q4_K": (4, 64), "Q5_K": (4, 64), "Q6_K": (2, 128)}


def _block(kind: str) -> tuple[int, int]:
    """(inputs, bytes) of one turn of the loop over a row: 16 plain numbers, or one stored block."""
    inputs, size = STORED_BLOCK[kind]
    return (inputs, size) if inputs > 1 else (LANES, LANES * size)


def _tail(e: Emit, kind: str, at: Value, mask: Value) -> Value:
    """The last, masked vector of a row of plain numbers; lanes outside are zero."""
    if kind == "F32":
        return e.load_masked(at, mask)
    vector = ir.VectorType(I16, LANES)
    pointer = e.b.inttoptr(at, vector.as_pointer())
    masks = ir.VectorType(ir.IntType(1), LANES)
    load = cgutils.get_or_insert_function(
        e.b.module,
        ir.FunctionType(vector, [pointer.type, I32, masks, vector]),
        "llvm.masked.load.v16i16.p0",
    )
    nothing = ir.Constant(vector, [0] * LANES)
    halves = e.b.call(load, [pointer, ir.Constant(I32, 2), mask, nothing])
    if kind == "F16":
        return e.b.fpext(e.b.bitcast(halves, ir.VectorType(F16, LANES)), VF)
    return e.b.bitcast(e.b.shl(e.b.zext(halves, VI), e.ints(16)), VF)


def _each_vector(e: Emit, kind: str, rows: list[Value], size: Value, step: _Step) -> None:
    """Call `step` along the rows."""
    inputs, stored = _block(kind)
    plain = inputs == LANES
    blocks = e.b.udiv(size, e.i64(inputs))
    emit = _Blocks(e)
    with e.loop(blocks) as index:
        at = e.times(index, stored)
        base = e.times(index, 4 * inputs)
        places = [e.plus(row, at) for row in rows]
        if kind in _SECTIONS:
            sections, weights = _SECTIONS[kind]
            with e.loop(e.i64(sections)) as section:
                streams = [emit.vectors(kind, place, section) for place in places]
                _together(e, streams, e.plus(base, e.times(section, 4 * weights)), step)
        else:
            _together(e, [emit.vectors(kind, place) for place in places], base, step)
    if not plain:
        return
    rest = e.b.urem(size, e.i64(LANES))
    with e.b.if_then(e.b.icmp_signed("!=", rest, e.i64(0))):
        mask, done = e.mask_below(rest), e.times(blocks, stored)
        step(e.times(blocks, 4 * inputs), mask, [_tail(e, kind, e.plus(row, done), mask) for row in rows])


def _together(e: Emit, streams: list[Iterator[tuple[int, Value]]], base: Value, step: _Step) -> None:
    """The same vector of every row, one vector after the other."""
    for vectors in zip(*streams, strict=True):
        step(e.plus(base, 4 * vectors[0][0]), None, [weights for _, weights in vectors])


def _dots_body(kind: str) -> Callable[..., None]:
    def body(e: Emit, *args: Value) -> None:
        *rows, x, size, out = args
        sums = [e.var(e.const(0.0)) for _ in rows]

        def step(off: Value, mask: Value | None, weights: list[Value]) -> None:
            at = e.plus(x, off)
            inputs = e.load(at) if mask is None else e.load_masked(at, mask)
            for total, vector in zip(sums, weights, strict=True):
                e.set(total, e.fma(vector, inputs, e.get(total)))

        _each_vector(e, kind, list(rows), size, step)
        for row, total in enumerate(sums):
            pointer = e.b.inttoptr(e.plus(out, 4 * row), F32.as_pointer())
            e.b.store(e.fold(e.get(total), e.add), pointer, align=4)

    return body


def _adds_body(kind: str) -> Callable[..., None]:
    def body(e: Emit, *args: Value) -> None:
        *rows, factors, acc, size = args
        scales = [e.splat_load(factors, 4 * row) for row in range(ROWS)]

        def step(off: Value, mask: Value | None, weights: list[Value]) -> None:
            at = e.plus(acc, off)
            total = e.load(at) if mask is None else e.load_masked(at, mask)
            for scale, vector in zip(scales, weights, strict=True):
                total = e.fma(vector, scale, total)
            if mask is None:
                e.store(at, total)
            else:
                e.store_masked(at, total, mask)

        _each_vector(e, kind, list(rows), size, step)

    return body


def _by_kind(e: Emit, name: str, make: Callable[[str], Callable[..., None]], args: tuple[Value, ...]) -> None:
    """Call the function of the kind whose code comes first in `args`."""
    code, *rest = args
    done = e.b.append_basic_block("done")
    switch = e.b.switch(code, done)
    for kind, number in KIND_CODES.items():
        block = e.b.append_basic_block(f"{name}_{kind}")
        switch.add_case(ir.Constant(I64, number), block)
        with e.b.goto_block(block):
            function = outlined(e.b, f"{name}_{kind}", [I64] * len(rest), make(kind), _VOID)
            e.b.call(function, list(rest))
            e.b.branch(done)
    e.b.position_at_end(done)


@intrinsic
def dot_rows(_typing, code, row0, row1, row2, row3, x, size, out):
    """out[4] = the stored rows at four addresses times x[size]; `code` is the kind's of KIND_CODES."""

    def body(e: Emit, *args: Value) -> None:
        _by_kind(e, "dots", _dots_body, args)

    return _void_op(body, 8)


@intrinsic
def add_rows(_typing, code, row0, row1, row2, row3, factors, acc, size):
    """acc[size] += the stored rows at four addresses, each times its own of factors[4]."""

    def body(e: Emit, *args: Value) -> None:
        _by_kind(e, "adds", _adds_body, args)

    return _void_op(body, 8)
