"""The row kernels against float64 formulas, at sizes that fit no tile."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cuda.conftest import relative_error

rowops = pytest.importorskip("larql_kv.backends.cuda.rowops")

BF16 = 3e-3  # norm-wise error of rounding to bf16 once, with room: 2^-9 at most, about 1.7e-3 seen
EPS = 1e-6
GUARD = 3.0


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def made(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


class Blocks:
    """Blocks of a store with guard rows on both sides, all NaN, and their table."""

    def __init__(self, device: str, shape: tuple[int, ...], row_axis: int, slots: int, ring: int) -> None:
        self.row_axis, self.ring = row_axis, ring
        self.tensors: list[torch.Tensor] = []
        self._guarded: list[torch.Tensor] = []
        for index in range(-(-slots // 64)):
            height = min(64, ring - 64 * index) if ring else 64
            sizes = [*shape]
            sizes.insert(row_axis, height)
            numel = math.prod(sizes)
            store = torch.full((numel + 128,), math.nan, dtype=torch.bfloat16, device=device)
            store[:64] = store[-64:] = GUARD
            self._guarded.append(store)
            self.tensors.append(store[64 : 64 + numel].view(sizes))
        addresses = [block.data_ptr() for block in self.tensors] + [0]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)

    def row(self, position: int) -> torch.Tensor:
        slot = position % self.ring if self.ring else position
        return self.tensors[slot // 64].select(self.row_axis, slot % 64)

    def check_guards(self) -> None:
        assert all(
            bool((store[:64] == GUARD).all() and (store[-64:] == GUARD).all()) for store in self._guarded
        )

    def written(self) -> int:
        """Rows without any NaN; the others must be NaN throughout."""
        count = 0
        for block in self.tensors:
            holes = block.isnan().transpose(0, self.row_axis).flatten(1)
            assert bool((holes.all(1) | ~holes.any(1)).all())
            count += int((~holes.any(1)).sum())
        return count


@pytest.mark.parametrize(("n", "hidden"), [(1, 72), (3, 576), (5, 1100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm(device, n, hidden, dtype):
    x, weight = made(device, n, hidden) * 5, made(device, hidden, seed=1)
    out = rowops.rms_norm(x, weight, EPS, dtype)
    assert out.dtype is dtype
    error = relative_error(out, normed(x, weight))
    assert error < (BF16 if dtype is torch.bfloat16 else 1e-6)
    if dtype is torch.float32:
        rounded = rowops.rms_norm(x, weight, EPS, dtype, round_input=True)
        assert relative_error(rounded, normed(x.bfloat16(), weight)) < 1e-6


def test_rounding_to_bf16_is_to_nearest_even(device):
    ties = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]], device=device)
    blocks = Blocks(device, (4,), 0, 64, 0)
    rowops.write_rows(ties, blocks.table, 0, 2, 0)
    assert torch.equal(blocks.row(2), ties[0].bfloat16())
    special = torch.tensor([[math.nan, math.inf, -math.inf, 3.4e38]], device=device)
    rowops.write_rows(special, blocks.table, 0, 2, 0)
    assert torch.equal(blocks.row(2)[1:], special[0, 1:].bfloat16())
    assert bool(blocks.row(2)[0].isnan())


def test_a_row_does_not_depend_on_its_neighbours(device):
    x, weight = made(device, 65, 72), made(device, 72, seed=1)
    assert torch.equal(rowops.rms_norm(x, weight, EPS)[7:8], rowops.rms_norm(x[7:8], weight, EPS))
    x[3] = math.nan  # and NaN stays in its row
    out = rowops.rms_norm(x, weight, EPS)
    assert bool(out[3].isnan().all())
    assert not bool(torch.cat((out[:3], out[4:])).isnan().any())


@pytest.mark.parametrize(("n", "hidden"), [(1, 72), (3, 576), (130, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_norm", [False, True])
def test_add_normed(device, n, hidden, dtype, with_norm):
    store = torch.full((n + 2, hidden), GUARD, device=device)
    rows = store[1:-1]
    rows.copy_(made(device, n, hidden))
    update, weight = made(device, n, hidden, seed=2, dtype=dtype), made(device, hidden, seed=1)
    expected = rows.double() + (normed(update, weight) if with_norm else update.double())
    rowops.add_normed_(rows, update, weight if with_norm else None, EPS)
    assert relative_error(rows, expected) < 1e-6
    assert bool((store[0] == GUARD).all() and (store[-1] == GUARD).all())


def rotated(x: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x.double() if norm is None else normed(x, norm)
    a, b = x.chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "head_dim"), [(1, 9, 3, 64), (3, 8, 4, 256), (5, 5, 1, 24), (7, 0, 3, 16)]
)
@pytest.mark.parametrize("extras", ["none", "norms", "bias", "both"])
def test_rope_qkv(device, n, heads, kv_heads, head_dim, extras):
    width = (heads + 2 * kv_heads) * head_dim
    dtype = torch.bfloat16 if extras in ("norms", "both") and heads != 8 else torch.float32
    qkv = made(device, n, width, dtype=dtype)
    angles = made(device, n, head_dim // 2, seed=3) * 10
    cos, sin = angles.cos(), angles.sin()
    bias = made(device, width, seed=4) if extras in ("bias", "both") else None
    q_norm, k_norm = (made(device, head_dim, seed=s) if extras in ("norms", "both") else None for s in (5, 6))
    got = rowops.rope_qkv(qkv, bias, cos, sin, q_norm, k_norm, EPS, heads, kv_heads, head_dim)
    rows = qkv.double() if bias is None else qkv.double() + bias.double()
    parts = rows.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
    q, k, v = (part.view(n, -1, head_dim) for part in parts)
    expected = (rotated(q, q_norm, cos, sin), rotated(k, k_norm, cos, sin), v)
    for actual, reference in zip(got, expected, strict=True):
        assert actual.dtype is torch.bfloat16
        assert actual.shape == reference.shape
        assert relative_error(actual, reference) < BF16


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # the interpreter's; inf is meant
@pytest.mark.parametrize(("n", "inter"), [(1, 72), (3, 1536), (2, 1030)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_act(device, n, inter, dtype, activation):
    gate_up = (made(device, n, 2 * inter) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -30.0])
    gate, up = gate_up.double().chunk(2, 1)
    if activation == "silu":
        active = gate / (1 + (-gate).exp())
    else:
        active = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    out = rowops.gated_act(gate_up, activation)
    assert out.dtype is torch.bfloat16
    expected = active * up
    assert relative_error(out[:, 4:], expected[:, 4:]) < BF16
    assert torch.allclose(out[0, :4].double(), expected[0, :4], rtol=4e-3, atol=1e-10)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 24), (1, 64)])
@pytest.mark.parametrize(
    ("ring", "first", "n", "skip"),
    [(0, 0, 1, 0), (0, 60, 130, 7), (8, 0, 3, 0), (8, 7, 65, 2), (100, 64, 65, 0), (100, 200, 130, 40)],
)
def test_append_rows(device, kv_heads, head_dim, ring, first, n, skip):
    blocks = Blocks(device, (2, kv_heads, head_dim), 2, min(first + n, ring) if ring else first + n, ring)
    k, v = (made(device, n, kv_heads, head_dim, seed=s, dtype=torch.bfloat16) for s in (0, 1))
    rowops.append_rows(k, v, blocks.table, ring, first, skip)
    begin = max(skip, n - ring) if ring else skip
    for row in range(begin, n):
        assert torch.equal(blocks.row(first + row), torch.stack((k[row], v[row])))
    assert blocks.written() == n - begin
    blocks.check_guards()


@pytest.mark.parametrize("hidden", [72, 1100])
@pytest.mark.parametrize(
    ("ring", "first", "n", "skip"), [(0, 0, 3, 1), (0, 60, 70, 0), (8, 7, 20, 3), (100, 64, 65, 0)]
)
def test_write_rows_and_read_rows(device, hidden, ring, first, n, skip):
    blocks = Blocks(device, (hidden,), 0, min(first + n, ring) if ring else first + n, ring)
    rows = made(device, n, hidden)
    rowops.write_rows(rows, blocks.table, ring, first, skip)
    begin = max(skip, n - ring) if ring else skip
    expected = rows[begin:].bfloat16()
    assert blocks.written() == n - begin
    blocks.check_guards()
    assert all(torch.equal(blocks.row(first + begin + i), row) for i, row in enumerate(expected))
    read = rowops.read_rows(blocks.table, ring, first + begin, first + n, hidden)
    assert torch.equal(read, expected.float())


def test_nothing_to_do(device):
    table = torch.zeros(0, dtype=torch.int64, device=device)
    none, weight = torch.empty(0, 72, device=device), torch.ones(72, device=device)
    assert rowops.rms_norm(none, weight, EPS).shape == (0, 72)
    assert rowops.gated_act(none, "silu").shape == (0, 36)
    rowops.add_normed_(none, none, weight, EPS)
    rowops.write_rows(none, table, 0, 0, 0)
    assert rowops.read_rows(table, 8, 0, 0, 72).shape == (0, 72)
    heads = torch.empty(0, 3, 24, dtype=torch.bfloat16, device=device)
    rowops.append_rows(heads, heads, table, 0, 0, 0)
    half = torch.empty(0, 12, device=device)
    q, k, v = rowops.rope_qkv(none, None, half, half, None, None, EPS, 1, 1, 24)
    assert q.shape == k.shape == v.shape == (0, 1, 24)


def test_what_does_not_fit_is_refused(device):
    x, weight = made(device, 4, 72), made(device, 72)
    table = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="not contiguous"):
        rowops.rms_norm(x.t().contiguous().t(), weight, EPS)
    with pytest.raises(ValueError, match="weight must be"):
        rowops.rms_norm(x, weight[:71], EPS)
    with pytest.raises(ValueError, match="out_dtype"):
        rowops.rms_norm(x, weight, EPS, torch.float16)
    with pytest.raises(ValueError, match="activation must be one of"):
        rowops.gated_act(x, "relu")
    with pytest.raises(ValueError, match="gate_up must be"):
        rowops.gated_act(x[:, :71].contiguous(), "silu")
    with pytest.raises(ValueError, match="do not fit 1 blocks"):
        rowops.write_rows(x, table, 0, 61, 0)
    with pytest.raises(ValueError, match="ring must be"):
        rowops.read_rows(table, -1, 0, 4, 72)
