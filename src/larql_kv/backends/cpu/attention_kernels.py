"""Parallel kernels of attention over K/V blocks, rings and new rows. Words: a "vector query" m = row*group
+ head
is one query head of one row; `group` of them share a K/V head. Positions are absolute.
"""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

import numpy as np
from numba import njit, prange
from numba.extending import register_jitable
from numba.np.ufunc import get_thread_id

from larql_kv.backends.cpu.attention_tiles import (
    copy_row,
    divide_vectors,
    scores_run,
    softmax_row,
    sums_run_1,
    sums_run_4,
    zero_vectors,
)
from larql_kv.backends.cpu.runtime import kernel, region
from larql_kv.backends.cpu.simd import peek_f32, peek_i64, poke_f32
from larql_kv.backends.cpu.turbo_kernels import decode_run

# `store` is the tuple (address of a store's STORE_WORDS int64, k_new, v_new, first_position, kv_heads, hd).
# Words of a store: where the rows lie that came before the new ones, see `KvStore` in attention.py.
TABLE, RING, IS_BF16, SINKS, SINK_TABLE, CODED, CODE_TABLE, CODE_RING = range(8)
K_BITS, V_BITS, K_BYTES, V_BYTES, LEVELS = range(8, 13)
STORE_WORDS = 13
TILE_ROWS = 65  # of a thread's tile: a run of rows, and the mean of K


@njit(inline="never", error_model="numpy")
def _slot(p, ring):
    """(block, row in it, rows of it) of position p."""
    slot = p % ring if ring > 0 else p
    block = slot >> 6
    return block, slot & 63, (min(64, ring - 64 * block) if ring > 0 else 64)


@njit(inline="never", error_model="numpy")
def _run(store, head, p, end):
    """(K address, V address, K stride, V stride, rows, form, ...) of the longest run of rows at p..end-1 in
    one place. Form: 0 float32, 1 bf16, 2 codes; the addresses of K scales, V scales and K mean follow."""
    words, k_new, v_new, first_position, kv_heads, hd = store
    if p >= first_position:
        at = ((p - first_position) * kv_heads + head) * hd * 4
        return k_new + at, v_new + at, kv_heads * hd * 4, kv_heads * hd * 4, min(64, end - p), 0, 0, 0, 0
    end = min(end, first_position)
    sinks, coded = peek_i64(words + 8 * SINKS), peek_i64(words + 8 * CODED)
    if sinks <= p < coded:
        block, row, rows = _slot(p, peek_i64(words + 8 * CODE_RING))
        k_bytes, v_bytes = peek_i64(words + 8 * K_BYTES), peek_i64(words + 8 * V_BYTES)
        k = peek_i64(peek_i64(words + 8 * CODE_TABLE) + 8 * block)
        v = k + kv_heads * 64 * k_bytes
        scales = v + kv_heads * 64 * v_bytes
        mean = scales + kv_heads * 64 * 8 + head * hd * 2
        at = head * 64 + row
        count = min(min(end, coded) - p, rows - row)
        k, v, scales = k + at * k_bytes, v + at * v_bytes, scales + 4 * at
        return k, v, k_bytes, v_bytes, count, 2, scales, scales + kv_heads * 64 * 4, mean
    is_bf16 = peek_i64(words + 8 * IS_BF16)
    table, ring = peek_i64(words + 8 * TABLE), peek_i64(words + 8 * RING)
    if p < sinks:
        table, ring, end = peek_i64(words + 8 * SINK_TABLE), 0, min(end, sinks)
    block, row, rows = _slot(p, ring)
    stride = hd * (2 if is_bf16 != 0 else 4)
    k = peek_i64(table + 8 * block) + (head * rows + row) * stride
    return k, k + kv_heads * rows * stride, stride, stride, min(end - p, rows - row), is_bf16, 0, 0, 0


@njit(inline="never", error_model="numpy")
def _padded(store, run, tile, want_v):
    """(address, stride, is_bf16) of a run's K (or V) rows; `tile` holds those that are codes (decoded), and
    all of them when hd is no multiple of 16."""
    k, v, k_stride, v_stride, rows, form, k_scales, v_scales, k_mean = run
    hd = store[5]
    src = v if want_v else k
    stride = v_stride if want_v else k_stride
    width = (hd + 15) >> 4
    if form == 2:
        words = store[0]
        bits = peek_i64(words + 8 * (V_BITS if want_v else K_BITS))
        mean = 0 if want_v else tile + 64 * width * 64
        if mean != 0:
            copy_row(k_mean, mean, hd, 1, 0)
        levels = peek_i64(words + 8 * LEVELS) + (12 if want_v else 0)
        decode_run(
            bits, src, stride, v_scales if want_v else k_scales, rows, hd, tile,
            mean, peek_f32(levels), peek_f32(levels + 4), peek_f32(levels + 8),
        )  # fmt: skip
        return tile, width * 64, 0
    if hd & 15 == 0:
        return src, stride, form
    for r in range(rows):
        zero_vectors(tile + r * width * 64, width)
        copy_row(src + r * stride, tile + r * width * 64, hd, form, 0)
    return tile, width * 64, 0


@njit(inline="never", error_model="numpy")
def _low(position, window, past_start):
    """First position that the query at `position` attends."""
    return max(past_start, position - window + 1) if window > 0 else past_start


@njit(inline="never", error_model="numpy")
def _score_span(store, head, rows, group, span, limits, queries, scores, tile):
    """Scores of keys span[0]..span[1]-1 for the vector queries of rows rows[0]..rows[1]-1.

    queries: addresses of 16-padded float32 vectors, those that full-precision rows meet and those that codes
    meet; scores: (address, stride, base position)
    """
    hd = store[5]
    width = (hd + 15) >> 4
    window, past_start = limits
    s_at, s_stride, base = scores
    total = (rows[1] - rows[0]) * group
    first = store[3] + rows[0]
    p = span[0]
    while p < span[1]:
        run = _run(store, head, p, span[1])
        k, stride, is_bf16 = _padded(store, run, tile, False)
        meeting = queries[1] if run[5] == 2 else queries[0]
        m = 0
        while m < total:
            m1, m2, m3 = min(m + 1, total - 1), min(m + 2, total - 1), min(m + 3, total - 1)
            start = max(p, _low(first + m // group, window, past_start))
            count = min(p + run[4], first + m3 // group + 1) - start
            if count > 0:
                at = s_at + (start - base) * 4
                scores_run(
                    is_bf16, k + (start - p) * stride, stride, count, width,
                    meeting + m * width * 64, meeting + m1 * width * 64,
                    meeting + m2 * width * 64, meeting + m3 * width * 64,
                    at + m * s_stride, at + m1 * s_stride, at + m2 * s_stride, at + m3 * s_stride,
                )  # fmt: skip
            m += 4
        p += run[4]


@njit(inline="never", error_model="numpy")
def _sum_part(is_bf16, v, stride, start, stop, m, last, scores, sums, width, first_vector, vectors):
    """sums[m..last] += weights * V rows start..stop-1 (v: the row at `start`), vectors first_vector..
    only."""
    s_at, s_stride, base = scores
    count = stop - start
    if count <= 0:
        return
    at = s_at + (start - base) * 4
    item = 32 if is_bf16 != 0 else 64
    done = 0
    while done < vectors:
        w = 4 if vectors - done >= 4 else (2 if vectors - done >= 2 else 1)
        out = sums + (first_vector + done) * 64
        row = v + (first_vector + done) * item
        if last == m:
            sums_run_1(is_bf16, w, row, stride, count, at + m * s_stride, out + m * width * 64)
        else:
            m1, m2, m3 = min(m + 1, last), min(m + 2, last), min(m + 3, last)
            sums_run_4(
                is_bf16, w, row, stride, count,
                at + m * s_stride, at + m1 * s_stride, at + m2 * s_stride, at + m3 * s_stride,
                out + m * width * 64, out + m1 * width * 64, out + m2 * width * 64, out + m3 * width * 64,
            )  # fmt: skip
        done += w


@njit(inline="never", error_model="numpy")
def _sum_span(store, head, rows, group, limits, end, scores, sums, tile, first_vector, vectors):
    """Weighted sums of the V rows below `end` for the vector queries of rows rows[0]..rows[1]-1, each in the
    order of position.

    Four queries go together where all four attend a row; what only some attend is added one by one.
    """
    hd = store[5]
    width = (hd + 15) >> 4
    window, past_start = limits
    total = (rows[1] - rows[0]) * group
    first = store[3] + rows[0]
    p = _low(first, window, past_start)
    while p < end:
        run = _run(store, head, p, end)
        v, stride, is_bf16 = _padded(store, run, tile, True)
        stop = p + run[4]
        m = 0
        while m < total:
            last = min(m + 3, total - 1)
            start_all = max(p, _low(first + last // group, window, past_start))
            stop_all = min(stop, first + m // group + 1)
            if start_all >= stop_all:
                start_all = stop_all = stop
            for i in range(m, last + 1):  # before the common rows
                a = max(p, _low(first + i // group, window, past_start))
                b = min(start_all, first + i // group + 1)
                _sum_part(
                    is_bf16,
                    v + (a - p) * stride,
                    stride,
                    a,
                    b,
                    i,
                    i,
                    scores,
                    sums,
                    width,
                    first_vector,
                    vectors,
                )
            _sum_part(
                is_bf16, v + (start_all - p) * stride, stride, start_all, stop_all, m, last,
                scores, sums, width, first_vector, vectors,
            )  # fmt: skip
            for i in range(m, last + 1):  # after them
                a = max(stop_all, _low(first + i // group, window, past_start))
                b = min(stop, first + i // group + 1)
                _sum_part(
                    is_bf16,
                    v + (a - p) * stride,
                    stride,
                    a,
                    b,
                    i,
                    i,
                    scores,
                    sums,
                    width,
                    first_vector,
                    vectors,
                )
            m += 4
        p = stop


@njit(inline="never", error_model="numpy")
def _load_queries(q, q_codes, rows, heads, group, head, hd, queries, sums):
    """Copy the vector queries of a K/V head to 16-padded vectors, and clear their sums. q_codes: those that
    codes meet, or 0."""
    width = (hd + 15) >> 4
    m = 0
    for row in range(rows[0], rows[1]):
        for g in range(group):
            at, source = m * width * 64, (row * heads + head * group + g) * hd * 4
            zero_vectors(queries[0] + at, width)
            zero_vectors(sums + at, width)
            copy_row(q + source, queries[0] + at, hd, 0, 0)
            if q_codes != 0:
                zero_vectors(queries[1] + at, width)
                copy_row(q_codes + source, queries[1] + at, hd, 0, 0)
            m += 1


@njit(inline="never", error_model="numpy")
def _finish(out, rows, heads, group, head, hd, sums, totals):
    """out = sums / softmax totals."""
    width = (hd + 15) >> 4
    m = 0
    for row in range(rows[0], rows[1]):
        for g in range(group):
            at = sums + m * width * 64
            divide_vectors(at, at, width, peek_f32(totals + 4 * m))
            copy_row(at, out + (row * heads + head * group + g) * hd * 4, hd, 0, 0)
            m += 1


@njit(inline="never", error_model="numpy")
def _softmax(s_at, position, limits, base, sinks, lead, scale, cap):
    """Softmax weights in place of a query's scores; returns their sum. Scores of sinks begin at `s_at`, those
    of the other rows `lead` floats after it at position `base`."""
    window, past_start = limits
    if sinks == 0:
        return softmax_row(s_at, _low(position, window, past_start) - base, position - base, 0, 0, scale, cap)
    if position < sinks:
        return softmax_row(s_at, 0, position, 0, 0, scale, cap)
    resume = lead + _low(position, window, past_start) - base
    return softmax_row(s_at, 0, lead + position - base, sinks, resume, scale, cap)


@region
def _many_rows(
    q, q_codes, k_new, v_new, n, heads, kv_heads, hd, words, first_position, window, past_start, sinks, out,
    task_rows, scratch, scratch_bytes, s_stride, scale, cap,
):  # fmt: skip
    """A task is one K/V head and `task_rows` rows. Scratch of a thread: queries, sums, totals, tile,
    scores."""
    group = heads // kv_heads
    store = (words, k_new, v_new, first_position, kv_heads, hd)
    limits = (window, past_start)
    lead = (sinks + 15) // 16 * 16
    row_blocks = (n + task_rows - 1) // task_rows
    tasks = row_blocks * kv_heads
    scale32, cap32 = np.float32(scale), np.float32(cap)
    vectors = (hd + 15) >> 4
    for index in prange(tasks):
        # Later rows attend more: taking tasks from both ends in turn gives every thread the same work.
        task = index // 2 if index & 1 == 0 else tasks - 1 - index // 2
        head = task % kv_heads
        start = (task // kv_heads) * task_rows
        rows = (start, min(n, start + task_rows))
        total = (rows[1] - rows[0]) * group
        vector_bytes = task_rows * group * vectors * 64
        plain = scratch + get_thread_id() * scratch_bytes
        queries = (plain, plain + vector_bytes)
        sums = plain + 2 * vector_bytes
        totals = sums + vector_bytes
        tile = totals + (task_rows * group * 4 + 63) // 64 * 64
        s_at = tile + TILE_ROWS * vectors * 64
        low = _low(first_position + rows[0], window, past_start)
        end = first_position + rows[1]
        scores = (s_at + 4 * lead, s_stride, low & -16)
        sink_scores = (s_at, s_stride, 0)
        _load_queries(q, q_codes, rows, heads, group, head, hd, queries, sums)
        if sinks > 0:
            span = (0, min(sinks, end))
            _score_span(store, head, rows, group, span, (0, 0), queries, sink_scores, tile)
        _score_span(store, head, rows, group, (low, end), limits, queries, scores, tile)
        for m in range(total):
            position = first_position + rows[0] + m // group
            total_weight = _softmax(
                s_at + m * s_stride, position, limits, scores[2], sinks, lead, scale32, cap32
            )
            poke_f32(totals + 4 * m, total_weight)
        if sinks > 0:
            _sum_span(store, head, rows, group, (0, 0), min(sinks, end), sink_scores, sums, tile, 0, vectors)
        _sum_span(store, head, rows, group, limits, end, scores, sums, tile, 0, vectors)
        _finish(out, rows, heads, group, head, hd, sums, totals)


@region
def _few_rows(
    q, q_codes, k_new, v_new, n, heads, kv_heads, hd, words, first_position, window, past_start, sinks, out,
    chunk, split, scratch, tiles, s_stride, scale, cap,
):  # fmt: skip
    """Few rows: scores in parallel over chunks of keys, softmax over vector queries, sums over parts of the
    head.

    Scratch: queries, sums, totals, scores; tiles: one per thread; split: vectors of the head size a task
    sums.
    """
    group = heads // kv_heads
    store = (words, k_new, v_new, first_position, kv_heads, hd)
    limits = (window, past_start)
    lead = (sinks + 15) // 16 * 16
    rows = (0, n)
    total = n * group
    vectors = (hd + 15) >> 4
    scale32, cap32 = np.float32(scale), np.float32(cap)
    vector_bytes = total * vectors * 64
    all_codes = scratch + kv_heads * vector_bytes
    all_sums = all_codes + kv_heads * vector_bytes
    all_totals = all_sums + kv_heads * vector_bytes
    all_scores = all_totals + (kv_heads * total * 4 + 63) // 64 * 64
    low = _low(first_position, window, past_start)
    base = low & -16
    end = first_position + n
    chunks = max(1, (end - base + chunk - 1) // chunk)
    for head in range(kv_heads):
        at = head * vector_bytes
        _load_queries(q, q_codes, rows, heads, group, head, hd, (scratch + at, all_codes + at), all_sums + at)
    for task in prange(kv_heads * chunks):
        head = task // chunks
        start = base + (task % chunks) * chunk
        queries = (scratch + head * vector_bytes, all_codes + head * vector_bytes)
        tile = tiles + get_thread_id() * TILE_ROWS * vectors * 64
        s_at = all_scores + head * total * s_stride
        if sinks > 0 and task % chunks == 0:
            span = (0, min(sinks, end))
            _score_span(store, head, rows, group, span, (0, 0), queries, (s_at, s_stride, 0), tile)
        span = (max(low, start), min(end, start + chunk))
        _score_span(store, head, rows, group, span, limits, queries, (s_at + 4 * lead, s_stride, base), tile)
    for index in prange(kv_heads * total):
        position = first_position + (index % total) // group
        total_weight = _softmax(
            all_scores + index * s_stride, position, limits, base, sinks, lead, scale32, cap32
        )
        poke_f32(all_totals + 4 * index, total_weight)
    parts = (vectors + split - 1) // split
    for task in prange(kv_heads * parts):
        head = task // parts
        first_vector = (task % parts) * split
        s_at = all_scores + head * total * s_stride
        sums, tile = all_sums + head * vector_bytes, tiles + get_thread_id() * TILE_ROWS * vectors * 64
        take = min(split, vectors - first_vector)
        if sinks > 0:
            scores = (s_at, s_stride, 0)
            _sum_span(
                store, head, rows, group, (0, 0), min(sinks, end), scores, sums, tile, first_vector, take
            )
        scores = (s_at + 4 * lead, s_stride, base)
        _sum_span(store, head, rows, group, limits, end, scores, sums, tile, first_vector, take)
    for head in range(kv_heads):
        _finish(
            out, rows, heads, group, head, hd, all_sums + head * vector_bytes, all_totals + 4 * head * total
        )


FEW_ROWS = 4  # up to here keys and parts of a head may be spread over threads; above, rows are
_TASK_QUERIES = 24  # vector queries of a task of many rows: their scores share one pass over K and V


@register_jitable
def scratch_layout(n, heads, kv_heads, hd, first_position, low, window, sinks, few):
    """(rows a task, bytes a vector query has for its scores, floats) of the scratch of `_few_rows` (a tile a
    thread comes on top) or `_many_rows` (so many floats a thread). low: the first position attended, sinks
    apart."""
    vectors, group = (hd + 15) // 16, heads // kv_heads
    if few:
        # The rows' scores start at multiples of 16, and end with a whole group of 16.
        rows, queries = n, n * heads
        s_stride = (max(first_position + n, low) - (low & -16) + 15) // 16 * 64
        tile = 0
    else:
        rows = min(n, max(1, _TASK_QUERIES // group))
        queries = rows * group
        span = max(first_position + n - low, 0)
        s_stride = ((min(span, window + rows) if window > 0 else span) + 47) // 16 * 64
        tile = TILE_ROWS * vectors * 16
    s_stride += (sinks + 15) // 16 * 64
    floats = 3 * queries * vectors * 16 + (queries + 15) // 16 * 16 + tile + queries * s_stride // 4
    return rows, s_stride, floats


@kernel(ints=17, floats=2, regions=True)
def attend_kernel(
    q, q_codes, k_new, v_new, out, words, first_position, window, n, heads, kv_heads, hd, past_start, sinks,
    threads, serial_work, scratch, scale, cap,
):  # fmt: skip
    """Attention of n rows. serial_work: multiply-adds from which few rows are worth two more launches;
    scratch: what `scratch_layout` says. sinks: positions below it are attended whatever window and past_start
    (which is then >= sinks) say. q_codes: the queries that codes meet, 0 where the store has no codes."""
    low = _low(first_position, window, past_start)
    few = n <= FEW_ROWS and (first_position + n - low) * heads * hd > serial_work
    rows, s_stride, floats = scratch_layout(n, heads, kv_heads, hd, first_position, low, window, sinks, few)
    if few:
        # Parts of 32 head dimensions where parts of 64 would leave threads idle. Every part decodes whole
        # rows of codes: no more of them than threads.
        split = 4 if kv_heads * ((hd + 63) // 64) % threads == 0 else 2
        if q_codes != 0:
            parts = (threads + kv_heads - 1) // kv_heads
            split = (((hd + 15) >> 4) + parts - 1) // parts
        _few_rows(
            q, q_codes, k_new, v_new, n, heads, kv_heads, hd, words, first_position, window, past_start,
            sinks, out, 256, split, scratch, scratch + 4 * floats, s_stride, scale, cap,
        )  # fmt: skip
    else:
        _many_rows(
            q, q_codes, k_new, v_new, n, heads, kv_heads, hd, words, first_position, window, past_start,
            sinks, out, rows, scratch, 4 * floats, s_stride, scale, cap,
        )  # fmt: skip


@kernel(ints=8, parallel=False)
def append_kernel(k_new, v_new, first, n, kv_heads, hd, words, first_position):
    """Write rows first..n-1 of the new K/V into their slots of full precision; of sinks into theirs too."""
    is_bf16, sinks = peek_i64(words + 8 * IS_BF16), peek_i64(words + 8 * SINKS)
    item = 2 if is_bf16 != 0 else 4
    for row in range(first, n):
        p = first_position + row
        table, ring = peek_i64(words + 8 * TABLE), peek_i64(words + 8 * RING)
        if p < sinks:
            table, ring = peek_i64(words + 8 * SINK_TABLE), 0
        block, slot, rows = _slot(p, ring)
        at = peek_i64(table + 8 * block) + slot * hd * item
        for head in range(kv_heads):
            src = (row * kv_heads + head) * hd * 4
            dst = at + head * rows * hd * item
            copy_row(k_new + src, dst, hd, 0, is_bf16)
            copy_row(v_new + src, dst + kv_heads * rows * hd * item, hd, 0, is_bf16)
