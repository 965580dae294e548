"""One new token's attention in one layer: the launch of `kernels/attention_step.py`, and how to size it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from larql_kv.backends.cuda.kernels.attention_step import attention_step as _kernel
from larql_kv.backends.cuda.linear import pdl_options
from larql_kv.backends.cuda.planes import Planes

TILE = 64  # rows of K/V that a program takes at once: a block of state/pages.py
MOST_SPLITS = 64  # beyond, combining costs more than splitting saves
LOG2_E = 1 / math.log(2)


def splits_for(capacity_tokens: int, kv_heads: int, sms: int = 132, head_dim: int = 256) -> int:
    """Programs a K/V head to share out `capacity_tokens` rows (of a ring: its rows).

    One tile a program while the processors last, so that 512 tokens take 8 and a ring of 1024 takes 16; then
    as many programs as run at once, which narrower heads leave room for more of. Gemma 3 4B: 33 from 2112 up.
    """
    tiles = math.ceil(max(capacity_tokens, 1) / TILE)
    at_once = sms * max(1, min(4, 256 // head_dim)) // kv_heads
    return max(1, min(tiles, at_once, MOST_SPLITS))


def stages_for(capacity_tokens: int, splits: int) -> int:
    """Depth of the K/V pipeline: none (and a third of the shared memory) where a program has one tile."""
    return 1 if capacity_tokens <= splits * TILE else 3


@dataclass(frozen=True)
class AttentionScratch:
    """Partial results of the programs; layers take turns with one. `arrived` is zero between launches."""

    acc: torch.Tensor  # float32 (kv_heads, splits, group, head_dim), or more splits than a launch has
    peak: torch.Tensor  # float32 (kv_heads, splits, group): the largest score
    mass: torch.Tensor  # float32 (kv_heads, splits, group): sum of exp2(score - peak)
    score: torch.Tensor  # float32 (kv_heads, group): of the new row
    arrived: torch.Tensor  # int32 (kv_heads,)

    @classmethod
    def empty(
        cls, kv_heads: int, group: int, head_dim: int, max_splits: int, device: torch.device | str
    ) -> AttentionScratch:
        """`group` is query heads per K/V head."""
        split = (kv_heads, max_splits, group)
        return cls(
            torch.empty(*split, head_dim, device=device),
            torch.empty(split, device=device),
            torch.empty(split, device=device),
            torch.empty(kv_heads, group, device=device),
            torch.zeros(kv_heads, dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.acc, self.peak, self.mass, self.score, self.arrived))


def attention_step(
    qkv: torch.Tensor,
    table: torch.Tensor,
    pos: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    scale: float,
    softcap: float,
    ring: int,
    window: int,
    splits: int,
    partials: AttentionScratch,
    planes: Planes | None,
    out: torch.Tensor | None,
    kv_stage: torch.Tensor | None,
    pdl: bool,
    stages: int = 1,
    warps: int = 4,
) -> None:
    """Norm, rotate and append the new token's K/V rows, and attend with its queries.

    qkv     float32 ((heads + 2 kv_heads) * head_dim,): the projections as they come: q, k, v rows
    table   int64: addresses of blocks (2, kv_heads, rows, head_dim) bfloat16; the new row's is reserved
    pos     int32 (1,): positions held before this token. May change between replays of a captured launch
    cos, sin    float32 (positions, head_dim / 2), half-split order
    q_norm, k_norm    float32 (head_dim,), or None for no norm
    softcap, ring, window    0: none. A window without a ring attends the last `window` positions
    planes, out    where (heads * head_dim,) goes: quantised and/or float32
    kv_stage    bfloat16 (2 * kv_heads * head_dim,): also gets the new rows, k then v
    splits, stages    see `splits_for`, `stages_for`; any values give right results
    pdl     reads of old rows go ahead of the kernels before: see `wait_for_previous` for what those may write
    """
    group = heads // kv_heads
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"{heads} heads on {kv_heads} of {head_dim}: not a whole group, or an odd head")
    if planes is not None and head_dim % 32:
        raise ValueError(f"planes need heads of a multiple of 32 values, not {head_dim}")
    if splits > partials.acc.shape[1]:
        raise ValueError(f"{splits} splits, but partial results have room for {partials.acc.shape[1]}")
    # at least four groups a warp: a thread then has all splits of its values, and warps exchange nothing
    wide = max(4 * warps, triton.next_power_of_2(math.ceil(group * head_dim / 32)))
    constants: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "D": head_dim,
        "RING": ring,
        "WINDOW": window,
        "SPLITS": splits,
        "R": max(16, triton.next_power_of_2(group)),
        "HALF_PAD": max(16, triton.next_power_of_2(head_dim // 2)),
        "WIDE": wide,
        "CHUNK": min(triton.next_power_of_2(splits), max(1, 32 * warps // wide)),
        "HAS_NORM": q_norm is not None,
        "HAS_CAP": softcap != 0,
        "WRITE_F32": out is not None,
        "BITS": 0 if planes is None else planes.bits,
        "STAGE": kv_stage is not None,
        "STAGES": stages,
        "PDL": pdl,
        "num_warps": warps,
    }
    constants |= pdl_options(pdl)
    _kernel[(kv_heads, splits)](
        qkv,
        table,
        pos,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        scale / softcap if softcap else scale * LOG2_E,
        softcap * LOG2_E,
        partials.acc,
        partials.peak,
        partials.mass,
        partials.score,
        partials.arrived,
        out,
        None if planes is None else planes.q,
        None if planes is None else planes.scale,
        None if planes is None else planes.sums,
        0 if planes is None else planes.groups,
        kv_stage,
        **constants,
    )
