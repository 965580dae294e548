"""Directories that were damaged or made to do harm: named errors, and verify names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import larql_kv as lk
from larql_kv.model import vindex_files
from larql_kv.model.load import open_files
from larql_kv.model.vindex_config import config_from_json, config_to_json
from larql_kv.vindex.verify import verify_vindex
from tests import tiny_models
from tests.models import FAMILIES


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change index.json and give it a checksum that fits again: an attacker can do as much."""
    path = directory / "index.json"
    value = json.loads(path.read_text())
    value.pop("blake2b")
    change(value)
    value["blake2b"] = vindex_files._checksum(value)
    path.write_text(json.dumps(value))


def put(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return change


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        for key in keys[:-1]:
            value = value[key]
        del value[keys[-1]]

    return change


FFN, GATE = "layer-0001-ffn.safetensors", "layers.1.gate"
SUM = "0" * 64
INDEX_FAULTS = [
    (put("version", to=2), "version '2'"),
    (put("format", to="larql-vindex-x"), "format 'larql-vindex-x'"),
    (
        put("files", to={"../../etc/passwd": {"bytes": 1, "blake2b": SUM}}),
        "a file name is '../../etc",
    ),
    (put("files", "/etc/passwd", to={"bytes": 1, "blake2b": SUM}), "a file name is '/etc/passwd'"),
    (put("files", "tokenizer/../x.json", to={"bytes": 1, "blake2b": SUM}), "a file name is"),
    (put("files", FFN, "bytes", to=1 << 70), "the size of layer-0001-ffn"),
    (put("files", FFN, "bytes", to=-1), "the size of layer-0001-ffn"),
    (put("files", FFN, "bytes", to=12), "index.json says 12 bytes"),
    (put("files", FFN, "blake2b", to="xyz"), "is no BLAKE2b checksum"),
    (put("files", "layer-0099-ffn.safetensors", to={"bytes": 1, "blake2b": SUM}), "is missing"),
    (put("files", to=[]), "malformed"),
    (put("tensors", GATE, "kind", to="Q3_X"), "the kind of layers.1.gate"),
    (put("tensors", GATE, "kind", to="BF16"), "the file holds"),
    (put("tensors", GATE, "shape", to=[1 << 60, 64]), "the shape of layers.1.gate"),
    (put("tensors", GATE, "shape", to=[96, 0]), "the shape of layers.1.gate"),
    (put("tensors", GATE, "shape", to=[96.0, 64]), "the shape of layers.1.gate"),
    (put("tensors", GATE, "shape", to=[48, 128]), "has shape"),
    (put("tensors", GATE, "file", to="head.safetensors"), "the file lacks it"),
    (put("tensors", GATE, "file", to="none.safetensors"), "the file of layers.1.gate"),
    (drop("tensors", GATE), "lacks tensor 'layers.1.gate'"),
    (drop("tensors", "layers.1.down_features"), "lacks tensor 'layers.1.down'"),
    (put("tensors", "layers.1.down_features", "shape", to=[64, 96]), r"expected \(96, 64\)"),
    (drop("tensors"), "malformed: KeyError"),
    (put("weights", "format", to="q2"), "the format of the weights"),
    (put("weights", "down_features", to="q2"), "down_features is 'q2'"),
    (put("down_meta", to={"top_k": 0, "layers": []}), "top_k '0'"),
    (put("down_meta", to={"top_k": 3, "layers": [1]}), "names layer '1', which has no file"),
    (put("print", to=3), "no BLAKE2b checksum"),
    (put("config", to=[]), "expected an object"),
    (put("config", "hidden", to=1 << 80), "hidden size must be positive"),
    (put("config", "hidden", to="64"), "hidden is '64', expected an integer"),
    (put("config", "heads", to=True), "heads is 'True'"),
    (drop("config", "vocab"), "vocab is missing"),
    (put("config", "layers", to=[]), "layer count"),
    (put("config", "layers", to={}), "expected a list"),
    (put("config", "layers", to=[{"rope": 9, "window": None}] * 4), "rope is '9'"),
    (put("config", "layers", to=[{"rope": 0, "window": -3}] * 4), "sliding window must be positive"),
    (put("config", "ropes", to=[{}]), "scaling is missing"),
    (put("config", "norm_eps", to=float("inf")), "norm_eps is 'inf'"),
    (put("config", "norm_eps", to=10**400), "norm_eps"),
    (put("config", "attention_scale", to=float("nan")), "attention_scale is 'nan'"),
    (put("config", "tied", to="no"), "tied is 'no'"),
    (put("config", "activation", to="relu"), "activation is 'relu'"),
    (put("config", "name", to="x" * 2000), "a short text"),
    (put("config", "kv_inputs", to=[3]), "expected names"),
]


@pytest.mark.parametrize(("change", "message"), INDEX_FAULTS)
def test_a_lying_index_is_refused(own, change, message):
    vindex = own("llama", "hf")
    rewrite(vindex, change)
    with pytest.raises(lk.ModelError, match=message):
        lk.load_model(vindex)
    assert verify_vindex(vindex)


def test_frequencies_must_fit(own):
    vindex = own("llama", "hf")

    def shorten(value: dict[str, Any]) -> None:
        value["config"]["ropes"][0]["inv_freq"].pop()

    rewrite(vindex, shorten)
    with pytest.raises(lk.ModelError, match="7 RoPE frequencies, expected 8"):
        lk.load_model(vindex)
    rewrite(vindex, put("config", "ropes", to=[{"base": 1.0, "scaling": "odd"}]))
    with pytest.raises(lk.ModelError, match="scaling is 'odd'"):
        lk.load_model(vindex)
    rope = {"base": 1.0, "scaling": "none", "inv_freq": ["x"], "attention_factor": 1.0}
    rewrite(vindex, put("config", "ropes", to=[rope]))
    with pytest.raises(lk.ModelError, match="finite numbers"):
        lk.load_model(vindex)


def test_a_quantised_down_cannot_be_turned(own):
    vindex = own("llama", "Q8_0", "stored", "q8_0")
    rewrite(vindex, drop("tensors", "layers.1.down"))
    with pytest.raises(lk.ModelError, match="is Q8_0 and cannot be turned"):
        lk.load_model(vindex)


def test_every_changed_byte_of_the_index_is_noticed(own):
    vindex = own("llama", "hf")
    path = vindex / "index.json"
    text = path.read_text()
    path.write_text(text.replace('"heads": 4', '"heads": 2'))
    with pytest.raises(lk.ModelError, match="its own checksum does not match"):
        lk.load_model(vindex)
    problems = verify_vindex(vindex)
    assert [problem.file for problem in problems] == ["index.json"]
    path.write_text(text[: len(text) // 2])
    with pytest.raises(lk.ModelError, match="not valid JSON"):
        lk.load_model(vindex)


@pytest.mark.parametrize("name", [FFN, "embed.safetensors", "tokenizer/tokenizer.json"])
def test_verify_names_the_file(own, name):
    vindex = own("llama", "hf")
    assert verify_vindex(vindex) == []
    path = vindex / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    (problem,) = verify_vindex(vindex)
    assert problem.file == name
    assert "checksum" in problem.what
    path.write_bytes(data[:-1])
    (problem,) = verify_vindex(vindex)
    assert problem.file == name
    assert "bytes, index.json says" in problem.what
    with pytest.raises(lk.ModelError, match=path.name):
        lk.load_model(vindex)
    path.unlink()
    (problem,) = verify_vindex(vindex)
    assert "cannot be read" in problem.what


@pytest.mark.parametrize("length", [b"\xff" * 8, (1 << 20).to_bytes(8, "little"), bytes(8)])
def test_lying_safetensors_headers(own, length):
    vindex = own("llama", "hf")
    path = vindex / FFN
    data = bytearray(path.read_bytes())
    data[:8] = length
    path.write_bytes(data)
    with pytest.raises(lk.ModelError, match=FFN):
        lk.load_model(vindex)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_comes_back_as_it_was(family):
    config = open_files(tiny_models.model_dir(family)).config
    text = json.dumps(config_to_json(config))
    assert config_from_json(json.loads(text), "x") == config
