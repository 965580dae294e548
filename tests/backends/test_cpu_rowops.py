"""Norms, rotary embedding and activations against float64 formulas; rows and lanes do not disturb each
other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from larql_kv.backends.cpu import ops


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("size", [1, 8, 15, 16, 17, 63, 64, 100, 576, 640, 2560])
def test_rms_norm(size: int) -> None:
    x, weight = torch.randn(129, size), torch.randn(size)
    for round_input in (False, True):
        y = ops.rms_norm(x, weight, 1e-5, round_input)
        exact = norm64(x.bfloat16() if round_input else x, weight, 1e-5)
        assert torch.allclose(y.double(), exact, rtol=1e-6, atol=1e-7)
        for n in (1, 2, 64):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert torch.equal(
                    ops.rms_norm(x[5 : 5 + n].contiguous(), weight, 1e-5, round_input), y[5 : 5 + n]
                )


def test_add_normed() -> None:
    h, y, weight = torch.randn(3, 100), torch.randn(3, 100), torch.randn(100)
    expected = h + ops.rms_norm(y, weight, 1e-6)
    assert torch.equal(ops.add_normed_(h.clone(), y, weight, 1e-6), expected)
    assert torch.equal(ops.add_normed_(h.clone(), y, None, 1e-6), h + y)


@pytest.mark.parametrize(("hd", "rot"), [(64, 64), (256, 256), (8, 8), (80, 32), (32, 10), (6, 6)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope(hd: int, rot: int, normed: bool) -> None:
    n = 70
    q, k = torch.randn(n, 5, hd), torch.randn(n, 2, hd)
    angle = torch.rand(n, rot // 2) * 100
    cos, sin = angle.cos(), angle.sin()
    weights = [torch.randn(hd), torch.randn(hd)] if normed else [None, None]
    expected = []
    for x, weight in zip((q, k), weights, strict=True):
        y = x.double() if weight is None else norm64(x, weight, 1e-6)
        a, b, rest = y[..., : rot // 2], y[..., rot // 2 : rot], y[..., rot:]
        c, s = cos.double()[:, None], sin.double()[:, None]
        expected.append(torch.cat([a * c - b * s, b * c + a * s, rest], -1))
    one = [q[7:8].clone(), k[7:8].clone()]
    ops.rope_qk_(q, k, cos, sin, *weights, 1e-6)
    ops.rope_qk_(*one, cos[7:8].contiguous(), sin[7:8].contiguous(), *weights, 1e-6)
    for x, y in zip((q, k), expected, strict=True):
        assert torch.allclose(x.double(), y, rtol=1e-5, atol=2e-6)
    assert torch.equal(one[0], q[7:8])
    assert torch.equal(one[1], k[7:8])


def test_round_bf16() -> None:
    x = torch.randn(1003) * torch.logspace(-40, 38, 1003)
    x[:4] = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])
    expected = x.bfloat16().float()
    y = ops.round_bf16_(x.clone())
    assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0))
    ties = torch.arange(0x3F80, 0x3F90, dtype=torch.int32).mul(65536).add(32768).view(torch.float32)
    assert torch.equal(ops.round_bf16_(ties.clone()), ties.bfloat16().float())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_act(activation: str) -> None:
    gate = torch.cat(
        [torch.linspace(-100, 100, 4001), torch.linspace(-2, 2, 1000), torch.tensor([0.0, 1e-30, -1e-30])]
    )
    up = torch.ones_like(gate)
    y = ops.gated_act(torch.cat([gate, up])[None], activation)[0].double()
    g = gate.double()
    u = (2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)
    exact = torch.nn.functional.silu(g) if activation == "silu" else g * torch.sigmoid(2 * u)
    assert torch.allclose(y, exact, rtol=4e-6 if activation == "gelu_tanh" else 5e-7, atol=1e-33)
    torch_exact = torch.nn.functional.gelu(g, approximate="tanh") if activation == "gelu_tanh" else exact
    assert torch.allclose(y, torch_exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [1, 16, 21, 1536])
def test_gated_act_rows_are_independent(size: int) -> None:
    x = torch.randn(129, 2 * size)
    whole = ops.gated_act(x, "silu")
    assert torch.equal(ops.gated_act(x[3:4].contiguous(), "silu"), whole[3:4])
    shifted = torch.cat([x[:, 1:size], x[:, :1], x[:, size + 1 :], x[:, size : size + 1]], dim=1)
    assert torch.equal(
        ops.gated_act(shifted, "silu"), torch.cat([whole[:, 1:], whole[:, :1]], dim=1)
    )  # lanes


def test_wrong_arguments_are_refused() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="weight"):
        ops.rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="activation"):
        ops.gated_act(x, "relu")
    with pytest.raises(ValueError, match="gate_up"):
        ops.gated_act(x[:, :7].contiguous(), "silu")
    with pytest.raises(ValueError, match="cos"):
        ops.rope_qk_(x[:, None].contiguous(), x[:, None].contiguous(), torch.ones(2, 5), torch.ones(2, 5))
    with pytest.raises(ValueError, match="same"):
        ops.add_normed_(x, x[:1], None, 1e-6)
