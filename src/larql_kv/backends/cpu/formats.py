"""How packed weights lie in memory, and the microkernels that read them.

The output rows of a matrix are cut into blocks of 64 (the last one zero padded). A block is a run of records
along k (the input features); in a record every array has the 64 outputs innermost, so that vector lanes are
outputs and no reduction ever crosses lanes:

| format    | k/record | record                                                         | weight           |
|-----------|---------:|----------------------------------------------------------------|------------------|
| f32       |        1 | f32[64]                                                        | as stored        |
| bf16, f16 |        1 | u16[64] / f16[64]                                              | as stored        |
| i8        |       32 | scale f16[64], q i8[32][64]                                    | q*scale          |
| i8_k      |      256 | d f16[64], 16 x (sc i8[64], q i8[16][64])                      | q*(d*sc)         |
| i8m       |       32 | scale f16[64], min f16[64], q i8[32][64]                       | q*scale + min    |
| i8m_k     |      256 | d f16[64], dmin f16[64], 8 x (sc u8[64], m u8[64], q i8[32][64]) | q*(d*sc)-(dmin*m)|
| u4z       |       32 | scale f16[64], q u32[4][64]                                    | q*scale - 8*scale|
| u4m       |       32 | scale f16[64], min f16[64], q u32[4][64]                       | q*scale + min    |
| u4m_k     |      256 | d f16[64], dmin f16[64], 8 x (sc u8[64], m u8[64], q u32[4][64]) | q*(d*sc)-(dmin*m)|

A u32 holds the 4-bit codes of 8 consecutive k, the first one lowest. Every product above is exact in float32
(at most 24 significant bits), so one fma gives the bits of the reference dequantisation, which rounds once.
"""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from larql_kv.backends.cpu.simd import I64, Emit, intrinsic, outlined, void_op

BLOCK = 64  # outputs a block
_COLUMNS = range(4)  # vectors of 16 outputs in a block
_VOID = ir.VoidType()
Value = Any


@dataclass(frozen=True)
class Format:
    name: str
    code: int
    record_k: int
    record_bytes: int


F32, BF16, F16 = Format("f32", 0, 1, 256), Format("bf16", 1, 1, 128), Format("f16", 2, 1, 128)
I8 = Format("i8", 3, 32, 128 + 2048)
I8_K = Format("i8_k", 4, 256, 128 + 16 * (64 + 1024))
I8M = Format("i8m", 5, 32, 256 + 2048)
I8M_K = Format("i8m_k", 6, 256, 256 + 8 * (128 + 2048))
U4Z = Format("u4z", 7, 32, 128 + 1024)
U4M = Format("u4m", 8, 32, 256 + 1024)
U4M_K = Format("u4m_k", 9, 256, 256 + 8 * (128 + 1024))
FORMATS = (F32, BF16, F16, I8, I8_K, I8M, I8M_K, U4Z, U4M, U4M_K)

FORMAT_OF_KIND = {
    "F32": F32,
    "BF16": BF16,
    "F16": F16,
    "Q8_0": I8,
    "Q5_0": I8,
    "Q6_K": I8_K,
    "Q5_1": I8M,
    "Q5_K": I8M_K,
    "Q4_0": U4Z,
    "Q4_1": U4M,
    "Q4_K": U4M_K,
}

# body(emit, k_bytes, weights): `weights` are the 4 vectors of one k; k_bytes = 4*k as an i64 value
_Body = Callable[[Emit, Value, list[Value]], None]


def _each_k(e: Emit, fmt: Format, w: Value, records: Value, body: _Body) -> None:
    """Walk the weights of a block in the order of k."""
    if fmt.record_k == 1:
        _each_plain(e, fmt, w, records, body)
        return
    size = 16 if fmt is I8_K else 32
    groups = fmt.record_k // size
    is_u4, has_min, is_k = fmt.name.startswith("u4"), "m" in fmt.name, fmt.name.endswith("_k")
    header = (256 if has_min else 128) if is_k else 0
    group_bytes = (fmt.record_bytes - header) // groups
    with e.loop(records) as record:
        base = e.plus(w, e.times(record, fmt.record_bytes))
        record_k_bytes = e.times(record, 4 * fmt.record_k)
        with e.loop(e.i64(groups)) as g:
            group = e.plus(base, e.plus(e.times(g, group_bytes), header))
            k_bytes = e.plus(record_k_bytes, e.times(g, 4 * size))
            scales: list[Value] = []
            mins: list[Value] = []
            if is_k:
                load = e.load_u8 if has_min else e.load_i8
                scales = [e.mul(e.load_f16(base, 32 * c), load(group, 16 * c)) for c in _COLUMNS]
                codes_at = 64
                if has_min:
                    mins = [
                        e.neg(e.mul(e.load_f16(base, 128 + 32 * c), e.load_u8(group, 64 + 16 * c)))
                        for c in _COLUMNS
                    ]
                    codes_at = 128
            else:
                scales = [e.load_f16(group, 32 * c) for c in _COLUMNS]
                codes_at = 128
                if has_min:
                    mins = [e.load_f16(group, 128 + 32 * c) for c in _COLUMNS]
                    codes_at = 256
            if fmt is U4Z:
                mins = [e.mul(s, e.const(-8.0)) for s in scales]
            with e.loop(e.i64(size // 8)) as eighth:
                codes = e.plus(group, e.plus(e.times(eighth, 256 if is_u4 else 512), codes_at))
                k0 = e.plus(k_bytes, e.times(eighth, 32))
                words = [e.load_words(codes, 64 * c) for c in _COLUMNS] if is_u4 else []
                for j in range(8):
                    weights = []
                    for c in _COLUMNS:
                        q = e.nibble(words[c], j) if is_u4 else e.load_i8(codes, 64 * j + 16 * c)
                        weights.append(e.fma(q, scales[c], mins[c]) if mins else e.mul(q, scales[c]))
                    body(e, e.plus(k0, 4 * j), weights)


def _each_plain(e: Emit, fmt: Format, w: Value, records: Value, body: _Body) -> None:
    load, size = {"f32": (e.load, 4), "bf16": (e.load_bf16, 2), "f16": (e.load_f16, 2)}[fmt.name]

    def step(k: Value) -> None:
        at = e.plus(w, e.times(k, 64 * size))
        body(e, e.times(k, 4), [load(at, 16 * size * c) for c in _COLUMNS])

    quads = e.b.lshr(records, e.i64(2))
    with e.loop(quads) as quad:
        for j in range(4):
            step(e.plus(e.times(quad, 4), j))
    with e.loop(e.b.and_(records, e.i64(3))) as rest:
        step(e.plus(e.times(quads, 4), rest))


def _rows_body(fmt: Format, rows: int) -> Callable[..., None]:
    """acc[row][64] (+)= sum over k of w[k][64] * x[row][k]: one accumulator an output, sequential in k."""

    def body(
        e: Emit, w: Value, records: Value, x: Value, x_stride: Value, out: Value, out_stride: Value
    ) -> None:
        outs = [e.plus(out, e.times(out_stride, r)) for r in range(rows)]
        xs = [e.plus(x, e.times(x_stride, r)) for r in range(rows)]
        acc = [[e.var(e.load(outs[r], 64 * c)) for c in _COLUMNS] for r in range(rows)]

        def step(e: Emit, k_bytes: Value, weights: list[Value]) -> None:
            for r in range(rows):
                xv = e.splat_load(xs[r], k_bytes)
                for c in _COLUMNS:
                    e.set(acc[r][c], e.fma(weights[c], xv, e.get(acc[r][c])))

        _each_k(e, fmt, w, records, step)
        for r in range(rows):
            for c in _COLUMNS:
                e.store(outs[r], e.get(acc[r][c]), 64 * c)

    return body


def _panel_body(fmt: Format) -> Callable[..., None]:
    """Dequantise records of a block to float32 [k][64]."""

    def body(e: Emit, w: Value, records: Value, panel: Value) -> None:
        def step(e: Emit, k_bytes: Value, weights: list[Value]) -> None:
            at = e.plus(panel, e.times(k_bytes, 64))
            for c in _COLUMNS:
                e.store(at, weights[c], 64 * c)

        _each_k(e, fmt, w, records, step)

    return body


def _switch(e: Emit, selector: Value, cases: dict[int, Any], args: list[Value]) -> None:
    """Call the function that `selector` names."""
    done = e.b.append_basic_block("done")
    switch = e.b.switch(selector, done)
    for number, function in cases.items():
        block = e.b.append_basic_block(f"case{number}")
        switch.add_case(ir.Constant(I64, number), block)
        with e.b.goto_block(block):
            e.b.call(function, args)
            e.b.branch(done)
    e.b.position_at_end(done)


MAX_ROWS = 4  # rows a packed block is multiplied with at once
MAX_PANEL_ROWS = 6  # the same for a float32 panel: 24 accumulators and 4 weight vectors of 32 registers


@intrinsic
def block_rows(_typing, code, rows, w, records, x, x_stride, out, out_stride):
    """out[rows][64] += block * x[rows]; rows in 1, 2, 4 (f32: also 6), `code` a format's; strides in
    bytes."""

    def body(e: Emit, code: Value, rows: Value, *args: Value) -> None:
        cases = {}
        for fmt in FORMATS:
            for r in (1, 2, 4, 6) if fmt is F32 else (1, 2, 4):
                name = f"rows_{fmt.name}_{r}"
                cases[fmt.code * 8 + r] = outlined(e.b, name, [I64] * 6, _rows_body(fmt, r), _VOID)
        _switch(e, e.plus(e.times(code, 8), rows), cases, list(args))

    return void_op(body, 8)


@intrinsic
def block_row(_typing, code, w, records, x, out):
    """`block_rows` for one row alone, which keeps the code of a one-row kernel small."""

    def body(e: Emit, code: Value, *args: Value) -> None:
        cases = {
            fmt.code: outlined(e.b, f"rows_{fmt.name}_1", [I64] * 6, _rows_body(fmt, 1), _VOID)
            for fmt in FORMATS
        }
        w, records, x, out = args
        _switch(e, code, cases, [w, records, x, e.i64(0), out, e.i64(0)])

    return void_op(body, 5)


@intrinsic
def block_panel(_typing, code, w, records, panel):
    """panel[records*record_k][64] float32 = the dequantised records."""

    def body(e: Emit, code: Value, *args: Value) -> None:
        cases = {
            fmt.code: outlined(e.b, f"panel_{fmt.name}", [I64] * 3, _panel_body(fmt), _VOID)
            for fmt in FORMATS
        }
        _switch(e, code, cases, list(args))

    return void_op(body, 4)


@intrinsic
def zero64(_typing, addr):
    """Store 64 float32 zeros."""

    def body(e: Emit, addr: Value) -> None:
        for c in _COLUMNS:
            e.store(addr, e.const(0.0), 64 * c)

    return void_op(body, 1)


def _copy64(e: Emit, src: Value, bias: Value, out: Value, count: Value) -> None:
    for c in _COLUMNS:
        mask = e.mask_below(e.plus(count, -16 * c))
        v = e.load(src, 64 * c)
        with e.b.if_else(e.b.icmp_signed("!=", bias, e.i64(0))) as (then, other):
            with then:
                biased = e.add(v, e.load_masked(e.plus(bias, 64 * c), mask))
                then_block = e.b.block
            with other:
                other_block = e.b.block
        phi = e.b.phi(v.type)
        phi.add_incoming(biased, then_block)
        phi.add_incoming(v, other_block)
        e.store_masked(e.plus(out, 64 * c), phi, mask)


@intrinsic
def copy64(_typing, src, bias, out, count):
    """out[:count] = src[:count] (+ bias[:count] when bias is no null address); count <= 64."""

    def body(e: Emit, *args: Value) -> None:
        e.b.call(outlined(e.b, "copy64", [I64] * 4, _copy64, _VOID), list(args))

    return void_op(body, 4)
