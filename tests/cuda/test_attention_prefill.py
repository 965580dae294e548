"""Prefill attention against a float64 softmax, over blocks that hold NaN where nothing was written."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cuda.conftest import relative_error

prefill = pytest.importorskip("larql_kv.backends.cuda.attention_prefill")
rowops = pytest.importorskip("larql_kv.backends.cuda.rowops")

# Norm-wise: the output is rounded to bf16 (1.7e-3), and on the chip the probabilities are too.
TOLERANCE = 4e-3


def made(device: str, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)


def held_rows(
    k: torch.Tensor, v: torch.Tensor, ring: int, first: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Blocks with the rows of positions below `first`, NaN elsewhere, and their table."""
    _, kv_heads, head_dim = k.shape
    slots = min(first, ring) if ring else first
    blocks = [
        torch.full(
            (2, kv_heads, min(64, ring - 64 * index) if ring else 64, head_dim),
            math.nan,
            dtype=torch.bfloat16,
            device=k.device,
        )
        for index in range(-(-slots // 64))
    ]
    for position in range(max(0, first - ring) if ring else 0, first):
        slot = position % ring if ring else position
        blocks[slot // 64][0, :, slot % 64] = k[position]
        blocks[slot // 64][1, :, slot % 64] = v[position]
    addresses = [block.data_ptr() for block in blocks] + [0]
    return torch.tensor(addresses, dtype=torch.int64, device=k.device), blocks


def expected_attention(q, k, v, first: int, window: int, scale: float, softcap: float) -> torch.Tensor:
    """q (n, heads, D); k, v (first + n, kv_heads, D): every row so far -> float64 (n, heads * D)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = first + torch.arange(len(q), device=q.device)[:, None]
    key = torch.arange(len(k), device=q.device)[None, :]
    seen = (key <= at) & (key > at - window if window else key >= 0)
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return torch.einsum("hnt,thd->nhd", weights, v).flatten(1)


def run_case(device, n, first, ring, window, heads, kv_heads, head_dim, softcap=0.0, tiles=None) -> None:
    q = made(device, n, heads, head_dim, seed=0)
    k = made(device, first + n, kv_heads, head_dim, seed=1)
    v = made(device, first + n, kv_heads, head_dim, seed=2)
    table, blocks = held_rows(k, v, ring, first)
    scale = 2.0 / math.sqrt(head_dim)  # sharp enough that single keys matter
    new_k, new_v = k[first:].clone(), v[first:].clone()
    out = prefill.attend(q, new_k, new_v, table, ring, first, window, scale, softcap, tiles)
    assert out.dtype is torch.bfloat16
    assert out.shape == (n, heads * head_dim)
    expected = expected_attention(q, k, v, first, window, scale, softcap)
    worst = max(relative_error(out[i], expected[i]) for i in {0, n // 2, n - 1})
    assert relative_error(out, expected) < TOLERANCE
    assert worst < 2 * TOLERANCE
    del blocks


@pytest.mark.parametrize("n", [1, 3, 65, 130])
@pytest.mark.parametrize("first", [0, 7, 64, 200])
@pytest.mark.parametrize(
    ("ring", "window"), [(0, 0), (0, 5), (0, 100), (8, 8), (100, 100), (150, 70), (64, 65)]
)
def test_positions(device, n, first, ring, window):
    run_case(device, n, first, ring, window, 3, 1, 24)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (8, 4, 256), (8, 2, 128), (1, 1, 16), (4, 4, 32), (5, 1, 24)],
)
@pytest.mark.parametrize(("first", "ring", "window"), [(0, 0, 0), (70, 0, 0), (130, 100, 100)])
def test_shapes(device, heads, kv_heads, head_dim, first, ring, window):
    run_case(device, 37, first, ring, window, heads, kv_heads, head_dim)


@pytest.mark.parametrize(("first", "ring", "window"), [(128, 0, 66), (128, 80, 66), (193, 66, 67)])
def test_the_oldest_row_seen_is_the_last_of_its_block(device, first, ring, window):
    run_case(device, 2, first, ring, window, 8, 1, 16)


@pytest.mark.parametrize("softcap", [1.5, 50.0])
def test_softcap(device, softcap):
    run_case(device, 65, 70, 0, 0, 4, 2, 24, softcap)


@pytest.mark.parametrize(
    ("head_dim", "tiles"), [(size, tiles) for size, choices in prefill.TILES.items() for tiles in choices]
)
def test_every_choice_of_tiles(device, head_dim, tiles):
    run_case(device, 40, 170, 150, 150, 2, 1, head_dim, tiles=tiles)
    run_case(device, 150, 33, 0, 0, 2, 1, head_dim, tiles=tiles)


def test_blocks_made_by_append_rows(device):
    """In chunks, each appended to a ring after it was attended: the same as all at once."""
    ring, window, total = 100, 90, 260
    q, k, v = (made(device, total, heads, 16, seed=s) for s, heads in enumerate((2, 1, 1)))
    shapes = [(2, 1, min(64, ring - 64 * index), 16) for index in range(2)]
    blocks = [torch.full(shape, math.nan, dtype=torch.bfloat16, device=device) for shape in shapes]
    table = torch.tensor([block.data_ptr() for block in blocks], dtype=torch.int64, device=device)
    parts, first = [], 0
    for count in (1, 50, 64, 130, 15):
        part = slice(first, first + count)
        parts.append(prefill.attend(q[part], k[part], v[part], table, ring, first, window, 0.5))
        rowops.append_rows(k[part], v[part], table, ring, first, 0)
        first += count
    whole = prefill.attend(q, k, v, table[:0], 0, 0, window, 0.5)
    assert first == total
    assert relative_error(torch.cat(parts), whole) < TOLERANCE
    assert relative_error(whole, expected_attention(q, k, v, 0, window, 0.5, 0.0)) < TOLERANCE


def test_chunks_of_whole_tiles_give_the_same_bits(device):
    """Whatever tile a row was in: a tile that it does not see leaves no trace."""
    tiles = prefill.Tiles(64, 64, 4, 2)
    q, k, v = (made(device, 192, heads, 24, seed=s) for s, heads in enumerate((3, 1, 1)))
    table, blocks = held_rows(k, v, 0, 128)
    whole = prefill.attend(q, k, v, table, 0, 0, 70, 0.5, tiles=tiles)
    last = prefill.attend(q[128:], k[128:], v[128:], table, 0, 128, 70, 0.5, tiles=tiles)
    assert torch.equal(whole[128:], last)
    del blocks


def test_nan_of_a_query_stays_with_it(device):
    q, k, v = (made(device, 20, heads, 16, seed=s) for s, heads in enumerate((2, 1, 1)))
    q[5, 1] = math.nan
    table = torch.zeros(0, dtype=torch.int64, device=device)
    out = prefill.attend(q, k, v, table, 0, 0, 0, 0.5).view(20, 2, 16)
    assert bool(out[5, 1].isnan().all())
    assert int(out.isnan().sum()) == 16


def test_nothing_to_do_and_what_does_not_fit(device):
    q, k = (made(device, 4, heads, 16, seed=heads) for heads in (4, 2))
    table = torch.zeros(1, dtype=torch.int64, device=device)
    assert prefill.attend(q[:0], k[:0], k[:0], table, 0, 0, 0, 1.0).shape == (0, 64)
    with pytest.raises(ValueError, match="do not fit together"):
        prefill.attend(q, q[:, :3].contiguous(), q[:, :3].contiguous(), table, 0, 0, 0, 1.0)
    with pytest.raises(ValueError, match="do not fit 1 blocks"):
        prefill.attend(q, k, k, table, 0, 65, 0, 1.0)
    with pytest.raises(ValueError, match="does not fit 8 rows"):
        prefill.attend(q, k, k, table, 8, 20, 0, 1.0)
    with pytest.raises(ValueError, match="does not fit 8 rows"):
        prefill.attend(q, k, k, table, 8, 20, 10, 1.0)
    with pytest.raises(ValueError, match="not contiguous"):
        prefill.attend(q.transpose(0, 1), k, k, table, 0, 0, 0, 1.0)
    with pytest.raises(ValueError, match="out of range"):
        prefill.attend(q, k, k, table, 0, 0, 0, 0.0)
