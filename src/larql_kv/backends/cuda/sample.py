"""Choosing the next token on the device."""

# Triton's annotations know neither launch options nor that next_power_of_2 gives an int.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from larql_kv.backends.cuda.kernels import sample as kernels
from larql_kv.backends.cuda.linear import pdl_options

EMPTY = -2  # a slot whose token has not landed


@dataclass(frozen=True)
class SamplingBuffers:
    """The settings a captured draw reads: one graph serves all temperatures, cuts and seeds."""

    numbers: torch.Tensor  # float32 (3,): temperature, top_p, min_p
    top_k: torch.Tensor  # int64 (1,); the vocabulary's size or more: off
    seed: torch.Tensor  # int64 (1,)
    uniform: torch.Tensor  # float32 (1,)

    @classmethod
    def empty(cls, device: torch.device) -> SamplingBuffers:
        return cls(
            torch.tensor([1.0, 1.0, 0.0], device=device),
            torch.full((1,), 1 << 40, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, device=device),
        )

    def set(self, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
        """`temperature` > 0; top_k 0, top_p 1 and min_p 0 cut nothing."""
        self.numbers.copy_(torch.tensor([temperature, top_p, min_p]))
        self.top_k.fill_(top_k or 1 << 40)
        self.seed.fill_(seed % (1 << 62))


def choose_largest(
    best: torch.Tensor,
    best_at: torch.Tensor,
    token: torch.Tensor,
    landed: torch.Tensor,
    sequence: torch.Tensor,
    pdl: bool,
) -> None:
    """token (int32) = row of the largest logit, from the tiles' maxima; also to the next slot of `landed`."""
    count = best.shape[0]
    kernels.choose_largest[(1,)](
        best,
        best_at,
        count,
        token,
        landed,
        sequence,
        SLOTS=landed.shape[0],
        STEP=min(8192, triton.next_power_of_2(count)),
        PDL=pdl,
        num_warps=8,
        **pdl_options(pdl),
    )


def draw(
    logits: torch.Tensor,
    settings: SamplingBuffers,
    position: torch.Tensor,
    token: torch.Tensor,
    landed: torch.Tensor,
    sequence: torch.Tensor,
) -> None:
    """Sample from logits (vocab,): temperature, then top-k, top-p, min-p in that order, as `filtered` does on
    the host. The random number is a function of seed and position, so a text is repeated by its seed."""
    temperature, top_p, min_p = settings.numbers
    ranked, order = torch.sort(logits, descending=True, stable=True)
    weights = torch.softmax((ranked - ranked[0]) / temperature, 0)
    rank = torch.arange(len(ranked), device=ranked.device)
    inside = torch.where(rank < settings.top_k, weights, 0.0)
    before = inside.cumsum(0) - inside
    keep = (before < top_p * inside.sum()) | (top_p >= 1)
    keep &= inside >= min_p * inside[0]
    keep |= rank == 0  # not keep[0] = True: that copies from the host, which a capture refuses
    mass = torch.where(keep, inside, 0.0).cumsum(0)
    kernels.uniform[(1,)](settings.seed, position, settings.uniform)
    place = torch.searchsorted(mass, settings.uniform * mass[-1], right=True)
    place = torch.minimum(place, keep.sum() - 1)  # kept ranks come first; sums may differ by an ulp
    chosen = torch.where(torch.isfinite(ranked).all(), order[place], -1)
    kernels.emit[(1,)](chosen, token, landed, sequence, SLOTS=landed.shape[0])
