"""The decode step's attention kernel against a float64 formula, step by step over its own pages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from larql_kv.backends.cuda.attention_step import AttentionScratch, attention_step, splits_for, stages_for
from larql_kv.backends.cuda.planes import Planes
from larql_kv.state.pages import BLOCK, PagedRows, allocate_block
from tests.cuda.conftest import relative_error

NAN = float("nan")
EPS = 1e-6
TOLERANCE = 6e-3  # q and the weights are rounded to bfloat16


@dataclass(frozen=True)
class Case:
    """One layer's shape. `bits` 0: float32 output alone."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ring: int = 0
    window: int = 0
    splits: int = 2
    bits: int = 8
    norm: bool = True
    softcap: float = 0.0
    warps: int = 4
    stages: int = 1

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def values(self) -> int:
        return self.heads * self.head_dim


class Layer:
    """Random weights, pages the kernel writes, and every K/V row as float64 kept beside them."""

    def __init__(self, case: Case, positions: int, device: str, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.case, self.device = case, device
        angle = torch.rand(positions, case.head_dim // 2, generator=random) * 6
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)
        self.norms = [(1 + 0.3 * torch.randn(case.head_dim, generator=random)).to(device) for _ in range(2)]
        self.random = random

        def block(rows: int) -> torch.Tensor:
            shape = (2, case.kv_heads, rows, case.head_dim)
            made = allocate_block(shape, torch.bfloat16, torch.device(device))
            return made.fill_(NAN)  # what no position was written to must not be read

        self.pages = PagedRows(block, case.ring or None)
        self.scratch = AttentionScratch.empty(case.kv_heads, case.group, case.head_dim, case.splits, device)
        self.keys: list[torch.Tensor] = []  # (kv_heads, head_dim) float64, rounded as they are stored
        self.values: list[torch.Tensor] = []

    def fill(self, count: int) -> None:
        """Positions before the first step: random rows, written by the host."""
        for position in range(count):
            k, v = torch.randn(2, self.case.kv_heads, self.case.head_dim, generator=self.random).bfloat16()
            self.pages.reserve(position, position + 1)
            self._slot(position).copy_(torch.stack((k, v)))
            self.keys.append(k.double())
            self.values.append(v.double())

    def _slot(self, position: int) -> torch.Tensor:
        slot = position % self.case.ring if self.case.ring else position
        return self.pages.block(slot // BLOCK)[:, :, slot % BLOCK]

    def step(self, stage: bool = False) -> None:
        """One token through the kernel; checks pages, outputs, staging and counters."""
        case, position = self.case, len(self.keys)
        rows = torch.randn(case.heads + 2 * case.kv_heads, case.head_dim, generator=self.random)
        rows[: case.heads] *= 2  # sharp enough attention that a lost or doubled row shows
        self.pages.reserve(position, position + 1)
        before = [self.pages.block(i).clone() for i in range(self.pages.block_count)]
        spare = 5
        out = torch.full((case.values + spare,), NAN, device=self.device)
        planes = self._poisoned_planes() if case.bits else None
        staged = torch.full((2 * case.kv_heads * case.head_dim,), NAN, dtype=torch.bfloat16).to(self.device)
        for partial in (self.scratch.acc, self.scratch.peak, self.scratch.mass, self.scratch.score):
            partial.fill_(NAN)
        self.launch(
            rows.reshape(-1).to(self.device),
            self.pages.table.to(self.device),
            torch.tensor([position], dtype=torch.int32, device=self.device),
            out,
            planes,
            staged if stage else None,
        )
        expected = self._reference(rows.double(), position)
        self._check_pages(before, position)
        alone = 1 in (len(self.keys), case.ring, case.window)  # then the output is the stored V itself
        assert relative_error(out[: case.values], expected) < (1e-6 if alone else TOLERANCE)
        assert out[case.values :].isnan().all()
        assert not self.scratch.arrived.any()
        if planes is not None:
            self._check_planes(planes, out[: case.values])
        if stage:
            row = torch.stack((self.keys[-1], self.values[-1])).reshape(-1)
            torch.testing.assert_close(staged.double().cpu(), row, rtol=2**-7, atol=1e-30)

    def launch(
        self,
        qkv: torch.Tensor,
        table: torch.Tensor,
        pos: torch.Tensor,
        out: torch.Tensor,
        planes: Planes | None = None,
        stage: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        case = self.case
        q_norm, k_norm = self.norms if case.norm else (None, None)
        attention_step(
            qkv, table, pos, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim,
            cos=self.cos, sin=self.sin, q_norm=q_norm, k_norm=k_norm, eps=EPS, scale=case.head_dim**-0.5,
            softcap=case.softcap, ring=case.ring, window=case.window, splits=case.splits,
            partials=self.scratch, planes=planes, out=out, kv_stage=stage, pdl=pdl, stages=case.stages,
            warps=case.warps,
        )  # fmt: skip

    def _reference(self, rows: torch.Tensor, position: int) -> torch.Tensor:
        case, half = self.case, self.case.head_dim // 2
        q, k, v = rows.split((case.heads, case.kv_heads, case.kv_heads))
        if case.norm:
            q, k = (
                x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * w.double().cpu()
                for x, w in zip((q, k), self.norms, strict=True)
            )
        cos, sin = self.cos[position].double().cpu(), self.sin[position].double().cpu()
        q, k = (
            torch.cat(
                (x[:, :half] * cos - x[:, half:] * sin, x[:, half:] * cos + x[:, :half] * sin), 1
            )
            for x in (q, k)
        )  # fmt: skip
        self.keys.append(k.bfloat16().double())
        self.values.append(v.bfloat16().double())
        reach = case.ring or case.window or position + 1
        keys = torch.stack(self.keys[-reach:], 1).repeat_interleave(case.group, 0)
        values = torch.stack(self.values[-reach:], 1).repeat_interleave(case.group, 0)
        scores = torch.einsum("hd,htd->ht", q, keys) * case.head_dim**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        return torch.einsum("ht,htd->hd", scores.softmax(1), values).reshape(-1)

    def _check_pages(self, before: list[torch.Tensor], position: int) -> None:
        """The new row is right to an ulp, and nothing else changed."""
        new = self._slot(position).double().cpu()
        torch.testing.assert_close(new[0], self.keys[-1], rtol=2**-7, atol=1e-6)
        assert torch.equal(new[1], self.values[-1])
        self.keys[-1] = new[0].clone()  # later steps attend what is stored
        self._slot(position).fill_(0)
        slot = position % self.case.ring if self.case.ring else position
        before[slot // BLOCK][:, :, slot % BLOCK] = 0
        for index, block in enumerate(before):
            now = self.pages.block(index)
            assert torch.equal(now.view(torch.int16), block.view(torch.int16))
        self._slot(position).copy_(new.bfloat16())

    def _poisoned_planes(self) -> Planes:
        """Two groups wider than needed; every value that must be written is poisoned, the rest is zero."""
        groups = self.case.values // 32
        planes = Planes.empty(self.case.values, self.case.bits, self.device, groups + 2)
        planes.q[:, :groups] = 0x5A5A5A5A
        planes.scale[:groups] = NAN
        planes.sums[:, :groups] = NAN
        return planes

    def _check_planes(self, planes: Planes, out: torch.Tensor) -> None:
        groups, limit = self.case.values // 32, 2 ** (self.case.bits - 1) - 1
        exact = out.view(groups, 32)
        step = exact.abs().amax(1) / limit
        torch.testing.assert_close(planes.scale[:groups], step, rtol=1e-5, atol=0)
        decoded = planes.decoded(self.case.values).view(groups, 32)
        assert ((decoded - exact).abs() <= 0.501 * step[:, None] + 1e-7).all()
        for part, half in enumerate((decoded[:, :16], decoded[:, 16:])):
            torch.testing.assert_close(planes.sums[part, :groups], half.sum(1), rtol=1e-4, atol=1e-4)
        rest = torch.cat(
            (planes.q[:, groups:].flatten(), planes.scale[groups:], planes.sums[:, groups:].flatten())
        )
        assert not rest.any()


@pytest.mark.parametrize(
    ("case", "filled", "steps"),
    [
        (Case(), 0, 4),  # from nothing
        (Case(splits=3), 62, 4),  # into a second block
        (Case(splits=1), 126, 4),
        (Case(splits=2, stages=3), 300, 1),  # several tiles a program
        (Case(heads=2, kv_heads=2, splits=4, bits=16), 200, 2),
        (Case(heads=3, kv_heads=1, head_dim=64, splits=2, bits=16), 70, 2),
        (Case(heads=8, kv_heads=1, head_dim=32, splits=3, norm=False), 65, 2),
        (Case(heads=4, kv_heads=1, head_dim=16, bits=0), 30, 2),
        (Case(heads=3, kv_heads=3, head_dim=24, bits=0), 63, 3),
        (Case(heads=6, kv_heads=3, head_dim=12, bits=0, splits=1), 63, 2),
        (Case(heads=2, kv_heads=1, head_dim=18, bits=0), 66, 1),
        (Case(heads=3, kv_heads=1, head_dim=96, splits=3), 130, 1),
        (Case(heads=2, kv_heads=1, head_dim=128, splits=2, warps=8), 100, 1),
        (Case(heads=4, kv_heads=2, head_dim=256, splits=2, bits=16), 90, 1),
        (Case(heads=20, kv_heads=1, head_dim=32, splits=2), 70, 1),
        (Case(softcap=3.0, norm=False), 70, 2),
    ],
    ids=str,
)
def test_full_attention(case: Case, filled: int, steps: int, device: str) -> None:
    layer = Layer(case, filled + steps, device)
    layer.fill(filled)
    for _ in range(steps):
        layer.step()


@pytest.mark.parametrize(
    ("case", "filled", "steps"),
    [
        (Case(ring=5, splits=1), 0, 12),  # smaller than a block, wraps twice
        (Case(ring=64, splits=2), 62, 4),
        (Case(ring=65, splits=2), 63, 5),  # a last block of one row, which the new row replaces
        (Case(ring=65, splits=1, bits=16), 129, 2),
        (Case(ring=100, splits=3), 98, 4),
        (Case(ring=100, splits=2, stages=3, softcap=5.0), 262, 2),
        (Case(ring=200, splits=4, head_dim=24, bits=0), 391, 2),
        (Case(ring=1, splits=2), 0, 3),
    ],
    ids=str,
)
def test_ring(case: Case, filled: int, steps: int, device: str) -> None:
    layer = Layer(case, filled + steps, device, seed=1)
    layer.fill(filled)
    for _ in range(steps):
        layer.step()


@pytest.mark.parametrize(
    ("case", "filled", "steps"),
    [
        (Case(window=1, splits=2), 62, 4),
        (Case(window=10, splits=2), 60, 8),
        (Case(window=64, splits=3), 190, 3),
        (Case(window=100, splits=2, stages=3), 340, 1),
    ],
    ids=str,
)
def test_window_without_ring(case: Case, filled: int, steps: int, device: str) -> None:
    layer = Layer(case, filled + steps, device, seed=2)
    layer.fill(filled)
    for _ in range(steps):
        layer.step()


def test_new_rows_are_staged(device: str) -> None:
    layer = Layer(Case(ring=66), 70, device)
    layer.fill(65)
    for _ in range(3):
        layer.step(stage=True)


def test_split_counts_agree(device: str) -> None:
    """Whatever the split, the result is the same to rounding; the same split gives the same bits."""
    results = []
    for splits in (1, 2, 3, 7, 7):
        layer = Layer(Case(splits=splits, bits=0), 258, device, seed=3)
        layer.fill(257)
        layer.pages.reserve(257, 258)
        rows = torch.linspace(-2, 2, 8 * 32, device=device)
        out = torch.empty(layer.case.values, device=device)
        pos = torch.tensor([257], dtype=torch.int32, device=device)
        layer.launch(rows, layer.pages.table.to(device), pos, out)
        results.append(out)
    assert all(relative_error(result, results[0]) < TOLERANCE for result in results)
    assert torch.equal(results[-1], results[-2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("ring", [0, 130])
def test_one_capture_serves_every_position(ring: int, device: str) -> None:
    """Replays with dependent launch, each right behind the kernel that writes its inputs."""
    case = Case(heads=8, kv_heads=2, head_dim=128, splits=3, stages=3, ring=ring, bits=0)
    layer = Layer(case, 300, device, seed=4)
    layer.fill(120)
    layer.pages.reserve(120, 300)
    table, pos = layer.pages.table.to(device), torch.tensor([120], dtype=torch.int32, device=device)
    source = torch.zeros((case.heads + 2 * case.kv_heads) * case.head_dim, device=device)
    qkv, out = torch.zeros_like(source), torch.empty(case.values, device=device)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer.launch(qkv, table, pos, out, pdl=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        torch.mul(source, 2, out=qkv)
        layer.launch(qkv, table, pos, out, pdl=True)
    torch.cuda.synchronize()
    for position in range(120, 300):
        rows = torch.randn(source.numel(), generator=layer.random)
        source.copy_(rows / 2)
        pos.fill_(position)
        graph.replay()
        expected = layer._reference(rows.view(-1, case.head_dim).double(), position)
        layer.keys[-1] = layer._slot(position)[0].double().cpu()
        assert relative_error(out, expected) < TOLERANCE


def test_sizes() -> None:
    assert [splits_for(n, 4) for n in (1, 512, 1024, 8192, 32768, 131072)] == [1, 8, 16, 33, 33, 33]
    assert splits_for(131072, 8, head_dim=128) == 33
    assert splits_for(131072, 1, head_dim=256) == 64
    assert [stages_for(n, 8) for n in (512, 513)] == [1, 3]
    scratch = AttentionScratch.empty(2, 3, 16, 4, "cpu")
    assert scratch.nbytes == 4 * (2 * 4 * 3 * (16 + 2) + 2 * 3 + 2)


@pytest.mark.parametrize(
    ("case", "splits", "message"),
    [
        (Case(heads=3), 2, "whole group"),
        (Case(head_dim=24), 2, "multiple of 32"),
        (Case(), 3, "room for 2"),
    ],
)
def test_refusals(case: Case, splits: int, message: str) -> None:
    none = torch.empty(0)
    with pytest.raises(ValueError, match=message):
        attention_step(
            none, none, none, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim,
            cos=none, sin=none, q_norm=None, k_norm=None, eps=EPS, scale=1.0, softcap=0.0, ring=0, window=0,
            splits=splits, partials=AttentionScratch.empty(2, 2, case.head_dim, 2, "cpu"),
            planes=Planes.empty(64, 8, "cpu"), out=None, kv_stage=None, pdl=False,
        )  # fmt: skip
