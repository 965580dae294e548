"""Matrix times one row, straight from the packed weights: norm before, bias or gated activation after.

Bytes of a launch: the packed matrix, once. A program owns one tile of output rows and walks the groups of
32 along k in chunks; a thread owns four whole groups of a chunk, so every code load is 16 bytes. The first
AHEAD chunks are loaded before the wait for the kernel in front (weights do not depend on it).
"""

# coverage: compiled
# pyright: basic
from __future__ import annotations

import triton
import triton.language as tl

from larql_kv.backends.cuda.kernels.common import (
    INT,
    dot4,
    dot4_wide,
    high_half,
    low_half,
    store_planes,
    store_row_bf16,
    to_bf16,
)

# What a launch does before its product, and after it.
PLANES: tl.constexpr = tl.constexpr(0)  # the activations are ready
NORM: tl.constexpr = tl.constexpr(1)  # rows += (normed) update; norm; quantise into scratch
STORE: tl.constexpr = tl.constexpr(0)
GLU: tl.constexpr = tl.constexpr(1)  # tile rows are 32 gate rows, then their 32 up rows
HEAD: tl.constexpr = tl.constexpr(2)  # soft cap, logits, largest of the tile

HALF: tl.constexpr = tl.constexpr(0)
PAIR: tl.constexpr = tl.constexpr(1)
SUPER: tl.constexpr = tl.constexpr(2)
SUPER16: tl.constexpr = tl.constexpr(3)


@triton.jit
def load_small(p):
    """int16 numbers as int32 (upper half zero). A thread owns four neighbours: one 8-byte load."""
    if INT:
        return tl.load(p).to(tl.int32) & 0xFFFF
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b; ld.global.nc.v2.b32 {a, b}, [$4];
            and.b32 $0, a, 0xFFFF; shr.u32 $1, a, 16; and.b32 $2, b, 0xFFFF; shr.u32 $3, b, 16; }""",
            "=r,=r,=r,=r,l,l,l,l",
            [p.to(tl.int64, bitcast=True)],
            tl.int32,
            True,
            4,
        )


@triton.jit
def load_super(p):
    """One int32 a group out of one for eight groups: a thread's four groups share it."""
    if INT:
        return tl.load(p)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$4]; mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0;",
            "=r,=r,=r,=r,l,l,l,l",
            [p.to(tl.int64, bitcast=True)],
            tl.int32,
            True,
            4,
        )


@triton.jit
def load_chunk(
    codes, small, supers, tile, chunk, NC, ROWS, GROUPS,
    WORDS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The words, small and super numbers of one chunk, as a tuple of (ROWS, GROUPS) tensors."""
    T: tl.constexpr = ROWS * GROUPS
    off = tl.arange(0, ROWS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    at = tile.to(tl.int64) * NC + chunk
    base = codes + at * (WORDS * T) + off
    loaded = ()
    for w in tl.static_range(WORDS):
        # read once a step: should make room first for what is read again
        loaded = loaded + (tl.load(base + w * T, eviction_policy="evict_first"),)
    if SCALE == PAIR:
        loaded = loaded + (tl.load(small + at * T + off),)
    else:
        loaded = loaded + (load_small(small + at * T + off),)
    if SCALE >= SUPER:
        loaded = loaded + (load_super(supers + at * (T // 8) + off // 8),)
    return loaded


@triton.jit
def signed_byte(word, at: tl.constexpr):
    return (word << (24 - at)) >> 24


@triton.jit
def chunk_dot(
    chunk,
    q,
    scale,
    sums,
    stride,
    column,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
):
    """weights . x over each group of a chunk, float32 (ROWS, GROUPS). `column`: the groups' indices."""
    WORDS: tl.constexpr = CODES
    first = tl.zeros_like(chunk[0])
    second = tl.zeros_like(chunk[0])
    for k in tl.static_range(4):
        if CODES == 8:
            low = chunk[k]
            high = chunk[4 + k]
        else:
            low = chunk[k] & 0x0F0F0F0F
            high = (chunk[k] >> 4) & 0x0F0F0F0F
        if CODES == 5:
            low = low | (((chunk[4] >> k) & 0x01010101) << 4)
            high = high | (((chunk[4] >> (4 + k)) & 0x01010101) << 4)
        if CODES == 6:
            upper = chunk[4 + k // 2]
            if k % 2 == 0:
                low = low | ((upper << 4) & 0x30303030)
                high = high | ((upper << 2) & 0x30303030)
            else:
                low = low | (upper & 0x30303030)
                high = high | ((upper >> 2) & 0x30303030)
        if BITS == 8:
            first = dot4(low, tl.load(q + k * stride + column)[None, :], first, CODES == 8)
            x = tl.load(q + (4 + k) * stride + column)[None, :]
            if SCALE == SUPER16:
                second = dot4(high, x, second, CODES == 8)
            else:
                first = dot4(high, x, first, CODES == 8)
        else:
            a = tl.load(q + 2 * k * stride + column)[None, :]
            b = tl.load(q + (2 * k + 1) * stride + column)[None, :]
            first = dot4_wide(low, a, b, first, CODES == 8)
            a = tl.load(q + (8 + 2 * k) * stride + column)[None, :]
            b = tl.load(q + (9 + 2 * k) * stride + column)[None, :]
            if SCALE == SUPER16:
                second = dot4_wide(high, a, b, second, CODES == 8)
            else:
                first = dot4_wide(high, a, b, first, CODES == 8)
    xs = tl.load(scale + column)[None, :]
    products = first.to(tl.float32) * xs
    small = chunk[WORDS]
    if SCALE == HALF:
        if ZERO != 0:
            total = (tl.load(sums + column) + tl.load(sums + stride + column))[None, :]
            products = products - ZERO * total
        return low_half(small) * products
    elif SCALE == PAIR:
        total = (tl.load(sums + column) + tl.load(sums + stride + column))[None, :]
        return low_half(small) * products + high_half(small) * total
    elif SCALE == SUPER:
        total = (tl.load(sums + column) + tl.load(sums + stride + column))[None, :]
        d = low_half(chunk[WORDS + 1]) * (small & 0xFF).to(tl.float32)
        m = high_half(chunk[WORDS + 1]) * (small >> 8).to(tl.float32)
        return d * products - m * total
    else:
        d = low_half(chunk[WORDS + 1])
        lower = products - 32.0 * tl.load(sums + column)[None, :]
        upper = second.to(tl.float32) * xs - 32.0 * tl.load(sums + stride + column)[None, :]
        return d * (
            signed_byte(small, 0).to(tl.float32) * lower + signed_byte(small, 8).to(tl.float32) * upper
        )


@triton.jit
def activate(x, GELU: tl.constexpr):
    """SiLU, or GELU in its tanh form (GELU)."""
    if GELU:
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (tl.exp(2.0 * u) + 1.0))
    else:
        return x / (1.0 + tl.exp(-x))


PART: tl.constexpr = tl.constexpr(16)  # groups of a row taken at once


@triton.jit
def row_of(ptr, K: tl.constexpr, PARTS: tl.constexpr):
    """A float32 row as PARTS tensors of (PART, 32), zero past K."""
    at = tl.arange(0, PART)[:, None] * 32 + tl.arange(0, 32)[None, :]
    parts = ()
    for i in tl.static_range(PARTS):
        here = at + i * 512
        if (i + 1) * 512 <= K:
            parts = parts + (tl.load(ptr + here),)
        else:
            parts = parts + (tl.load(ptr + here, mask=here < K, other=0.0),)
    return parts


@triton.jit
def kept_row(row_table, pos_ptr, K: tl.constexpr, RING: tl.constexpr):
    """Where the residual row of the position goes: its slot in the layer's blocks (64, K) bfloat16."""
    pos = tl.load(pos_ptr)
    slot = pos % RING if RING > 0 else pos
    return tl.load(row_table + slot // 64).to(tl.pointer_type(tl.bfloat16)) + (slot % 64) * K


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def norm_row(
    x,
    update_ptr,
    post,
    weight,
    out_ptr,
    kept,
    stage_ptr,
    q_ptr,
    scale_ptr,
    sums_ptr,
    stride,
    eps,
    program,
    programs,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    UPDATE: tl.constexpr,
    POST: tl.constexpr,
    KEEP: tl.constexpr,
    STAGE: tl.constexpr,
    ROUND: tl.constexpr,
    ONE_PASS: tl.constexpr,
    BITS: tl.constexpr,
):
    """x + update (normed first, with POST); its norm times `weight`, as planes (BITS 32: float32 values).

    x, post, weight: a row in PARTS tensors. The sum goes to out_ptr as float32 and, rounded to bfloat16, to
    `kept` (KEEP) and the staging row (STAGE): a part each by another of the launch's `programs`, all of which
    make the whole row, so that none of them comes late. With POST and ONE_PASS the
    mean square of the sum is had from four sums at once: |x|^2 + 2 r x.u + r^2 |u|^2, u = update * post.
    """
    at = tl.arange(0, PART)[:, None] * 32 + tl.arange(0, 32)[None, :]
    yy = tl.zeros([PART, 32], tl.float32)
    xx = tl.zeros([PART, 32], tl.float32)
    xu = tl.zeros([PART, 32], tl.float32)
    uu = tl.zeros([PART, 32], tl.float32)
    total = ()
    if UPDATE:
        update = row_of(update_ptr, K, PARTS)
        for i in tl.static_range(PARTS):
            if POST:
                u = update[i] * post[i]
                yy += update[i] * update[i]
                xx += x[i] * x[i]
                xu += x[i] * u
                uu += u * u
                total = total + (u,)
            else:
                total = total + (x[i] + update[i],)
    else:
        total = x
    r = 1.0
    if POST and ONE_PASS:
        if INT:  # its reduction by a function of one's own takes seconds
            yy = tl.sum(tl.sum(yy, 1), 0)
            xx = tl.sum(tl.sum(xx, 1), 0)
            xu = tl.sum(tl.sum(xu, 1), 0)
            uu = tl.sum(tl.sum(uu, 1), 0)
        else:
            yy, xx, xu, uu = tl.reduce((yy, xx, xu, uu), 1, add4)
            yy, xx, xu, uu = tl.reduce((yy, xx, xu, uu), 0, add4)
        r = tl.rsqrt(yy / K + eps)
        square = xx + 2.0 * r * xu + r * r * uu
    else:
        if POST:
            r = tl.rsqrt(tl.sum(tl.sum(yy, 1), 0) / K + eps)
            rows = ()
            for i in tl.static_range(PARTS):
                rows = rows + (x[i] + total[i] * r,)
            total = rows
        squares = tl.zeros([PART, 32], tl.float32)
        for i in tl.static_range(PARTS):
            # K/V are derived from the row as a residual state stores it
            seen = to_bf16(total[i]).to(tl.float32) if ROUND else total[i]
            squares += seen * seen
        square = tl.sum(tl.sum(squares, 1), 0)
    size = tl.rsqrt(square / K + eps)
    for i in tl.static_range(PARTS):
        here = at + i * 512
        inside = here < K
        row = x[i] + total[i] * r if POST and ONE_PASS else total[i]
        tl.store(out_ptr + here, row, mask=inside & (program == i % programs))
        keeps = program == programs - 1 - i % programs
        if KEEP:
            store_row_bf16(kept, row, i * 512, K, keeps)
        if STAGE:
            store_row_bf16(stage_ptr, row, i * 512, K, keeps)
        if ROUND:
            row = to_bf16(row).to(tl.float32)
        z = row * size * weight[i]
        if BITS == 32:
            tl.store(q_ptr.to(tl.pointer_type(tl.float32)) + here, z, mask=inside)
        else:
            group = i * PART + tl.arange(0, PART)
            store_planes(z, group, group < stride, q_ptr, scale_ptr, sums_ptr, stride, BITS)


@triton.jit
def tile_product(
    codes,
    small,
    supers,
    tile,
    first,
    q,
    scale,
    sums,
    stride,
    NC: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The products of a tile's rows, float32 (ROWS,); `first` holds its first AHEAD chunks."""
    total = tl.zeros([ROWS, GROUPS], tl.float32)
    for c in tl.static_range(NC):
        chunk = (
            first[c]
            if c < AHEAD
            else load_chunk(codes, small, supers, tile, c, NC, ROWS, GROUPS, CODES, SCALE)
        )
        column = c * GROUPS + tl.arange(0, GROUPS)
        total += chunk_dot(chunk, q, scale, sums, stride, column, CODES, SCALE, ZERO, BITS)
    return tl.sum(total, 1)
