"""Packed rows back as the file's numbers, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from larql_kv.backends.cuda.bandwidth import WORDS_EACH, read_all
from larql_kv.backends.cuda.formats import FORMATS
from larql_kv.backends.cuda.packed import Tile, pack_rows
from larql_kv.backends.cuda.tiles import choose_tile
from larql_kv.backends.cuda.unpack import gather_into, unpack_into
from larql_kv.backends.cuda.weights import ROLES, Weights, glu_order
from tests.cuda.blocks import random_raw

KINDS = [*FORMATS, "F32", "F16", "BF16"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [Tile(16, 8, 1, 1), Tile(8, 16, 1, 1), Tile(64, 16, 4, 1)])
def test_rows_come_back_as_they_were(kind: str, tile: Tile, device: str) -> None:
    raw = random_raw(kind, 37, 768)
    matrix = pack_rows([raw], torch.device(device), tile)
    out = torch.full((40, 768), float("nan"), device=device)
    unpack_into(matrix, out[:37])
    assert torch.equal(out[:37].cpu(), torch.from_numpy(raw.dequantize().copy()))
    assert out[37:].isnan().all()
    ids = torch.tensor([5, 36, 0, 5], dtype=torch.int32, device=device)
    rows = torch.full((4, 768), float("nan"), device=device)
    gather_into(matrix, ids, rows, 2.5, pdl=False)
    assert torch.equal(rows, out[ids.long()] * 2.5)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "BF16"])
def test_interleaved_rows_come_back_in_order(kind: str, device: str) -> None:
    inner = 80
    gate, up = random_raw(kind, inner, 256, 3), random_raw(kind, inner, 256, 4)
    matrix = pack_rows([gate, up], torch.device(device), Tile(64, 8, 1, 1), glu_order(inner))
    out = torch.full((2 * inner, 256), float("nan"), dtype=torch.bfloat16, device=device)
    unpack_into(matrix, out, glu=True)
    expected = torch.cat([torch.from_numpy(raw.dequantize().copy()) for raw in (gate, up)])
    assert torch.equal(out.cpu(), expected.bfloat16())


def test_a_slice_of_rows(device: str) -> None:
    raw = random_raw("Q6_K", 70, 256)
    matrix = pack_rows([raw], torch.device(device), Tile(16, 8, 1, 1))
    out = torch.full((30, 256), float("nan"), device=device)
    unpack_into(matrix, out, first=33)
    assert torch.equal(out.cpu(), torch.from_numpy(raw.dequantize().copy())[33:63])


def test_stacks_of_float_and_quantised_rows_become_bfloat16(device: str) -> None:
    """What one launch cannot hold is converted, and counted."""
    config = SimpleNamespace(intermediate=64, layer_count=0, tied=True)
    raws = {
        "embed": random_raw("Q8_0", 8, 64),
        "final_norm": SimpleNamespace(dequantize=lambda: np.ones(64, dtype=np.float32)),
        "q": random_raw("Q8_0", 32, 64, name="q"),
        "k": random_raw("F32", 32, 64, name="k"),
    }
    source = SimpleNamespace(get=raws.__getitem__)
    weights = Weights(config, MappedSource(source, raws), torch.device(device))  # type: ignore[arg-type]
    linear = weights._linear("qkv", ["q", "k"])
    assert weights.converted == {"q", "k"}
    out = torch.empty(64, 64, device=device)
    unpack_into(linear.matrices[0], out)
    whole = np.concatenate([raws["q"].dequantize(), raws["k"].dequantize()])
    assert torch.equal(out.cpu(), torch.from_numpy(whole).bfloat16().float())
    assert weights.resident_bytes == weights.step_bytes == weights.head.nbytes


class MappedSource:
    def __init__(self, source: Any, names: dict[str, Any]) -> None:
        self.get, self._names = source.get, names

    def __contains__(self, name: object) -> bool:
        return name in self._names


def test_a_tile_fits_the_row_or_pads_it_little() -> None:
    assert choose_tile("gate_up", 80, "Q4_K").groups == 16
    for role in ROLES:
        for groups in (1, 2, 18, 20, 48, 304):
            tile = choose_tile(role, groups, "Q4_1")
            padded = -(-groups // tile.groups) * tile.groups
            assert padded * 8 <= groups * 9 or tile.groups == 4, (role, groups)
            assert role != "gate_up" or tile.rows == 64


def test_reading_for_the_bandwidth_reads_every_word(device: str) -> None:
    data = torch.randint(-(1 << 31), (1 << 31) - 1, (2 * WORDS_EACH,), dtype=torch.int32, device=device)
    before = read_all(data)
    for word in (0, 1023, WORDS_EACH - 1, WORDS_EACH, 2 * WORDS_EACH - 1):
        data[word] += 1
        after = read_all(data)
        assert int((after != before).sum()) == 1
        before = after
