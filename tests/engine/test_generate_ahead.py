"""`generate` on a backend that feeds its own tokens back: the same text, one step ahead of its reader."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

import larql_kv as lk
from tests import tiny_models
from tests.feeding import feeding
from tests.models import SPECS, tiny

IDS = tiny_models.sample_ids(20, 128)
each_engine = pytest.mark.parametrize("spec", SPECS)
each_family = pytest.mark.parametrize("family", ["llama", "gemma3"])
DRAWN = {"temperature": 1.3, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 5}


def _ids(engine: lk.KvEngine, prompt: list[int], count: int, **options: Any) -> list[int]:
    options = {"ignore_stop_tokens": True, **options}
    return [token.id for token in engine.generate(prompt, count, **options)]


@each_engine
@each_family
def test_the_text_and_the_state_of_stepping(spec: str, family: str) -> None:
    model, _ = feeding(family)
    engine, witness = lk.build_engine(spec, model), lk.build_engine(spec, tiny(family))
    prompt = IDS
    for count in (1, 2, 12):
        got = _ids(engine, prompt, count)
        assert got == _ids(witness, prompt, count)
        assert engine.tokens == witness.tokens == prompt + got[:-1]
        assert engine.held_positions == witness.held_positions == engine._state.length
        assert engine.recomputed_tokens == witness.recomputed_tokens
        prompt = [*engine.tokens, got[-1], 7]
    assert torch.equal(engine.decode_step(9), witness.decode_step(9))


@each_engine
@pytest.mark.parametrize("taken", [1, 2, 5])
def test_closed_early_it_holds_what_was_handed_out_but_the_last(spec: str, taken: int) -> None:
    engine = lk.build_engine(spec, feeding("gemma3")[0])
    stream = engine.generate(IDS, 30, ignore_stop_tokens=True)
    got = [token.id for token in itertools.islice(stream, taken)]
    assert engine.tokens == IDS + got[:-1]
    stream.close()  # type: ignore[attr-defined]
    assert engine.tokens == IDS + got[:-1]
    assert engine.held_positions == engine._state.length
    witness = lk.build_engine(spec, tiny("gemma3"))
    witness.prefill(engine.tokens)
    assert torch.equal(engine.decode_step(got[-1]), witness.decode_step(got[-1]))
    if engine.policy.canonical != "token ids":
        assert engine.recomputed_tokens == 0, "to go back by one step is free"


def test_a_step_is_enqueued_before_the_token_in_front_of_it_is_read() -> None:
    model, executor = feeding("llama")
    engine = lk.build_engine("standard", model)
    stream = engine.generate(IDS, 5, ignore_stop_tokens=True)
    next(stream)
    assert executor.trace == [], "the first token waits for no step"
    next(stream)
    assert executor.trace == ["step", "step", "read"]
    next(stream)
    assert executor.trace == ["step", "step", "read", "step", "read"]
    assert len(list(stream)) == 2
    assert executor.trace.count("step") == 4, "nothing runs beyond the last token"
    assert engine.info.backend == "cpu graph"


def test_a_stop_token_ends_the_text_and_takes_the_step_ahead_back() -> None:
    model, executor = feeding("llama")
    engine = lk.build_engine("standard", model)
    free = _ids(engine, IDS, 30)
    stop = next(token for index, token in enumerate(free) if token not in free[:index] and index > 3)
    at = free.index(stop)
    engine.reset()
    executor.trace.clear()
    model.tokenizer = dataclasses.replace(model.tokenizer, stop_ids=frozenset({stop}))
    tokens = list(engine.generate(IDS, 30))
    assert [token.id for token in tokens] == free[: at + 1]
    assert tokens[-1].finish == "stop"
    assert engine.tokens == IDS + free[:at]
    assert engine._state.length == len(engine.tokens)
    assert executor.trace.count("step") == at + 1


def test_stop_strings_and_the_context_end_it_as_they_do_elsewhere() -> None:
    fed, plain = lk.build_engine("standard", feeding("llama")[0]), lk.build_engine("standard", tiny("llama"))
    text = "".join(token.text for token in plain.generate(IDS, 30, ignore_stop_tokens=True))
    for prompt, options in (
        (IDS, {"stop": text[6:9]}),
        ([5] * 250, {}),
        ([5] * 256, {}),
    ):
        options["ignore_stop_tokens"] = True
        got, expected = (list(engine.generate(prompt, 40, **options)) for engine in (fed, plain))
        assert got == expected
        assert fed.tokens == plain.tokens
        assert fed._state.length == len(fed.tokens)


def test_a_seed_repeats_the_text_whatever_else_is_asked_for() -> None:
    model, executor = feeding("llama")
    engine = lk.build_engine("standard", model)
    text = _ids(engine, IDS, 20, **DRAWN)
    assert executor.trace.count("step") == 19
    assert _ids(engine, IDS, 20, **DRAWN) == text
    assert _ids(engine, IDS, 20, **{**DRAWN, "seed": 6}) != text
    assert _ids(engine, IDS, 20, with_logits=True, **DRAWN) == text
    assert _ids(engine, IDS, 20, **{**DRAWN, "seed": None}) != _ids(
        engine, IDS, 20, **{**DRAWN, "seed": None}
    )
    steps = executor.trace.count("step")
    engine.profile()
    assert _ids(engine, IDS, 20, **DRAWN) == text
    assert executor.trace.count("step") == steps, "with the timers on, layer by layer"


def test_a_repetition_penalty_is_the_host_s_work() -> None:
    model, executor = feeding("llama")
    options = {"repetition_penalty": 1.4, **DRAWN}
    got = _ids(lk.build_engine("standard", model), IDS, 20, **options)
    assert got == _ids(lk.build_engine("standard", tiny("llama")), IDS, 20, **options)
    assert "read" not in executor.trace


def test_logits_are_those_of_the_step() -> None:
    engine = lk.build_engine("standard", feeding("llama")[0])
    free = _ids(engine, IDS, 6)
    tokens = list(engine.generate(IDS, 6, with_logits=True, ignore_stop_tokens=True))
    assert [token.id for token in tokens] == free
    for token in tokens:
        assert token.logits is not None
        assert int(token.logits.argmax()) == token.id


@pytest.mark.parametrize("act", ["decode", "trim", "reset", "generate", "ahead"])
def test_another_use_ends_the_text(act: str) -> None:
    engine = lk.build_engine("standard", feeding("gemma3")[0])
    stream = engine.generate(IDS, 9, ignore_stop_tokens=True)
    next(stream), next(stream)
    if act == "decode":
        engine.decode_step(9)
    elif act == "trim":
        engine.trim(15)
    elif act == "reset":
        engine.reset()
    elif act == "generate":
        next(engine.generate([5, 6, 7], 3))
    else:
        next(engine.decode_ahead(3, 9))
    held = engine.tokens
    with pytest.raises(lk.InvariantViolation, match="used for something else"):
        next(stream)
    assert engine.tokens == held


@each_engine
def test_looking_forking_and_dropping_do_not_end_it(spec: str) -> None:
    model, executor = feeding("gemma3")
    engine = lk.build_engine(spec, model)
    expected = _ids(lk.build_engine(spec, tiny("gemma3")), IDS, 12)
    got = []
    for index, token in enumerate(engine.generate(IDS, 12, ignore_stop_tokens=True)):
        got.append(token.id)
        if index == 3:
            engine.ledger()
            child = engine.fork()
            assert child.tokens == IDS + got[:-1]
            child.decode_step(9)
        if index == 6:
            engine.drop_derivative()
        if index == 9:
            engine.profile()
    assert got == expected
    assert engine.tokens == IDS + got[:-1]
    if lk.build_engine(spec, model)._state.step_rows() is not None:
        assert executor.trace.count("read") > 5


def test_two_engines_on_one_model_take_turns() -> None:
    model, _ = feeding("llama")
    specs = ("standard", "markov-rs")
    prompts = (IDS, IDS[:7])
    expected = [_ids(lk.build_engine(s, model), p, 12) for s, p in zip(specs, prompts, strict=True)]
    streams = [
        lk.build_engine(s, model).generate(p, 12, ignore_stop_tokens=True)
        for s, p in zip(specs, prompts, strict=True)
    ]
    turns = [[token.id for token in turn] for turn in zip(*streams, strict=True)]
    assert [list(ids) for ids in zip(*turns, strict=True)] == expected


def test_a_failure_leaves_the_engine_as_far_as_it_was_handed_out() -> None:
    model, executor = feeding("llama")
    engine = lk.build_engine("standard", model)
    free = _ids(engine, IDS, 9)
    executor.no_numbers_at = executor.trace.count("read") + 2
    stream = engine.generate(IDS, 9, ignore_stop_tokens=True)
    got = [next(stream).id for _ in range(3)]
    assert got == free[:3]
    with pytest.raises(lk.BackendFailure, match="not finite"):
        next(stream)
    assert engine.tokens == IDS + got[:2]
    assert engine._state.length == len(engine.tokens)
    executor.fails_at = 0
    stream = engine.generate(IDS, 9, ignore_stop_tokens=True)
    next(stream)
    with pytest.raises(lk.BackendFailure, match="the device is gone"):
        next(stream)
    assert engine.tokens == IDS


def test_another_ffn_in_the_middle_is_refused() -> None:
    class Other(lk.DenseFfn):
        name = "other"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Other)

        __hash__ = object.__hash__

    model, _ = feeding("llama")
    engine = lk.build_engine("standard", model)
    stream = engine.generate(IDS, 9, ignore_stop_tokens=True)
    next(stream), next(stream)
    engine.ffn = Other(model)
    with pytest.raises(lk.InvariantViolation, match="reset"):
        next(stream)
