"""Packed weights back to rows: for prefill's matrix products, and for embeddings."""

# coverage: compiled
# pyright: basic
from __future__ import annotations

import triton
import triton.language as tl

from larql_kv.backends.cuda.kernels.common import high_half, low_half, to_bf16, wait_for_previous
from larql_kv.backends.cuda.kernels.linear import HALF, PAIR, SUPER, signed_byte


@triton.jit
def weights_at(
    codes,
    small,
    supers,
    row,
    column,
    inside,
    NC: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Weights (float32) of packed rows `row` and columns `column` (int32, broadcast to one shape)."""
    T: tl.constexpr = ROWS * GROUPS
    group = column // 32
    e = column % 32
    tile = (row // ROWS).to(tl.int64) * NC + group // GROUPS
    place = (row % ROWS) * GROUPS + group % GROUPS
    base = codes + tile * (CODES * T) + place
    k = (e % 16) // 4
    byte = e % 4
    if CODES == 8:
        word = tl.load(base + (e // 4) * T, mask=inside, other=0)
        q = (word << (24 - 8 * byte)) >> 24
    else:
        word = tl.load(base + k * T, mask=inside, other=0)
        q = (word >> (8 * byte + 4 * (e // 16))) & 15
        if CODES == 5:
            fifth = tl.load(base + 4 * T, mask=inside, other=0)
            q = q | (((fifth >> (8 * byte + k + 4 * (e // 16))) & 1) << 4)
        if CODES == 6:
            upper = tl.load(base + (4 + k // 2) * T, mask=inside, other=0)
            q = q | (((upper >> (8 * byte + 4 * (k % 2) + 2 * (e // 16))) & 3) << 4)
    number = tl.load(small + tile * T + place, mask=inside, other=0).to(tl.int32)
    if SCALE == HALF:
        return low_half(number) * (q - ZERO).to(tl.float32)
    elif SCALE == PAIR:
        return low_half(number) * q.to(tl.float32) + high_half(number)
    else:
        outer = tl.load(supers + tile * (T // 8) + place // 8, mask=inside, other=0)
        if SCALE == SUPER:
            d = low_half(outer) * (number & 0xFF).to(tl.float32)
            return d * q.to(tl.float32) - high_half(outer) * ((number >> 8) & 0xFF).to(tl.float32)
        else:
            half = tl.where(e < 16, signed_byte(number, 0), signed_byte(number, 8))
            return (low_half(outer) * half.to(tl.float32)) * (q - 32).to(tl.float32)


@triton.jit
def unpack_rows(
    codes, small, supers, ids, out, first, scale, rows,
    K: tl.constexpr, NC: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    CODES: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr,
    GATHER: tl.constexpr, GLU: tl.constexpr, HEIGHT: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[i] = scale * packed row first + i (GATHER: row ids[i]), in out's dtype, for i < rows.

    GLU: packed rows are interleaved (32 gate, 32 up); out has `rows / 2` gate rows, then the up rows.
    """
    wait_for_previous(PDL)
    index = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    here = index < rows
    row = tl.load(ids + index, mask=here, other=0).to(tl.int32) if GATHER else first + index
    if GLU:
        half = rows // 2
        feature = index % half
        row = (feature // 32) * 64 + feature % 32 + 32 * (index // half)
    column = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = here[:, None] & (column < K)[None, :]
    w = weights_at(
        codes, small, supers, row[:, None], column[None, :], inside, NC, ROWS, GROUPS, CODES, SCALE, ZERO
    )
    at = index.to(tl.int64)[:, None] * K + column[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + at, to_bf16(w * scale), mask=inside)
    else:
        tl.store(out + at, w * scale, mask=inside)


@triton.jit
def gather_rows(
    data, ids, out, scale, rows,
    K: tl.constexpr, HEIGHT: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[i] = scale * data[ids[i]] as float32, from a matrix stored as floats."""
    wait_for_previous(PDL)
    index = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    row = tl.load(ids + index, mask=index < rows, other=0).to(tl.int64)
    column = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = (index < rows)[:, None] & (column < K)[None, :]
    w = tl.load(data + row[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index.to(tl.int64)[:, None] * K + column[None, :], w * scale, mask=inside)
