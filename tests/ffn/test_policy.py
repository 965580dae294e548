"""The policy language: what it means, and that nothing else is taken."""

from __future__ import annotations

import pytest
import torch

from larql_kv.errors import RemoteError, SpecError
from larql_kv.ffn.base import DenseFfn, LayerFfn, LayerPath, NullFfn, path_table
from larql_kv.ffn.policy import FfnKind, FfnPolicy, build_ffn, parse_ffn, walk_index
from larql_kv.ffn.walk import WalkFfn
from tests.models import tiny

GOOD = [
    ("dense", "dense"),
    ("weight", "dense"),
    (" Weights ", "dense"),
    ("null", "null"),
    ("off", "null"),
    ("walk", "walk"),
    ("walk:k=100", "walk:k=100"),
    ("walk:k=none", "walk:k=none"),
    ("walk: k=7 , l1=exact", "walk:k=7,l1=exact"),
    ("remote-walk:endpoint=http://h:8080", "remote-walk:endpoint=http://h:8080"),
    ("http://h:8080/ffn", "remote-walk:endpoint=http://h:8080/ffn"),
    ("0-1=http://a,2-3=http://b", "remote-walk:endpoint=0-1=http://a,2-3=http://b"),
    (
        "remote-walk:endpoint=0-1=http://a,2-3=http://b,wire=f16,k=8,timeout=2.5",
        "remote-walk:endpoint=0-1=http://a,2-3=http://b,wire=f16,k=8,timeout=2.5",
    ),
    ("{walk:k=5}@all", "walk:k=5"),
    ("{walk:k=5}@layers=1-2;{dense}@otherwise", "{walk:k=5}@layers=1-2;{dense}@otherwise"),
    (" {walk} @ layers=3, 0-1 ; {null}@otherwise", "{walk}@layers=3,0-1;{null}@otherwise"),
]


@pytest.mark.parametrize(("text", "canonical"), GOOD)
def test_what_is_meant(text, canonical):
    policy = parse_ffn(text)
    assert policy.text == canonical
    assert parse_ffn(policy.text) == policy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "such as 'dense'"),
        ("walc", "did you mean 'walk'"),
        ("walk:kk=3", "did you mean 'k'"),
        ("walk:k", "key=value"),
        ("walk:k=", "key=value"),
        ("walk:", "after its colon"),
        ("walk:k=0", "at least 1"),
        ("walk:k=-3", "at least 1"),
        ("walk:k=3.5", "at least 1"),
        ("walk:k=ten", "at least 1"),
        ("walk:k=99999999999", "at least 1"),
        ("walk:k=1,k=2", "given twice"),
        ("walk:l1=feature", "did you mean 'features'"),
        ("dense:k=3", "no key 'k'"),
        ("remote-walk", "endpoint=URL"),
        ("remote-walk:wire=f16", "endpoint=URL"),
        ("remote-walk:endpoint=http://h,wire=f17", "not one of best, f32, f16, i8"),
        ("remote-walk:endpoint=http://h,timeout=no", "seconds"),
        ("remote-walk:endpoint=http://h,timeout=0", "seconds"),
        ("walk;dense", "in braces"),
        ("walk@all", "in braces"),
        ("{walk}", "not of the form"),
        ("{walk@all", "closing brace"),
        ("{walk}}@all", "unexpected '}'"),
        ("{{walk}}@all", "unexpected '{'"),
        ("{walk}@layer=1", "did you mean 'layers'"),
        ("{walk}@layers", "unknown predicate"),
        ("{walk}@layers=", "no range"),
        ("{walk}@layers=3-1;{dense}@otherwise", "no range"),
        ("{walk}@layers=a", "no range"),
        ("{walk}@all;{dense}@otherwise", "stands alone"),
        ("{walk}@otherwise;{dense}@otherwise", "given twice"),
        ("{walk}@layers=1;", "not of the form"),
    ],
)
def test_what_is_refused(text, says):
    with pytest.raises(SpecError) as caught:
        parse_ffn(text)
    assert says in str(caught.value)


def test_only_texts_are_parsed():
    with pytest.raises(SpecError, match="a text"):
        parse_ffn(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{walk}@layers=0-1", "layers 2-3: add"),
        ("{walk}@layers=1,3", "layers 0, 2: add"),
        ("{walk}@layers=0-2;{dense}@layers=2-3", "name layer 2"),
        ("{walk}@layers=0-2,1;{dense}@otherwise", "name layer 1"),
        ("{walk}@layers=2-4;{dense}@otherwise", "has layers 0-3"),
    ],
)
def test_what_does_not_fit_the_model(text, says):
    with pytest.raises(SpecError) as caught:
        build_ffn(text, tiny("llama"))
    assert says in str(caught.value)


def test_by_layer():
    kinds = parse_ffn("{walk:k=9}@layers=1-2;{null}@layers=3;{dense}@otherwise").by_layer(5)
    assert [kind.kind for kind in kinds] == ["dense", "walk", "walk", "null", "dense"]
    assert kinds[1] == FfnKind("walk", (("k", 9),))
    assert FfnPolicy().by_layer(2) == [FfnKind("dense")] * 2


def test_built_backends():
    model = tiny("llama")
    assert build_ffn("dense", model) == DenseFfn(model)
    assert build_ffn("{dense}@layers=0;{dense}@otherwise", model) == DenseFfn(model)
    assert isinstance(build_ffn("null", model), NullFfn)
    walk = build_ffn("walk:k=9,l1=exact", model)
    assert isinstance(walk, WalkFfn)
    assert walk.top_k == (9,) * 4
    assert walk.l1_cache_stats() == (0, 0)
    assert build_ffn("walk", model).cache_stats() == []
    assert walk_index(parse_ffn("null"), model) is None


def test_each_layer_goes_its_own_way():
    model = tiny("llama")
    text = "{walk:k=9,l1=exact}@layers=1-2;{null}@layers=3;{dense}@otherwise"
    ffn = build_ffn(text, model)
    assert isinstance(ffn, LayerFfn)
    assert ffn.name == text
    x = torch.randn(1, 64)
    walk, dense = WalkFfn(model, walk_index(parse_ffn("walk"), model), 9), DenseFfn(model)
    assert torch.equal(ffn.forward(0, x), dense.forward(0, x))
    assert torch.equal(ffn.forward(2, x), walk.forward(2, x))
    assert torch.equal(ffn.forward(3, x), torch.zeros(1, 64))
    assert not ffn.in_graph(model.decoder)
    assert path_table(ffn, range(4)) == [
        {"layers": "0", "path": "dense"},
        {"layers": "1-2", "path": "sparse", "k": 9, "features": 96},
        {"layers": "3", "path": "null"},
    ]
    assert ffn.saved_bytes(0) == 0 < ffn.saved_bytes(1)
    (stats,) = ffn.cache_stats()
    assert stats["misses"] == 1
    same, other = build_ffn(text, model), build_ffn(text.replace("k=9", "k=8"), model)
    assert ffn == same
    assert hash(ffn) == hash(same)
    assert ffn != other != DenseFfn(model)


def test_paths_of_the_simple_ones():
    model = tiny("llama")
    assert DenseFfn(model).path(0) == LayerPath("dense")
    assert NullFfn() == NullFfn()
    assert hash(NullFfn()) == hash(NullFfn())
    assert NullFfn() != DenseFfn(model)
    assert DenseFfn(model) != DenseFfn(tiny("gemma3"))


def test_a_remote_that_is_not_there():
    with pytest.raises(RemoteError, match=r"127\.0\.0\.1:9"):
        build_ffn("remote-walk:endpoint=http://127.0.0.1:9,timeout=1,k=5", tiny("llama"))
