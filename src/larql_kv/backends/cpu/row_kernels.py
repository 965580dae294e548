"""Kernels of a decode step: one row through a composite step of the decoder in one call.

They chain the bodies that the many-row kernels are made of, so the bits are those. `scratch` belongs to the
calling thread and is dead when a kernel returns; it starts with what the docstring lists, and ends with 512
bytes a thread for the linears.
"""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

from numba import prange
from numba.np.ufunc import get_thread_id

from larql_kv.backends.cpu.attention_tiles import copy_row
from larql_kv.backends.cpu.formats import block_row, copy64, zero64
from larql_kv.backends.cpu.rowop_kernels import add_row, gated_row, norm_one, rope_heads, round_row
from larql_kv.backends.cpu.runtime import kernel, region
from larql_kv.backends.cpu.simd import peek_i64

# A part of a table of linears is 8 int64: format code, weight address, bytes a block, records a block,
# byte offset of its first output, outputs, bias address (0: none), one past its last block.
PART_WORDS = 8


@region
def _linears(parts, blocks, x, out, pad):
    """Every block of the parts times x: linears of one input share a launch."""
    for index in prange(blocks):
        part, first = parts, 0
        while index >= peek_i64(part + 56):
            first = peek_i64(part + 56)
            part += 8 * PART_WORDS
        b = index - first
        acc = pad + get_thread_id() * 512
        bias = peek_i64(part + 48)
        zero64(acc)
        block_row(peek_i64(part), peek_i64(part + 8) + b * peek_i64(part + 16), peek_i64(part + 24), x, acc)
        copy64(
            acc,
            bias + 256 * b if bias != 0 else 0,
            out + peek_i64(part + 32) + 256 * b,
            min(64, peek_i64(part + 40) - 64 * b),
        )


@region
def _gated_blocks(code, gate, gate_block, up_code, up, up_block, records, x, out, blocks, activation, pad):
    """out = act(gate block * x) * (up block * x), 64 outputs a task."""
    for b in prange(blocks):
        acc = pad + get_thread_id() * 512
        zero64(acc)
        zero64(acc + 256)
        block_row(code, gate + b * gate_block, records, x, acc)
        block_row(up_code, up + b * up_block, records, x, acc + 256)
        gated_row(acc, acc + 256, out + 256 * b, 64, activation)


@kernel(ints=18, floats=1, regions=True)
def inputs_kernel(
    norm, hidden, rounded, parts, blocks, heads, kv_heads, hd, half, q_norm, k_norm,
    x, cos, sin, q, k, v, scratch, eps,
):  # fmt: skip
    """q, k, v of one row: norm, projections, norms of heads, rotation; rounded != 0: bf16 in and out.

    Scratch: the normed row (hidden), then q, k and v."""
    projected = scratch + 4 * hidden
    key = projected + 4 * heads * hd
    value = key + 4 * kv_heads * hd
    norm_one(x, scratch, hidden, norm, 1 if rounded != 0 else 0, eps)
    _linears(parts, blocks, scratch, projected, value + 4 * kv_heads * hd)
    copy_row(projected, q, heads * hd, 0, 0)
    copy_row(key, k, kv_heads * hd, 0, 0)
    copy_row(value, v, kv_heads * hd, 0, 0)
    rope_heads(q, k, 0, heads, kv_heads, hd, cos, sin, half, q_norm, k_norm, eps)
    if rounded != 0:
        round_row(k, kv_heads * hd)
        round_row(v, kv_heads * hd)


@kernel(ints=7, floats=1, regions=True)
def add_linear_kernel(parts, blocks, hidden, norm, x, h, scratch, eps):
    """h += linear(x), normed where `norm` is an address. Scratch: the linear's output (hidden)."""
    _linears(parts, blocks, x, scratch, scratch + 4 * hidden)
    if norm != 0:
        norm_one(scratch, h, hidden, norm, 2, eps)
    else:
        add_row(scratch, h, hidden)


@kernel(ints=4, floats=1, parallel=False)
def add_kernel(hidden, norm, y, h, eps):
    """h += y, normed where `norm` is an address."""
    if norm != 0:
        norm_one(y, h, hidden, norm, 2, eps)
    else:
        add_row(y, h, hidden)


@kernel(ints=16, regions=True)
def ffn_kernel(
    code, gate, gate_block, up_code, up, up_block, records, parts, blocks, size, activation,
    down_parts, down_blocks, x, out, scratch,
):  # fmt: skip
    """out = down(act(gate(x)) * up(x)). records == 0: gate and up do not pair by blocks, they are `parts`.

    Scratch: the activations (size), then gate and up (2 * size)."""
    pad = scratch + 12 * size
    if records != 0:
        _gated_blocks(
            code, gate, gate_block, up_code, up, up_block, records, x, scratch, size // 64, activation, pad
        )
    else:
        gate_up = scratch + 4 * size
        _linears(parts, blocks, x, gate_up, pad)
        gated_row(gate_up, gate_up + 4 * size, scratch, size, activation)
    _linears(down_parts, down_blocks, scratch, out, pad)
