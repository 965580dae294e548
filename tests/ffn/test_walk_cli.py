"""`larql walk`, and `--ffn` on run and bench, in this process on tiny models."""

from __future__ import annotations

import json

import pytest

import larql_kv as lk
from larql_kv.cli.walk import parse_layers
from larql_kv.errors import SpecError
from tests.cli.conftest import Larql
from tests.ffn.patched import index_of
from tests.tiny_models import model_dir

F32 = ("--dtype", "float32")
PATHS = [{"layers": "0-3", "path": "sparse", "k": 20, "features": 96}]


@pytest.fixture
def larql() -> Larql:
    return Larql()


@pytest.fixture(scope="module")
def model():
    return model_dir("llama")


def test_walk_json(larql, model):
    result = larql.json(
        *("walk", model, "-p", "tell me", "-k", 20, "-l", "0,2-3", "--down-top-k", 3, *F32),
        *("--predict", "--predict-top-k", 4, "-n", 3, "--compare", "--engine", "markov-rs"),
    )
    assert result["ffn_paths"] == PATHS
    assert (result["ffn"], result["engine"]) == ("walk:k=20", "markov-rs")
    assert [entry["layer"] for entry in result["trace"]] == [0, 2, 3]
    loaded = lk.load_model(model, dtype="float32")
    ids = loaded.tokenizer.encode("tell me")
    assert result["prompt_tokens"] == len(ids)
    for entry in result["trace"]:
        assert entry["path"] == "sparse"
        scores = [abs(item["score"]) for item in entry["features"]]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) == 10
        assert all(len(item["tokens"]) == 3 for item in entry["features"])
    # The first layer's features are those of its own input, which no FFN has touched.
    index, rows = index_of(loaded), {}

    class Spy(lk.FfnBackend):
        name = "spy"

        def forward(self, layer, x):
            rows.setdefault(layer, x[-1].clone())
            return lk.DenseFfn(loaded).forward(layer, x)

    lk.build_engine("standard", loaded, ffn=Spy()).prefill(ids)
    expected = index.gate_knn(0, rows[0], 10)
    assert [item["feature"] for item in result["trace"][0]["features"]] == expected.features.tolist()
    predicted = result["predict"]
    assert len(predicted["token_ids"]) == 3
    assert [set(item) for item in predicted["top"]] == [{"id", "text", "p"}] * 4
    assert predicted["top"][0]["id"] == predicted["token_ids"][0]
    compared = result["compare"]
    assert compared["positions"] == len(ids)
    assert compared["mean_kl"] > 0
    assert not compared["same_bits"]


def test_an_unlimited_walk_is_the_dense_ffn(larql, model):
    result = larql.json("walk", model, "-p", "tell me", "--compare", *F32)
    assert [(item["layers"], item["path"]) for item in result["ffn_paths"]] == [("0-3", "dense")]
    assert result["compare"]["same_bits"]
    assert result["compare"]["top1_agreement"] == 1
    assert "predict" not in result
    run = larql.json("run", model, "tell me", "-n", 3, "--raw", *F32)
    walked = larql.json("walk", model, "-p", "tell me", "--predict", "-n", 3, *F32)
    assert walked["predict"]["token_ids"] == run["token_ids"]


def test_walk_as_text(larql, model):
    result = larql("walk", model, "-p", "tell me", "-k", 20, "-l", "1", "--predict", "--compare", *F32)
    assert result.exit_code == 0
    assert "Layer 1 (sparse)" in result.stdout
    assert "walk against dense over" in result.stdout
    assert "  1. " in result.stdout
    assert "ffn walk:k=20 (sparse k=20 on 0-3)" in result.stderr


def test_walk_with_a_policy_and_a_vindex(larql, model, tmp_path):
    built = larql("vindex", "build", model, "-o", tmp_path / "v")
    assert built.exit_code == 0, built.output
    text = "{walk:k=20}@layers=1-2;{null}@layers=3;{dense}@otherwise"
    result = larql.json("walk", model, "-p", "tell me", "--ffn", text, "--index", tmp_path / "v", *F32)
    assert [(item["layers"], item["path"]) for item in result["ffn_paths"]] == [
        ("0", "dense"),
        ("1-2", "sparse"),
        ("3", "null"),
    ]
    assert [entry["path"] for entry in result["trace"]] == ["dense", "sparse", "sparse", "null"]
    other = larql("walk", model_dir("qwen3"), "-p", "tell me", "--index", tmp_path / "v", *F32)
    assert other.exit_code != 0
    assert "another model" in other.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "needs a prompt"),
        (("-p", "x", "-k", "0"), "Invalid value"),
        (("-p", "x", "-k", "3", "--ffn", "dense"), "say k in the spec"),
        (("-p", "x", "--ffn", "walc"), "did you mean 'walk'"),
        (("-p", "x", "-l", "3-1"), "list of layers"),
        (("-p", "x", "-l", "2-9"), "layers 0-3"),
        (("-p", "x", "--engine", "standrad"), "did you mean 'standard'"),
    ],
)
def test_walk_refuses(larql, model, words, says):
    result = larql("walk", model, *words)
    assert result.exit_code == 2
    assert says in result.stderr


def test_layers_are_lists_and_ranges():
    assert parse_layers("26,27") == [(26, 26), (27, 27)]
    assert parse_layers("24-33") == [(24, 33)]
    assert parse_layers(None) == []
    for text in ("", "a", "1-", "3-2", "1;2"):
        with pytest.raises(SpecError):
            parse_layers(text)


def test_legacy_cache_names_warn(larql, model):
    words = ("walk", model, "-p", "x", "--engine", "no-cache", "--kv-cache", "standard", "-l", "0", *F32)
    assert "wins" in larql(*words).stderr
    assert len(larql.json(*words)["warnings"]) == 1


# -- run and bench -----------------------------------------------------------------------------------------


def test_run_with_a_walk(larql, model):
    result = larql.json("run", model, "tell me", "-n", 6, "--raw", "--ffn", "walk:k=20,l1=exact", *F32)
    assert (result["ffn"], result["ffn_paths"]) == ("walk:k=20", PATHS)
    (stats,) = result["ffn_caches"]
    assert stats["misses"] == (result["generated_tokens"] - 1) * 4 > 0
    assert stats["bypassed"]["rows"] == 4
    dense = larql.json("run", model, "tell me", "-n", 6, "--raw", *F32)
    assert (dense["ffn"], dense["ffn_paths"]) == ("dense", [{"layers": "0-3", "path": "dense"}])
    assert dense["token_ids"] != result["token_ids"]
    whole = larql.json("run", model, "tell me", "-n", 6, "--raw", "--ffn", "walk", *F32)
    assert whole["token_ids"] == dense["token_ids"]
    assert "ffn walk:k=20 · " in larql("run", model, "tell me", "-n", 1, "--ffn", "walk:k=20").stderr


@pytest.mark.parametrize("command", ["run", "bench"])
def test_bad_policies_exit_2_before_loading(larql, command):
    words = ("hi",) if command == "run" else ()
    result = larql(command, "./no-such-model.gguf", *words, "--ffn", "walk:q=3")
    assert result.exit_code == 2
    assert "no key 'q'" in result.stderr


def test_bench_with_a_walk(larql, model):
    words = (
        "bench",
        model,
        "-e",
        "standard",
        "-e",
        "no-cache",
        "-n",
        3,
        "--repeats",
        1,
        "--prompt-tokens",
        8,
    )
    result = larql.json(*words, "--ffn", "walk:k=20", *F32)
    assert result["ffn"] == {"name": "walk:k=20", "paths": PATHS}
    standard, none = result["results"]
    assert standard["contract"]["ok"]
    assert none["contract"]["ok"]
    assert standard["ids"]["hash"] == none["ids"]["hash"]
    dense = larql.json(*words, "--no-check", *F32)
    assert dense["ffn"]["name"] == "dense"
    saved = dense["results"][0]["bytes_per_step"]["weights"] - standard["bytes_per_step"]["weights"]
    packed = (128 - 96) * 64 * 4  # the walk's gate is padded to whole blocks of 64 rows
    assert saved == 4 * (2 * (96 - 20) * 64 * 4 - packed)
    shown = larql(*words, "--no-check", "--ffn", "walk:k=20", *F32)
    assert ", ffn walk:k=20)" in shown.stdout
    json.dumps(result)
