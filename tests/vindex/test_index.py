"""`VectorIndex` against plain formulas: scores, ranking, ties, edits, prints, approximate search."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv.model.vindex_edits import Patch
from larql_kv.vindex.index import VectorIndex, strongest
from larql_kv.vindex.patch import delete, insert, update
from larql_kv.vindex.store import model_print
from tests import tiny_models
from tests.vindex.conftest import source_of


@pytest.fixture(scope="module")
def model() -> lk.Model:
    return lk.load_model(tiny_models.model_dir("llama"), dtype="float32")


@pytest.fixture
def index(model) -> VectorIndex:
    return VectorIndex.of_model(model)


def rows(model: lk.Model, name: str) -> np.ndarray:
    return model.tensors.get(name).dequantize().astype(np.float64)


def test_scores_and_knn_are_those_of_the_formula(model, index):
    x = torch.randn(3, 64)
    wanted = x.double().numpy() @ rows(model, "layers.1.gate").T
    scores = index.gate_scores(1, x)
    np.testing.assert_allclose(scores.numpy(), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(index.gate_scores(1, x[1:2])[0], scores[1])  # a row's bits are its own
    for top_k in (1, 7, 95, 96, 1000):
        found = index.gate_knn(1, x[0], top_k)
        order = np.argsort(-np.abs(scores[0].numpy()), kind="stable")[:top_k]
        assert found.features.tolist() == order.tolist()
        assert torch.equal(found.scores, scores[0][found.features])
    assert (found.scores < 0).any()  # ranked by size, signs kept


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
def test_ties_go_to_the_lower_id(top_k):
    scores = torch.tensor([1.0, -3.0, 3.0, 2.0, -3.0])
    assert strongest(scores, top_k).features.tolist() == [1, 2, 4, 3, 0][:top_k]


def test_rows_are_features(model, index):
    assert (index.layer_count, index.hidden, index.features(0)) == (4, 64, 96)
    np.testing.assert_array_equal(
        index.down(2).dequantize(), model.tensors.get("layers.2.down").dequantize().T
    )
    np.testing.assert_array_equal(index.up(2).data, model.tensors.get("layers.2.up").data)
    assert index.down(2) is index.down(2)


def test_prints_know_the_model(shared, model, index, tmp_path):
    print_ = index.print
    assert len(print_) == 64
    assert VectorIndex.of_model(lk.load_model(tiny_models.model_dir("llama"))).print == print_
    assert VectorIndex.open(shared("llama", "hf")).print == print_
    assert VectorIndex.open(shared("llama", "hf", "f32")).print != print_
    for family in ("llama-linear", "llama-bias"):  # another RoPE, more tensors
        assert VectorIndex.of_model(lk.load_model(tiny_models.model_dir(family))).print != print_
    gguf = lk.load_model(source_of("llama", "F32", tmp_path))
    assert VectorIndex.of_model(gguf).print != print_  # GGUF metadata give another config
    changed = lk.load_model(tiny_models.model_dir("llama"))
    data = changed.tensors.get("layers.3.v").data.copy()
    data[0, 0] ^= 1

    class Changed:
        def __contains__(self, name):
            return name in changed.tensors

        def get(self, name):
            raw = changed.tensors.get(name)
            return raw if name != "layers.3.v" else type(raw)(raw.name, raw.kind, raw.shape, data)

    assert model_print(changed.config, Changed()) != print_


def test_a_vindex_of_this_model_or_none(shared, model):
    assert VectorIndex.of_model(model, shared("llama", "hf")).print == VectorIndex.of_model(model).print
    assert VectorIndex.of_model(model, shared("llama", "hf", "bf16")).gate(0).kind == "BF16"
    with pytest.raises(lk.StoreError, match="is of another model"):
        VectorIndex.of_model(model, shared("qwen2", "hf"))
    with pytest.raises(lk.StoreError, match="is no vindex"):
        VectorIndex.open(tiny_models.model_dir("llama"))
    loaded = lk.load_model(shared("llama", "hf"))
    assert VectorIndex.of_model(loaded).print == VectorIndex.of_model(model).print


def test_edits_are_laid_over(model, index):
    gate, up, down = torch.randn(3, 64)
    x = torch.randn(2, 64)
    before = index.gate_scores(2, x)
    first = index.print
    index.apply(Patch("one", (insert(2, gate, up, down, feature=5), delete(2, 9))))
    scores = index.gate_scores(2, x)
    np.testing.assert_allclose(scores[:, 5].numpy(), (x @ gate).numpy(), rtol=1e-5)
    assert (scores[:, 9] == 0).all()
    others = [feature for feature in range(96) if feature not in (5, 9)]
    assert torch.equal(scores[:, others], before[:, others])
    assert index.has_overrides_at(2)
    assert not index.has_overrides_at(1)
    edit = index.override(2, 5)
    assert edit is not None
    assert torch.equal(edit.down, down)
    assert index.override(2, 9).deleted
    assert index.override(2, 4) is None
    assert set(index.overrides_at(2)) == {5, 9}
    assert (index.epoch, len(index.patches)) == (1, 1)
    assert index.print != first
    np.testing.assert_array_equal(index.gate(2).data, model.tensors.get("layers.2.gate").data)

    later = torch.randn(64)
    index.apply(Patch("two", (update(2, 5, gate=later), update(2, 9, up=up))))
    assert torch.equal(index.override(2, 5).gate, later)
    assert torch.equal(index.override(2, 5).up, up)  # an update keeps the other parts
    assert index.override(2, 9).deleted
    assert index.gate_scores(2, x)[0, 5] == pytest.approx(float(x[0] @ later), rel=1e-4)
    index.remove("two")
    assert torch.equal(index.override(2, 5).gate, gate)
    index.remove("one")
    assert torch.equal(index.gate_scores(2, x), before)
    assert (index.epoch, index.print) == (4, first)
    with pytest.raises(lk.StoreError, match="no patch named 'one' is applied; applied: none"):
        index.remove("one")


def test_a_deleted_feature_is_revived_by_an_insert(index):
    gate = torch.randn(64)
    index.apply(Patch("a", (delete(0, 3), insert(0, gate, feature=3))))
    assert not index.override(0, 3).deleted
    assert index.override(0, 3).down is None  # the base's own again


def test_an_insert_takes_the_weakest_feature_that_is_free(model, index):
    norms = np.linalg.norm(rows(model, "layers.1.gate"), axis=1)
    order = np.argsort(norms, kind="stable").tolist()
    np.testing.assert_allclose(index.gate_norms(1).numpy(), norms, rtol=1e-5)
    gate = torch.randn(64)
    ops = (insert(1, gate), insert(1, gate), delete(1, order[2]), insert(1, gate))
    placed = index.apply(Patch("p", ops))
    assert [op.feature for op in placed.operations] == [order[0], order[1], order[2], order[3]]
    more = index.apply(Patch("q", (insert(1, gate),)))
    assert more.operations[0].feature == order[4]
    with pytest.raises(lk.StoreError, match="'q' is applied already"):
        index.apply(more)
    with pytest.raises(lk.StoreError, match="no feature left"):
        index.placed(Patch("r", (insert(1, gate),) * 97))


def test_bad_questions(index):
    for bad in (-1, 4):
        with pytest.raises(lk.ModelError, match="not in the model's layers 0 to 3"):
            index.gate(bad)
    with pytest.raises(lk.ModelError, match="top_k must be at least 1"):
        index.gate_knn(0, torch.zeros(64), 0)
    with pytest.raises(lk.ModelError, match=r"want float32 \(n, 64\)"):
        index.gate_scores(0, torch.zeros(2, 63))
    with pytest.raises(lk.ModelError, match="feature 96"):
        index.top_tokens(0, 96)
    assert index.top_tokens(0, 1) == []
    with pytest.raises(lk.ModelError, match="cannot be held as 'q4_0'"):
        VectorIndex(index.config, None, lambda: "", down_form="q4_0")  # type: ignore[arg-type]


def test_the_approximate_index_is_measured_against_the_exact_one(index):
    pytest.importorskip("usearch")
    from larql_kv.vindex.approximate import ApproximateIndex, GraphSettings, measure_recall

    queries = torch.randn(20, 64)
    found = measure_recall(index, 1, queries, 10)
    assert found.recall > 0.9
    assert found.to_dict()["top_k"] == 10
    poor = measure_recall(index, 1, queries, 10, GraphSettings(2, 2, 1))
    assert poor.recall < found.recall  # the measure can tell
    assert poor.worst <= poor.recall
    every = ApproximateIndex(index, 1).knn(queries[0], 500)
    assert sorted(every.features.tolist()) == list(range(96))
    gate = 50 * torch.randn(64)
    index.apply(Patch("p", (insert(1, gate, feature=3),)))
    assert ApproximateIndex(index, 1).knn(-gate, 1).features.tolist() == [3]  # edits count, and so do signs
    with pytest.raises(lk.StoreError, match="at least one query"):
        measure_recall(index, 1, queries[:0], 10)


def test_without_usearch_the_error_says_what_to_install(index, monkeypatch):
    from larql_kv.vindex.approximate import ApproximateIndex

    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.startswith("usearch"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(lk.StoreError, match=r"larql-kv\[knn\]"):
        ApproximateIndex(index, 0)
