"""RoPE against transformers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from larql_kv.errors import ModelError
from larql_kv.model.config import RopeSpec
from larql_kv.model.rope import RopeScaling, RopeTable, divide_frequencies, resolve_rope, scaling_from_hf

RULES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "linear-odd-factor": {"rope_type": "linear", "factor": 2.7},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3-32": {
        "rope_type": "llama3",
        "factor": 32,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 40,
        "beta_fast": 24.0,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "yarn-no-truncation": {
        "rope_type": "yarn",
        "factor": 8.0,
        "truncate": False,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 4096,
    },
    "yarn-narrow-ramp": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}


def _theirs(rule: dict, theta: float, head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=rule | {"rope_theta": theta},
    )
    return LlamaRotaryEmbedding(config)


def _ours(rule: dict, theta: float, head_dim: int) -> RopeSpec:
    scaling = scaling_from_hf(rule, 131072, truncate=rule.get("truncate", True))
    return resolve_rope(theta, head_dim, scaling)


@pytest.mark.parametrize("head_dim", [12, 64, 80, 128, 256])
@pytest.mark.parametrize("theta", [10000, 10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("name", RULES)
def test_inverse_frequencies_and_factor_are_transformers_bits(name: str, theta: float, head_dim: int) -> None:
    theirs, ours = _theirs(RULES[name], theta, head_dim), _ours(RULES[name], theta, head_dim)
    np.testing.assert_array_equal(np.array(ours.inv_freq, np.float32), theirs.inv_freq.numpy())
    assert ours.attention_factor == theirs.attention_scaling
    assert ours.scaling == {"default": "none"}.get(name, name.split("-")[0])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("head_dim", [12, 64, 256])
def test_table_is_transformers_bits_in_any_chunks(name: str, head_dim: int) -> None:
    theirs = _theirs(RULES[name], 10000.0, head_dim)
    n = 1500
    cos, sin = theirs(torch.zeros(1), torch.arange(n)[None])
    half = head_dim // 2
    table = RopeTable(_ours(RULES[name], 10000.0, head_dim))
    start = 0
    for count in (1, 1, 7, 250, 3, 500, 0, 700, 38):
        ours = table.rows(start, count)
        assert ours[0].shape == (count, half)
        assert torch.equal(ours[0], cos[0, start : start + count, :half])
        assert torch.equal(ours[1], sin[0, start : start + count, :half])
        start += count
    assert start == n


def test_rows_do_not_depend_on_history_and_prefix_survives_growth() -> None:
    spec = resolve_rope(10000.0, 64)
    stepped, at_once = RopeTable(spec), RopeTable(spec)
    before = stepped.rows(0, 300)[0].clone()
    for position in range(300, 2000, 3):
        stepped.rows(position, 1)
    for ours, other in zip(stepped.rows(0, 2000), at_once.rows(0, 2000), strict=True):
        assert torch.equal(ours, other)
    assert torch.equal(before, stepped.rows(0, 300)[0])


def test_table_grows_by_doubling_and_counts_its_bytes() -> None:
    table = RopeTable(resolve_rope(10000.0, 64))
    sizes = {table.nbytes}
    for position in range(0, 4096, 5):
        table.rows(position, 1)
        sizes.add(table.nbytes)
    assert len(sizes) <= 7
    assert table.nbytes == 2 * 4096 * 32 * 4 + 32 * 4


def test_positions_tensor() -> None:
    table = RopeTable(resolve_rope(10000.0, 64))
    positions = torch.tensor([[5, 0, 700], [700, 3, 3]])
    cos, sin = table.at(positions)
    assert cos.shape == sin.shape == (2, 3, 32)
    assert torch.equal(cos[0, 2], table.rows(700, 1)[0][0])
    assert torch.equal(sin[1, 1], table.rows(3, 1)[1][0])
    assert table.at(torch.empty(0, dtype=torch.int64))[0].shape == (0, 32)


def test_negative_positions_are_refused() -> None:
    table = RopeTable(resolve_rope(10000.0, 64))
    with pytest.raises(ValueError, match="negative"):
        table.rows(-1, 2)
    with pytest.raises(ValueError, match="negative"):
        table.at(torch.tensor([2, -3]))


def test_gemma3_layer_types() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig(num_hidden_layers=6, head_dim=256, rope_parameters=rope))
    for kind, parameters in rope.items():
        ours = _ours(parameters, parameters["rope_theta"], 256)
        np.testing.assert_array_equal(
            np.array(ours.inv_freq, np.float32), getattr(theirs, f"{kind}_inv_freq").numpy()
        )


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "mrope", "proportional", "su"])
def test_unsupported_rules_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=rf"{kind}.*supported: none, linear, llama3, yarn"):
        resolve_rope(10000.0, 64, scaling_from_hf({"type": kind, "factor": 2.0}, 4096))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "linear"}, "factor must be a number, got None"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number, got '2'"),
        ({"rope_type": "linear", "factor": True}, "factor must be a number, got True"),
        ({"rope_type": "linear", "factor": 0.0}, "factor must be positive"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor must be a number, got nan"),
        (RULES["llama3"] | {"low_freq_factor": 4.0}, "low_freq_factor < high_freq_factor"),
        (RULES["llama3"] | {"original_max_position_embeddings": 0}, "original context must be positive"),
        (RULES["yarn"] | {"beta_fast": -1.0}, "betas must be positive"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_bad_parameters(parameters: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_rope(10000.0, 64, scaling_from_hf(parameters, 4096))


@pytest.mark.parametrize(("base", "dim"), [(1.0, 64), (float("inf"), 64), (0, 64), (1e4, 63), (1e4, 0)])
def test_bad_base_or_dimension(base: float, dim: int) -> None:
    with pytest.raises(ModelError):
        resolve_rope(base, dim)


def test_context_stands_in_for_the_original_one() -> None:
    rule = {"rope_type": "yarn", "factor": 4.0}
    assert scaling_from_hf(rule, 4096).original_context == 4096
    assert scaling_from_hf(rule, 4096, original_context=1024).original_context == 1024
    no_factor = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert scaling_from_hf(no_factor, 4096).factor == 4.0


def test_rope_freqs_divide() -> None:
    spec = resolve_rope(10000.0, 8)
    divided = divide_frequencies(spec, np.array([1, 1, 2, 8], np.float32))
    assert divided.scaling == "llama3"
    np.testing.assert_array_equal(np.array(divided.inv_freq) * [1, 1, 2, 8], spec.inv_freq)
    assert divide_frequencies(spec, np.ones(4, np.float32)) == spec
    with pytest.raises(ModelError, match=r"shape \(3,\), expected \(4,\)"):
        divide_frequencies(spec, np.ones(3, np.float32))
    with pytest.raises(ModelError, match="not positive"):
        divide_frequencies(spec, np.array([1, 0, 2, 8], np.float32))


def test_specs_compare_by_value() -> None:
    assert resolve_rope(10000.0, 8) == resolve_rope(10000, 8, RopeScaling())
    assert len({resolve_rope(10000.0, 8), resolve_rope(10000, 8)}) == 1
