"""Queries, keys and values of a coded layer on their way into the rotated domain (codec/turbo.py)."""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

from numba import njit, prange

from larql_kv.backends.cpu.attention_tiles import copy_row
from larql_kv.backends.cpu.runtime import kernel
from larql_kv.backends.cpu.simd import peek_f32, poke_f32
from larql_kv.backends.cpu.turbo_kernels import rotate_vector


@njit(inline="never", error_model="numpy")
def _turn(src, dst, dim, by):
    """dst = R (src * by); by 0: R src."""
    copy_row(src, dst, dim, 0, 0)
    if by != 0:
        for i in range(dim):
            poke_f32(dst + 4 * i, peek_f32(dst + 4 * i) * peek_f32(by + 4 * i))
    rotate_vector(dst, dim)


@njit(inline="never", error_model="numpy")
def _turn_row(q, k, v, scale, out, row, n, heads, kv_heads, dim):
    """out: q (n, heads, dim), q for codes, k (n, kv_heads, dim), v, one after the other."""
    group, size = heads // kv_heads, dim * 4
    q_all, kv_all = n * heads * size, n * kv_heads * size
    for h in range(heads):
        at = (row * heads + h) * size
        _turn(q + at, out + at, dim, 0)
        _turn(q + at, out + q_all + at, dim, scale + h // group * size if scale != 0 else 0)
    for h in range(kv_heads):
        at = (row * kv_heads + h) * size
        _turn(k + at, out + 2 * q_all + at, dim, 0)
        _turn(v + at, out + 2 * q_all + kv_all + at, dim, 0)


@kernel(ints=9, parallel=False)
def turn_kernel_serial(q, k, v, scale, out, n, heads, kv_heads, dim):
    for row in range(n):
        _turn_row(q, k, v, scale, out, row, n, heads, kv_heads, dim)


@kernel(ints=9)
def turn_kernel(q, k, v, scale, out, n, heads, kv_heads, dim):
    """q (n, heads, dim), k and v (n, kv_heads, dim) float32; scale (kv_heads, dim) float32, or 0."""
    for row in prange(n):
        _turn_row(q, k, v, scale, out, row, n, heads, kv_heads, dim)
