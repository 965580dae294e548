"""Which engine, model and prompt the words on the command line mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from larql_kv import spec as registry
from larql_kv.cli.choose import Request, check_ffn, choose_engine, choose_request, raw_wanted
from larql_kv.errors import ModelError, SpecError
from larql_kv.policy import StateKind, StatePolicy, TaskLevel
from larql_kv.spec import EngineSpec

ENV = {"LARQL_KV_ENGINE": "no-cache"}


@pytest.mark.parametrize(
    ("engine", "kv_cache", "window", "environ", "text", "source"),
    [
        (None, None, 0, {}, "standard", "default"),
        (None, "none", 0, {}, "no-cache", "--kv-cache"),
        (None, "off", 0, {}, "no-cache", "--kv-cache"),
        (None, "fp32", 0, {}, "standard", "--kv-cache"),
        (None, "markov-bounded", 64, {}, "standard:window=64", "--kv-cache"),
        (None, "markov", 64, {}, "standard:window=64", "--kv-cache"),
        (None, None, 0, ENV, "no-cache", "LARQL_KV_ENGINE"),
        ("markov-rs", None, 0, ENV, "markov-rs", "--engine"),
        ("markov_rs:window=8", None, 0, {}, "markov-rs:window=8", "--engine"),
        ("sliding", None, 32, {}, "standard:window=32", "--engine"),
        (None, None, 0, {"LARQL_KV_ENGINE": ""}, "standard", "default"),
    ],
)
def test_precedence(engine, kv_cache, window, environ, text, source):
    choice = choose_engine(engine, kv_cache, window, environ)
    assert (choice.spec.text, choice.source, choice.warnings) == (text, source, ())


@pytest.mark.parametrize(
    ("engine", "environ", "winner"), [("markov-rs", {}, "--engine"), (None, ENV, "LARQL_KV_ENGINE")]
)
def test_engine_and_kv_cache_warn(engine, environ, winner):
    choice = choose_engine(engine, "standard", 0, environ)
    assert choice.source == winner
    assert len(choice.warnings) == 1
    assert f"{winner} wins" in choice.warnings[0]


@pytest.mark.parametrize(
    ("engine", "kv_cache"),
    [("standard", None), (None, None), (None, "none"), ("sliding:window=8", None), ("markov-rs", None)],
)
def test_a_window_that_nobody_uses_is_said(engine, kv_cache):
    (warning,) = choose_engine(engine, kv_cache, 512, {}).warnings
    assert "--context-window 512 has no effect" in warning


@pytest.mark.parametrize(
    ("engine", "kv_cache", "says"),
    [
        ("sliding", None, "--context-window"),
        (None, "markov-bounded", "--context-window"),
        ("standrad", None, "standard"),
        ("standard:windwo=3", None, "window"),
        (None, "standart", "standard"),
    ],
)
def test_bad_specs(engine, kv_cache, says):
    with pytest.raises(SpecError, match=says):
        choose_engine(engine, kv_cache, 0, {})


def test_retrieval_engines_are_for_the_bench(monkeypatch):
    @dataclass(frozen=True)
    class Oracle(EngineSpec):
        """Looks it up."""

        kind = "retrieval"

        @property
        def policy(self):
            return StatePolicy(StateKind.TOKEN_IDS, StateKind.NOTHING, TaskLevel())

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_ALIASES", dict(registry._ALIASES))
    registry.engine("oracle")(Oracle)
    with pytest.raises(SpecError, match="bench only"):
        choose_engine("oracle", None, 0, {})


def test_words(tmp_path: Path, monkeypatch):
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    gguf = tmp_path / "a model.gguf"
    gguf.write_bytes(b"GGUF")
    (tmp_path / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    demo = "smollm2-135m"
    assert choose_request([]) == Request(demo, None)
    assert choose_request(["Hello there"]) == Request(demo, "Hello there")
    assert choose_request(["Smollm2-135M"]) == Request("Smollm2-135M", None)
    assert choose_request([str(model)]) == Request(str(model), None)
    assert choose_request([str(gguf)]) == Request(str(gguf), None)
    assert choose_request(["gemma3-270m", "hi"]) == Request("gemma3-270m", "hi")
    # What merely looks a little like a model is a prompt.
    for prompt in ("and/or", "notes", "", "x" * 5000, "What is /etc/passwd?", "a\nb.gguf", "nul\0"):
        assert choose_request([prompt]) == Request(demo, prompt)


@pytest.mark.parametrize("word", ["./missing", "/nowhere/model", "missing.gguf", "~/no-such-model"])
def test_a_path_without_a_file_is_no_prompt(word):
    with pytest.raises(ModelError, match="no GGUF file"):
        choose_request([word])


@pytest.mark.parametrize(("value", "raw"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_raw_by_environment(value, raw):
    assert raw_wanted(False, {"LARQL_RAW_PROMPT": value}) is raw
    assert raw_wanted(True, {})


def test_ffn_policies_are_checked():
    assert check_ffn("weights").text == "dense"
    assert check_ffn("walk:k=8").text == "walk:k=8"
    with pytest.raises(SpecError, match="did you mean 'walk'"):
        check_ffn("wolk:k=8")
