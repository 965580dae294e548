"""`decode_ahead` and the protocol of a captured step, under a stand-in for a device's step executor."""

from __future__ import annotations

import itertools

import pytest
import torch

import larql_kv as lk
from larql_kv.engine.base import KvEngine
from larql_kv.state import bridge, transit
from tests import tiny_models
from tests.engine.test_capture import CASCADE, compare_host_with_device
from tests.feeding import feeding
from tests.lanes import LateLane
from tests.models import SPECS, tiny

each_engine = pytest.mark.parametrize("spec", SPECS)
each_family = pytest.mark.parametrize("family", ["llama", "gemma3"])


def _stepped(engine: KvEngine, count: int, token: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token = int(engine.logits(engine.decode_step(token)).argmax())
        tokens.append(token)
    return tokens


@each_engine
@each_family
@pytest.mark.parametrize("feeds", [False, True])
def test_equals_stepping(spec: str, family: str, feeds: bool) -> None:
    model = feeding(family)[0] if feeds else tiny(family)
    ids = tiny_models.sample_ids(20, 128)
    engine, witness = lk.build_engine(spec, model), lk.build_engine(spec, tiny(family))
    engine.prefill(ids)
    witness.prefill(ids)
    for count in (1, 9, 50):
        expected = _stepped(witness, count, 7)
        assert list(engine.decode_ahead(count, 7)) == expected
        assert engine.tokens == witness.tokens
        assert engine.recomputed_tokens == witness.recomputed_tokens
        assert engine._state.rows_read == witness._state.rows_read
    sizes = [
        sum(item.live for item in side.ledger() if item.role != "workspace") for side in (engine, witness)
    ]
    assert sizes[0] == sizes[1]
    engine.drop_derivative()
    assert torch.equal(engine.decode_step(9), witness.decode_step(9))


@pytest.mark.parametrize(("spec", "mask"), CASCADE)
@each_family
def test_captured_steps_write_what_eager_ones_do(spec: str, mask: str, family: str, monkeypatch) -> None:
    monkeypatch.setattr(transit, "PlainLane", LateLane)
    monkeypatch.setattr(bridge, "SLOTS", 5)
    model, executor = feeding(family)
    ids = tiny_models.sample_ids(90, 128)
    engine, witness = lk.build_engine(spec, model), lk.build_engine("standard", tiny(family))
    engine.set_capture(mask)
    engine.prefill(ids[:60])
    witness.prefill(ids[:60])
    parked = []
    for step, token in enumerate(ids[60:]):
        if step in (7, 20):
            engine.drop_derivative()
        if step == 10:
            parked.append(engine.fork())
        if step == 15:
            engine.trim(engine.length - 1)
            engine.decode_step(ids[60 + step - 1])
        assert torch.equal(engine.decode_step(token), witness.decode_step(token))
    assert executor.trace.count("step") >= 28, "steps did not run captured"
    if mask != "none":
        for one in (engine, *parked):
            compare_host_with_device(one, one.length)


def test_every_step_is_enqueued_before_the_first_token_is_read() -> None:
    model, executor = feeding("llama")
    engine = lk.build_engine("standard", model)
    engine.prefill([5, 6, 7])
    tokens = engine.decode_ahead(6, 8)
    assert executor.trace == ["step"] * 6, "the call itself enqueues them"
    assert engine.tokens == [5, 6, 7]
    first = next(tokens)
    assert executor.trace == ["step"] * 6 + ["read"]
    assert engine.tokens == [5, 6, 7, 8]
    rest = list(tokens)
    assert engine.tokens == [5, 6, 7, 8, first, *rest[:-1]]


@each_engine
@each_family
@pytest.mark.parametrize("feeds", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_stopping_early_leaves_what_was_handed_out(spec: str, family: str, feeds: bool, taken: int) -> None:
    model = feeding(family)[0] if feeds else tiny(family)
    ids = tiny_models.sample_ids(20, 128)
    engine, witness = lk.build_engine(spec, model), lk.build_engine(spec, tiny(family))
    engine.prefill(ids)
    stream = engine.decode_ahead(9, 7)
    got = list(itertools.islice(stream, taken))
    stream.close()  # type: ignore[attr-defined]
    held = ids + [7, *got][:taken]
    assert engine.tokens == held
    witness.prefill(held)
    assert torch.equal(engine.decode_step(11), witness.decode_step(11))
    assert engine.tokens == [*held, 11]


@pytest.mark.parametrize("act", ["decode", "trim", "fork", "drop", "ahead", "reset"])
@pytest.mark.parametrize("feeds", [False, True])
def test_another_use_takes_the_rest_back_and_is_noticed(act: str, feeds: bool) -> None:
    model = feeding("gemma3")[0] if feeds else tiny("gemma3")
    engine, witness = lk.build_engine("markov-rs:rows=none", model), lk.build_engine("standard", model)
    ids = tiny_models.sample_ids(20, 128)
    engine.prefill(ids)
    stream = engine.decode_ahead(9, 7)
    next(stream)
    if act == "decode":
        engine.decode_step(9)
    elif act == "trim":
        engine.trim(15)
    elif act == "fork":
        assert engine.fork().tokens == [*ids, 7]
    elif act == "drop":
        engine.drop_derivative()
    elif act == "ahead":
        next(engine.decode_ahead(3, 9))
    else:
        engine.reset()
    if feeds or act not in ("fork", "drop"):  # these leave the tokens alone
        with pytest.raises(lk.InvariantViolation, match="used for something else"):
            next(stream)
    if engine.length:
        witness.prefill(engine.tokens)
        assert torch.equal(engine.decode_step(3), witness.decode_step(3))


def test_a_failure_leaves_the_engine_as_far_as_it_was_handed_out() -> None:
    model, executor = feeding("llama")
    engine, witness = lk.build_engine("markov-rs", model), lk.build_engine("markov-rs", tiny("llama"))
    ids = tiny_models.sample_ids(20, 128)
    engine.prefill(ids)
    executor.fails_at = 3
    with pytest.raises(lk.BackendFailure, match="the device is gone"):
        engine.decode_ahead(5, 7)
    assert engine.tokens == ids
    executor.fails_at, executor.no_numbers_at = -1, 2
    stream = engine.decode_ahead(5, 7)
    first, _ = next(stream), next(stream)
    with pytest.raises(lk.BackendFailure, match="not finite"):
        next(stream)
    assert engine.tokens == [*ids, 7, first]
    witness.prefill(engine.tokens)
    assert torch.equal(engine.decode_step(3), witness.decode_step(3))


def test_what_was_dropped_comes_back_with_the_first_step() -> None:
    model, executor = feeding("gemma3")
    engine, witness = (
        lk.build_engine("markov-rs:rows=none", model),
        lk.build_engine("standard", tiny("gemma3")),
    )
    ids = tiny_models.sample_ids(20, 128)
    for side in (engine, witness):
        side.prefill(ids)
    engine.drop_derivative()
    assert list(engine.decode_ahead(6, 7)) == _stepped(witness, 6, 7)
    assert executor.trace.count("step") == 5
    engine.drop_derivative()
    assert list(engine.decode_ahead(1, 8)) == _stepped(witness, 1, 8)
    assert engine.recomputed_tokens == 26


def test_with_the_stage_timers_on_steps_run_layer_by_layer() -> None:
    model, executor = feeding("llama")
    engine = lk.build_engine("standard", model)
    engine.prefill([5, 6, 7])
    engine.profile()
    tokens = list(engine.decode_ahead(3, 8))
    assert not executor.trace
    assert engine.info.backend == "cpu eager"
    summary = engine.stage_summary()
    assert summary is not None
    assert summary.steps == 3
    assert summary.microseconds["attention"] > 0
    engine.profile(False)
    engine.trim(3)
    assert list(engine.decode_ahead(3, 8)) == tokens
    assert engine.info.backend == "cpu graph"


@pytest.mark.parametrize("feeds", [False, True])
def test_mistakes_are_named_at_the_call(feeds: bool) -> None:
    model = feeding("llama")[0] if feeds else tiny("llama")
    engine = lk.build_engine("standard", model)
    with pytest.raises(lk.InvariantViolation, match="before prefill"):
        engine.decode_ahead(3, 5)
    engine.prefill([5])
    with pytest.raises(ValueError, match="count >= 1, got 0"):
        engine.decode_ahead(0, 5)
    with pytest.raises(lk.ModelError, match="outside the vocabulary"):
        engine.decode_ahead(3, 128)
    with pytest.raises(lk.ModelError, match="257 tokens do not fit"):
        engine.decode_ahead(256, 5)
    with pytest.raises(TypeError):
        engine.decode_ahead(1.5, 5)  # type: ignore[arg-type]
    assert engine.tokens == [5]
    assert len(list(engine.decode_ahead(255, 5))) == 255


def test_tables_change_version_when_they_change() -> None:
    engine = lk.build_engine("markov-rs", feeding("gemma3")[0])
    engine.prefill(tiny_models.sample_ids(60, 128))
    rows = engine._state.step_rows()
    assert rows is not None
    assert rows is engine._state.step_rows()
    assert rows.residual is not None
    seen = rows.reserve(60)
    assert [rows.reserve(position) for position in (61, 62, 63)] == [seen] * 3
    assert rows.reserve(64) > seen, "a block more on the layers that keep everything"
    tables = [pages.table.clone() for pages in (*(kv.hot for kv in rows.kv), *rows.residual)]
    child = engine.fork()
    twin = child._state.step_rows()
    assert twin is not None
    assert twin is not rows
    before = rows.version
    assert rows.reserve(62) > before, "the block to be written is shared: it is cloned"
    after = [pages.table for pages in (*(kv.hot for kv in rows.kv), *rows.residual)]
    assert any(not torch.equal(old, new) for old, new in zip(tables, after, strict=True))
    before = rows.version
    engine.reset()
    assert rows.version > before
    assert lk.build_engine("no-cache", tiny("llama"))._state.step_rows() is None


def test_use_before_the_first_token_is_found_out() -> None:
    engine = lk.build_engine("standard", tiny("llama"))
    engine.prefill([5, 17, 3])
    tokens = engine.decode_ahead(3, 7)
    engine.prefill([11, 12])
    with pytest.raises(lk.InvariantViolation):
        next(tokens)
    assert engine.tokens == [5, 17, 3, 11, 12]


def test_a_count_past_the_context_is_refused_before_any_work() -> None:
    engine = lk.build_engine("standard", tiny("llama"))
    engine.prefill([5, 17, 3])
    with pytest.raises(lk.ModelError, match="context"):
        engine.decode_ahead(1 << 40, 7)
    assert engine.tokens == [5, 17, 3]
