"""Rows as bytes on the card: outliers, grouped integers, one clipped scale, turbo codes of blocks.

The formats are those of larql_kv/codec, bit for bit: launch with `enable_fp_fusion=False`. Rows are bytes at
any address. A row that its codec cannot hold decodes to NaN: nothing is raised here.
"""

# coverage: compiled
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from larql_kv.backends.cuda.kernels.common import as_int
from larql_kv.backends.cuda.kernels.turbo import (
    level,
    load_codes,
    neighbour_sum,
    quantise,
    rotate,
    store_codes,
)

LARGEST_BF16: tl.constexpr = tl.constexpr(3.3895313892515355e38)
NEAREST: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken off, it rounds to integers


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
