"""The launches of a decode step around `linear.py`: packed and float matrices, and the last norm."""

# coverage: compiled
# pyright: basic
from __future__ import annotations

import triton
import triton.language as tl

from larql_kv.backends.cuda.kernels.common import store_planes, wait_for_previous
from larql_kv.backends.cuda.kernels.linear import (
    GLU,
    HEAD,
    NORM,
    PART,
    activate,
    kept_row,
    load_chunk,
    norm_row,
    row_of,
    tile_product,
)


@triton.jit
def _row_of_tile(tile, ROWS: tl.constexpr, AFTER: tl.constexpr):
    """Rows of the matrix that a tile has, its gate rows before their up rows (stored 32 and 32 in turn)."""
    r = tl.arange(0, ROWS)
    if AFTER == GLU and ROWS < 64:
        gate = tile * (ROWS // 2) + r % (ROWS // 2)
        return gate // 32 * 64 + r // (ROWS // 2) * 32 + gate % 32
    else:
        return tile * ROWS + r


@triton.jit
def finish_tile(
    y,
    tile,
    rows,
    out,
    bias,
    planes_q,
    planes_scale,
    planes_sums,
    planes_stride,
    best,
    best_at,
    cap,
    ROWS: tl.constexpr,
    AFTER: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    CAP: tl.constexpr,
    OUT_BITS: tl.constexpr,
):
    """Bias, then STORE / GLU / HEAD for the tile's products y (ROWS,)."""
    row = tile * ROWS + tl.arange(0, ROWS)
    if BIAS:
        y += tl.load(bias + _row_of_tile(tile, ROWS, AFTER))
    if AFTER == GLU:
        gate, up = tl.split(tl.trans(tl.reshape(y, [2, ROWS // 2])))
        a = activate(gate, GELU) * up
        if OUT_BITS == 32:
            at = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
            tl.store(planes_q.to(tl.pointer_type(tl.float32)) + at, a, mask=at < rows // 2)
        else:
            group = tl.zeros([1], tl.int32) + tile
            store_planes(
                tl.reshape(a, [1, 32]),
                group,
                group >= 0,
                planes_q,
                planes_scale,
                planes_sums,
                planes_stride,
                OUT_BITS,
            )
    else:
        if AFTER == HEAD:
            if CAP:
                y = cap * (1.0 - 2.0 / (tl.exp(2.0 * (y / cap)) + 1.0))
            largest, at = tl.max(tl.where(row < rows, y, float("-inf")), 0, return_indices=True)
            tl.store(best + tile, largest + tl.sum(y * 0.0, 0))  # not finite where a logit is not
            tl.store(best_at + tile, tile * ROWS + at)
        tl.store(out + row, y, mask=row < rows)


@triton.jit
def packed_linear(
    codes_a,
    small_a,
    super_a,
    rows_a,
    tiles_a,
    codes_b,
    small_b,
    super_b,
    rows_b,
    out_a,
    out_b,
    bias_a,
    bias_b,
    q,
    scale,
    sums,
    stride,
    x_ptr,
    update_ptr,
    post_ptr,
    weight_ptr,
    x_out,
    row_table,
    pos_ptr,
    stage_ptr,
    scratch,
    eps,
    planes_q,
    planes_scale,
    planes_sums,
    planes_stride,
    best,
    best_at,
    cap,
    tiles_each,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS_ALL: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    AHEAD: tl.constexpr,
    CODES_A: tl.constexpr,
    SCALE_A: tl.constexpr,
    ZERO_A: tl.constexpr,
    CODES_B: tl.constexpr,
    SCALE_B: tl.constexpr,
    ZERO_B: tl.constexpr,
    BITS: tl.constexpr,
    BEFORE: tl.constexpr,
    UPDATE: tl.constexpr,
    POST: tl.constexpr,
    RING: tl.constexpr,
    KEEP: tl.constexpr,
    STAGE: tl.constexpr,
    ROUND: tl.constexpr,
    AFTER: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    CAP: tl.constexpr,
    OUT_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row through rows of one or two formats (CODES_B 0: one). Programs: tiles of a, then of b; with
    AFTER = HEAD `tiles_each` tiles a program."""
    NC: tl.constexpr = GROUPS_ALL // GROUPS
    program = tl.program_id(0)
    if CODES_B == 0 or program < tiles_a:
        _section(
            codes_a, small_a, super_a, rows_a, out_a, bias_a, program, tiles_a,
            q, scale, sums, stride,
            x_ptr, update_ptr, post_ptr, weight_ptr, x_out, row_table, pos_ptr, stage_ptr, scratch, eps,
            planes_q, planes_scale, planes_sums, planes_stride, best, best_at, cap, tiles_each,
            K, PARTS, GROUPS_ALL, NC, ROWS, GROUPS, AHEAD, CODES_A, SCALE_A, ZERO_A, BITS,
            BEFORE, UPDATE, POST, RING, KEEP, STAGE, ROUND, AFTER, BIAS, GELU, CAP, OUT_BITS, PDL,
        )  # fmt: skip
    else:
        _section(
            codes_b, small_b, super_b, rows_b, out_b, bias_b, program - tiles_a, tiles_a,
            q, scale, sums, stride,
            x_ptr, update_ptr, post_ptr, weight_ptr, x_out, row_table, pos_ptr, stage_ptr, scratch, eps,
            planes_q, planes_scale, planes_sums, planes_stride, best, best_at, cap, tiles_each,
            K, PARTS, GROUPS_ALL, NC, ROWS, GROUPS, AHEAD, CODES_B, SCALE_B, ZERO_B, BITS,
            BEFORE, UPDATE, POST, RING, KEEP, STAGE, ROUND, AFTER, BIAS, GELU, CAP, OUT_BITS, PDL,
        )  # fmt: skip


@triton.jit
def _section(
    codes, small, supers, rows, out, bias, program, tiles,
    q, scale, sums, stride,
    x_ptr, update_ptr, post_ptr, weight_ptr, x_out, row_table, pos_ptr, stage_ptr, scratch, eps,
    planes_q, planes_scale, planes_sums, planes_stride, best, best_at, cap, tiles_each,
    K: tl.constexpr, PARTS: tl.constexpr, GROUPS_ALL: tl.constexpr, NC: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, AHEAD: tl.constexpr,
    CODES: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, BITS: tl.constexpr,
    BEFORE: tl.constexpr, UPDATE: tl.constexpr, POST: tl.constexpr, RING: tl.constexpr,
    KEEP: tl.constexpr, STAGE: tl.constexpr, ROUND: tl.constexpr, AFTER: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, CAP: tl.constexpr, OUT_BITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    first_tile = program * tiles_each if AFTER == HEAD else program
    ahead = ()
    for c in tl.static_range(AHEAD):
        ahead = ahead + (load_chunk(codes, small, supers, first_tile, c, NC, ROWS, GROUPS, CODES, SCALE),)
    if BEFORE == NORM:
        weight = row_of(weight_ptr, K, PARTS)
        post = row_of(post_ptr, K, PARTS) if POST else weight
        kept = kept_row(row_table, pos_ptr, K, RING) if KEEP else x_out
        wait_for_previous(PDL)
        x = row_of(x_ptr, K, PARTS)
        own = scratch + tl.program_id(0) * ((BITS + 3) * GROUPS_ALL)
        own_scale = (own + BITS * GROUPS_ALL).to(tl.pointer_type(tl.float32))
        own_sums = own_scale + GROUPS_ALL
        norm_row(
            x, update_ptr, post, weight, x_out, kept, stage_ptr,
            own, own_scale, own_sums, GROUPS_ALL, eps, tl.program_id(0), tl.num_programs(0),
            K, PARTS, UPDATE, POST, KEEP, STAGE, ROUND, True, BITS,
        )  # fmt: skip
        tl.debug_barrier()
        y = tile_product(
            codes, small, supers, first_tile, ahead, own, own_scale, own_sums, GROUPS_ALL,
            NC, ROWS, GROUPS, CODES, SCALE, ZERO, BITS, AHEAD,
        )  # fmt: skip
    else:
        wait_for_previous(PDL)
        y = tile_product(
            codes, small, supers, first_tile, ahead, q, scale, sums, stride,
            NC, ROWS, GROUPS, CODES, SCALE, ZERO, BITS, AHEAD,
        )  # fmt: skip
    finish_tile(
        y, first_tile, rows, out, bias, planes_q, planes_scale, planes_sums, planes_stride,
        best, best_at, cap, ROWS, AFTER, BIAS, GELU, CAP, OUT_BITS,
    )  # fmt: skip
    if AFTER == HEAD:
        for step in range(1, tl.minimum(tiles_each, tiles - first_tile)):
            tile = first_tile + step
            y = tile_product(
                codes, small, supers, tile, (), q, scale, sums, stride,
                NC, ROWS, GROUPS, CODES, SCALE, ZERO, BITS, 0,
            )  # fmt: skip
            finish_tile(
                y, tile, rows, out, bias, planes_q, planes_scale, planes_sums, planes_stride,
                best, best_at, cap, ROWS, AFTER, BIAS, GELU, CAP, OUT_BITS,
            )  # fmt: skip


@triton.jit
def load_floats(data, row, rows, k: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr):
    """Columns k..k+STEP-1 of a tile's rows as stored; padding rows and columns come as zeros."""
    column = k + tl.arange(0, STEP)
    mask = (row < rows)[:, None] & (column < K)[None, :]
    # read once a step: should make room first for what is read again
    at = data + row.to(tl.int64)[:, None] * K + column[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def float_linear(
    data, rows, out, bias, vector,
    x_ptr, update_ptr, post_ptr, weight_ptr, x_out, row_table, pos_ptr, stage_ptr, scratch, eps,
    planes_q, planes_scale, planes_sums, planes_stride, best, best_at, cap,
    K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
    BEFORE: tl.constexpr, UPDATE: tl.constexpr, POST: tl.constexpr, RING: tl.constexpr,
    KEEP: tl.constexpr, STAGE: tl.constexpr, ROUND: tl.constexpr, AFTER: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, CAP: tl.constexpr, OUT_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row through a matrix stored as float32, float16 or bfloat16, (rows, K) contiguous. AHEAD chunks of
    STEP columns are loaded before the wait, and always so far ahead of the product."""
    NC: tl.constexpr = (K + STEP - 1) // STEP
    tile = tl.program_id(0)
    row = _row_of_tile(tile, ROWS, AFTER)
    chunks = ()
    for c in tl.static_range(AHEAD):
        chunks = chunks + (load_floats(data, row, rows, c * STEP, K, STEP),)
    if BEFORE == NORM:
        weight = row_of(weight_ptr, K, PARTS)
        post = row_of(post_ptr, K, PARTS) if POST else weight
        kept = kept_row(row_table, pos_ptr, K, RING) if KEEP else x_out
        own = (scratch + tile * (PARTS * 512)).to(tl.pointer_type(tl.float32))
        wait_for_previous(PDL)
        norm_row(
            row_of(x_ptr, K, PARTS), update_ptr, post, weight, x_out, kept, stage_ptr,
            own, own, own, 0, eps, tile, tl.num_programs(0),
            K, PARTS, UPDATE, POST, KEEP, STAGE, ROUND, True, 32,
        )  # fmt: skip
        tl.debug_barrier()
    else:
        own = vector
        wait_for_previous(PDL)
    total = tl.zeros([ROWS, STEP], tl.float32)
    for c in tl.static_range(NC):
        if c + AHEAD < NC:
            chunks = chunks + (load_floats(data, row, rows, (c + AHEAD) * STEP, K, STEP),)
        column = c * STEP + tl.arange(0, STEP)
        x = tl.load(own + column, mask=column < K, other=0.0)
        total += chunks[c].to(tl.float32) * x[None, :]
    finish_tile(
        tl.sum(total, 1), tile, rows, out, bias, planes_q, planes_scale, planes_sums, planes_stride,
        best, best_at, cap, ROWS, AFTER, BIAS, GELU, CAP, OUT_BITS,
    )  # fmt: skip


@triton.jit
def last_norm(
    x_ptr, update_ptr, post_ptr, weight_ptr, hidden, pos_ptr, q, scale, sums, stride, eps,
    K: tl.constexpr, PARTS: tl.constexpr, UPDATE: tl.constexpr, POST: tl.constexpr,
    ADVANCE: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What leaves the last layer into `hidden`, and its final norm as planes; the position moves on.

    Not in one pass: the norm is that of the row in `hidden`, in the bits a later `logits(hidden)` gives."""
    weight = row_of(weight_ptr, K, PARTS)
    post = row_of(post_ptr, K, PARTS) if POST else weight
    wait_for_previous(PDL)
    norm_row(
        row_of(x_ptr, K, PARTS), update_ptr, post, weight, hidden, hidden, hidden,
        q, scale, sums, stride, eps, 0, 1, K, PARTS, UPDATE, POST, False, False, False, False, BITS,
    )  # fmt: skip
    if ADVANCE:
        tl.store(pos_ptr, tl.load(pos_ptr) + 1)


@triton.jit
def quantise_row(
    x, q, scale, sums, stride,
    K: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A float32 row as planes."""
    wait_for_previous(PDL)
    parts = row_of(x, K, PARTS)
    for i in tl.static_range(PARTS):
        group = i * PART + tl.arange(0, PART)
        store_planes(parts[i], group, group < stride, q, scale, sums, stride, BITS)
