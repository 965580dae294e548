"""Down-meta against the formula in float64; it goes on where it was stopped."""

from __future__ import annotations

import json

import numpy as np
import pytest

import larql_kv as lk
from larql_kv.vindex import down_meta as module
from larql_kv.vindex.down_meta import add_down_meta
from larql_kv.vindex.index import VectorIndex
from larql_kv.vindex.verify import verify_vindex, vindex_facts


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [8192, 50])
def test_tokens_are_those_of_the_formula(own, monkeypatch, family, chunk):
    monkeypatch.setattr(module, "_VOCABULARY_CHUNK", chunk)
    monkeypatch.setattr(module, "_FEATURE_CHUNK", 7 if chunk == 50 else 1024)
    vindex = own(family, "hf")
    add_down_meta(vindex, 5)
    index = VectorIndex.open(vindex)
    tensors = lk.load_model(vindex, dtype="float32").tensors

    def values(name: str) -> np.ndarray:
        return tensors.get(name).dequantize().astype(np.float64)

    head = values("embed" if index.config.tied else "head")
    for layer in (0, index.layer_count - 1):
        weight = values("final_norm")
        if family == "gemma3":
            weight = weight * values(f"layers.{layer}.post_ffn_norm")
        scores = (values(f"layers.{layer}.down").T * weight) @ head.T
        for feature in (0, 41, 95):
            order = np.argsort(-scores[feature])[:5]
            found = index.top_tokens(layer, feature)
            assert [token for token, _ in found] == order.tolist()
            np.testing.assert_allclose([score for _, score in found], scores[feature][order], rtol=1e-4)
    assert verify_vindex(vindex) == []
    assert vindex_facts(vindex)["down_meta"] == {"top_k": 5, "layers": index.layer_count}


def test_it_goes_on_where_it_was_stopped(own):
    vindex = own("llama", "hf")

    class Stop(Exception):
        pass

    def stop_after_two(what: str, done: int, total: int) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        add_down_meta(vindex, 3, stop_after_two)
    assert verify_vindex(vindex) == []
    index = VectorIndex.open(vindex)
    assert len(index.top_tokens(1, 0)) == 3
    assert index.top_tokens(2, 0) == []
    first = (vindex / "down-meta-0000.safetensors").stat().st_mtime_ns
    with pytest.raises(lk.StoreError, match="down-meta with 3 tokens a feature, 4 were asked for"):
        add_down_meta(vindex, 4)
    assert add_down_meta(vindex, 3).layers == (0, 1, 2, 3)
    assert (vindex / "down-meta-0000.safetensors").stat().st_mtime_ns == first
    assert len(VectorIndex.open(vindex).top_tokens(3, 95)) == 3


def test_bad_numbers_and_files(own):
    vindex = own("llama", "hf")
    with pytest.raises(lk.StoreError, match="keeps 1 to 1000 tokens"):
        add_down_meta(vindex, 0)
    add_down_meta(vindex, 1000)  # more than the vocabulary has
    index = VectorIndex.open(vindex)
    assert len(index.top_tokens(0, 0)) == index.config.vocab
    path = vindex / "down-meta-0001.safetensors"
    data = bytearray(path.read_bytes())
    at = 8 + int.from_bytes(data[:8], "little")
    data[at : at + 4] = (9999).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(lk.ModelError, match="outside the vocabulary of 128"):
        index.top_tokens(1, 0)
    header = json.loads(data[8:at])
    data[8:at] = json.dumps(header).replace('"ids"', '"idz"').encode().ljust(at - 8)[: at - 8]
    path.write_bytes(data)
    with pytest.raises(lk.ModelError, match="no I32 tensor 'ids'"):
        VectorIndex.open(vindex).top_tokens(1, 0)
