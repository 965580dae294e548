"""boundary-per-layer: records that are whole and speak for the run, rows that are coded layer by layer."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import larql_kv as lk
from larql_kv.codec.rows import row_codec
from larql_kv.engine.calibration import (
    CalibrationRecord,
    Fragility,
    LayerPolicy,
    Measured,
    TokenBytes,
    policy_of,
    read_record,
    write_record,
)
from larql_kv.engine.residual_cost import state_bytes
from larql_kv.model.model import Model
from larql_kv.vindex.store import model_print
from tests import tiny_models
from tests.models import tiny

MIX = ("int8", "bf16", "int4", "int8")


def record_for(model: Model, codecs: tuple[str, ...] = MIX, **changes: Any) -> CalibrationRecord:
    """A record of these codecs on `model`, as if 0.02 nats had been measured."""
    codecs = tuple(row_codec(name).name for name in codecs)
    config = model.config
    size = sum(row_codec(name).bytes_per_row(config.hidden) for name in codecs)
    made = CalibrationRecord(
        policy=policy_of(model, codecs),
        model_source=model.source,
        model_print=model_print(model.config, model.tensors),
        corpus_sha256=hashlib.sha256(b"text").hexdigest(),
        corpus_tokens=400,
        window=16,
        samples=2,
        budget_nats=0.1,
        kl_bound_nats=0.04,
        chosen_on=Measured(100, 0.001, 0.01, 0.015, 0.99),
        held_out=Measured(100, 0.001, 0.01, 0.02, 0.98),
        fragility=(Fragility(0, codecs[0], 0.001, 0.01),),
        bytes=TokenBytes(size, len(codecs) * 2 * config.hidden, 1024, "float32"),
        reason=None,
        library="0.1.0",
    )
    return dataclasses.replace(made, **changes)


def write(path: Path, value: Any) -> Path:
    """`value` as a record's file with the right checksum, whatever it holds."""
    value = {key: item for key, item in value.items() if key != "blake2b"}
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    value["blake2b"] = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    path.write_text(json.dumps(value))
    return path


@pytest.fixture
def model() -> Model:
    return tiny("llama")


# -- the engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["boundary-per-layer", "boundary_per_layer", "boundary-pl", "boundary_pl"])
def test_every_name_parses_and_the_default_needs_no_record(name: str) -> None:
    spec = lk.parse_spec(name)
    assert spec.text == "boundary-per-layer"
    assert spec.policy.contract == lk.BoundedKLPerLayer(0.01)
    assert spec.policy.contract.name == "BoundedKLPerLayer(nats=0.01)"


def test_a_path_is_a_value_of_policy(tmp_path: Path) -> None:
    text = f"boundary-per-layer:window=64,policy={tmp_path}/a record.json,budget_nats=0.25"
    spec = lk.parse_spec(text)
    assert spec.text == text
    assert lk.parse_spec(spec.text) == spec
    assert {key.name for entry in lk.engines() if entry.name == spec.engine_name for key in entry.keys} == {
        "window",
        "layers",
        "policy",
        "rows",
        "budget_nats",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("boundary-pl:policy=int8", "markov-rs-codec:codec=int8"),
        ("boundary-pl:policy=/tmp/a,b.json", "a path cannot hold a comma"),
        ("boundary-pl:policy=x.json,policy=y.json", "key 'policy' is given twice"),
        ("boundary-pl:policy_=x.json", "no key 'policy_'"),
        ("boundary-pl:layers=all", "layers='all' is not"),
        ("boundary-pl:budget_nats=-1", "budget_nats must be at least 0"),
        ("boundary-pl:rows=none,window=-1", "window must be at least 0"),
    ],
)
def test_bad_specs_are_named(text: str, message: str) -> None:
    with pytest.raises(lk.SpecError, match=message):
        lk.parse_spec(text)


def test_a_comma_is_refused_however_the_spec_is_made() -> None:
    from larql_kv.engine.boundary_per_layer import BoundaryPerLayer

    with pytest.raises(lk.SpecError, match="comma"):
        BoundaryPerLayer(policy_="a,b.json")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_is_lossless_against_bf16_rows(dtype: str) -> None:
    """In the bfloat16 form rows are bf16 already: the bits of `standard`. In float32: of the bf16 codec."""
    model = tiny("llama", dtype)
    ids = tiny_models.sample_ids(200, model.config.vocab)
    engine = lk.build_engine("boundary-per-layer:window=20", model)
    rows = engine.prefill_rows(ids)
    twin = "standard" if dtype == "bfloat16" else "markov-rs-codec:window=20"
    assert torch.equal(rows, lk.build_engine(twin, model).prefill_rows(ids))
    if dtype == "float32":
        assert not torch.equal(rows, lk.build_engine("standard", model).prefill_rows(ids))
    assert "lossless against bf16 rows" in engine.info.note


def test_the_models_layer_count_is_asked_for(model: Model) -> None:
    assert lk.build_engine("boundary-pl:layers=4", model).length == 0
    assert lk.parse_spec("boundary-pl:layers=0") == lk.parse_spec("boundary-pl")
    with pytest.raises(lk.ModelError, match="layer count mismatch: layers=34, the model has 4"):
        lk.build_engine("boundary-pl:layers=34", model)


def test_each_layer_holds_its_own_codec(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, record_for(model))
    engine = lk.build_engine(f"boundary-per-layer:window=20,policy={path}", model)
    assert engine.policy.contract == lk.BoundedKLPerLayer(0.04)
    engine.prefill(tiny_models.sample_ids(200, model.config.vocab))
    coded = (199 - 20) // 64 * 64
    for pages, name in zip(engine._state.pages, MIX, strict=True):
        listed = pages.entries("rows", "canonical", engine.length)
        cold = sum(item.live for item in listed if item.tier == "cold" and item.role == "canonical")
        assert cold == coded * row_codec(name).bytes_per_row(model.config.hidden), name
    assert any("int4" in row["name"] and row["tier"] == "cold" for row in engine.ledger().rows())
    assert engine.info.note.startswith("2 x int8")
    other = lk.build_engine("markov-rs-codec:window=20,codec=int8", model)
    assert not torch.equal(engine.prefill([5]), (other.prefill(engine.tokens[:-1]), other.prefill([5]))[1])


def test_the_record_is_read_once_and_lazily(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    spec = lk.parse_spec(f"boundary-pl:window=16,policy={path}")  # nothing is there yet
    write_record(path, record_for(model))
    engine = lk.build_engine(spec, model)
    path.unlink()
    assert engine.policy.contract == lk.BoundedKLPerLayer(0.04)
    assert engine.fresh().prefill([3, 4]).shape == (1, model.config.hidden)


# -- matching ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ({"model_print": "0" * 64}, "", "it is of a model with print 0000000000000000, this one's is"),
        ({"policy": LayerPolicy("0" * 16, MIX)}, "", "its policy is for revision '0000000000000000'"),
        ({"policy": LayerPolicy("r", MIX[:3])}, "", "codecs for 3 layers, the model has 4"),
        ({"policy": LayerPolicy("r", (*MIX[:3], "int5"))}, "", "unknown codec 'int5'"),
        ({"bytes": TokenBytes(300, 512, 1024, "float32")}, "", "took 300 bytes a token when measured, now"),
        ({"window": 64}, "", "measured with window=64, and window=20 codes rows that were hot"),
        ({}, ",budget_nats=0.03", "its bound of 0.04 nats is above budget_nats=0.03"),
    ],
)
def test_a_record_that_does_not_speak_for_the_run_is_refused(
    model: Model, tmp_path: Path, changes: dict[str, Any], keys: str, message: str
) -> None:
    path = tmp_path / "record.json"
    write_record(path, record_for(model, **changes))
    with pytest.raises(lk.StoreError, match=message) as caught:
        lk.build_engine(f"boundary-per-layer:window=20,policy={path}{keys}", model)
    assert str(path) in str(caught.value)


def test_a_record_within_budget_and_under_a_wider_window_is_taken(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, record_for(model))
    for keys in ("window=16", "window=40,budget_nats=0.04", "layers=4"):
        assert lk.build_engine(f"boundary-per-layer:{keys},policy={path}", model).length == 0
    with pytest.raises(lk.StoreError, match=r"above budget_nats=0\.005"):
        lk.build_engine("boundary-per-layer:budget_nats=0.005", model)
    with pytest.raises(lk.StoreError, match="print"):
        lk.build_engine(f"boundary-per-layer:policy={path}", tiny("llama-linear"))


# -- the file ------------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = record_for(model, reason="why not")
    write_record(path, record)
    assert read_record(path) == record
    assert [item.name for item in tmp_path.iterdir()] == ["record.json"]
    value = json.loads(path.read_text())
    names = [row_codec(name).name for name in MIX]
    revision = record.model_print[:16]
    assert value["fingerprint"] == revision + "|" + ",".join(f"{i}={name}" for i, name in enumerate(names))
    assert value["saving"] == pytest.approx(1 - record.bytes.policy / record.bytes.bf16)
    write_record(path, dataclasses.replace(record, samples=3))
    assert read_record(path).samples == 3
    with pytest.raises(lk.StoreError, match="cannot be written"):
        write_record(tmp_path / "record.json" / "under a file", record)


def _leaves(value: Any, at: tuple = ()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [leaf for key, item in items for leaf in _leaves(item, (*at, key))] or [at]


def _set(value: Any, at: tuple, new: Any) -> None:
    for key in at[:-1]:
        value = value[key]
    value[at[-1]] = new


def test_any_changed_field_is_noticed(model: Model, tmp_path: Path) -> None:
    whole = record_for(model).to_dict()
    path = tmp_path / "record.json"
    leaves = _leaves(whole)
    assert len(leaves) > 30
    for at in leaves:
        changed = copy.deepcopy(whole)
        _set(changed, at, "changed")
        path.write_text(json.dumps(changed))
        with pytest.raises(lk.StoreError, match=r"record\.json"):
            read_record(path)


_HOSTILE = [
    ("kl_bound_nats", 0.015, "a bound of 0.015 nats where 0.02 were measured"),
    ("kl_bound_nats", 0.5, "and 0.1 allowed"),
    ("kl_bound_nats", True, "no number"),
    ("kl_bound_nats", "0.04", "no number"),
    ("kl_bound_nats", 10**300, "no number"),
    ("budget_nats", -1, "no number"),
    ("window", -1, "no count"),
    ("window", 1.5, "no count"),
    ("samples", 1 << 60, "no count"),
    ("fingerprint", "rev|0=bf16", "fingerprint"),
    ("policy", [], "list indices"),
    ("policy", {"revision": "r"}, "codecs"),
    ("policy", {"revision": "r", "codecs": "bf16"}, "no list"),
    ("policy", {"revision": "r", "codecs": ["bf16"] * 1025}, "no list of at most 1024"),
    ("policy", {"revision": "r", "codecs": ["../../etc/passwd"]}, "no text of the right form"),
    ("policy", {"revision": "r", "codecs": [None]}, "no text of the right form"),
    ("model", {"source": "x", "print": "zz"}, "no text of the right form"),
    ("held_out", {"steps": 1}, "has not the fields"),
    ("held_out", 7, "has not the fields"),
    ("fragility", [{"layer": 0}], "has not the fields"),
    ("fragility", {}, "no list"),
    ("library", "x" * 1001, "no text of the right form"),
    ("bytes", {"policy": 0, "bf16": 0, "kv": 0, "kv_dtype": "float32"}, "no layers"),
    ("corpus", None, "NoneType"),
]


@pytest.mark.parametrize(("field", "value", "message"), _HOSTILE, ids=[str(i) for i in range(len(_HOSTILE))])
def test_a_rightly_summed_but_senseless_record_is_refused(
    model: Model, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    path = write(tmp_path / "record.json", record_for(model).to_dict() | {field: value})
    with pytest.raises(lk.StoreError, match=message):
        read_record(path)


def test_a_field_that_is_missing_is_named(model: Model, tmp_path: Path) -> None:
    value = record_for(model).to_dict()
    del value["reason"]
    with pytest.raises(lk.StoreError, match="'reason'"):
        read_record(write(tmp_path / "record.json", value))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1, 2]", "is no larql-calibration"),
        (b"7", "is no larql-calibration"),
        (b'{"format": "larql-calibration", "version": 2}', "of version 1"),
        (b'{"format": "larql-calibration", "version": 1}', "checksum"),
        (b"[" * 200_000, "cannot be read"),
        (b'{"budget_nats": NaN}', "NaN is no number"),
        (b"9" * 100_000, "cannot be read"),
        (b" " * ((1 << 20) + 1), "larger than 1,048,576 bytes"),
    ],
    ids=range(10),
)
def test_hostile_files_are_refused_by_path(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(data)
    with pytest.raises(lk.StoreError, match=message) as caught:
        read_record(path)
    assert str(path) in str(caught.value)


def test_what_is_no_file_is_refused_at_once(model: Model, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, message in (
        (pipe, "it is no file"),
        ("/dev/zero", "it is no file"),
        (tmp_path, "directory|no file"),
        (tmp_path / "nothing.json", "No such file"),
        (f"{tmp_path}/" + "x" * 300, "too long"),
        (f"{tmp_path}/\0", "null"),
    ):
        with pytest.raises(lk.StoreError, match=message):
            lk.build_engine(f"boundary-per-layer:policy={path}", model)


# -- cost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize(
    "spec", ["markov-rs-codec", "markov-rs-codec:window=20,codec=int4", "boundary-pl:window=4"]
)
def test_the_cost_stated_is_the_ledgers(family: str, spec: str) -> None:
    model = tiny(family)
    engine = lk.build_engine(spec, model)
    name = getattr(engine.spec, "codec", "bf16")
    codecs = [row_codec(name)] * model.config.layer_count
    for length in (5, 70, 84, 85, 149, 200):
        engine.reset()
        engine.prefill([5] * length)
        listed = engine.ledger().rows()
        rows = sum(row["live"] for row in listed if row["name"].startswith("residual rows"))
        kv = sum(row["live"] for row in listed if row["name"] == "K/V rows")
        assert state_bytes(model, codecs, engine.spec.window, length) == (rows, kv), length


def wide_model(path: Path, kv_heads: int, context: int = 256) -> Model:
    """The tiny llama's sizes (hidden 64) with so many K/V heads of 16, in the bfloat16 form."""
    import transformers as tf

    sizes = tiny_models._SIZES | {"num_key_value_heads": kv_heads, "max_position_embeddings": context}
    torch.manual_seed(0)
    tiny_models.save(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)), path)
    return lk.load_model(path, dtype="bfloat16")


@pytest.mark.parametrize("name", ["markov-rs-codec", "boundary-per-layer"])
def test_engines_say_where_residual_rows_cost_more_and_where_they_win(name: str, tmp_path: Path) -> None:
    grouped = wide_model(tmp_path / "grouped", 1)  # K/V of 32 values beside rows of 64
    note = lk.build_engine(f"{name}:window=16", grouped).info.note
    assert "the rows are 100% more than plain K/V" in note
    assert "a step holds 200% more than plain K/V in bfloat16" in note
    wide = wide_model(tmp_path / "wide", 4)  # K/V of 128 values
    note = lk.build_engine(f"{name}:window=16", wide).info.note
    assert "the rows are 50% less than plain K/V" in note
    note = lk.build_engine(name, wide_model(tmp_path / "even", 2)).info.note
    assert "nothing is coded without window=N" in note
    assert "the rows are as much as plain K/V" in note
    assert lk.build_engine("standard", wide).info.note == ""


def long_context(family: str, path: Path, context: int = 1024) -> Path:
    """A copy of a tiny model with a longer context."""
    shutil.copytree(tiny_models.model_dir(family), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return path
