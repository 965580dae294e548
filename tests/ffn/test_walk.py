"""`WalkFfn` against the formula in float64: families, formats, patches, the dense rewrite, engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv.errors import BackendUnavailable, InvariantViolation, ModelError, SpecError
from larql_kv.ffn.base import DenseFfn, LayerFfn, NullFfn
from larql_kv.ffn.trace import RecordingFfn, layer_trace, written_tokens
from larql_kv.ffn.walk import WalkFfn, is_dense
from larql_kv.model.vindex_source import PatchedTensors
from tests import tiny_models
from tests.ffn.patched import edit, index_of, patch, reference, vector
from tests.models import tiny

FAMILIES = ("llama", "llama-bias", "llama-odd", "gemma3", "qwen3")


def close(given: torch.Tensor, expected: np.ndarray) -> bool:
    return bool(np.abs(given.double().numpy() - expected).max() < 2e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("top_k", [1, 10, 70])
def test_the_formula(family, top_k):
    model = tiny(family)
    walk = WalkFfn(model, index_of(model), top_k)
    x = torch.randn(5, model.config.hidden)
    for layer in (0, model.config.layer_count - 1):
        expected = reference(model, layer, x, top_k)
        rows = walk.forward(layer, x)
        assert close(rows, expected)
        for i in range(5):  # a step gives the bits of a prompt
            assert torch.equal(walk.forward(layer, x[i : i + 1])[0], rows[i])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_features_are_the_dense_ffn(family):
    """With the rewrite to the bit, and close to it when a patch that changes nothing forces the walk."""
    model = tiny(family)
    index = index_of(model)
    x = torch.randn(3, model.config.hidden)
    dense = DenseFfn(model).forward(1, x)
    assert torch.equal(WalkFfn(model, index).forward(1, x), dense)
    up = model.tensors.get("layers.1.up").dequantize()[3]
    patch(index, edit("update", 1, 3, up=up))
    assert WalkFfn(model, index).path(1).path == "sparse with patches"
    assert close(WalkFfn(model, index).forward(1, x), dense.double().numpy())


def test_from_four_fifths_on_a_layer_is_dense():
    assert [is_dense(k, 10240) for k in (8191, 8192, 8193, None)] == [False, True, True, True]
    assert [is_dense(k, 96) for k in (76, 77)] == [False, True]
    model = tiny("llama")
    index = index_of(model)
    assert [path.path for path in WalkFfn(model, index, [76, 77, None, 1000]).paths()] == [
        "sparse",
        "dense",
        "dense",
        "dense",
    ]
    assert "k=77 is 4/5" in WalkFfn(model, index, 77).path(0).why
    assert WalkFfn(model, index).path(0).why == ""
    x = torch.randn(1, 64)
    assert torch.equal(WalkFfn(model, index, 77).forward(0, x), DenseFfn(model).forward(0, x))
    assert not torch.equal(WalkFfn(model, index, 76).forward(0, x), DenseFfn(model).forward(0, x))


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_every_format_walks_and_takes_patches(tmp_path, quant):
    """Patches reach the walk in every stored format (the original's quantised path ignored them)."""
    model = lk.load_model(tiny_models.write_tiny_gguf("llama", tmp_path / "m.gguf", quant), dtype="float32")
    index = index_of(model)
    x = torch.randn(2, 64)
    walk = WalkFfn(model, index, 20)
    before = walk.forward(2, x)
    assert close(before, reference(model, 2, x, 20))
    new = {"gate": vector(64, 1, 3), "up": vector(64, 2), "down": vector(64, 3)}
    patch(index, edit("insert", 2, 5, **new))
    assert close(walk.forward(2, x), reference(model, 2, x, 20, {5: new}))
    index.remove("p")
    assert torch.equal(walk.forward(2, x), before)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("top_k", [8, 90, None])
@pytest.mark.parametrize("parts", [("gate",), ("up",), ("down",), ("up", "down"), ("gate", "up", "down")])
def test_patches_force_the_sparse_path(family, top_k, parts):
    model = tiny(family)
    index, hidden = index_of(model), model.config.hidden
    walk = WalkFfn(model, index, top_k)
    x = torch.randn(3, hidden)
    edits = {f: {part: vector(hidden, 10 * f + i, 2.0) for i, part in enumerate(parts)} for f in (0, 41, 95)}
    patch(index, *[edit("update", 1, feature, **vectors) for feature, vectors in edits.items()])
    assert close(walk.forward(1, x), reference(model, 1, x, top_k, edits))
    assert torch.equal(walk.forward(1, x[1:2])[0], walk.forward(1, x)[1])
    assert walk.path(1).path == "sparse with patches"
    assert walk.path(0).path == ("dense" if top_k in (90, None) else "sparse")
    assert torch.equal(walk.forward(0, x), WalkFfn(model, index_of(model), top_k).forward(0, x))


def test_a_deleted_feature_adds_nothing():
    model = tiny("llama")
    index = index_of(model)
    x = torch.randn(1, 64)
    strongest = WalkFfn(model, index).trace(0, x[0], 1)[0].feature
    patch(index, edit("delete", 0, strongest))
    zero = {"gate": np.zeros(64), "down": np.zeros(64)}
    assert close(WalkFfn(model, index, 10).forward(0, x), reference(model, 0, x, 10, {strongest: zero}))
    assert strongest not in [item.feature for item in WalkFfn(model, index).trace(0, x[0], 95)]


def test_patches_and_biases():
    model = tiny("llama-bias")
    index = index_of(model)
    x = torch.randn(2, 64)
    new = {"gate": vector(64, 1, 4), "down": vector(64, 2)}
    patch(index, edit("update", 0, 9, **new), edit("update", 0, 11, gate=new["gate"]))
    expected = reference(model, 0, x, 30, {9: new, 11: {"gate": new["gate"]}})
    assert close(WalkFfn(model, index, 30).forward(0, x), expected)


def test_rows_that_are_not_contiguous():
    model = tiny("llama")
    walk = WalkFfn(model, index_of(model), 20)
    x = torch.randn(64, 3).T
    assert torch.equal(walk.forward(0, x), walk.forward(0, x.contiguous()))


def test_bad_arguments():
    model, index = tiny("llama"), index_of(tiny("llama"))
    for top_k, says in ((0, "at least 1"), ([1, 2], "2 layers"), ([1, 2, 3, -4], "-4"), (True, "True")):
        with pytest.raises(SpecError, match=says):
            WalkFfn(model, index, top_k)
    with pytest.raises(ModelError, match="another model"):
        WalkFfn(tiny("llama-odd"), index)
    with pytest.raises(BackendUnavailable, match="device 'cpu'"):
        WalkFfn(_elsewhere(model), index)


def _elsewhere(model):
    from dataclasses import replace

    class Decoder:
        name = "cuda"

    return replace(model, decoder=Decoder())


# -- with engines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["standard", "no-cache", "markov-rs"])
def test_engines_use_the_walk(spec):
    model = tiny("gemma3")
    ids = tiny_models.sample_ids(20)
    walk = WalkFfn(model, index_of(model), 20)
    engine = lk.build_engine(spec, model, ffn=walk)
    whole = engine.prefill_rows(ids)
    steps = engine.fresh()
    steps.prefill(ids[:7])
    for token, expected in zip(ids[7:], whole[7:], strict=True):
        assert torch.equal(steps.decode_step(token)[0], expected)
    assert not torch.equal(whole, lk.build_engine(spec, model).prefill_rows(ids))


def test_rows_of_two_ffns_are_not_mixed():
    model = tiny("llama")
    index = index_of(model)
    engine = lk.build_engine("standard", model, ffn=WalkFfn(model, index, 20))
    engine.prefill([5, 6, 7])
    with engine.using(WalkFfn(model, index, 20)):
        engine.decode_step(8)
    for other in (WalkFfn(model, index, 21), DenseFfn(model), NullFfn()):
        with engine.using(other), pytest.raises(lk.InvariantViolation):
            engine.decode_step(8)


def test_equal_is_what_computes_the_same():
    model = tiny("llama")
    index, twin = index_of(model), index_of(model)
    walk = WalkFfn(model, index, 20)
    assert walk == WalkFfn(model, twin, [20] * 4)
    assert hash(walk) == hash(WalkFfn(model, twin, 20))
    assert walk != WalkFfn(model, index, 21)
    assert walk != WalkFfn(tiny("gemma3"), index_of(tiny("gemma3")), 20)
    assert walk == WalkFfn(model, index, 20).with_l1_cache(mode="exact")
    assert walk != WalkFfn(model, index, 20).with_l1_cache()  # answers by what it has seen
    # All of it dense is the dense FFN, and so is the next K above.
    whole = WalkFfn(model, index)
    assert whole == DenseFfn(model)
    assert DenseFfn(model) == whole == WalkFfn(model, index, 90)
    assert hash(whole) == hash(DenseFfn(model))
    assert whole.in_graph(model.decoder)
    patch(twin, edit("update", 1, 3, up=vector(64, 1)))
    assert walk != WalkFfn(model, twin, 20)
    assert WalkFfn(model, twin) != whole
    assert WalkFfn(model, twin) != DenseFfn(model)
    assert not WalkFfn(model, twin).in_graph(model.decoder)


def test_names_and_saved_bytes():
    model = tiny("llama")
    index = index_of(model)
    assert WalkFfn(model, index).name == "walk:k=none"
    assert WalkFfn(model, index, 5).name == "walk:k=5"
    assert WalkFfn(model, index, [5, 6, 7, None]).name == "walk:k=..."
    assert WalkFfn(model, index).saved_bytes(0) == 0
    # float32: up and down rows of 96 - 5 features are not read.
    packed = 128 * 64 * 4 - 96 * 64 * 4  # padding of the packed gate to a block of 64 rows
    assert WalkFfn(model, index, 5).saved_bytes(0) == 2 * (96 - 5) * 64 * 4 - packed


# -- looking -----------------------------------------------------------------------------------------------


def test_the_trace_is_by_gate_score():
    model = tiny("gemma3")
    index = index_of(model)
    walk = WalkFfn(model, index, 30)
    x = torch.randn(64)
    found = walk.trace(2, x, 12)
    knn = index.gate_knn(2, x, 12)
    assert [item.feature for item in found] == knn.features.tolist()
    assert torch.allclose(torch.tensor([item.score for item in found]), knn.scores)
    assert len(walk.trace(2, x, 50)) == 30
    # Activations are what the features multiply their down vectors by.
    everything = walk.trace(2, x, 30)
    downs = walk.down_rows(2, [item.feature for item in everything])
    summed = torch.tensor([item.activation for item in everything]) @ downs
    assert torch.allclose(summed, walk.forward(2, x[None])[0], atol=1e-5)


def test_the_trace_follows_patches():
    model = tiny("llama")
    index = index_of(model)
    x = torch.randn(64)
    new = {"gate": 50 * x.numpy(), "up": vector(64, 1), "down": vector(64, 2)}
    patch(index, edit("insert", 1, 17, **new))
    top = WalkFfn(model, index, 30).trace(1, x, 3)[0]
    assert top.feature == 17
    assert top.score == pytest.approx(float(50 * x @ x), rel=1e-5)
    assert top.activation == pytest.approx(
        float(50 * x @ x) * float(torch.from_numpy(new["up"]) @ x), rel=1e-4
    )
    assert torch.equal(WalkFfn(model, index).down_rows(1, [17])[0], torch.from_numpy(new["down"]))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
def test_written_tokens_are_those_of_the_vindex(family):
    from larql_kv.vindex import down_meta

    model = tiny(family)
    downs = WalkFfn(model, index_of(model)).down_rows(1, [3, 50])
    expected = down_meta.written_tokens(model.config, model.tensors, 1, downs, 5)
    for at, written in enumerate(written_tokens(model, 1, downs, 5)):
        assert [token.id for token in written] == expected.ids[at].tolist()
        scores = torch.tensor([token.score for token in written])
        assert torch.allclose(scores, expected.scores[at], rtol=2e-3, atol=1e-4)


def test_layer_trace_prefers_what_the_vindex_knows(monkeypatch):
    model = tiny("llama")
    index = index_of(model)
    walk = WalkFfn(model, index, 30)
    x = torch.randn(64)
    first, second = (item.feature for item in walk.trace(0, x, 2))
    known = {first: [(4, 2.5), (9, 1.0), (1, 0.5)], second: []}
    monkeypatch.setattr(index, "top_tokens", lambda layer, feature: known[feature])
    found = layer_trace(walk, 0, x, 2, 2)
    assert found[0][1] == [(4, 2.5), (9, 1.0)]
    assert found[1][1] == written_tokens(model, 0, walk.down_rows(0, [second]), 2)[0]
    assert layer_trace(walk, 0, x, 2, 0)[1][1] == []


def test_recording_changes_nothing():
    model = tiny("llama")
    walk = WalkFfn(model, index_of(model), 20)
    recorded = RecordingFfn(walk)
    ids = tiny_models.sample_ids(9)
    hidden = lk.build_engine("standard", model, ffn=recorded).prefill(ids)
    assert torch.equal(hidden, lk.build_engine("standard", model, ffn=walk).prefill(ids))
    assert set(recorded.inputs) == {0, 1, 2, 3}
    x = torch.randn(2, 64)
    recorded.forward(1, x)
    assert torch.equal(recorded.inputs[1], x[1])
    assert recorded == RecordingFfn(walk) != RecordingFfn(DenseFfn(model))
    assert hash(recorded) == hash(RecordingFfn(walk))
    assert (recorded.name, recorded.path(0), recorded.saved_bytes(0)) == (
        *(walk.name, walk.path(0), walk.saved_bytes(0)),
    )
    assert recorded.cache_stats() == []
    assert not recorded.in_graph(model.decoder)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_patch_in_mid_sequence_is_not_mixed_in(wrapped):
    """The FFN is the same object before and after: its mark is what tells the rows apart."""
    model = tiny("llama")
    index = index_of(model)
    walk = WalkFfn(model, index, 20)
    ffn = LayerFfn([DenseFfn(model), *[RecordingFfn(walk)] * 3], "mixed") if wrapped else walk
    engine = lk.build_engine("standard", model, ffn=ffn)
    ids = tiny_models.sample_ids(6)
    engine.prefill(ids)
    forked = engine.fork()
    patch(index, edit("update", 1, 3, down=vector(64, 5)))
    for held in (engine, forked):
        with pytest.raises(InvariantViolation, match=r"its patches.*reset\(\) first"):
            held.decode_step(1)
        with pytest.raises(InvariantViolation, match="has changed"):
            held.trim(3)
    index.remove("p")
    engine.decode_step(1)  # as before: nothing was run in between
    patch(index, edit("update", 1, 3, down=vector(64, 5)))
    engine.reset()
    engine.prefill(ids)
    engine.decode_step(1)
    index.remove("p")
    with pytest.raises(InvariantViolation, match="has changed"):
        engine.decode_step(1)
    assert ffn.mark is None


def test_dense_layers_loaded_with_other_patches_are_refused():
    base = tiny("llama")
    edited = index_of(base)
    patch(edited, edit("update", 2, 5, up=vector(64, 7)))
    model = replace(base, tensors=PatchedTensors(base.tensors, edited.overlay))  # type: ignore[arg-type]
    own, bare = index_of(model), index_of(base)
    assert own.patches == edited.patches
    WalkFfn(model, bare, 20)  # sparse layers read the index's rows
    for top_k in (None, [20, 20, 90, 20]):
        with pytest.raises(ModelError, match=r"layer 2 of .* was loaded with patches"):
            WalkFfn(model, bare, top_k)
    walk = WalkFfn(model, own)
    x = torch.randn(1, 64)
    walk.forward(2, x)
    own.remove("p")
    walk.forward(1, x)
    with pytest.raises(ModelError, match=r"layer 2 of .* was loaded with patches"):
        walk.forward(2, x)
