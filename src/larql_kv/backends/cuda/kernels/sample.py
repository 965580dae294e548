"""The end of a step: which token comes next, told to the device and to the host."""

# coverage: compiled
# pyright: basic
from __future__ import annotations

import triton
import triton.language as tl

from larql_kv.backends.cuda.kernels.common import wait_for_previous


@triton.jit
def land(value, token, landed, sequence, SLOTS: tl.constexpr):
    """`value` (int32) is the next token, and the host sees it in the next slot; -1: nothing to choose."""
    count = tl.load(sequence)
    tl.store(token, tl.maximum(value, 0))
    tl.store(landed + count % SLOTS, value)
    tl.store(sequence, count + 1)


@triton.jit
def choose_largest(
    best, best_at, count, token, landed, sequence, SLOTS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr
):
    """The row of the largest of `count` tile maxima, lowest row first; -1 where one is not finite."""
    wait_for_previous(PDL)
    top = tl.full([], float("-inf"), tl.float32)
    at = tl.zeros([], tl.int32)
    poison = tl.zeros([], tl.float32)
    for first in range(0, count, STEP):
        index = first + tl.arange(0, STEP)
        value = tl.load(best + index, mask=index < count, other=-3.0e38)
        poison += tl.sum(value * 0.0, 0)
        here, place = tl.max(value, 0, return_indices=True)
        at = tl.where(here > top, first + place, at)
        top = tl.maximum(top, here)
    land(tl.where(poison == 0.0, tl.load(best_at + at), -1), token, landed, sequence, SLOTS)


@triton.jit
def emit(chosen, token, landed, sequence, SLOTS: tl.constexpr):
    """`land` of a token that torch chose: int64, one."""
    land(tl.load(chosen).to(tl.int32), token, landed, sequence, SLOTS)


@triton.jit
def uniform(seed_ptr, pos_ptr, out):
    """out = a number in [0, 1) that depends on the seed (int64) and the position alone (Philox)."""
    tl.store(out, tl.rand(tl.load(seed_ptr), tl.load(pos_ptr)))
