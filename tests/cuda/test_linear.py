"""Packed matrices times one row, against float64 on the file's own numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from larql_kv.backends.cuda.formats import FORMATS
from larql_kv.backends.cuda.linear import Glu, Head, Norm, RowLinear, last_norm
from larql_kv.backends.cuda.packed import FloatMatrix, FloatTile, Tile, pack_rows
from larql_kv.backends.cuda.planes import Planes
from tests.cuda.blocks import random_raw
from tests.cuda.conftest import relative_error

KINDS = [*FORMATS, "F32", "F16", "BF16"]


def dense(*raws) -> torch.Tensor:
    return torch.cat([torch.from_numpy(raw.dequantize().copy()) for raw in raws]).double()


def planes_of(x: torch.Tensor, bits: int, groups: int) -> Planes:
    """x float32 (n,) quantised by torch."""
    planes = Planes.empty(len(x), bits, x.device, groups)
    padded = torch.nn.functional.pad(x, (0, groups * 32 - len(x))).view(groups, 32)
    limit = 2 ** (bits - 1) - 1
    largest = padded.abs().amax(1)
    q = torch.floor(padded * torch.where(largest > 0, limit / largest, 0.0)[:, None] + 0.5)
    planes.scale.copy_(largest / limit)
    planes.sums.copy_(planes.scale * q.view(groups, 2, 16).sum(-1).t())
    words = q.to(torch.int8 if bits == 8 else torch.int16).view(torch.int32)
    planes.q.copy_(words.view(groups, bits).t())
    return planes


def tolerance(bits: int) -> float:
    return {8: 3e-2, 16: 2e-4, 32: 2e-6}[bits]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(35, 512)])
def test_product_is_exact_on_the_quantised_activations(
    kind: str, bits: int, rows: int, columns: int, device: str
) -> None:
    raw = random_raw(kind, rows, columns, seed=rows)
    for tile in (Tile(16, 8, 1, 1), Tile(8, 16, 1, 2), Tile(64, 16, 4, 5)):
        linear = RowLinear([pack_rows([raw], torch.device(device), tile)], bits=bits)
        x = torch.randn(columns, device=device)
        planes = planes_of(x, bits, linear.groups)
        out = torch.full((rows + 3,), float("nan"), device=device)
        linear.run(planes, out)
        expected = dense(raw) @ planes.decoded(columns).cpu().double()
        assert relative_error(out[:rows], expected) < 1e-5
        assert out[rows:].isnan().all()
        assert relative_error(out[:rows], dense(raw) @ x.cpu().double()) < tolerance(bits)


def test_odd_group_counts_are_padded(device: str) -> None:
    """18 and 20 groups (SmolLM2's and Gemma 3 270M's rows) with the default tiles, and one group alone."""
    for columns in (576, 640, 32, 96):
        raw = random_raw("Q4_1", 33, columns)
        linear = RowLinear([pack_rows([raw], torch.device(device))], bits=16)
        x = torch.randn(columns, device=device)
        out = torch.full((33,), float("nan"), device=device)
        linear.run(planes_of(x, 16, linear.groups), out)
        assert relative_error(out, dense(raw) @ x.cpu().double()) < 2e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("post", [False, True])
def test_norm_before_and_two_formats(kind: str, post: bool, device: str) -> None:
    """Norm, residual add and bias around stacked matrices; the sum and its bfloat16 copies are kept."""
    hidden = 256
    other = kind if kind in ("F32", "F16", "BF16") else "Q6_K"
    raws = [random_raw(kind, 40, hidden, 1), random_raw(other, 24, hidden, 2)]
    tile = Tile(16, 8, 1, 1)
    matrices = [pack_rows([raw], torch.device(device), tile) for raw in raws]
    bias = torch.randn(64, device=device)
    linear = RowLinear(matrices, bias=bias, bits=16)
    x, update = torch.randn(hidden, device=device), torch.randn(hidden, device=device)
    weight, post_weight = torch.rand(hidden, device=device) + 0.5, torch.rand(hidden, device=device) + 0.5
    x_out = torch.full((hidden,), float("nan"), device=device)
    pages = torch.full((2, 64, hidden), float("nan"), dtype=torch.bfloat16, device=device)
    table = torch.tensor([page.data_ptr() for page in pages], device=device)
    stage = torch.full((hidden,), float("nan"), dtype=torch.bfloat16, device=device)
    pos = torch.tensor([167], dtype=torch.int32, device=device)
    norm = Norm(x, update, post_weight if post else None, weight, x_out, 1e-6, pos, table, 100, stage)
    out = torch.full((64,), float("nan"), device=device)
    scratch = torch.full((linear.scratch_words,), -1, dtype=torch.int32, device=device)
    linear.run(norm, out, scratch=scratch)

    y = update.cpu().double()
    if post:
        y = y * torch.rsqrt(y.square().mean() + 1e-6) * post_weight.cpu().double()
    total = x.cpu().double() + y
    z = total * torch.rsqrt(total.square().mean() + 1e-6) * weight.cpu().double()
    assert relative_error(x_out, total) < 1e-6
    assert torch.equal(stage, x_out.bfloat16())
    assert torch.equal(pages[1, 3], stage)  # position 167 of a ring of 100
    assert int(pages.isnan().any(-1).logical_not().sum()) == 1
    assert relative_error(out, dense(*raws) @ z + bias.cpu().double()) < 2e-4


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "BF16", "F32"])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("inner", "rows"), [(96, 64), (80, 16)])
def test_gated_activation_after(kind: str, gelu: bool, inner: int, rows: int, device: str) -> None:
    columns = 256
    gate, up = random_raw(kind, inner, columns, 3), random_raw(kind, inner, columns, 4)
    order = interleaved_order(inner)
    matrix = pack_rows([gate, up], torch.device(device), Tile(64, 8, 1, 1), order, FloatTile(rows, 64, 2, 3))
    floats = isinstance(matrix, FloatMatrix)
    bits = 32 if floats else 16
    linear = RowLinear([matrix], bits=bits)
    x = torch.randn(columns, device=device) / 16
    if floats:
        before, out = x, torch.full((101,), float("nan"), device=device)
    else:
        before, out = planes_of(x, 16, linear.groups), Planes.empty(inner, 8, device)
    linear.run(before, Glu(out, gelu))
    g, u = dense(gate) @ x.cpu().double(), dense(up) @ x.cpu().double()
    act = torch.nn.functional.gelu(g, approximate="tanh") if gelu else torch.nn.functional.silu(g)
    if floats:
        assert out[96:].isnan().all()  # whole tiles of 32 are written
        actual = out[:inner]
    else:
        actual = out.decoded(inner)
    assert relative_error(actual, act * u) < (1e-5 if floats else 2e-2)


def interleaved_order(inner: int) -> np.ndarray:
    from larql_kv.backends.cuda.weights import glu_order

    return glu_order(inner)


@pytest.mark.parametrize("kind", ["Q6_K", "Q8_0", "F16"])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_head_gives_logits_and_the_best_of_each_tile(kind: str, cap: float, device: str) -> None:
    vocab, columns = 131, 256
    raw = random_raw(kind, vocab, columns)
    linear = RowLinear([pack_rows([raw], torch.device(device), Tile(32, 8, 1, 1))], bits=16)
    x = torch.randn(columns, device=device)
    before = x if linear.bits == 32 else planes_of(x, 16, linear.groups)
    logits = torch.full((vocab,), float("nan"), device=device)
    best = torch.full((linear.tiles,), float("nan"), device=device)
    best_at = torch.full((linear.tiles,), -1, dtype=torch.int32, device=device)
    linear.run(before, Head(best, best_at, cap), out=logits, tiles_each=2)
    expected = dense(raw) @ x.cpu().double()
    if cap:
        expected = cap * torch.tanh(expected / cap)
    assert relative_error(logits, expected) < 2e-4
    assert int(best_at[best.argmax()]) == int(logits.argmax())
    assert float(best.max()) == float(logits.max())


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("hidden", [72, 256, 576])
def test_last_norm(bits: int, hidden: int, device: str) -> None:
    x, update = torch.randn(hidden, device=device), torch.randn(hidden, device=device)
    weight = torch.rand(hidden, device=device) + 0.5
    out = torch.full((hidden,), float("nan"), device=device)
    pos = torch.tensor([6], dtype=torch.int32, device=device)
    planes = torch.zeros(hidden, device=device) if bits == 32 else Planes.empty(hidden, bits, device, 32)
    last_norm(Norm(x, update, None, weight, out, 1e-5), out, planes, pos, pdl=False)
    total = (x + update).cpu().double()
    z = total * torch.rsqrt(total.square().mean() + 1e-5) * weight.cpu().double()
    assert relative_error(out, total) < 1e-6
    assert int(pos) == 7
    actual = planes if isinstance(planes, torch.Tensor) else planes.decoded(hidden)
    assert relative_error(actual, z) < tolerance(bits)
