"""The kernel that measures what memory can deliver: the yardstick of every other kernel."""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import prange

from larql_kv.backends.cpu.runtime import kernel
from larql_kv.backends.cpu.simd import I64, Emit, intrinsic, outlined, void_op


def _read_body(e: Emit, data: Any, groups: Any, out: Any) -> None:
    sums = [e.var(e.const(0.0)) for _ in range(4)]
    with e.loop(groups) as g:
        for j in range(4):
            e.set(sums[j], e.add(e.get(sums[j]), e.load(data, e.plus(e.times(g, 256), 64 * j))))
    for j in range(4):
        e.store(out, e.get(sums[j]), 64 * j)


@intrinsic
def read_groups(_typing, data, groups, out):
    """Read groups of 64 float32; their lane sums go to out[64], so that no load can be left out."""

    def body(e: Emit, *args: Any) -> None:
        e.b.call(outlined(e.b, "read", [I64] * 3, _read_body, ir.VoidType()), list(args))

    return void_op(body, 3)


@kernel(ints=4)
def read_kernel(data, groups, threads, out):
    for t in prange(threads):
        read_groups(data + t * groups * 256, groups, out + t * 256)
