"""Kernels over the rows of a prompt: norms, rotary embedding, gated activation, rows into and out of blocks.

Every kernel reads and writes each byte once, and a row's bits do not depend on how many rows are run
together. Blocks are found through a table of int64 addresses; `ring` is the number of slots, where "no
ring" is a number larger than any position.
"""

# coverage: compiled
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from larql_kv.backends.cuda.kernels.common import to_bf16

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def block_pointer(table_ptr, block):
    """Addresses of the bf16 blocks `block` (a number or a vector of them)."""
    address = tl.load(table_ptr + block)
    return tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, H: tl.constexpr, BLOCK: tl.constexpr, ROUND_INPUT: tl.constexpr
):
    """One row a program: out = x / sqrt(mean(x^2) + eps) * weight; x (n, H) float32, out bf16 or float32."""
    row = tl.program_id(0).to(tl.int64) * H
    e = tl.arange(0, BLOCK)
    mask = e < H
    x = tl.load(x_ptr + row + e, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + e, mask=mask, other=0.0)
    if ROUND_INPUT:
        x = to_bf16(x).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * weight
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr + row + e, to_bf16(y), mask=mask)
    else:
        tl.store(out_ptr + row + e, y, mask=mask)


@triton.jit
def add_normed_kernel(rows_ptr, update_ptr, weight_ptr, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program: rows (n, H) float32 += update, or += its norm where there is a weight."""
    row = tl.program_id(0).to(tl.int64) * H
    e = tl.arange(0, BLOCK)
    mask = e < H
    y = tl.load(update_ptr + row + e, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(rows_ptr + row + e, mask=mask, other=0.0)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + e, mask=mask, other=0.0)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / H + eps) * weight
    tl.store(rows_ptr + row + e, x + y, mask=mask)


@triton.jit
def rotate_heads(
    x_ptr, bias_ptr, norm_ptr, out_ptr, cos, sin, eps, COUNT: tl.constexpr, D: tl.constexpr,
    COUNT_P: tl.constexpr, HALF_P: tl.constexpr,
):  # fmt: skip
    """COUNT heads of one row: bias, RMS norm of each head, rotation of the pairs (i, i + D/2), bf16 out.

    cos, sin: (1, HALF_P). COUNT_P, HALF_P: powers of two, at least COUNT and D/2.
    """
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, COUNT_P)[:, None]
    e = tl.arange(0, HALF_P)[None, :]
    mask = (h < COUNT) & (e < HALF)
    at = h * D + e
    a = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        a += tl.load(bias_ptr + at, mask=mask, other=0.0)
        b += tl.load(bias_ptr + at + HALF, mask=mask, other=0.0)
    if norm_ptr is not None:
        factor = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        a *= factor * tl.load(norm_ptr + e, mask=e < HALF, other=0.0)
        b *= factor * tl.load(norm_ptr + HALF + e, mask=e < HALF, other=0.0)
    tl.store(out_ptr + at, to_bf16(a * cos - b * sin), mask=mask)
    tl.store(out_ptr + at + HALF, to_bf16(b * cos + a * sin), mask=mask)


@triton.jit
def rope_qkv_kernel(
    qkv_ptr, bias_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_ptr, k_ptr, v_ptr, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    HEADS_P: tl.constexpr, KV_HEADS_P: tl.constexpr, HALF_P: tl.constexpr, V_P: tl.constexpr,
):  # fmt: skip
    """One row a program: [q | k | v] -> q and k normed and rotated, v as it is, all bf16.

    *_P: powers of two, at least HEADS, KV_HEADS, D/2 and KV_HEADS * D.
    """
    Q: tl.constexpr = HEADS * D
    KV: tl.constexpr = KV_HEADS * D
    row = tl.program_id(0).to(tl.int64)
    qkv_ptr += row * (Q + 2 * KV)
    e = tl.arange(0, HALF_P)[None, :]
    cos = tl.load(cos_ptr + row * (D // 2) + e, mask=e < D // 2, other=0.0)
    sin = tl.load(sin_ptr + row * (D // 2) + e, mask=e < D // 2, other=0.0)
    if HEADS > 0:
        rotate_heads(qkv_ptr, bias_ptr, q_norm_ptr, q_ptr + row * Q, cos, sin, eps, HEADS, D, HEADS_P, HALF_P)
    k_bias_ptr = None if bias_ptr is None else bias_ptr + Q
    rotate_heads(
        qkv_ptr + Q, k_bias_ptr, k_norm_ptr, k_ptr + row * KV, cos, sin, eps, KV_HEADS, D, KV_HEADS_P, HALF_P
    )
    j = tl.arange(0, V_P)
    v = tl.load(qkv_ptr + Q + KV + j, mask=j < KV, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        v += tl.load(bias_ptr + Q + KV + j, mask=j < KV, other=0.0)
    tl.store(v_ptr + row * KV + j, to_bf16(v), mask=j < KV)


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, F: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """BLOCK values of one row a program: act(gate) * up in bf16, of gate_up (n, 2F).

    Both activations are gate * sigmoid(t): silu with t = gate; the tanh form of gelu, where
    (1 + tanh(u)) / 2 is sigmoid(2 u), with t = 2 sqrt(2/pi) (gate + 0.044715 gate^3).
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = e < F
    gate = tl.load(gate_up_ptr + row * 2 * F + e, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + e, mask=mask, other=0.0).to(tl.float32)
    t = gate
    if GELU:
        t = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    tl.store(out_ptr + row * F + e, to_bf16(gate / (1.0 + tl.exp2(-LOG2E * t)) * up), mask=mask)


@triton.jit(do_not_specialize=["rows", "first", "ring"])
def append_kernel(
    k_ptr, v_ptr, table_ptr, rows, first, ring,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R heads of K and of V a program: row i of k, v (rows, KV_HEADS, D) bf16 into the slot of `first` + i.

    Blocks are (2, KV_HEADS, 64, D), with fewer rows in a ring's last block. rows <= ring.
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    row = r // KV_HEADS
    live = row < rows
    slot = (first + row) % ring
    block = slot // 64
    base = block_pointer(table_ptr, tl.where(live, block, 0))
    height = tl.minimum(64, ring - block * 64)
    e = tl.arange(0, DP)[None, :]
    mask = live[:, None] & (e < D)
    source = r.to(tl.int64)[:, None] * D + e
    target = base[:, None] + ((r % KV_HEADS * height + slot % 64) * D)[:, None] + e
    tl.store(target, tl.load(k_ptr + source, mask=mask), mask=mask)
    tl.store(target + (KV_HEADS * height * D)[:, None], tl.load(v_ptr + source, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["first", "ring"])
def write_rows_kernel(rows_ptr, table_ptr, first, ring, H: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK values of one row a program: row i of rows (n, H) float32, as bf16, into the slot of `first` + i.

    Blocks are (64, H); n <= ring.
    """
    row = tl.program_id(0)
    slot = (first + row) % ring
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(rows_ptr + row.to(tl.int64) * H + e, mask=e < H)
    tl.store(block_pointer(table_ptr, slot // 64) + slot % 64 * H + e, to_bf16(x), mask=e < H)


@triton.jit(do_not_specialize=["first", "ring"])
def read_rows_kernel(table_ptr, out_ptr, first, ring, H: tl.constexpr, BLOCK: tl.constexpr):
    """The way back: out (n, H) float32 row i = the row in the slot of position `first` + i."""
    row = tl.program_id(0)
    slot = (first + row) % ring
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(block_pointer(table_ptr, slot // 64) + slot % 64 * H + e, mask=e < H)
    tl.store(out_ptr + row.to(tl.int64) * H + e, x.to(tl.float32), mask=e < H)
