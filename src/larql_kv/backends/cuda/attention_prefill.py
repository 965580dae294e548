"""Launcher of prefill attention: many queries over the past's blocks and the new rows."""

# Triton's annotations know neither launch options nor that next_power_of_2 gives an int.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from larql_kv.backends.cuda.kernels.attention_prefill import prefill_kernel
from larql_kv.backends.cuda.rowops import check, check_table

NO_WINDOW = 1 << 30


class Tiles(NamedTuple):
    """How the kernel cuts its work: (query, head) pairs a program, keys a step, warps, pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# By padded head_dim, for benchmarks/micro/cuda_prefill.py to time: the default first, the one for few rows
# last. Each fits the 227 KB of shared memory and (but for a few bytes) the 255 registers of Hopper.
TILES: dict[int, tuple[Tiles, ...]] = {
    256: (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 3), Tiles(128, 32, 8, 4), Tiles(64, 32, 4, 3)),
    128: (Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3)),
    64: (Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3)),
}


def default_tiles(head_dim: int, pairs: int) -> Tiles:
    """The tiles of a call with `pairs` (query, head of a group) pairs a K/V head."""
    choices = TILES[max(64, triton.next_power_of_2(head_dim))]
    return choices[-1] if pairs <= 64 else choices[0]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    ring: int,
    first: int,
    window: int,
    scale: float,
    softcap: float = 0.0,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """q (n, heads, D), new k and v (n, kv_heads, D) bf16 -> (n, heads * D) bf16; D at most 256.

    Query i, at position first + i, sees positions above first + i - window (0: all) up to its own: those
    before `first` in the blocks (2, kv_heads, 64, D) of `table` (see `rowops`), the others in k and v.
    softcap (0: none): s = cap tanh(s / cap) after the scale, which must be positive.
    """
    n, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    check("q", q, (n, heads, head_dim), torch.bfloat16)
    check("k", k, (n, kv_heads, head_dim), torch.bfloat16)
    check("v", v, (n, kv_heads, head_dim), torch.bfloat16)
    if kv_heads == 0 or heads % kv_heads or head_dim > 256:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit together")
    if window < 0 or not scale > 0 or softcap < 0:
        raise ValueError(f"window {window}, scale {scale} or softcap {softcap} is out of range")
    slots = check_table(table, ring, first)
    if ring and min(first, (window or NO_WINDOW) - 1) > ring:
        raise ValueError(f"a window of {window or None} at position {first} does not fit {ring} rows")
    out = torch.empty(n, heads * head_dim, dtype=torch.bfloat16, device=q.device)
    if n == 0:
        return out
    pairs = n * (heads // kv_heads)
    tiles = tiles or default_tiles(head_dim, pairs)
    log2e = math.log2(math.e)
    prefill_kernel[(triton.cdiv(pairs, tiles.block_m) * kv_heads,)](
        q, k, v, out, table, n, first, slots, window or NO_WINDOW,
        2 * log2e * scale / softcap if softcap else log2e * scale, log2e * softcap,
        HEADS=heads, KV_HEADS=kv_heads, D=head_dim, DP=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PAST=first > 0, SOFTCAP=softcap > 0,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
