"""Kernels of a walk: gate scores, the features of the largest ones, and the sum over those features alone.

The features of a row are cut into parts by their number only, and a part is one task: the bits do not depend
on threads, nor on how many rows are run together.
"""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

from numba import njit, prange
from numba.np.ufunc import get_thread_id

from larql_kv.backends.cpu.formats import zero64
from larql_kv.backends.cpu.row_kernels import _linears
from larql_kv.backends.cpu.rowop_kernels import add_row, gated_row
from larql_kv.backends.cpu.runtime import kernel, region
from larql_kv.backends.cpu.simd import peek_f32, peek_u8, peek_u32, poke_8, poke_32, poke_f32
from larql_kv.backends.cpu.sparse_formats import add_rows, dot_rows

MAX_PARTS = 16
PART_FEATURES = 32  # a part has at least so many, unless there is one part only
HISTOGRAM_WORDS = 2048


@njit(inline="never", error_model="numpy")
def _magnitude_of_rank(scores, size, wanted, histogram):
    """(m, r): the magnitude bits m of the score of rank `wanted` by size, and how many of the scores of
    exactly that magnitude are among the `wanted` largest. Histogram: 2048 words of scratch."""
    known = 0  # bits found so far, from the top
    shift, bits = 20, 11
    rest = wanted
    while True:
        bins = 1 << bits
        for b in range(bins):
            poke_32(histogram + 4 * b, 0)
        for f in range(size):
            m = peek_u32(scores + 4 * f) & 0x7FFFFFFF
            if (m >> (shift + bits)) == known:
                at = histogram + 4 * ((m >> shift) & (bins - 1))
                poke_32(at, peek_u32(at) + 1)
        b = bins - 1
        while b > 0 and peek_u32(histogram + 4 * b) < rest:
            rest -= peek_u32(histogram + 4 * b)
            b -= 1
        known = (known << bits) | b
        if shift == 0:
            return known, rest
        shift -= 10
        bits = 10


@njit(inline="never", error_model="numpy")
def _select(scores, size, wanted, ids, gates, bitmap, histogram):
    """The `wanted` features of the largest |score|, of equals the lower ids: ids u32 ascending, their scores,
    and the set as a bitmap of (size + 7) // 8 bytes."""
    limit, ties = _magnitude_of_rank(scores, size, wanted, histogram)
    for b in range((size + 7) >> 3):
        poke_8(bitmap + b, 0)
    found = 0
    for f in range(size):
        m = peek_u32(scores + 4 * f) & 0x7FFFFFFF
        if m < limit:
            continue
        if m == limit:
            if ties == 0:
                continue
            ties -= 1
        poke_32(ids + 4 * found, f)
        poke_32(gates + 4 * found, peek_u32(scores + 4 * f))
        at = bitmap + (f >> 3)
        poke_8(at, peek_u8(at) | (1 << (f & 7)))
        found += 1


@kernel(ints=7, parallel=False)
def select_kernel(scores, size, wanted, ids, gates, bitmap, histogram):
    _select(scores, size, wanted, ids, gates, bitmap, histogram)


@kernel(ints=11, regions=True)
def score_select_kernel(parts, blocks, x, size, wanted, scores, ids, gates, bitmap, histogram, pad):
    """Gate scores of one row, and `select_kernel` of them. pad: 512 bytes a thread."""
    _linears(parts, blocks, x, scores, pad)
    _select(scores, size, wanted, ids, gates, bitmap, histogram)


@njit(inline="never", error_model="numpy")
def _walk_part(
    up_code, up, up_bytes, up_bias, down_code, down, down_bytes, hidden, activation, x, ids, gates, count,
    values, acc,
):  # fmt: skip
    """acc[hidden] = sum of act(gate) * (up row . x) * down row over `count` features; those of at most 1e-10
    are left out. values: 2 * (count rounded up to 4) floats of scratch."""
    padded = (count + 3) & ~3
    factors = values + 4 * padded
    k = 0
    while k < hidden:
        zero64(acc + 4 * k)
        k += 64
    if count == 0:
        return
    i = 0
    while i < count:
        last = count - 1
        a, b = up + peek_u32(ids + 4 * i) * up_bytes, up + peek_u32(ids + 4 * min(i + 1, last)) * up_bytes
        c = up + peek_u32(ids + 4 * min(i + 2, last)) * up_bytes
        d = up + peek_u32(ids + 4 * min(i + 3, last)) * up_bytes
        dot_rows(up_code, a, b, c, d, x, hidden, values + 4 * i)
        i += 4
    if up_bias != 0:
        for i in range(count):
            poke_f32(values + 4 * i, peek_f32(values + 4 * i) + peek_f32(up_bias + 4 * peek_u32(ids + 4 * i)))
    gated_row(gates, values, factors, count, activation)
    for i in range(padded):
        if i >= count or abs(peek_f32(factors + 4 * i)) <= 1e-10:
            poke_f32(factors + 4 * i, 0.0)
    i = 0
    while i < count:
        last = count - 1
        a, b = (
            down + peek_u32(ids + 4 * i) * down_bytes,
            down + peek_u32(ids + 4 * min(i + 1, last)) * down_bytes,
        )
        c = down + peek_u32(ids + 4 * min(i + 2, last)) * down_bytes
        d = down + peek_u32(ids + 4 * min(i + 3, last)) * down_bytes
        add_rows(down_code, a, b, c, d, factors + 4 * i, acc, hidden)
        i += 4


@region
def _walk_parts(
    up_code, up, up_bytes, up_bias, down_code, down, down_bytes, hidden, activation, x, ids, gates, count,
    parts, stride, values, sums,
):  # fmt: skip
    for p in prange(parts):
        first = p * count // parts
        _walk_part(
            up_code, up, up_bytes, up_bias, down_code, down, down_bytes, hidden, activation, x,
            ids + 4 * first, gates + 4 * first, (p + 1) * count // parts - first,
            values + 8 * stride * p, sums + 4 * ((hidden + 63) & ~63) * p,
        )  # fmt: skip


@njit(inline="never", error_model="numpy")
def _sum_parts(parts, hidden, sums, down_bias, out):
    for k in range(hidden):
        poke_32(out + 4 * k, 0)
    for p in range(parts):
        add_row(sums + 4 * ((hidden + 63) & ~63) * p, out, hidden)
    if down_bias != 0:
        add_row(down_bias, out, hidden)


@region
def _walk_rows(
    n, up_code, up, up_bytes, up_bias, down_code, down, down_bytes, down_bias, hidden, activation, x, scores,
    size, wanted, parts, stride, scratch, scratch_bytes, out,
):  # fmt: skip
    for row in prange(n):
        ids = scratch + get_thread_id() * scratch_bytes
        gates = ids + 4 * wanted
        bitmap = gates + 4 * wanted
        histogram = bitmap + ((size + 63) >> 6) * 8
        values = histogram + 8192
        sums = values + 8 * stride * parts
        _select(scores + 4 * size * row, size, wanted, ids, gates, bitmap, histogram)
        for p in range(parts):
            first = p * wanted // parts
            _walk_part(
                up_code, up, up_bytes, up_bias, down_code, down, down_bytes, hidden, activation,
                x + 4 * hidden * row, ids + 4 * first, gates + 4 * first, (p + 1) * wanted // parts - first,
                values, sums + 4 * ((hidden + 63) & ~63) * p,
            )  # fmt: skip
        _sum_parts(parts, hidden, sums, down_bias, out + 4 * hidden * row)


@kernel(ints=22, regions=True)
def walk_kernel(
    n, up_code, up, up_bytes, up_bias, down_code, down, down_bytes, down_bias, hidden, activation, x, ids,
    gates, scores, size, wanted, parts, stride, scratch, scratch_bytes, out,
):  # fmt: skip
    """x (n, hidden) -> out (n, hidden), on `wanted` features a row in `parts` parts of at most `stride`.

    With ids and gates (of a selection): one row, whose parts are tasks. Else rows are tasks, each with its
    own selection from scores (n, size). The bits are the same. Scratch: scratch_bytes a thread."""
    if ids != 0:
        sums = scratch + 8 * stride * parts
        _walk_parts(
            up_code, up, up_bytes, up_bias, down_code, down, down_bytes, hidden, activation, x, ids, gates,
            wanted, parts, stride, scratch, sums,
        )  # fmt: skip
        _sum_parts(parts, hidden, sums, down_bias, out)
    else:
        _walk_rows(
            n, up_code, up, up_bytes, up_bias, down_code, down, down_bytes, down_bias, hidden, activation, x,
            scores, size, wanted, parts, stride, scratch, scratch_bytes, out,
        )  # fmt: skip
