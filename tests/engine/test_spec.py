"""Spec strings: every name of the seeds parses, every mistake is named."""

from __future__ import annotations

import dataclasses

import pytest

import larql_kv as lk
from larql_kv.spec import kv_cache_spec, split_specs
from tests.models import SPECS

NAMES = {  # seeds and facts.md section 5
    "standard": ["standard", "full", "fp32"],
    "no-cache": ["no-cache", "no_cache", "none", "off"],
    "markov-rs": ["markov-rs", "markov_rs", "markov-residual", "markov_residual"],
}


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine, names in NAMES.items() for name in names]
)
def test_every_name_and_alias(engine: str, name: str) -> None:
    assert lk.parse_spec(name).engine_name == engine
    assert lk.parse_spec(name.upper()).engine_name == engine


@pytest.mark.parametrize("name", ["sliding", "bounded", "markov-bounded"])
def test_legacy_windowed_names_need_a_window(name: str) -> None:
    with pytest.raises(lk.SpecError, match="needs window=N"):
        lk.parse_spec(name)
    with pytest.raises(lk.SpecError, match="needs window=N"):
        lk.parse_spec(f"{name}:window=0")
    assert lk.parse_spec(f"{name}:window=512") == lk.parse_spec("standard:window=512")
    assert lk.parse_spec(name, context_window=64) == lk.parse_spec("standard:window=64")
    assert lk.parse_spec(f"{name}:window=9", context_window=64) == lk.parse_spec("standard:window=9")


def test_a_context_window_does_not_touch_the_modern_names() -> None:
    assert lk.parse_spec("standard", context_window=64) == lk.parse_spec("standard")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("markvo-rs", "did you mean 'markov-rs'"),
        ("", "unknown engine ''"),
        ("standard:windw=3", "did you mean 'window'"),
        ("standard:window=x", "window='x' is not a valid int"),
        ("standard:window=1.5", "window='1.5'"),
        ("standard:window=-1", "at least 0, got -1"),
        ("standard:window", "not of the form key=value"),
        ("standard:window=1,window=2", "given twice"),
        ("no-cache:window=3", "has no key 'window'"),
        ("standard:=3", "has no key ''"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(lk.SpecError, match=message):
        lk.parse_spec(text)


@pytest.mark.parametrize("spec", SPECS)
def test_text_round_trip_and_frozen(spec: str) -> None:
    parsed = lk.parse_spec(spec)
    assert lk.parse_spec(parsed.text) == parsed
    assert parsed.text == spec
    for field in dataclasses.fields(parsed):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(parsed, field.name, None)


def test_bounds_hold_however_a_spec_is_made() -> None:
    from larql_kv.engine.standard import Standard

    assert Standard(window=0) == Standard()
    with pytest.raises(lk.SpecError, match="at least 0, got -3"):
        Standard(window=-3)


@pytest.mark.parametrize("window", ["8", 2.5, True, 10**20])
def test_values_of_another_type_or_size(window: object) -> None:
    from larql_kv.engine.standard import Standard

    with pytest.raises(lk.SpecError, match="window"):
        Standard(window=window)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, 5, b"standard"])
def test_a_spec_that_is_no_text(text: object) -> None:
    with pytest.raises(lk.SpecError, match="an engine spec is a text"):
        lk.parse_spec(text)  # type: ignore[arg-type]
    with pytest.raises(lk.SpecError):
        lk.build_engine(text, None)  # type: ignore[arg-type]


def test_window_zero_and_none_mean_no_window() -> None:
    for raw in ("0", "none", "None"):
        assert lk.parse_spec(f"standard:window={raw}") == lk.parse_spec("standard")


@pytest.mark.parametrize(
    ("kv_cache", "window", "expected"),
    [
        ("standard", 0, "standard"),
        ("full", 0, "standard"),
        ("markov-bounded", 256, "standard:window=256"),
        ("markov", 256, "standard:window=256"),
        ("sliding", 8, "standard:window=8"),
        ("none", 0, "no-cache"),
        ("off", 0, "no-cache"),
    ],
)
def test_legacy_kv_cache_values(kv_cache: str, window: int, expected: str) -> None:
    assert kv_cache_spec(kv_cache, window) == lk.parse_spec(expected)


def test_legacy_kv_cache_refuses() -> None:
    with pytest.raises(lk.SpecError, match="unknown --kv-cache"):
        kv_cache_spec("markov-rs")
    with pytest.raises(lk.SpecError, match="needs window"):
        kv_cache_spec("markov-bounded")


def test_lists_of_specs() -> None:
    assert split_specs("standard,markov-rs:window=5,no-cache") == [
        "standard",
        "markov-rs:window=5",
        "no-cache",
    ]
    assert split_specs("turbo-quant:bits=4,sinks=4,standard") == ["turbo-quant:bits=4,sinks=4", "standard"]
    assert split_specs("a:b=1,c=2; d ;") == ["a:b=1,c=2", "d"]


def test_engines_lists_everything_a_user_can_write() -> None:
    listed = {entry.name: entry for entry in lk.engines()}
    assert set(NAMES) <= set(listed)
    assert [key.name for key in listed["standard"].keys] == ["window", "sinks"]
    for entry in listed.values():
        assert entry.description
        assert entry.to_dict()["policy"].keys() == {"canonical", "derivative", "contract"}
        assert all(key.help for key in entry.keys)


def test_a_taken_name_is_refused_at_registration() -> None:
    from larql_kv.spec import EngineSpec, engine

    with pytest.raises(ValueError, match="already registered"):
        engine("full")(
            type("Twin", (EngineSpec,), {"__doc__": "x", "policy": lk.parse_spec("standard").policy})
        )


def test_a_codec_without_a_measured_bound_is_refused() -> None:
    with pytest.raises(lk.SpecError, match="no measured bound"):
        lk.parse_spec("markov-rs-codec:codec=int8-clip3")
