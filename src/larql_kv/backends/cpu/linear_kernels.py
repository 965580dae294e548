"""Parallel kernels of the packed linear: small row counts straight from the packed form, many by panels.

Both accumulate one float32 per output in the order of k with explicit fma, so a row gets the same bits from
either, whatever the other rows, the thread count and the chunking.
"""

from __future__ import annotations

from numba import prange
from numba.np.ufunc import get_thread_id

from larql_kv.backends.cpu.formats import block_panel, block_rows, copy64, zero64
from larql_kv.backends.cpu.runtime import kernel
from larql_kv.backends.cpu.simd import peek_f32, poke_16, round_bf16_bits

PANEL_K = 512  # k a panel: 64*512*4 = 128 KiB stays in L2
ROW_CHUNK = 96  # rows a task of the panel kernel: dequantising a panel is then about 3 % of its work
PAD = 64 * 4  # bytes of one 64-wide float32 row


@kernel(ints=14)
def small_kernel(
    code, n, x, x_stride, w, blocks, block_bytes, records, out, out_stride, outputs, bias, pad, max_rows
):
    """n rows (few) times every block. `pad`: (threads, 4, 64) float32 scratch."""
    for b in prange(blocks):
        acc = pad + get_thread_id() * 4 * 256
        count = min(64, outputs - 64 * b)
        block_bias = bias + 256 * b if bias != 0 else 0
        row = 0
        while row < n:
            left = min(n - row, max_rows)
            rows = 4 if left >= 4 else (2 if left >= 2 else 1)
            for r in range(rows):
                zero64(acc + 256 * r)
            block_rows(code, rows, w + b * block_bytes, records, x + row * x_stride, x_stride, acc, 256)
            for r in range(rows):
                copy64(acc + 256 * r, block_bias, out + (row + r) * out_stride + 256 * b, count)
            row += rows


@kernel(ints=16)
def panel_kernel(
    code, n, x, x_stride, w, blocks, block_bytes, records, record_k, record_bytes, out, out_stride, outputs,
    bias,
    pad, row_chunk,
):  # fmt: skip
    """n rows (many): dequantise PANEL_K x 64 weights to scratch, then 6 x 64 register blocks.

    `pad`: per thread PANEL_K rows of 64 float32 (the panel), then ROW_CHUNK rows of accumulators.
    """
    chunks = (n + row_chunk - 1) // row_chunk
    step = PANEL_K // record_k
    for task in prange(blocks * chunks):
        b, first = task // chunks, (task % chunks) * row_chunk
        last = min(n, first + row_chunk)
        panel = pad + get_thread_id() * (PANEL_K + ROW_CHUNK) * 256
        acc = panel + PANEL_K * 256
        count = min(64, outputs - 64 * b)
        block_bias = bias + 256 * b if bias != 0 else 0
        for r in range(last - first):
            zero64(acc + 256 * r)
        record = 0
        while record < records:
            take = min(step, records - record)
            block_panel(code, w + b * block_bytes + record * record_bytes, take, panel)
            row = first
            while row < last:
                left = last - row
                rows = 6 if left >= 6 else (4 if left >= 4 else (2 if left >= 2 else 1))
                at = x + row * x_stride + record * record_k * 4
                block_rows(0, rows, panel, take * record_k, at, x_stride, acc + (row - first) * 256, 256)
                row += rows
            record += take
        for r in range(last - first):
            copy64(acc + 256 * r, block_bias, out + (first + r) * out_stride + 256 * b, count)


@kernel(ints=10)
def unpack_bf16_kernel(code, w, blocks, block_bytes, records, record_k, record_bytes, out, outputs, pad):
    """(outputs, in) row-major bf16 (nearest even) from the packed form. `pad` as in `panel_kernel`."""
    step = PANEL_K // record_k
    inputs = records * record_k
    for b in prange(blocks):
        panel = pad + get_thread_id() * (PANEL_K + ROW_CHUNK) * 256
        count = min(64, outputs - 64 * b)
        record = 0
        while record < records:
            take = min(step, records - record)
            block_panel(code, w + b * block_bytes + record * record_bytes, take, panel)
            for r in range(count):
                row = out + ((64 * b + r) * inputs + record * record_k) * 2
                for k in range(take * record_k):
                    poke_16(row + 2 * k, round_bf16_bits(peek_f32(panel + k * 256 + r * 4)))
            record += take
