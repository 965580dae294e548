"""Turbo codes of vectors on the card: rotation, encoding, decoding. The format: larql_kv/codec/turbo.py.

Bit for bit: launch with `enable_fp_fusion=False`, so that no multiply-add is fused.
"""

# coverage: compiled
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

TINY_NORM: tl.constexpr = tl.constexpr(1e-12)
SIGN_SEED: tl.constexpr = tl.constexpr(0x9E3779B9)


@triton.jit
def signs(index):
    """-1 or 1 for coordinates `index` (int32)."""
    h = index.to(tl.uint32) + SIGN_SEED
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return tl.where(((h ^ (h >> 16)) & 1) != 0, -1.0, 1.0)


@triton.jit
def pairs(x, S: tl.constexpr):
    """(a, b): the values of x (n, B) that are 2^S apart in a row, each half as many."""
    half: tl.constexpr = x.numel >> (S + 1)
    return tl.split(x.reshape(half, 2, 1 << S).permute(0, 2, 1))


@triton.jit
def unpaired(a, b, x, S: tl.constexpr):
    """The inverse of `pairs`, in the shape of x."""
    return tl.join(a, b).permute(0, 2, 1).reshape(x.shape[0], x.shape[1])


@triton.jit
def neighbour_sum(x, LOG: tl.constexpr):
    """x (n, 2^LOG) float32 -> (n,): neighbours are added first."""
    for s in tl.static_range(LOG):  # every value becomes its group's sum: a shrinking tile would cost more
        a, b = pairs(x, s)
        x = unpaired(a + b, a + b, x, s)
    return tl.sum(tl.where(tl.arange(0, 1 << LOG)[None, :] == 0, x, 0.0), 1)


@triton.jit
def rotate(x, index, LOG: tl.constexpr, FACTOR: tl.constexpr):
    """The rotation of n blocks x (n, 2^LOG) float32; index: their coordinates; FACTOR: 2^(-LOG/2)."""
    diagonal = signs(index)
    x = x * diagonal
    for s in tl.static_range(LOG):
        a, b = pairs(x, s)
        x = unpaired(a + b, a - b, x, s)
    return x * FACTOR * diagonal


@triton.jit
def level(code, c1, c3, c5, BITS: tl.constexpr):
    """The levels of codes, float32."""
    x = code - ((1 << BITS) - 1) * 0.5
    square = x * x
    return x * (c1 + square * (c3 + square * c5))


@triton.jit
def norms(x, BLOCKS: tl.constexpr, LOG: tl.constexpr):
    """The norm of what each block of x (n, 2^LOG) belongs to: a vector of its own (BLOCKS = 1), or the one
    vector of the first BLOCKS blocks, which are added in order. (n,)"""
    sums = neighbour_sum(x * x, LOG)
    if BLOCKS > 1:
        block = tl.arange(0, x.shape[0])
        total = tl.sum(tl.where(block == 0, sums, 0.0), 0)
        for i in tl.static_range(1, BLOCKS):
            total += tl.sum(tl.where(block == i, sums, 0.0), 0)
        sums = tl.where(block >= 0, total, 0.0)
    return tl.sqrt_rn(sums)


@triton.jit
def quantise(x, c1, c3, c5, BITS: tl.constexpr, BLOCKS: tl.constexpr, LOG: tl.constexpr, ROOT: tl.constexpr):
    """Rotated x (n, 2^LOG), blocks of vectors as for `norms` -> codes int32 and the scale of each block (n,).

    ROOT: the square root of a vector's size.
    """
    norm = norms(x, BLOCKS, LOG)
    is_tiny = norm <= TINY_NORM
    factor = tl.where(is_tiny, 0.0, tl.div_rn(tl.full(norm.shape, ROOT, tl.float32), norm))
    y = x * factor[:, None]
    codes = tl.zeros(x.shape, tl.int32)
    upper = level(tl.full((), 0.0, tl.float32), c1, c3, c5, BITS)
    for k in tl.static_range(1, 1 << BITS):
        lower = upper
        upper = level(tl.full((), k, tl.float32), c1, c3, c5, BITS)
        codes += ((upper + lower) * 0.5 <= y).to(tl.int32)
    levels = level(codes.to(tl.float32), c1, c3, c5, BITS)
    return codes, tl.where(is_tiny, 0.0, tl.div_rn(norm, norms(levels, BLOCKS, LOG)))


@triton.jit
def store_plane(
    codes, ptr, stride, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, LOG: tl.constexpr
):
    """WIDTH bits from LOW of codes (n, 2^LOG), a plane for each of the first BLOCKS blocks."""
    EACH: tl.constexpr = 8 // WIDTH
    N: tl.constexpr = (1 << LOG) // EACH
    block = tl.arange(0, codes.shape[0])[:, None]
    fields = ((codes >> LOW) & ((1 << WIDTH) - 1)).reshape(codes.shape[0], EACH, N)
    packed = tl.sum(fields << (WIDTH * tl.arange(0, EACH)[None, :, None]), 1)
    at = block * stride + tl.arange(0, N)[None, :]
    tl.store(ptr + at, packed.to(tl.uint8), mask=(block < BLOCKS) & (at >= 0))


@triton.jit
def store_codes(codes, ptr, BLOCKS: tl.constexpr, BITS: tl.constexpr, LOG: tl.constexpr):
    """The planes of vectors that are the blocks of codes (n, 2^LOG), one after the other; BLOCKS of them."""
    STRIDE: tl.constexpr = BITS << LOG >> 3
    if BITS == 3:
        store_plane(codes, ptr, STRIDE, BLOCKS, 2, 0, LOG)
        store_plane(codes, ptr + (1 << LOG >> 2), STRIDE, BLOCKS, 1, 2, LOG)
    else:
        store_plane(codes, ptr, STRIDE, BLOCKS, BITS, 0, LOG)


@triton.jit
def store_odd_plane(
    flat, ptr, DIM: tl.constexpr, DIM_P: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr
):
    """WIDTH bits from LOW of the codes `flat` (DIM_P,) of one vector whose size is no power of two."""
    N: tl.constexpr = DIM * WIDTH // 8
    j = tl.arange(0, DIM_P // 2)
    packed = tl.zeros((DIM_P // 2,), tl.int32)
    for i in tl.static_range(8 // WIDTH):
        field = tl.gather(flat, tl.minimum(i * N + j, DIM - 1), 0)
        packed |= ((field >> LOW) & ((1 << WIDTH) - 1)) << (WIDTH * i)
    tl.store(ptr + j, packed.to(tl.uint8), mask=j < N)


@triton.jit
def load_plane(ptr, c, mask, DIM: tl.constexpr, WIDTH: tl.constexpr):
    N: tl.constexpr = DIM * WIDTH // 8
    byte = tl.load(ptr + c % N, mask=mask, other=0).to(tl.int32)
    return (byte >> (c // N * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def load_codes(ptr, c, mask, DIM: tl.constexpr, BITS: tl.constexpr):
    """The codes (int32) of coordinates c of vectors whose planes are at `ptr`, one address or one each."""
    if BITS == 3:
        high = load_plane(ptr + DIM // 4, c, mask, DIM, 1)
        return load_plane(ptr, c, mask, DIM, 2) | (high << 2)
    else:
        return load_plane(ptr, c, mask, DIM, BITS)


@triton.jit
def rotate_kernel(
    x_ptr, out_ptr, DIM: tl.constexpr, DIM_P: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr
):
    """One vector a program: out = R x, of x (n, DIM) float32 or bf16; out float32, may be x."""
    at = tl.program_id(0).to(tl.int64) * DIM
    c = (tl.arange(0, DIM_P >> LOG)[:, None] << LOG) + tl.arange(0, 1 << LOG)[None, :]
    x = tl.load(x_ptr + at + c, mask=c < DIM, other=0.0).to(tl.float32)
    tl.store(out_ptr + at + c, rotate(x, c, LOG, FACTOR), mask=c < DIM)


@triton.jit
def encode_kernel(
    x_ptr, mean_ptr, codes_ptr, scale_ptr, heads, x_row, x_head, codes_row, codes_head, scale_row, scale_head,
    c1, c3, c5, DIM: tl.constexpr, DIM_P: tl.constexpr, BITS: tl.constexpr, LOG: tl.constexpr,
    ROOT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """One vector a program: x, float32 or bf16, less the mean (heads, DIM) where there is one, to codes.

    FACTOR: 0 where x is rotated already, else the rotation's. Strides in elements of what is pointed to.
    """
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    c = (tl.arange(0, DIM_P >> LOG)[:, None] << LOG) + tl.arange(0, 1 << LOG)[None, :]
    mask = c < DIM
    x = tl.load(x_ptr + row * x_row + head * x_head + c, mask=mask, other=0.0).to(tl.float32)
    if FACTOR != 0.0:
        x = rotate(x, c, LOG, FACTOR)
    if mean_ptr is not None:
        x = x - tl.load(mean_ptr + head * DIM + c, mask=mask, other=0.0)
    codes, scales = quantise(x, c1, c3, c5, BITS, DIM >> LOG, LOG, ROOT)
    codes_ptr += row * codes_row + head * codes_head
    if DIM >> LOG == 1:
        store_codes(codes, codes_ptr, 1, BITS, LOG)
    else:
        flat = codes.reshape(DIM_P)
        if BITS == 3:
            store_odd_plane(flat, codes_ptr, DIM, DIM_P, 2, 0)
            store_odd_plane(flat, codes_ptr + DIM // 4, DIM, DIM_P, 1, 2)
        else:
            store_odd_plane(flat, codes_ptr, DIM, DIM_P, BITS, 0)
    block = tl.arange(0, DIM_P >> LOG)
    tl.store(scale_ptr + row * scale_row + head * scale_head + block, scales, mask=block == 0)


@triton.jit
def decode_kernel(
    codes_ptr, scale_ptr, mean_ptr, out_ptr, heads, codes_row, codes_head, scale_row, scale_head,
    c1, c3, c5, DIM: tl.constexpr, BITS: tl.constexpr, DIM_P: tl.constexpr,
):  # fmt: skip
    """One vector a program: codes to rotated vectors (rows, heads, DIM) float32."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    c = tl.arange(0, DIM_P)
    mask = c < DIM
    codes = load_codes(codes_ptr + row * codes_row + head * codes_head, c, mask, DIM, BITS)
    scale = tl.load(scale_ptr + row * scale_row + head * scale_head)
    x = level(codes.to(tl.float32), c1, c3, c5, BITS) * scale
    if mean_ptr is not None:
        x += tl.load(mean_ptr + head * DIM + c, mask=mask, other=0.0)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * DIM + c, x, mask=mask)
