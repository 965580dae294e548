"""The next token: the largest logit, or a draw with the host's cuts."""

from __future__ import annotations

import pytest
import torch

from larql_kv.backends.cuda import sample
from larql_kv.engine.sampling import SamplingOptions, filtered


def ends(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """token, landing slots, sequence number."""
    landed = torch.full((8,), sample.EMPTY, dtype=torch.int32, pin_memory=device == "cuda")
    return (
        torch.zeros(1, dtype=torch.int32, device=device),
        landed,
        torch.full((1,), 6, dtype=torch.int32, device=device),
    )


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("count", [1, 5, 4099, 9000])
def test_the_largest_tile_wins_and_the_first_of_equals(count: int, device: str) -> None:
    best = torch.randn(count, device=device)
    if count > 4:
        best[3] = best[count - 1] = 9.0
    at = torch.arange(count, dtype=torch.int32, device=device) * 3
    token, landed, sequence = ends(device)
    sample.choose_largest(best, at, token, landed, sequence, pdl=False)
    settle(device)
    expected = 9 if count > 4 else 0
    assert (int(token), int(landed[6]), int(sequence)) == (expected, expected, 7)
    assert (landed[[0, 1, 2, 3, 4, 5, 7]] == sample.EMPTY).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_told_to_the_host(poison: float, device: str) -> None:
    best = torch.randn(100, device=device)
    best[57] = poison
    token, landed, sequence = ends(device)
    sample.choose_largest(
        best, torch.arange(100, dtype=torch.int32, device=device), token, landed, sequence, False
    )
    settle(device)
    assert int(landed[6]) == -1
    assert int(token) == 0  # an id that the next step can run


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.05},
        {"top_k": 1},
    ],
)
def test_draws_follow_the_host_sampler_s_distribution(cuts: dict[str, float], device: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(50, device=device)
    options = SamplingOptions(temperature=0.8, **cuts)
    expected = filtered(((logits.double() - logits.max()) / 0.8).cpu(), options)
    settings = sample.SamplingBuffers.empty(torch.device(device))
    settings.set(0.8, options.top_k, options.top_p, options.min_p, seed=11)
    counts = torch.zeros(50)
    draws = 600
    for position in range(draws):
        token, landed, sequence = ends(device)
        place = torch.tensor([position], dtype=torch.int32, device=device)
        sample.draw(logits, settings, place, token, landed, sequence)
        settle(device)
        assert int(token) == int(landed[6])
        counts[int(token)] += 1
    assert not counts[expected == 0].any()
    share = expected / expected.sum()
    spread = (share * (1 - share) / draws).sqrt()
    assert ((counts / draws - share).abs() <= 5 * spread + 1e-9).all()


def test_a_draw_is_a_function_of_seed_and_position(device: str) -> None:
    logits = torch.zeros(1000, device=device)
    settings = sample.SamplingBuffers.empty(torch.device(device))

    def drawn(seed: int, position: int) -> int:
        settings.set(1.0, 0, 1.0, 0.0, seed)
        token, landed, sequence = ends(device)
        place = torch.tensor([position], dtype=torch.int32, device=device)
        sample.draw(logits, settings, place, token, landed, sequence)
        return int(token)

    assert drawn(3, 7) == drawn(3, 7)
    assert len({drawn(3, position) for position in range(8)}) > 6
    assert len({drawn(seed, 7) for seed in range(8)}) > 6


def test_a_draw_from_logits_that_are_not_finite_is_told(device: str) -> None:
    logits = torch.randn(64, device=device)
    logits[9] = float("nan")
    settings = sample.SamplingBuffers.empty(torch.device(device))
    token, landed, sequence = ends(device)
    place = torch.zeros(1, dtype=torch.int32, device=device)
    sample.draw(logits, settings, place, token, landed, sequence)
    settle(device)
    assert int(landed[6]) == -1
