"""config.json against the configuration classes of transformers, and every refusal."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from larql_kv.errors import ModelError
from larql_kv.model.config_hf import config_from_directory, config_from_json
from tests.tiny_models import FAMILIES, model_dir

# As published on the Hub (the parts that matter here), old and new spellings.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2-7b": {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "llama-3.2-1b": {
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "llama-linear-old": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-null-head-dim": {"model_type": "llama", "head_dim": None, "num_key_value_heads": None},
    "mistral-7b-v0.1": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "mistral-7b-v0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
    "mistral-defaults": {"model_type": "mistral"},
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen2.5-yarn": {
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen2-windowed": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 1024,
        "max_window_layers": 20,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-layer-types": {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma-2-27b": {
        "model_type": "gemma2",
        "head_dim": 128,
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "final_logit_softcapping": None,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gemma-3-pattern": {"model_type": "gemma3_text", "sliding_window_pattern": 4, "num_hidden_layers": 9},
    "gemma-3-new": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "sliding_attention": {"rope_theta": 20000.0},
        },
    },
}
GEMMA_4B = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}


@functools.cache
def tiny(name: str) -> dict[str, Any]:
    return json.loads((model_dir(name) / "config.json").read_text())


def load(values: dict[str, Any]):
    return config_from_json(copy.deepcopy(values), "somewhere/model")


def check_against_transformers(values: dict[str, Any]) -> None:
    ours = load(values)
    kind = values["model_type"]
    theirs = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(values))
    assert ours.architecture == kind.removesuffix("_text")
    assert ours.hidden == theirs.hidden_size
    assert ours.heads == theirs.num_attention_heads
    assert ours.kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.intermediate == theirs.intermediate_size
    assert ours.vocab == theirs.vocab_size
    assert ours.context == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.layer_count == theirs.num_hidden_layers
    assert ours.tied == theirs.tie_word_embeddings
    gemma = kind.startswith("gemma")
    assert ours.activation == ("gelu_tanh" if gemma else "silu")
    assert ours.attention_scale == (theirs.query_pre_attn_scalar if gemma else head_dim) ** -0.5
    assert ours.embedding_scale == (np.float32(theirs.hidden_size**0.5) if gemma else 1.0)
    assert ours.attention_softcap == (theirs.attn_logit_softcapping if kind == "gemma2" else None)
    assert ours.final_softcap == (theirs.final_logit_softcapping if gemma else None)
    assert ours.qk_norm == (kind in ("qwen3", "gemma3_text"))
    assert ours.post_norms == gemma
    types = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    if kind == "mistral" and theirs.sliding_window is not None:
        types = ["sliding_attention"] * theirs.num_hidden_layers
    for layer, layer_type in zip(ours.layers, types, strict=True):
        assert layer.window == (theirs.sliding_window if layer_type == "sliding_attention" else None)
    if kind == "gemma3_text":
        table = Gemma3RotaryEmbedding(theirs)
        rotary = {
            kind: (getattr(table, f"{kind}_inv_freq"), getattr(table, f"{kind}_attention_scaling"))
            for kind in set(types)
        }
    else:  # the other families' classes are copies of Llama's
        table = LlamaRotaryEmbedding(theirs)
        rotary = dict.fromkeys(set(types), (table.inv_freq, table.attention_scaling))
    for layer, layer_type in zip(ours.layers, types, strict=True):
        inv_freq, factor = rotary[layer_type]
        np.testing.assert_array_equal(np.array(layer.rope.inv_freq, np.float32), inv_freq.numpy())
        assert layer.rope.attention_factor == factor


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str) -> None:
    check_against_transformers(PUBLISHED[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_configurations_that_transformers_5_saves(name: str) -> None:
    check_against_transformers(tiny(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_directory_equals_its_json(name: str) -> None:
    path = model_dir(name)
    assert config_from_directory(path) == config_from_json(tiny(name), path)


def test_multimodal_wrapper() -> None:
    config = load(GEMMA_4B)
    assert (config.architecture, config.vocab, config.heads, config.kv_heads) == ("gemma3", 262208, 8, 4)
    assert config.head_dim == 256
    assert config.tied
    assert [layer.window for layer in config.layers[:6]] == [1024] * 5 + [None]
    assert config.layers[5].rope.scaling == "linear"
    assert config.layers[5].rope.inv_freq[0] == 0.125
    assert config.layers[4].rope.inv_freq[0] == 1.0
    check_against_transformers({**GEMMA_4B["text_config"], "tie_word_embeddings": True})


def test_code_in_the_directory_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    values = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"'evil' is not supported \(its own code is never run\)"):
        config_from_directory(tmp_path)
    assert load(tiny("llama") | {"auto_map": {"AutoModel": "evil.Model"}}).architecture == "llama"


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("llama", {"model_type": "mixtral"}, "'mixtral' is not supported; supported: llama, mistral, qwen2"),
        ("llama", {"model_type": None}, "model type None"),
        ("llama", {"model_type": ["llama"]}, "is not supported"),
        ("llama", {"hidden_act": "relu"}, "'relu' is not supported; supported: silu"),
        ("llama", {"hidden_act": ["silu"]}, "is not supported"),
        ("gemma3", {"hidden_activation": "gelu"}, "'gelu' is not supported"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported; supported"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "takes no rope parameters by layer type"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
        ("llama", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be a number"),
        ("llama", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be a number"),
        ("llama", {"rope_parameters": {"rope_theta": math.nan}}, "rope_theta must be a number"),
        ("gemma3", {"rope_parameters": {"rope_type": "linear"}}, "by layer type"),
        ("gemma3", {"rope_parameters": {"full_attention": 3}}, "full_attention are 3, expected an object"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "no attention soft cap"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be positive"),
        ("gemma2", {"sliding_window": None}, "sliding_window is not given"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 7}, "layer_types must be"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types must be 7 of"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is false"),
        ("llama", {"num_experts": 8}, "mixtures of experts"),
        ("llama", {"hidden_size": 0}, "hidden_size 0"),
        ("llama", {"hidden_size": -64}, "hidden_size must be an integer from 0"),
        ("llama", {"hidden_size": 64.0}, "hidden_size must be an integer"),
        ("llama", {"hidden_size": True}, "hidden_size must be an integer"),
        ("llama", {"hidden_size": 10**400}, "hidden_size must be an integer"),
        ("llama", {"num_attention_heads": 0}, "0 heads"),
        ("llama", {"num_key_value_heads": 3}, "not a multiple of the key/value head count 3"),
        ("llama", {"num_key_value_heads": 0}, "key/value head count must be positive"),
        ("llama", {"head_dim": 0}, "0 elements"),
        ("llama", {"head_dim": 15}, "must be even"),
        ("llama", {"head_dim": None, "hidden_size": 65}, "no multiple of 4 heads"),
        ("llama", {"num_hidden_layers": 10**9}, "layer count must lie between"),
        ("llama", {"num_hidden_layers": 0}, "layer count must lie between"),
        ("llama", {"vocab_size": 1 << 40}, "vocabulary must be positive and at most"),
        ("llama", {"rms_norm_eps": 0}, "norm epsilon"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number"),
        ("mistral", {"sliding_window": 0}, "sliding window must be positive"),
        ("mistral", {"sliding_window": "8"}, "sliding_window must be an integer"),
    ],
)
def test_refusals(base: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(tiny(base) | change)


@pytest.mark.parametrize("text", [None, [], {"model_type": "llama"}])
def test_wrapper_without_a_text_model(text: object) -> None:
    with pytest.raises(ModelError, match="without a gemma3_text text_config"):
        load(GEMMA_4B | {"text_config": text})


def test_missing_or_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        config_from_directory(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        config_from_directory(tmp_path)
    for text in ("", "{", "[]", '{"a": 1, "a": 2}', "[" * 100_000, "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=r"config\.json"):
            config_from_directory(tmp_path)


def test_any_damaged_configuration_is_read_or_refused() -> None:
    """10 values of every wrong kind at random places: a ModelError or a config, nothing else."""
    junk = [None, True, -1, 0, 1, 3, 10**400, 1e308, math.nan, math.inf, "", "x", [], [1], {}, {"a": 1}]
    generator = random.Random(5)
    bases = [*map(tiny, FAMILIES), *PUBLISHED.values(), GEMMA_4B]
    refused = 0
    for _ in range(3000):
        values = copy.deepcopy(generator.choice(bases))
        for _ in range(generator.randint(1, 3)):
            place = values
            while True:
                key = generator.choice([*place])
                if not isinstance(place[key], dict) or not place[key] or generator.random() < 0.3:
                    break
                place = place[key]
            place[key] = generator.choice(junk)
        try:
            load(values)
        except ModelError:
            refused += 1
    assert 500 < refused < 3000
