"""Reading memory and nothing else: the ceiling that a step is measured against."""

# coverage: compiled
# pyright: basic
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_words(data, out, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    """Each program reads CHUNKS * SIZE int32 words, four chunks in flight, and stores one word of them."""
    program = tl.program_id(0)
    lane = tl.arange(0, SIZE)
    mix = tl.zeros([SIZE], tl.int32)
    for chunk in range(0, CHUNKS, 4):
        base = data + (program.to(tl.int64) * CHUNKS + chunk) * SIZE + lane
        a = tl.load(base)
        b = tl.load(base + SIZE)
        c = tl.load(base + 2 * SIZE)
        d = tl.load(base + 3 * SIZE)
        mix ^= a ^ b ^ c ^ d
    tl.store(out + program, tl.xor_sum(mix, 0))
