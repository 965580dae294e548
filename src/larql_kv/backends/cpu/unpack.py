"""Reading ggml's stored blocks (bytes of a mapped file) in compiled code: codes, scales and single rows.

Layouts follow `ggml-quants.c` / `gguf.quants`; `tests/backends` compares every one with the `gguf` package
bit
for bit. A kind is passed as its number in KIND_CODES.
"""

from __future__ import annotations

from numba import njit, prange

from larql_kv.backends.cpu.runtime import kernel
from larql_kv.backends.cpu.simd import (
    peek_f16,
    peek_f32,
    peek_i8,
    peek_i64,
    peek_u8,
    peek_u16,
    peek_u32,
    poke_8,
    poke_16,
    poke_32,
    poke_f32,
)

KIND_CODES = {
    "F32": 0,
    "BF16": 1,
    "F16": 2,
    "Q4_0": 3,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 6,
    "Q8_0": 7,
    "Q4_K": 8,
    "Q5_K": 9,
    "Q6_K": 10,
}
# kind: (weights, bytes) of one stored block
STORED_BLOCK = {
    "F32": (1, 4),
    "BF16": (1, 2),
    "F16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


@njit(inline="never", error_model="numpy")
def _codes_32(kind, row, g, out):
    """The 32 codes of group g of a stored row, as bytes at `out`: signed for Q5_0, Q8_0 and Q6_K, else
    unsigned."""
    if kind == 7:  # Q8_0: d f16, q i8[32]
        src = row + g * 34 + 2
        for j in range(32):
            poke_8(out + j, peek_u8(src + j))
    elif kind == 3 or kind == 4:  # Q4_0: d f16, nibbles; Q4_1: d f16, m f16, nibbles
        src = row + g * 18 + 2 if kind == 3 else row + g * 20 + 4
        for j in range(16):
            byte = peek_u8(src + j)
            poke_8(out + j, byte & 15)
            poke_8(out + 16 + j, byte >> 4)
    elif kind == 5 or kind == 6:  # Q5_0: d f16, high bits u32, nibbles; Q5_1: d, m, high bits, nibbles
        src = row + g * 22 + 2 if kind == 5 else row + g * 24 + 4
        offset = 16 if kind == 5 else 0
        high = peek_u32(src)
        for j in range(16):
            byte = peek_u8(src + 4 + j)
            poke_8(out + j, ((byte & 15) | (((high >> j) & 1) << 4)) - offset)
            poke_8(out + 16 + j, ((byte >> 4) | (((high >> (16 + j)) & 1) << 4)) - offset)
    elif kind == 8:  # Q4_K: d, dmin, scales[12], 4 x 32 bytes: low nibbles one group, high ones the next
        src = row + (g >> 3) * 144 + 16 + ((g & 7) >> 1) * 32
        shift = 4 * (g & 1)
        for j in range(32):
            poke_8(out + j, (peek_u8(src + j) >> shift) & 15)
    elif kind == 9:  # Q5_K: d, dmin, scales[12], high bits[32], nibbles[128]
        base = row + (g >> 3) * 176 + 16
        src = base + 32 + ((g & 7) >> 1) * 32
        shift, bit = 4 * (g & 1), g & 7
        for j in range(32):
            poke_8(out + j, ((peek_u8(src + j) >> shift) & 15) | (((peek_u8(base + j) >> bit) & 1) << 4))
    else:  # Q6_K: ql[128], qh[64], scales i8[16], d f16
        base, half, quarter = row + (g >> 3) * 210, (g & 7) >> 2, g & 3
        low = base + 64 * half + 32 * (quarter & 1)
        high = base + 128 + 32 * half
        for j in range(32):
            q = ((peek_u8(low + j) >> (4 * (quarter >> 1))) & 15) | (
                ((peek_u8(high + j) >> (2 * quarter)) & 3) << 4
            )
            poke_8(out + j, q - 32)


@njit(inline="never", error_model="numpy")
def _k_scale(scales, j):
    """6-bit scale and min of group j of a Q4_K / Q5_K block (ggml's get_scale_min_k4)."""
    if j < 4:
        return peek_u8(scales + j) & 63, peek_u8(scales + j + 4) & 63
    low, scale_high, min_high = peek_u8(scales + j + 4), peek_u8(scales + j - 4), peek_u8(scales + j)
    return (low & 15) | ((scale_high >> 6) << 4), (low >> 4) | ((min_high >> 6) << 4)


@njit(inline="never", error_model="numpy")
def _pack_row_quantised(kind, src, groups, dst, r, codes):
    """Output r of a block: scatter its codes and scales into the records that `formats` describes."""
    for g in range(groups):
        _codes_32(kind, src, g, codes)
        if kind >= 8:
            sup, j = g >> 3, g & 7
            if kind == 10:
                record = dst + sup * (128 + 16 * 1088)
                stored = src + sup * 210
                poke_16(record + 2 * r, peek_u16(stored + 208))
                for h in range(2):
                    group = record + 128 + (2 * j + h) * 1088
                    poke_8(group + r, peek_u8(stored + 192 + 2 * j + h))
                    for k in range(16):
                        poke_8(group + 64 + 64 * k + r, peek_u8(codes + 16 * h + k))
                continue
            stored = src + sup * (144 if kind == 8 else 176)
            group_bytes = 1152 if kind == 8 else 2176
            record = dst + sup * (256 + 8 * group_bytes)
            poke_16(record + 2 * r, peek_u16(stored))
            poke_16(record + 128 + 2 * r, peek_u16(stored + 2))
            scale, low = _k_scale(stored + 4, j)
            group = record + 256 + j * group_bytes
            poke_8(group + r, scale)
            poke_8(group + 64 + r, low)
            data = group + 128
        else:
            has_min = kind == 4 or kind == 6
            is_u4 = kind == 3 or kind == 4
            size = 18 + 2 * (kind - 3) if kind < 7 else 34
            header = 256 if has_min else 128
            record = dst + g * (header + (1024 if is_u4 else 2048))
            poke_16(record + 2 * r, peek_u16(src + g * size))
            if has_min:
                poke_16(record + 128 + 2 * r, peek_u16(src + g * size + 2))
            data = record + header
        if kind == 3 or kind == 4 or kind == 8:
            for word in range(4):
                bits = 0
                for j8 in range(8):
                    bits |= peek_u8(codes + 8 * word + j8) << (4 * j8)
                poke_32(data + (word * 64 + r) * 4, bits)
        else:
            for k in range(32):
                poke_8(data + 64 * k + r, peek_u8(codes + k))


@kernel(ints=8)
def pack_kernel(kind, rows, blocks, outputs, inputs, dst, block_bytes, codes):
    """Stored rows -> blocks of 64 outputs.

    rows: int64[outputs] addresses of stored rows; codes: uint8 scratch (blocks, 64); dst: zeroed where
    padded.
    """
    for b in prange(blocks):
        base = dst + b * block_bytes
        count = min(64, outputs - 64 * b)
        if kind >= 3:
            for r in range(count):
                src = peek_i64(rows + 8 * (64 * b + r))
                _pack_row_quantised(kind, src, inputs // 32, base, r, codes + 64 * b)
        else:
            k0 = 0
            while k0 < inputs:  # tiles of 64 x 64 keep the strided side in the cache
                k1 = min(inputs, k0 + 64)
                for r in range(count):
                    src = peek_i64(rows + 8 * (64 * b + r))
                    if kind == 0:
                        for k in range(k0, k1):
                            poke_32(base + (k * 64 + r) * 4, peek_u32(src + 4 * k))
                    else:
                        for k in range(k0, k1):
                            poke_16(base + (k * 64 + r) * 2, peek_u16(src + 2 * k))
                k0 = k1


@njit(inline="never", error_model="numpy")
def _group_values(kind, row, g, codes, out, scale):
    """32 float32 values of group g of a stored row, times `scale`."""
    _codes_32(kind, row, g, codes)
    if kind == 10:
        stored = row + (g >> 3) * 210
        d = peek_f16(stored + 208)
        for h in range(2):
            s = d * peek_i8(stored + 192 + 2 * (g & 7) + h)
            for k in range(16):
                poke_f32(out + 4 * (16 * h + k), s * peek_i8(codes + 16 * h + k) * scale)
        return
    if kind >= 8:
        stored = row + (g >> 3) * (144 if kind == 8 else 176)
        sc, m = _k_scale(stored + 4, g & 7)
        # int64 * float32 is float64 in numba: exact, and rounded once by poke_f32 where a single sum is
        # rounded
        d, low = peek_f16(stored) * sc, -(peek_f16(stored + 2) * m)
    else:
        stored = row + g * (18 + 2 * (kind - 3) if kind < 7 else 34)
        d = peek_f16(stored) * 1.0
        low = 0.0
        if kind == 3:
            low = -8.0 * d
        elif kind == 4 or kind == 6:
            low = peek_f16(stored + 2) * 1.0
    for k in range(32):
        poke_f32(out + 4 * k, d * peek_i8(codes + k) + low)
        poke_f32(out + 4 * k, peek_f32(out + 4 * k) * scale)


@kernel(ints=8, floats=1, parallel=False)
def rows_kernel(kind, ids, n, table, row_bytes, inputs, out, codes, scale):
    """Rows `ids` (int64) of a stored matrix -> float32 (n, inputs), times the float32 `scale`."""
    for i in range(n):
        row = table + peek_i64(ids + 8 * i) * row_bytes
        dst = out + i * inputs * 4
        if kind >= 3:
            for g in range(inputs // 32):
                _group_values(kind, row, g, codes, dst + 128 * g, scale)
        elif kind == 0:
            for k in range(inputs):
                poke_f32(dst + 4 * k, peek_f32(row + 4 * k) * scale)
        elif kind == 2:
            for k in range(inputs):
                poke_f32(dst + 4 * k, peek_f16(row + 2 * k) * scale)
        else:
            for k in range(inputs):
                poke_32(dst + 4 * k, peek_u16(row + 2 * k) << 16)
                poke_f32(dst + 4 * k, peek_f32(dst + 4 * k) * scale)
