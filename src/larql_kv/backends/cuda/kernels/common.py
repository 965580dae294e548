"""What the Triton kernels share: the interpreter switch, integer dots, quantised activations.

Quantised activations of K values ("planes"), what every packed linear reads when it runs one row:

    q       int32 (bits, groups)   word w of group g holds elements 32 g + 4 w .. + 3 as int8 (bits = 8),
                                   or 32 g + 2 w, + 1 as int16 (bits = 16), little end first
    scale   float32 (groups,)      value = q * scale; scale = absmax of the group / (2^(bits-1) - 1)
    sums    float32 (2, groups)    scale * sum of q over elements 0..15 and over 16..31 of the group

`groups` may be more than K / 32: the rest stays zero.
"""

# coverage: compiled
from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run in numpy, on CPU tensors
INT: tl.constexpr = tl.constexpr(INTERPRET)

if INTERPRET:

    @triton.jit
    def wait_for_previous(PDL: tl.constexpr):
        pass

else:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def wait_for_previous(PDL: tl.constexpr):
        """With dependent launch: let the next kernel start, then wait until the one before has finished.

        So kernels start as early as there is room for them, several deep, and load their weights. Before this
        a kernel may read nothing but weights, tables, rows of earlier steps and the position: of this step's
        kernels not even those far ahead need have run. (The position moves at a step's end, and a step is a
        graph of its own: launches outside a graph go without dependent launch.)
        """
        if PDL:
            gdc_launch_dependents()
            gdc_wait()


@triton.jit
def low_half(word):
    """float16 in bits 0..15 of int32 words -> float32."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word):
    """float16 in bits 16..31 of int32 words -> float32."""
    return ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def to_bf16(x):
    """float32 -> bfloat16, to the nearest, ties to even.

    The interpreter's cast cuts bits off: there the result is float32 of a bfloat16's value.
    """
    if INT:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def dot4(weights, x, total, SIGNED: tl.constexpr):
    """total + sum of 4 byte products: `weights` bytes unsigned (or signed), `x` int8. int32 words."""
    if INT:
        for b in tl.static_range(4):
            w = ((weights << (24 - 8 * b)) >> 24) if SIGNED else ((weights >> (8 * b)) & 0xFF)
            total = total + w * ((x << (24 - 8 * b)) >> 24)
        return total
    elif SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, x, total], tl.int32, True, 1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, x, total], tl.int32, True, 1
        )


@triton.jit
def dot4_wide(weights, x01, x23, total, SIGNED: tl.constexpr):
    """As `dot4` with int16 activations: `x01` meets bytes 0 and 1 of `weights`, `x23` bytes 2 and 3."""
    if INT:
        for b in tl.static_range(4):
            w = ((weights << (24 - 8 * b)) >> 24) if SIGNED else ((weights >> (8 * b)) & 0xFF)
            pair = x01 if b < 2 else x23
            total = total + w * ((pair << 16) >> 16 if b % 2 == 0 else pair >> 16)
        return total
    elif SIGNED:
        return tl.inline_asm_elementwise(
            "{ .reg .s32 t; dp2a.lo.s32.s32 t, $2, $1, $4; dp2a.hi.s32.s32 $0, $3, $1, t; }",
            "=r,r,r,r,r",
            [weights, x01, x23, total],
            tl.int32,
            True,
            1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .s32 t; dp2a.lo.s32.u32 t, $2, $1, $4; dp2a.hi.s32.u32 $0, $3, $1, t; }",
            "=r,r,r,r,r",
            [weights, x01, x23, total],
            tl.int32,
            True,
            1,
        )


@triton.jit
def store_here(ptr, value, mask):
    """Store 4-byte values from the registers they are in (every copy of them): tl.store would first exchange
    them through shared memory to widen the stores, which costs more time than it saves for a few values."""
    if INT:
        tl.store(ptr, value, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [ptr.to(tl.int64), value.to(tl.int32, bitcast=True), mask.to(tl.int32)],
            tl.int32,
            False,
            1,
        )


@triton.jit
def store_here_bf16(ptr, value, mask):
    """As `store_here`, for what `to_bf16` gives."""
    if INT:
        tl.store(ptr, value, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b16 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,h,r",
            [ptr.to(tl.int64), value.to(tl.int16, bitcast=True), mask.to(tl.int32)],
            tl.int32,
            False,
            1,
        )


@triton.jit
def store_row_bf16(base, row, first, K: tl.constexpr, when):
    """row (n, 32) float32 as bfloat16 at base + first .. (K values in all, K even): two to a word, from the
    registers they are in. `base` is 4-byte aligned."""
    n: tl.constexpr = row.shape[0]
    bits = (as_int(to_bf16(row).to(tl.float32)) >> 16) & 0xFFFF
    words = tl.sum(bits.reshape(n, 16, 2) << (16 * tl.arange(0, 2)[None, None, :]), 2)
    at = first // 2 + tl.arange(0, n)[:, None] * 16 + tl.arange(0, 16)[None, :]
    store_here(base.to(tl.pointer_type(tl.int32)) + at, words, (2 * at < K) & when)


@triton.jit
def load_here(ptr, mask, other: tl.constexpr):
    """float32 values into the registers that want them, past the first-level cache: other processors wrote
    them in this launch."""
    if INT:
        return tl.load(ptr, mask=mask, other=other)
    else:
        bits = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, $3; @p ld.global.cg.b32 $0, [$1]; }",
            "=r,l,r,r",
            [ptr.to(tl.int64), mask.to(tl.int32), as_int(tl.full([1], other, tl.float32))],
            tl.int32,
            False,
            1,
        )
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_planes(z, group, valid, q_ptr, scale_ptr, sums_ptr, stride, BITS: tl.constexpr):
    """Quantise z (n, 32) float32, rows being the groups `group` (n,) int32, into planes of `stride` groups.

    Groups where `valid` (n,) is false are not written. A NaN comes out as 0: what is not finite is found in
    the residual row (a prompt's and the final one) and in the logits.
    """
    limit: tl.constexpr = 127.0 if BITS == 8 else 32767.0
    per: tl.constexpr = 4 if BITS == 8 else 2
    n: tl.constexpr = z.shape[0]
    e = tl.arange(0, 32)[None, :]
    largest = tl.max(tl.abs(z), 1)
    q = tl.floor(z * (limit / tl.maximum(largest, 1e-30))[:, None] + 0.5)
    scale = largest / limit
    # `per` neighbours into one word: a thread has them all
    at = tl.arange(0, per)[None, None, :]
    bits = (q.to(tl.int32) & (0xFF if BITS == 8 else 0xFFFF)).reshape(n, BITS, per) << (at * (32 // per))
    words = tl.sum(bits, 2)
    word = tl.arange(0, BITS)[None, :]
    place = q_ptr + word * stride + group[:, None]
    store_here(place, words, valid[:, None] & (word >= 0))
    store_here((scale_ptr + group).to(tl.pointer_type(tl.int32)), as_int(scale), valid)
    low = scale * tl.sum(tl.where(e < 16, q, 0.0), 1)
    high = scale * tl.sum(tl.where(e < 16, 0.0, q), 1)
    store_here((sums_ptr + group).to(tl.pointer_type(tl.int32)), as_int(low), valid)
    store_here((sums_ptr + stride + group).to(tl.pointer_type(tl.int32)), as_int(high), valid)


@triton.jit
def as_int(x):
    """The bits of float32 values."""
    return x.to(tl.int32, bitcast=True)
