"""A single row's composite steps: the bits of the many-row steps, in fresh tensors, for every family."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from larql_kv.backends.cpu import ops
from larql_kv.backends.cpu.row_steps import LayerWeights, RotaryRows, RowSteps, is_row
from larql_kv.model.rope import RopeSpec, RopeTable
from tests.backends.quantised import make_raw
from tests.models import FAMILIES, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_gives_the_bits_of_many_rows(family: str) -> None:
    model = tiny(family)
    decoder, config = model.decoder, model.config
    n, first = 3, 4
    rows = torch.randn(n, config.hidden)
    attended, update = torch.randn(n, config.q_dim), torch.randn(n, config.hidden)
    for layer in (0, config.layer_count - 1):
        many = [
            *decoder.attention_inputs(layer, rows, first),
            decoder.ffn_input(layer, rows),
            decoder.dense_ffn(layer, rows),
        ]
        after = [rows.clone(), rows.clone()]
        decoder.add_attention_(layer, after[0], attended)
        decoder.add_ffn_(layer, after[1], update)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for i in range(n):
                one = rows[i : i + 1].clone()
                single = [
                    *decoder.attention_inputs(layer, one, first + i),
                    decoder.ffn_input(layer, one),
                    decoder.dense_ffn(layer, one),
                ]
                for got, expected in zip(single, many, strict=True):
                    assert torch.equal(got, expected[i : i + 1])
                assert torch.equal(one, rows[i : i + 1])
                decoder.add_attention_(layer, one, attended[i : i + 1].clone())
                assert torch.equal(one, after[0][i : i + 1])
                one = rows[i : i + 1].clone()
                decoder.add_ffn_(layer, one, update[i : i + 1].clone())
                assert torch.equal(one, after[1][i : i + 1])


def test_results_are_not_overwritten_by_later_calls() -> None:
    decoder = tiny("gemma3").decoder
    row = torch.randn(1, tiny("gemma3").config.hidden)
    kept = [*decoder.attention_inputs(0, row, 0), decoder.ffn_input(0, row), decoder.dense_ffn(0, row)]
    copies = [t.clone() for t in kept]
    other = torch.randn_like(row)
    for layer in (0, 1):
        decoder.attention_inputs(layer, other, 9)
        decoder.dense_ffn(layer, decoder.ffn_input(layer, other))
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def weights(kinds: tuple[str, ...], inner: int, hidden: int = 512) -> tuple[SimpleNamespace, LayerWeights]:
    """A layer of two heads of 16 whose gate and up are of the given kinds."""
    config = SimpleNamespace(
        hidden=hidden, heads=2, kv_heads=1, head_dim=16, intermediate=inner, norm_eps=1e-5, activation="silu"
    )

    def linear(*shapes: tuple[str, int, int]) -> ops.PackedLinear:
        raws = [make_raw(kind, out, size, seed=i) for i, (kind, out, size) in enumerate(shapes)]
        return ops.pack_linear(raws, gemm_bf16=False)

    ones = torch.ones(hidden)
    layer = LayerWeights(
        attn_norm=ones,
        q=linear(("Q4_K", 32, hidden)),
        kv=linear(("Q6_K", 16, hidden), ("F16", 16, hidden)),
        o=linear(("F32", hidden, 32)),
        ffn_norm=ones,
        gate_up=linear((kinds[0], inner, hidden), (kinds[-1], inner, hidden)),
        down=linear(("F32", hidden, inner)),
        q_norm=None,
        k_norm=None,
        post_attn_norm=None,
        post_ffn_norm=None,
        rope=RopeTable(RopeSpec(16, (1.0,) * 8)),
    )
    return config, layer


@pytest.mark.parametrize(
    ("kinds", "inner"), [(("Q4_1",), 128), (("Q8_0", "Q4_0"), 64), (("F32",), 50), (("Q6_K",), 192)]
)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
def test_ffn_of_every_layout(kinds: tuple[str, ...], inner: int, activation: str, biased: bool) -> None:
    config, layer = weights(kinds, inner)
    config.activation = activation
    if biased:
        layer.gate_up.bias = torch.randn(2 * inner) * 0.1
        layer.down.bias = torch.randn(512)
    steps = RowSteps(config, layer, RotaryRows(layer.rope), True)
    x = torch.randn(3, 512) * 0.05
    expected = layer.down(ops.gated_act(layer.gate_up(x), activation))
    for i in range(3):
        assert torch.equal(steps.ffn(x[i : i + 1].clone()), expected[i : i + 1])


def test_inputs_of_mixed_kinds_and_bfloat16() -> None:
    config, layer = weights(("F32",), 64)
    x = torch.randn(1, 512)
    for exact in (True, False):
        q, k, v = RowSteps(config, layer, RotaryRows(layer.rope), exact).inputs(x, 300)
        normed = ops.rms_norm(x, layer.attn_norm, 1e-5, not exact)
        q_many, kv = layer.q(normed).view(1, 2, 16), layer.kv(normed).view(1, 2, 16)
        k_many, v_many = kv[:, :1].clone(), kv[:, 1:].clone()
        ops.rope_qk_(q_many, k_many, *layer.rope.rows(300, 1))
        expected = (
            (q_many, k_many, v_many) if exact else (q_many, ops.round_bf16_(k_many), ops.round_bf16_(v_many))
        )
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), expected, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    config, layer = weights(("F32",), 64)
    with pytest.raises(ValueError, match="negative"):
        RowSteps(config, layer, RotaryRows(layer.rope), True).inputs(torch.zeros(1, 512), -1)
    layer.attn_norm = torch.ones(511)
    with pytest.raises(ValueError, match="vector"):
        RowSteps(config, layer, RotaryRows(layer.rope), True)
    layer.attn_norm = torch.ones(512)
    config.heads = 3
    with pytest.raises(ValueError, match="outputs"):
        RowSteps(config, layer, RotaryRows(layer.rope), True)
    assert is_row(torch.zeros(1, 4), 4)
    assert not is_row(torch.zeros(1, 4, dtype=torch.float64), 4)
    assert not is_row(torch.zeros(4, 2)[:, 0], 4)
