"""Attention of one new token over one layer's paged K/V: norm, RoPE, append, split-K, combine, quantise.

Programs (kv_heads, SPLITS). A program attends for the query heads of one K/V head over a run of whole 64-row
tiles (a tile is a block). Programs without a tile leave at once; the last one with tiles also makes and
writes the new row; the last to arrive combines the partial results and the new row, always in the same order.

Heads are taken as their two RoPE halves throughout: no exchange is needed to rotate, and each half is a
matrix operand of its own. (Products the other way round, K q and V' p with 64-tall Hopper instructions, gave
wrong sums on the chip under Triton 3.6 though right ones in its interpreter: not pursued.)
"""

# coverage: compiled
# pyright: basic
from __future__ import annotations

import triton
import triton.language as tl

from larql_kv.backends.cuda.kernels.common import (
    INT,
    as_int,
    load_here,
    store_here,
    store_here_bf16,
    store_planes,
    to_bf16,
    wait_for_previous,
)

TILE: tl.constexpr = tl.constexpr(64)  # rows of a block (state/pages.py)
LOW: tl.constexpr = tl.constexpr(-1e30)  # below every score, and finite: LOW - LOW is 0


@triton.jit
def load_address(table, i):
    """table[i], in a form that the pipeliner does not take for a tile to be staged in shared memory."""
    if INT:
        return tl.load(table + i)
    else:
        return tl.inline_asm_elementwise("ld.global.b64 $0, [$1];", "=l,l", [table + i], tl.int64, True, 1)


@triton.jit
def rows_of(tile, RING: tl.constexpr):
    """Rows of a block: 64, fewer in the last one of a ring."""
    if RING % 64 == 0:
        return 64
    else:
        return tl.minimum(64, RING - tile * 64)


@triton.jit
def load_tile(
    address, tile, h, first, stop, slot,
    KV_HEADS: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Both halves (64, HALF_PAD) of the K and V rows of the block at `address`, and which of them are
    attended: slots first..stop-1 without `slot`. The others are not read and come as zeros."""
    HALF: tl.constexpr = D // 2
    rows = rows_of(tile, RING)
    k = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16) + h * (rows * D)
    v = k + KV_HEADS * (rows * D)
    row = tl.arange(0, TILE)
    at = tile * TILE + row
    live = (at >= first) & (at < stop) & (at != slot)
    d = tl.arange(0, HALF_PAD)
    mask = live[:, None] if HALF_PAD == HALF else live[:, None] & (d < HALF)[None, :]
    off = row[:, None] * D + d[None, :]
    ka = tl.load(k + off, mask=mask, other=0.0)
    kb = tl.load(k + off + HALF, mask=mask, other=0.0)
    va = tl.load(v + off, mask=mask, other=0.0)
    vb = tl.load(v + off + HALF, mask=mask, other=0.0)
    if INT:
        ka, kb, va, vb = ka.to(tl.float32), kb.to(tl.float32), va.to(tl.float32), vb.to(tl.float32)
    return ka, kb, va, vb, live


@triton.jit
def capped(s, cap):
    """cap * tanh(s)"""
    return cap * (1.0 - 2.0 / (tl.exp2(s * 2.8853900817779268) + 1.0))


@triton.jit
def fold_tile(qa, qb, ka, kb, va, vb, live, peak, mass, acc_a, acc_b, cap, HAS_CAP: tl.constexpr):
    """One tile into the largest score `peak` (R,), the sum of weights `mass` (R,) and the halves of the
    weighted V, (R, HALF_PAD)."""
    s = tl.dot(qb, tl.trans(kb), tl.dot(qa, tl.trans(ka)))
    if HAS_CAP:
        s = capped(s, cap)
    s = tl.where(live[None, :], s, float("-inf"))
    higher = tl.maximum(peak, tl.max(s, 1))
    shrink = tl.exp2(peak - higher)
    p = tl.exp2(s - higher[:, None])
    mass = mass * shrink + tl.sum(p, 1)
    p = to_bf16(p)
    acc_a = tl.dot(p, va, acc_a * shrink[:, None])
    acc_b = tl.dot(p, vb, acc_b * shrink[:, None])
    return higher, mass, acc_a, acc_b


@triton.jit
def combine(
    acc_ptr, peak_ptr, mass_ptr, score_ptr, v_new, active, h,
    out, planes_q, planes_scale, planes_sums, planes_stride,
    GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    WRITE_F32: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The new row (its scores at `score_ptr`, its V at `v_new`) and the first `active` of SPLITS partial
    results of K/V head h. Values are taken as flat groups of 32."""
    group = tl.arange(0, WIDE)[:, None]
    flat = group * 32 + tl.arange(0, 32)[None, :]
    valid = flat < GROUP * D
    head = group * 32 // D if D % 32 == 0 else flat // D  # mostly a group's values belong to one head
    known = head < GROUP
    peak = load_here(score_ptr + h * GROUP + head, known, 0.0)
    mass = tl.full(head.shape, 1.0, tl.float32)
    total = to_bf16(tl.load(v_new + h * D + flat % D, mask=valid, other=0.0)).to(tl.float32)
    for chunk in tl.static_range((SPLITS + CHUNK - 1) // CHUNK):
        split = chunk * CHUNK + tl.arange(0, CHUNK)[None, :, None]
        at = (h * SPLITS + split) * GROUP + head[:, None, :]
        here = (split < active) & known[:, None, :]
        peaks = load_here(peak_ptr + at, here, -1.0e30)
        masses = load_here(mass_ptr + at, here, 0.0)
        # .cg: past the first-level cache, as `load_here`
        part = tl.load(
            acc_ptr + (h * SPLITS + split) * (GROUP * D) + flat[:, None, :],
            mask=(split < active) & valid[:, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(peak, tl.max(peaks, 1))
        weight = tl.exp2(peaks - higher[:, None, :])
        shrink = tl.exp2(peak - higher)
        mass = mass * shrink + tl.sum(weight * masses, 1)
        total = total * shrink + tl.sum(weight * part, 1)
        peak = higher
    z = total / mass
    if WRITE_F32:
        tl.store(out + h * (GROUP * D) + flat, z, mask=valid)
    if BITS > 0:
        groups: tl.constexpr = GROUP * D // 32
        g = tl.arange(0, WIDE)
        store_planes(
            tl.where(valid, z, 0.0), h * groups + g, g < groups,
            planes_q, planes_scale, planes_sums, planes_stride, BITS,
        )  # fmt: skip


@triton.jit
def rotated(a, b, norm_a, norm_b, c, n, eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Both halves (R, HALF_PAD) of heads, normed and rotated; padding holds zeros."""
    if HAS_NORM:
        size = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        a = a * size * norm_a
        b = b * size * norm_b
    return a * c - b * n, b * c + a * n


@triton.jit
def attention_step(
    qkv, table, pos_ptr, cos, sin, q_norm, k_norm, eps, q_scale, cap,
    acc_ptr, peak_ptr, mass_ptr, score_ptr, arrived,
    out, planes_q, planes_scale, planes_sums, planes_stride, kv_stage,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    RING: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    R: tl.constexpr, HALF_PAD: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, WRITE_F32: tl.constexpr, BITS: tl.constexpr,
    STAGE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One new token in one layer.

    qkv float32 (heads + 2 kv_heads, D); table int64 block addresses; pos int32 (1,); cos, sin float32
    (positions, D / 2); norms float32 (D,). Scores are scaled by `q_scale`, which holds log2(e) or, with a
    cap, 1 / cap; `cap` then holds cap * log2(e). Partial results: acc float32 (kv_heads, SPLITS, GROUP, D),
    peak and mass (kv_heads, SPLITS, GROUP), score (kv_heads, GROUP); `arrived` int32 (kv_heads,), zero and
    left zero. BITS 0: no planes. RING, WINDOW 0: none. STAGES: depth of the K/V pipeline after a run's first
    tile.
    """
    HALF: tl.constexpr = D // 2
    h = tl.program_id(0)
    s = tl.program_id(1)
    pos = tl.load(pos_ptr)
    slot = pos
    stop = pos
    first = 0
    if RING > 0:
        slot = pos % RING
        stop = tl.minimum(pos, RING)
    elif WINDOW > 0:
        first = tl.maximum(pos - WINDOW + 1, 0)
    first_tile = first // TILE
    tiles = (stop + TILE - 1) // TILE - first_tile
    each = (tiles + SPLITS - 1) // SPLITS
    active = tl.maximum((tiles + each - 1) // tl.maximum(each, 1), 1)
    if s >= active:
        return
    owner = s == active - 1  # of the new row
    tile = first_tile + s * each
    last_tile = first_tile + tl.minimum((s + 1) * each, tiles)

    # Old rows and tables: none of this comes from the kernel before.
    ka, kb, va, vb, live = load_tile(
        tl.load(table + tile), tile, h, first, stop, slot, KV_HEADS, D, HALF_PAD, RING
    )
    # In shape (R, HALF_PAD) throughout: one layout, so that nothing is exchanged between warps.
    r = tl.arange(0, R)[:, None]
    d = tl.arange(0, HALF_PAD)[None, :]
    same = r * 0 + d  # one head, in every row
    half = (r >= 0) & (d < HALF)
    c = tl.load(cos + pos * HALF + same, mask=half, other=0.0)
    n = tl.load(sin + pos * HALF + same, mask=half, other=0.0)
    if HAS_NORM:
        qna = tl.load(q_norm + same, mask=half, other=0.0)
        qnb = tl.load(q_norm + HALF + same, mask=half, other=0.0)
        kna = tl.load(k_norm + same, mask=half, other=0.0)
        knb = tl.load(k_norm + HALF + same, mask=half, other=0.0)
    else:
        qna, qnb, kna, knb = c, c, c, c
    new_block = tl.load(table + slot // TILE)

    wait_for_previous(PDL)
    q_at = qkv + (h * GROUP + r) * D + d
    q_mask = (r < GROUP) & half
    qa = tl.load(q_at, mask=q_mask, other=0.0)
    qb = tl.load(q_at + HALF, mask=q_mask, other=0.0)
    mine = half & owner
    k_at = qkv + (KV_HEADS * GROUP + h) * D + same
    ka1 = tl.load(k_at, mask=mine, other=0.0)
    kb1 = tl.load(k_at + HALF, mask=mine, other=0.0)
    e = tl.arange(0, 2 * HALF_PAD)
    v_mask = owner & (e < D)
    va1 = to_bf16(tl.load(qkv + (KV_HEADS * (GROUP + 1) + h) * D + e, mask=v_mask, other=0.0))
    qa, qb = rotated(qa, qb, qna, qnb, c, n, eps, D, HAS_NORM)
    qa *= q_scale
    qb *= q_scale
    peak = tl.full([R], LOW, tl.float32)
    mass = tl.zeros([R], tl.float32)
    acc_a = tl.zeros([R, HALF_PAD], tl.float32)
    acc_b = tl.zeros([R, HALF_PAD], tl.float32)
    qa16 = to_bf16(qa)
    qb16 = to_bf16(qb)
    peak, mass, acc_a, acc_b = fold_tile(
        qa16, qb16, ka, kb, va, vb, live, peak, mass, acc_a, acc_b, cap, HAS_CAP
    )
    for i in tl.range(tile + 1, last_tile, num_stages=STAGES):
        address = load_address(table, tl.minimum(i, last_tile - 1))  # the pipeline runs past the end
        ka, kb, va, vb, live = load_tile(
            address, i, h, first, stop, slot, KV_HEADS, D, HALF_PAD, RING
        )  # fmt: skip
        peak, mass, acc_a, acc_b = fold_tile(
            qa16, qb16, ka, kb, va, vb, live, peak, mass, acc_a, acc_b, cap, HAS_CAP
        )

    # The new row. The old row in its slot was masked out, so nobody reads what is written here.
    ka1, kb1 = rotated(ka1, kb1, kna, knb, c, n, eps, D, HAS_NORM)
    ka1, kb1 = to_bf16(ka1), to_bf16(kb1)
    rows = rows_of(slot // TILE, RING)
    new = tl.multiple_of(new_block.to(tl.pointer_type(tl.bfloat16)), 16) + (h * rows + slot % TILE) * D
    once = mine & (r == 0)
    store_here_bf16(new + same, ka1, once)
    store_here_bf16(new + HALF + same, kb1, once)
    tl.store(new + KV_HEADS * rows * D + e, va1, mask=v_mask)
    if STAGE:
        store_here_bf16(kv_stage + h * D + same, ka1, once)
        store_here_bf16(kv_stage + h * D + HALF + same, kb1, once)
        tl.store(kv_stage + (KV_HEADS + h) * D + e, va1, mask=v_mask)
    score = tl.sum(qa * ka1.to(tl.float32) + qb * kb1.to(tl.float32), 1)
    if HAS_CAP:
        score = capped(score, cap)
    r = tl.arange(0, R)
    store_here((score_ptr + h * GROUP + r).to(tl.pointer_type(tl.int32)), as_int(score), owner & (r < GROUP))

    at = (h * SPLITS + s) * GROUP + r
    acc_at = (acc_ptr + at[:, None] * D + d).to(tl.pointer_type(tl.int32))
    store_here(acc_at, as_int(acc_a), q_mask)
    store_here(acc_at + HALF, as_int(acc_b), q_mask)
    store_here((peak_ptr + at).to(tl.pointer_type(tl.int32)), as_int(peak), r < GROUP)
    store_here((mass_ptr + at).to(tl.pointer_type(tl.int32)), as_int(mass), r < GROUP)
    tl.debug_barrier()
    last = True
    if SPLITS > 1:
        last = tl.atomic_add(arrived + h, 1, sem="acq_rel", scope="gpu") == active - 1
    if last:
        if SPLITS > 1:
            tl.store(arrived + h, 0)
        combine(
            acc_ptr, peak_ptr, mass_ptr, score_ptr, qkv + KV_HEADS * (GROUP + 1) * D, active, h,
            out, planes_q, planes_scale, planes_sums, planes_stride,
            GROUP, D, SPLITS, WIDE, CHUNK, WRITE_F32, BITS,
        )  # fmt: skip
