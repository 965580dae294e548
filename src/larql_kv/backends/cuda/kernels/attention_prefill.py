"""Causal attention of a prompt's rows over the past (read from its blocks) and over themselves.

A program owns BLOCK_M (query, head) pairs of one K/V head: pair r is query r // GROUP, head r % GROUP of
the group, so K/V are read once for the whole group. It walks the tiles that its causal band (or window)
touches with the softmax kept up to date in base 2: acc, the running maximum and the running sum are float32.

Positions are counted from the first new row: query i is at i, a past row at a negative number. "No window"
and "no ring" are numbers larger than any position.
"""

# coverage: compiled
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from larql_kv.backends.cuda.kernels.common import INT, to_bf16
from larql_kv.backends.cuda.kernels.rows import block_pointer

FAR: tl.constexpr = tl.constexpr(1 << 30)  # further away than any window reaches


@triton.jit
def load_tile(pointers, mask):
    """A tile of bf16 rows, zero where masked: rows that nobody wrote may hold NaN, and 0 * NaN is NaN."""
    x = tl.load(pointers, mask=mask, other=0.0)
    if INT:
        x = x.to(tl.float32)
    return x


@triton.jit
def attend_tile(acc, top, total, q, k, v, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """Take the keys of one tile in: q (M, D), k and v (N, D), seen (M, N) -> acc (M, D), top and total (M,).

    `scale` brings q.k into base 2 (with a softcap: divided by it), `softcap` is then the cap in base 2.
    """
    s = tl.dot(q, tl.trans(k))
    if SOFTCAP:  # softcap * tanh(x), as 1 - 2 / (1 + e^2x)
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s * scale)))
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
    else:
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None]
    if not INT:
        p = p.to(tl.bfloat16)
    return tl.dot(p, v, acc), new_top, total


@triton.jit(do_not_specialize=["n", "first", "ring", "window"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, n, first, ring, window, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAST: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """q (n, HEADS, D), new k, v (n, KV_HEADS, D), out like q; `first` rows lie in the blocks (PAST: any do).

    DP: the power of two that is at least D. A ring holds the last min(first, ring) positions.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # The longest walks start first, so that the short ones fill the gaps at the end.
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.num_programs(0) // KV_HEADS - 1 - tl.program_id(0) // KV_HEADS
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = pair // GROUP
    lowest = tile * BLOCK_M // GROUP
    highest = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, n - 1)
    e = tl.arange(0, DP)[None, :]
    pair_at = (query * HEADS + kv_head * GROUP + pair % GROUP)[:, None] * D + e
    pair_mask = (pair < n * GROUP)[:, None] & (e < D)
    q = load_tile(q_ptr + pair_at, pair_mask)

    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a row that has seen nothing yet stays at total 0
    total = tl.zeros([BLOCK_M], tl.float32)

    if PAST:
        STEP: tl.constexpr = BLOCK_N if BLOCK_N < 64 else 64  # a part of one block
        held = tl.minimum(first, ring)
        need = tl.minimum(held, window - 1 - lowest)  # the newest rows that any query here sees
        newest = (first - 1) % ring
        oldest = (first - tl.maximum(need, 1)) % ring
        ring_steps = (ring + STEP - 1) // STEP
        step = oldest // STEP
        count = newest // STEP - step + 1
        if oldest > newest:  # around the ring's end; both ends may lie in one step
            count = tl.minimum(count + ring_steps, ring_steps)
        count = tl.where(need > 0, count, 0)
        j = tl.arange(0, STEP)
        past_base = block_pointer(table_ptr, step * STEP // 64)
        for _ in range(count):
            slot = step * STEP + j
            age = newest - slot  # 0: the row before the first new one
            age = tl.where(age < 0, age + ring, age)
            live = (age < held) & (slot < ring)
            height = tl.minimum(64, ring - step * STEP // 64 * 64)
            mask = live[:, None] & (e < D)
            k_at = past_base + (kv_head * height + step * STEP % 64 + j)[:, None] * D + e
            k = load_tile(k_at, mask)
            v = load_tile(k_at + KV_HEADS * height * D, mask)
            distance = query[:, None] + tl.where(live, age + 1, FAR)[None, :]
            acc, top, total = attend_tile(
                acc, top, total, q, k, v, distance < window, scale, softcap, SOFTCAP
            )
            step = tl.where(step + 1 == ring_steps, 0, step + 1)
            past_base = block_pointer(table_ptr, tl.where(step * STEP < held, step * STEP // 64, 0))

    start = tl.maximum(0, lowest - window + 1) // BLOCK_N * BLOCK_N
    for begin in range(start, highest + 1, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        mask = (key < n)[:, None] & (e < D)
        at = (key * KV_HEADS + kv_head)[:, None] * D + e
        k = load_tile(k_ptr + at, mask)
        v = load_tile(v_ptr + at, mask)
        # One unsigned comparison: later keys are at a negative distance, which is a huge number.
        distance = (query[:, None] - key[None, :]).to(tl.uint32, bitcast=True)
        acc, top, total = attend_tile(
            acc, top, total, q, k, v, distance < window.to(tl.uint32), scale, softcap, SOFTCAP
        )
    tl.store(out_ptr + pair_at, to_bf16(acc / total[:, None]), mask=pair_mask)
