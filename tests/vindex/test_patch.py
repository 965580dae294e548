"""Patches: the `.vlp` format, the dense path, epochs, baking, and files that must be refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv.model.load import open_files
from larql_kv.model.vindex_edits import Patch, patch_from_json, read_patch
from larql_kv.model.vindex_source import VindexTensors
from larql_kv.vindex.down_meta import add_down_meta
from larql_kv.vindex.index import VectorIndex
from larql_kv.vindex.patch import apply_patch, bake, delete, dequantised, insert, remove_patch, update
from larql_kv.vindex.verify import verify_vindex
from tests import tiny_models
from tests.vindex.conftest import source_of

IDS = tiny_models.sample_ids(12)


def logits(path: Any) -> torch.Tensor:
    model = lk.load_model(path, dtype="float32")
    engine = lk.build_engine("standard", model)
    return engine.logits(engine.prefill(IDS))


def b64(vector: torch.Tensor) -> str:
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def save(tmp_path: Path, *operations: Any, name: str = "fact", **notes: Any) -> Path:
    path = tmp_path / f"{name}.vlp"
    path.write_bytes(Patch(name, operations, notes).to_bytes())
    return path


def patched_by_hand(tmp_path: Path, edits: dict[str, dict[int, torch.Tensor]]) -> torch.Tensor:
    """The same edits made in the Hugging Face directory's own weights, by safetensors alone."""
    import shutil

    from safetensors.torch import load_file, save_file

    directory = Path(shutil.copytree(tiny_models.model_dir("llama"), tmp_path / "by-hand"))
    tensors = load_file(directory / "model.safetensors")
    for name, rows in edits.items():
        weight = tensors[f"model.layers.{name}.weight"]
        for feature, vector in rows.items():
            if name.endswith("down_proj"):
                weight[:, feature] = vector
            else:
                weight[feature] = vector
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return logits(directory)


@pytest.mark.parametrize("format", ["stored", "f32"])
def test_the_dense_path_uses_applied_patches(own, tmp_path, format):
    vindex = own("llama", "hf", format)
    before = logits(vindex)
    gate, up, down, other = torch.randn(4, 64)
    path = save(
        tmp_path, insert(1, gate, up, down, feature=7), delete(2, 11), update(3, 90, down=other), name="three"
    )
    apply_patch(vindex, path)
    zero = torch.zeros(64)
    wanted = patched_by_hand(
        tmp_path,
        {
            "1.mlp.gate_proj": {7: gate},
            "1.mlp.up_proj": {7: up},
            "1.mlp.down_proj": {7: down},
            "2.mlp.gate_proj": {11: zero},
            "3.mlp.down_proj": {90: other},
        },
    )
    assert torch.equal(logits(vindex), wanted)
    assert not torch.equal(wanted, before)
    assert verify_vindex(vindex) == []
    remove_patch(vindex, "three")
    assert torch.equal(logits(vindex), before)
    assert not list((vindex / "patches").iterdir())


def test_quantised_layers_are_dequantised_where_they_are_patched(own, tmp_path):
    vindex = own("gemma3", "Q8_0")
    gate, up, down = torch.randn(3, 64)
    apply_patch(vindex, save(tmp_path, insert(2, gate, up, down, feature=0), delete(5, 1)))
    model = lk.load_model(vindex, dtype="float32")
    kinds = {
        name: model.tensors.get(f"layers.{layer}.{name}").kind
        for layer, names in ((2, ("gate", "up", "down")), (5, ("gate", "up", "down")))
        for name in names
    }
    assert kinds == {"gate": "F32", "up": "Q8_0", "down": "F32"}  # of layer 5; the up row is the base's
    base = lk.load_model(source_of("gemma3", "Q8_0", tmp_path), dtype="float32")
    held, stored = model.tensors.get("layers.2.up").dequantize(), base.tensors.get("layers.2.up").dequantize()
    np.testing.assert_array_equal(held[0], up.numpy())
    np.testing.assert_array_equal(held[1:], stored[1:])
    np.testing.assert_array_equal(model.tensors.get("layers.2.down").dequantize()[:, 0], down.numpy())
    assert dequantised(model.tensors.base, model.tensors.overlay) == [
        "layers.2.gate",
        "layers.2.up",
        "layers.2.down",
        "layers.5.gate",
        "layers.5.down",
    ]


def test_later_patches_win_and_the_epoch_only_rises(own, tmp_path):
    vindex = own("llama", "hf")
    first, second = torch.randn(2, 64)
    assert VectorIndex.open(vindex).epoch == 0
    apply_patch(vindex, save(tmp_path, insert(1, first, feature=3), name="a"))
    apply_patch(vindex, save(tmp_path, update(1, 3, gate=second), name="b"))
    index = VectorIndex.open(vindex)
    assert torch.equal(index.override(1, 3).gate, second)
    assert (index.epoch, [patch.name for patch in index.patches]) == (2, ["a", "b"])
    both = index.print
    with pytest.raises(lk.StoreError, match="'b' is applied already"):
        apply_patch(vindex, save(tmp_path, delete(0, 0), name="b"))
    remove_patch(vindex, "b")
    index = VectorIndex.open(vindex)
    assert torch.equal(index.override(1, 3).gate, first)
    assert index.epoch == 3
    remove_patch(vindex, "a")
    assert VectorIndex.open(vindex).epoch == 4
    assert VectorIndex.open(vindex).print == index.base_print
    apply_patch(vindex, save(tmp_path, update(1, 3, gate=second), name="b"))
    apply_patch(vindex, save(tmp_path, insert(1, first, feature=3), name="a"))
    assert VectorIndex.open(vindex).print != both  # another order, another model


def test_an_index_over_a_patched_model_has_its_edits_once(own, tmp_path):
    vindex = own("llama", "hf")
    gate = torch.randn(64)
    apply_patch(vindex, save(tmp_path, insert(1, gate, feature=3)))
    model = lk.load_model(vindex, dtype="float32")
    for index in (VectorIndex.of_model(model), VectorIndex.of_model(model, vindex)):
        assert torch.equal(index.override(1, 3).gate, gate)
        base = lk.load_model(tiny_models.model_dir("llama"))
        np.testing.assert_array_equal(index.gate(1).data, base.tensors.get("layers.1.gate").data)
        assert index.print == VectorIndex.open(vindex).print


@pytest.mark.parametrize("source", [("llama", "hf", "stored"), ("llama", "hf", "f32"), ("gemma3", "Q8_0")])
def test_bake_keeps_gate_up_and_down(own, tmp_path, source):
    vindex = own(*source)
    add_down_meta(vindex, 4)
    gate, up, down = torch.randn(3, 64)
    apply_patch(vindex, save(tmp_path, insert(1, gate, up, down, feature=7), delete(2, 5)))
    index = VectorIndex.open(vindex)
    manifest = bake(vindex, tmp_path / "baked")
    assert manifest.print == index.print
    assert torch.equal(logits(tmp_path / "baked"), logits(vindex))
    baked = VectorIndex.open(tmp_path / "baked")
    assert not baked.patches
    for name, vector in (("gate", gate), ("up", up), ("down", down)):
        row = getattr(baked, name)(1).dequantize()[7]
        np.testing.assert_array_equal(row, vector.numpy(), err_msg=name)
    assert verify_vindex(tmp_path / "baked") == []
    assert baked.top_tokens(1, 6) == index.top_tokens(1, 6)
    assert baked.top_tokens(1, 7) != VectorIndex.open(vindex)._top_tokens(1, 7)  # made anew
    with pytest.raises(lk.StoreError, match="nothing to bake"):
        bake(tmp_path / "baked", tmp_path / "again")
    with pytest.raises(lk.StoreError, match="another model"):
        bake(vindex, own("qwen2", "hf", name="other"))


def test_a_bake_that_was_stopped_in_its_down_meta_goes_on(own, tmp_path, monkeypatch):
    from larql_kv.vindex import down_meta

    vindex = own("llama", "hf")
    add_down_meta(vindex, 4)
    apply_patch(vindex, save(tmp_path, delete(2, 5)))
    store, calls = down_meta._store, []

    def stops(*args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args[1])
        return store(*args)

    monkeypatch.setattr(down_meta, "_store", stops)
    with pytest.raises(KeyboardInterrupt):
        bake(vindex, tmp_path / "baked")
    monkeypatch.setattr(down_meta, "_store", store)
    bake(vindex, tmp_path / "baked")
    assert VindexTensors(tmp_path / "baked").manifest.down_meta.layers == (0, 1, 2, 3)
    assert verify_vindex(tmp_path / "baked") == []


def test_a_patch_that_would_not_be_read_again_is_not_applied(own, tmp_path, monkeypatch):
    from larql_kv.vindex import patch

    vindex = own("llama", "hf")
    path = save(tmp_path, insert(1, torch.ones(64)))
    monkeypatch.setattr(patch, "MAX_JSON_BYTES", 100)
    with pytest.raises(lk.StoreError, match="at most 100 are read"):
        apply_patch(vindex, path)
    assert not VectorIndex.open(vindex).patches


def test_many_inserts_look_at_a_layer_once(own, tmp_path, monkeypatch):
    index = VectorIndex.open(own("llama", "hf"))
    calls, norms = [], VectorIndex.gate_norms
    monkeypatch.setattr(
        VectorIndex, "gate_norms", lambda self, layer: calls.append(layer) or norms(self, layer)
    )
    placed = index.placed(Patch("p", tuple(insert(1, torch.ones(64)) for _ in range(20))))
    weakest = torch.argsort(norms(index, 1), stable=True)[:20].tolist()
    assert [op.feature for op in placed.operations] == weakest
    assert calls == [1]


def test_the_file_is_json_with_base64_vectors(tmp_path):
    config = open_files(tiny_models.model_dir("llama")).config
    gate, down = torch.randn(2, 64)
    path = save(
        tmp_path,
        insert(1, gate, None, down, None, (" tea", 9, 4.25), entity="Elmsea", target="tea"),
        delete(0, 3, "wrong"),
        author="me",
        tags=["test"],
    )
    value = json.loads(path.read_text())
    assert (value["version"], value["author"]) == (1, "me")
    assert value["operations"][0] == {
        "op": "insert", "layer": 1, "feature": None, "entity": "Elmsea", "target": "tea",
        "gate_vector_b64": b64(gate), "down_vector_b64": b64(down),
        "down_meta": {"t": " tea", "i": 9, "c": 4.25},
    }  # fmt: skip
    assert value["operations"][1] == {"op": "delete", "layer": 0, "feature": 3, "reason": "wrong"}
    again = read_patch(path, config)
    assert again.digest == Patch("fact", again.operations).digest
    assert json.loads(again.to_bytes()) == value


def test_what_an_edited_feature_writes(own, tmp_path):
    vindex = own("llama", "hf")
    add_down_meta(vindex, 3)
    known = VectorIndex.open(vindex).top_tokens(1, 8)
    gate, down = torch.randn(2, 64)
    ops = (
        insert(1, gate, None, down, 7, (" tea", 9, 4.0)),
        update(1, 8, gate=gate),
        update(1, 9, down=down),
        update(1, 10, writes=("x", 5, 1.0)),
    )
    apply_patch(vindex, save(tmp_path, *ops))
    index = VectorIndex.open(vindex)
    assert index.top_tokens(1, 7) == [(9, 4.0)]
    assert index.top_tokens(1, 8) == known  # its down vector is the base's
    assert index.top_tokens(1, 9) == []  # nobody said
    assert index.top_tokens(1, 10) == [(5, 1.0)]


GATE = b64(torch.ones(64))
BAD = [
    ({"op": "insert", "layer": 4, "feature": 0, "gate_vector_b64": GATE}, "layer '4' is not one of 0 to 3"),
    ({"op": "insert", "layer": True, "feature": 0, "gate_vector_b64": GATE}, "layer 'True'"),
    ({"op": "delete", "layer": 0, "feature": 96}, "feature '96' is not one of 0 to 95"),
    ({"op": "delete", "layer": 0}, "feature 'None'"),
    ({"op": "delete", "layer": 0, "feature": 1, "gate_vector_b64": GATE}, "takes no vectors"),
    ({"op": "update", "layer": 0, "feature": 1}, "needs a vector"),
    ({"op": "insert", "layer": 0, "feature": 1}, "needs a gate_vector_b64"),
    ({"op": "insert", "layer": 0, "gate_vector_b64": "@@@"}, "no base64"),
    ({"op": "insert", "layer": 0, "gate_vector_b64": 7}, "holds 0 bytes"),
    ({"op": "insert", "layer": 0, "gate_vector_b64": b64(torch.ones(63))}, "expected 64 float32 values"),
    ({"op": "insert", "layer": 0, "gate_vector_b64": b64(torch.full((64,), torch.nan))}, "not finite"),
    ({"op": "insert_knn", "layer": 0}, "'insert_knn' edits a store of keys"),
    ({"op": "DeleteKnn", "entity": "x"}, "'deleteknn' edits a store of keys"),
    ({"op": "call"}, "unknown op 'call'"),
    ("insert", "unknown op 'None'"),
    ({"op": "update", "layer": 0, "feature": 1, "down_meta": {"t": "x"}}, "down_meta must hold"),
    ({"op": "update", "layer": 0, "feature": 1, "down_meta": {"t": "x", "i": 128, "c": 1}}, "below 128"),
    ({"op": "update", "layer": 0, "feature": 1, "down_meta": {"t": "x", "i": 1, "c": "1"}}, "finite number"),
]


@pytest.mark.parametrize(("operation", "message"), BAD)
def test_bad_operations_are_refused_by_name(operation, message):
    config = open_files(tiny_models.model_dir("llama")).config
    good = {"op": "delete", "layer": 0, "feature": 1}
    with pytest.raises(lk.StoreError, match=message) as caught:
        patch_from_json({"version": 1, "operations": [good, operation]}, config, "p", "p.vlp")
    assert "p.vlp: operation 1" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "version 'None'"),
        ({"version": 2, "operations": []}, "version '2' is not supported"),
        ({"version": 1}, "operations must be"),
        ({"version": 1, "operations": []}, "operations must be"),
    ],
)
def test_bad_patches_are_refused(value, message):
    config = open_files(tiny_models.model_dir("llama")).config
    with pytest.raises(lk.StoreError, match=message):
        patch_from_json(value, config, "p", "p.vlp")
    with pytest.raises(lk.StoreError, match="no patch name"):
        patch_from_json(value, config, "../p", "p.vlp")


def test_a_refused_patch_changes_nothing(own, tmp_path):
    vindex = own("llama", "hf")
    before = sorted(path.name for path in vindex.iterdir())
    path = tmp_path / "bad.vlp"
    path.write_text("{")
    with pytest.raises(lk.StoreError, match="not valid JSON"):
        apply_patch(vindex, path)
    with pytest.raises(lk.StoreError, match="cannot be read"):
        apply_patch(vindex, tmp_path / "none.vlp")
    other = save(tmp_path, delete(0, 1), base_checksum="f" * 64)
    with pytest.raises(lk.StoreError, match="was made for the base 'ffffffffffffffff'"):
        apply_patch(vindex, other)
    assert sorted(path.name for path in vindex.iterdir() if path.name != ".lock") == before
    assert apply_patch(vindex, other, "mine", any_base=True).name == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "patches.json").write_text("{}"), "is not a list"),
        (lambda d: (d / "patches.json").write_text("["), "not valid JSON"),
        (lambda d: (d / "patches" / "fact.vlp").unlink(), "cannot be read"),
        (lambda d: edit_state(d, epoch=-1), "epoch '-1'"),
        (lambda d: edit_state(d, patches=[{"name": "../../x"}]), "no patch name"),
        (lambda d: edit_state(d, patches=[{"name": "fact", "digest": "0"}]), "was changed after"),
    ],
)
def test_broken_state_of_patches(own, tmp_path, change, message):
    vindex = own("llama", "hf")
    apply_patch(vindex, save(tmp_path, delete(0, 1)))
    change(vindex)
    with pytest.raises(lk.StoreError, match=message):
        lk.load_model(vindex)
    assert [problem.file for problem in verify_vindex(vindex)] == ["patches.json"]


def edit_state(directory: Path, **values: Any) -> None:
    path = directory / "patches.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_an_applied_insert_without_a_feature_is_refused(own, tmp_path):
    vindex = own("llama", "hf")
    placed = apply_patch(vindex, save(tmp_path, insert(0, torch.ones(64))))
    assert placed.operations[0].feature is not None
    unplaced = Patch("fact", (insert(0, torch.ones(64)),))
    (vindex / "patches" / "fact.vlp").write_bytes(unplaced.to_bytes())
    edit_state(vindex, patches=[{"name": "fact", "digest": unplaced.digest}])
    with pytest.raises(lk.StoreError, match="without a feature"):
        VectorIndex.open(vindex)
