"""Codecs on the card: turbo codes of vectors, and rows with outliers, grouped integers or one clipped scale.

The formats are those of larql_kv/codec, bit for bit: launch with `enable_fp_fusion=False`, so that no
multiply-add is fused. Rows are bytes at any address. A row that its codec cannot hold decodes to NaN: nothing
is raised here.
"""

# coverage: compiled
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from larql_kv.backends.cuda.kernels.common import as_int

TINY_NORM: tl.constexpr = tl.constexpr(1e-12)
SIGN_SEED: tl.constexpr = tl.constexpr(0x9E3779B9)
LARGEST_BF16: tl.constexpr = tl.constexpr(3.3895313892515355e38)
NEAREST: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken off, it rounds to integers


# --- turbo codes -------------------------------------------------------------------------------------


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


# --- rows --------------------------------------------------------------------------------------------


@triton.jit
def store_half(ptr, bits, mask):
    """The low 16 of `bits` (int32), little end first."""
    tl.store(ptr, (bits & 255).to(tl.uint8), mask=mask)
    tl.store(ptr + 1, ((bits >> 8) & 255).to(tl.uint8), mask=mask)


@triton.jit
def load_half(ptr, mask):
    low = tl.load(ptr, mask=mask, other=0).to(tl.int32)
    return low | (tl.load(ptr + 1, mask=mask, other=0).to(tl.int32) << 8)


@triton.jit
def store_float(ptr, x, mask):
    bits = as_int(x)
    store_half(ptr, bits, mask)
    store_half(ptr + 2, bits >> 16, mask)


@triton.jit
def load_float(ptr, mask):
    return (load_half(ptr, mask) | (load_half(ptr + 2, mask) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def load_bf16(ptr, mask):
    return (load_half(ptr, mask) << 16).to(tl.float32, bitcast=True)


@triton.jit
def nearest_integer(x):
    """For |x| < 2^22, ties to even."""
    return (x + NEAREST) - NEAREST


@triton.jit
def load_row(ptr, weight_ptr, c, WIDTH: tl.constexpr):
    x = tl.load(ptr + c, mask=c < WIDTH, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        x = x * tl.load(weight_ptr + c, mask=c < WIDTH, other=0.0)
    return x


@triton.jit
def poison(x, LARGEST: tl.constexpr):
    """0, or NaN where a value of the row x (n,) is too large or none."""
    bad = tl.max((tl.abs(x) <= LARGEST).to(tl.int32) ^ 1, 0)
    return tl.where(bad != 0, float("nan"), 0.0)


@triton.jit
def take_outliers(x, c, ptr, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Store the KEPT largest values of x (n,), n >= WIDTH, as outliers.py says; x with 0 in their places."""
    size = tl.where(c < WIDTH, tl.abs(x), -1.0)
    for k in tl.static_range(KEPT):
        _, channel = tl.max(size, 0, return_indices=True)
        value = tl.sum(tl.where(c == channel, x, 0.0), 0)
        value = tl.minimum(tl.maximum(value, -LARGEST_BF16), LARGEST_BF16)
        bits = as_int(value)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        store_half(ptr + 2 * k, channel, True)
        store_half(ptr + 2 * KEPT + 2 * k, bits, True)
        x = tl.where(c == channel, 0.0, x)
        size = tl.where(c == channel, -1.0, size)
    return x


@triton.jit
def put_outliers(x, c, ptr, KEPT: tl.constexpr):
    for k in tl.static_range(KEPT):
        channel, value = load_half(ptr + 2 * k, True), load_bf16(ptr + 2 * KEPT + 2 * k, True)
        x = tl.where(c == channel, value, x)
    return x


@triton.jit
def broken_row(scale):
    """What outliers of a row need too: NaN where a scale of the row is, else 0."""
    return tl.where(scale == scale, 0.0, scale)


@triton.jit
def store_row(ptr, weight_ptr, x, c, WIDTH: tl.constexpr):
    if weight_ptr is not None:
        x = tl.div_rn(x, tl.load(weight_ptr + c, mask=c < WIDTH, other=1.0))
    tl.store(ptr + c, x, mask=c < WIDTH)


@triton.jit
def encode_grouped_kernel(
    x_ptr, weight_ptr, codes_ptr, x_row, codes_row, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, KEPT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One row a program: x float32 or bf16 -> a row of `GroupedRows`. WIDTH_P: at least WIDTH and GROUP."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH_P)
    codes_ptr += row * codes_row
    x = load_row(x_ptr + row * x_row, weight_ptr, c, WIDTH)
    broken = poison(x, LARGEST)
    x = take_outliers(x, c, codes_ptr, WIDTH, KEPT).reshape(WIDTH_P // GROUP, GROUP)
    codes_ptr += 4 * KEPT

    HALF: tl.constexpr = 1 << (BITS - 1)
    high, low = tl.max(x, 1), tl.min(x, 1)
    size = as_int(tl.maximum(high, -low) * (1.0 / HALF))
    size = ((size + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    is_zero = size == 0.0
    scale = tl.where(high >= -low, -size, size)
    q = nearest_integer(tl.div_rn(x, tl.where(is_zero, 1.0, scale)[:, None]))
    q = tl.minimum(tl.maximum(q, -HALF), HALF - 1).to(tl.int32) + HALF
    group = tl.arange(0, WIDTH_P // GROUP)
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    scale = tl.where(is_zero, 0.0, scale) + broken
    store_half(codes_ptr + 2 * group, as_int(scale) >> 16, group < GROUPS)
    codes_ptr += 2 * GROUPS

    if BITS == 8:
        tl.store(codes_ptr + c, q.reshape(WIDTH_P).to(tl.uint8), mask=c < WIDTH)
    else:
        q = tl.where(c < WIDTH, q.reshape(WIDTH_P), 0)
        even, odd = tl.split(q.reshape(WIDTH_P // 2, 2))
        j = tl.arange(0, WIDTH_P // 2)
        tl.store(codes_ptr + j, (even | (odd << 4)).to(tl.uint8), mask=2 * j < WIDTH)


@triton.jit
def decode_grouped_kernel(
    codes_ptr, weight_ptr, out_ptr, codes_row, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One row a program -> (n, WIDTH) float32."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH_P)
    mask = c < WIDTH
    codes_ptr += row * codes_row
    scales_ptr = codes_ptr + 4 * KEPT
    fields_ptr = scales_ptr + 2 * ((WIDTH + GROUP - 1) // GROUP)
    scale = load_bf16(scales_ptr + 2 * (c // GROUP), mask)
    if BITS == 8:
        q = tl.load(fields_ptr + c, mask=mask, other=0).to(tl.int32)
    else:
        q = (tl.load(fields_ptr + c // 2, mask=mask, other=0).to(tl.int32) >> (4 * (c % 2))) & 15
    x = (q - (1 << (BITS - 1))).to(tl.float32) * scale
    x = put_outliers(x, c, codes_ptr, KEPT) + broken_row(load_bf16(scales_ptr, True))
    store_row(out_ptr + row * WIDTH, weight_ptr, x, c, WIDTH)


@triton.jit
def encode_clipped_kernel(
    x_ptr, weight_ptr, codes_ptr, x_row, codes_row, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr,
    LOG: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One row a program: x float32 or bf16 -> a row of `ClippedRows`. WIDTH_P: 2^LOG."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH_P)
    codes_ptr += row * codes_row
    x = load_row(x_ptr + row * x_row, weight_ptr, c, WIDTH)
    first = tl.sum(tl.where(c == 0, x, 0.0), 0)
    rest = tl.where(c < WIDTH, x - first, 0.0)
    width = tl.full((1,), WIDTH, tl.float32)
    mean = tl.div_rn(neighbour_sum(rest[None, :], LOG), width)
    deviations = tl.where(c < WIDTH, rest - mean, 0.0)
    sigma = tl.sqrt_rn(tl.div_rn(neighbour_sum((deviations * deviations)[None, :], LOG), width))
    scale = tl.div_rn(3.0 * tl.where(sigma == 0.0, 1.0, sigma), tl.full((1,), 127.0, tl.float32))
    q = tl.minimum(tl.maximum(tl.div_rn(x, scale), -127.0), 127.0)
    tl.store(codes_ptr + 4 + c, nearest_integer(q).to(tl.int8).to(tl.uint8, bitcast=True), mask=c < WIDTH)
    store_float(codes_ptr + tl.arange(0, 1), scale + poison(x, LARGEST), tl.arange(0, 1) == 0)


@triton.jit
def decode_clipped_kernel(
    codes_ptr, weight_ptr, out_ptr, codes_row, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr
):
    """One row a program -> (n, WIDTH) float32."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH_P)
    codes_ptr += row * codes_row
    q = tl.load(codes_ptr + 4 + c, mask=c < WIDTH, other=0).to(tl.int8, bitcast=True)
    store_row(out_ptr + row * WIDTH, weight_ptr, q.to(tl.float32) * load_float(codes_ptr, True), c, WIDTH)


@triton.jit
def encode_turbo_rows_kernel(
    x_ptr, weight_ptr, codes_ptr, x_row, codes_row, c1, c3, c5, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr,
    BITS: tl.constexpr, LOG: tl.constexpr, KEPT: tl.constexpr, ROOT: tl.constexpr, FACTOR: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """One row a program: x float32 or bf16 -> a row of `TurboRows`, whose blocks are vectors of 2^LOG."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH_P)
    codes_ptr += row * codes_row
    x = load_row(x_ptr + row * x_row, weight_ptr, c, WIDTH)
    broken = poison(x, LARGEST)
    x = take_outliers(x, c, codes_ptr, WIDTH, KEPT)
    BLOCKS_P: tl.constexpr = WIDTH_P >> LOG
    x = rotate(x.reshape(BLOCKS_P, 1 << LOG), tl.arange(0, 1 << LOG)[None, :], LOG, FACTOR)

    codes, scales = quantise(x, c1, c3, c5, BITS, 1, LOG, ROOT)
    BLOCKS: tl.constexpr = WIDTH >> LOG
    block = tl.arange(0, BLOCKS_P)
    store_float(codes_ptr + 4 * KEPT + 4 * block, scales + broken, block < BLOCKS)
    store_codes(codes, codes_ptr + 4 * KEPT + 4 * BLOCKS, BLOCKS, BITS, LOG)


@triton.jit
def decode_turbo_rows_kernel(
    codes_ptr, weight_ptr, out_ptr, codes_row, c1, c3, c5, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr,
    BITS: tl.constexpr, LOG: tl.constexpr, KEPT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """One row a program -> (n, WIDTH) float32."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH_P)
    mask = c < WIDTH
    codes_ptr += row * codes_row
    scales_ptr = codes_ptr + 4 * KEPT
    planes_ptr = scales_ptr + 4 * (WIDTH >> LOG) + (c >> LOG) * (BITS << LOG >> 3)
    codes = load_codes(planes_ptr, c % (1 << LOG), mask, 1 << LOG, BITS)
    x = level(codes.to(tl.float32), c1, c3, c5, BITS) * load_float(scales_ptr + 4 * (c >> LOG), mask)
    x = x.reshape(WIDTH_P >> LOG, 1 << LOG)
    x = rotate(x, tl.arange(0, 1 << LOG)[None, :], LOG, FACTOR).reshape(WIDTH_P)
    x = put_outliers(x, c, codes_ptr, KEPT) + broken_row(load_float(scales_ptr, True))
    store_row(out_ptr + row * WIDTH, weight_ptr, x, c, WIDTH)
