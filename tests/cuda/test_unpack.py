"""Packed rows back as the file's numbers, bit for bit."""

from __future__ import annotations

import pytest
import torch

from larql_kv.backends.cuda.formats import FORMATS
from larql_kv.backends.cuda.packed import Tile, pack_rows
from larql_kv.backends.cuda.unpack import gather_into, unpack_into
from larql_kv.backends.cuda.weights import glu_order
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
