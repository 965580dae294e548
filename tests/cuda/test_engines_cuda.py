"""Every engine on the CUDA backend: contracts, steps that run ahead, going back, masks, generation, bytes."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

import larql_kv as lk
from larql_kv.backends.cuda import program, rope, step
from larql_kv.engine.base import KvEngine
from larql_kv.state.ledger import Ledger
from tests import tiny_models
from tests.cuda import micro
from tests.storages import held_storages

SPECS = [
    "standard",
    "standard:window=13",
    "markov-rs",
    "markov-rs:rows=host",
    "markov-rs:rows=none",
    "no-cache",
]
IDS = tiny_models.sample_ids(80, micro.VOCAB)
each_engine = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_LEAST_CAPACITY", 64)


def build(spec: str, prompt: int = 14) -> KvEngine:
    engine = lk.build_engine(spec, micro.shared())
    engine.prefill(IDS[:prompt])
    return engine


def choose(engine: KvEngine, token: int) -> int:
    return int(engine.logits(engine.decode_step(token)).argmax())


@pytest.mark.parametrize("spec", ["standard:window=13", "markov-rs", "markov-rs:rows=none"])
def test_the_contract_holds(spec: str) -> None:
    engine = lk.build_engine(spec, micro.shared())
    report = engine.policy.contract.check(engine, IDS[:17], 14, 1)
    assert report.ok, report
    assert not report.teacher_forced.same_bits or spec != "standard", "one pass and steps differ here"


@each_engine
def test_steps_ahead_are_the_steps_and_can_be_taken_back(spec: str) -> None:
    engine = build(spec)
    ahead = list(engine.decode_ahead(2, 7))
    assert engine.tokens == [*IDS[:14], 7, ahead[0]]
    assert engine.info.backend.startswith("cuda ")
    assert ("eager" in engine.info.backend) == (spec == "no-cache")
    assert engine.trim(15) == 0, "one step back is free"
    child = engine.fork()
    assert choose(child, ahead[0]) == ahead[1]
    hidden = engine.decode_step(33)  # the child's last row stays what it was
    assert not torch.equal(hidden, child.decode_step(33))
    child.trim(14)
    assert choose(child, 7) == ahead[0]


def test_what_was_dropped_comes_back_and_the_device_goes_on() -> None:
    kept, dropped = build("standard"), build("markov-rs:rows=none")
    assert dropped.drop_derivative() > 0
    expected = choose(kept, 7)
    assert list(dropped.decode_ahead(2, 7)) == [expected, choose(kept, expected)]
    assert dropped.recomputed_tokens == 0, "of the last step"
    assert "eager" not in dropped.info.backend


def test_logits_and_tokens_are_the_same_under_every_mask() -> None:
    engines = {}
    for mask in ("none", "h_only", "full"):
        engine = engines[mask] = lk.build_engine("markov-rs", micro.shared())
        engine.set_capture(mask)
        assert engine.capture == mask
        engine.prefill(IDS[:14])
    logits = {mask: engine.logits(engine.decode_step(IDS[14])) for mask, engine in engines.items()}
    token = int(logits["none"].argmax())
    ahead = {mask: list(engine.decode_ahead(2, token)) for mask, engine in engines.items()}
    for mask in ("h_only", "full"):
        assert torch.equal(logits[mask], logits["none"]), mask
        assert ahead[mask] == ahead["none"], mask
    live = {
        mask: {row["name"]: row["live"] for row in engine.ledger().rows() if row["place"] == "host"}
        for mask, engine in engines.items()
    }
    config, rows = engines["full"].model.config, 17 + 8  # of the full layer and of the ring
    assert "residual rows (host copy)" not in live["none"]
    assert live["h_only"]["residual rows (host copy)"] == 2 * config.hidden * rows
    assert live["full"]["K/V rows (host copy)"] == 2 * 2 * config.kv_dim * rows
    for mask in ("h_only", "full"):
        host_holds_what_the_device_does(engines[mask])


def host_holds_what_the_device_does(engine: KvEngine) -> None:
    state: Any = engine._state
    for layer, pages in enumerate(rows.hot for rows in state.kv.rows):
        first = engine.length - pages.live_rows(engine.length)
        rows = state.pages[layer].read(first, engine.length).cpu()
        assert torch.equal(state.bridge.rows[layer].read(first, engine.length), rows)
        if state.bridge.full:
            both = state.bridge.kv[layer].read(first, engine.length)
            for position in range(first, engine.length):
                slot = position if pages.ring is None else position % pages.ring
                held = pages.block(slot // 64)[:, :, slot % 64].cpu().reshape(-1)
                assert torch.equal(both[position - first], held)


def test_graphs_grow_by_doubling_and_serve_every_engine() -> None:
    model = micro.load()
    executor = model.decoder.step_executor
    engine, other = (lk.build_engine("standard", model) for _ in range(2))
    engine.prefill(IDS[:62])
    other.prefill(IDS[:3])
    token = list(engine.decode_ahead(4, 7))[-1]  # past 64
    assert executor.captures == 2
    twin = engine.fork()
    following = list(twin.decode_ahead(1, token))
    short = list(other.decode_ahead(1, 5))
    assert executor.captures == 2, "a shorter text runs on the larger graph"
    engine.prefill(IDS[:62])
    assert list(engine.decode_ahead(1, 9))  # past 128
    assert executor.captures == 3
    twin.trim(66)
    assert list(twin.decode_ahead(1, token)) == following
    other.trim(3)
    assert list(other.decode_ahead(1, 5)) == short
    assert executor.captures == 3


def test_a_long_prompt_elsewhere_makes_new_graphs_for_new_rope_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the addresses of the RoPE rows; a prompt may replace them."""
    monkeypatch.setattr(rope, "_FIRST", 16)
    model = micro.load()
    executor = model.decoder.step_executor  # type: ignore[attr-defined]
    engine = lk.build_engine("standard", model)
    engine.prefill(IDS[:6])
    first = list(engine.decode_ahead(1, 7))
    before, table = executor.captures, weakref.ref(model.decoder.rope_tables[0].cos)  # type: ignore[attr-defined]
    lk.build_engine("standard", model).prefill(IDS[:70])
    engine.trim(6)
    assert list(engine.decode_ahead(1, 7)) == first
    assert executor.captures == before + 1
    assert table() is None, "what the old graph read is gone, and so is that graph"


def test_growth_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = micro.load()
    engine = lk.build_engine("standard", model)
    engine.prefill(IDS[:63])
    list(engine.decode_ahead(1, 7))

    def full(*sizes: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(program.AttentionScratch, "empty", full)
        with pytest.raises(lk.BackendFailure, match="out of memory"):
            engine.decode_step(9)
    buffers = model.decoder.step_executor._buffers  # type: ignore[attr-defined]
    assert buffers.capacity == 64 == buffers.kv_tables.shape[1] * 64
    assert torch.isfinite(engine.decode_step(9)).all()
    assert buffers.capacity == 128 == buffers.kv_tables.shape[1] * 64


def test_a_dropped_model_frees_its_weights_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model = micro.load()
        engine = lk.build_engine("standard", model)
        engine.prefill(IDS[:6])
        list(engine.decode_ahead(1, 7))
        weights = weakref.ref(model.decoder.weights)  # type: ignore[attr-defined]
        del model, engine
        assert weights() is None
    finally:
        gc.enable()


def test_keys_and_values_alone_are_those_of_the_whole_projection() -> None:
    decoder: Any = micro.shared().decoder
    for rows in (torch.randn(5, 32, device=decoder.device), torch.randn(1, 32, device=decoder.device)):
        _, k, v = decoder.attention_inputs(1, rows, 3)
        alone = decoder.project_kv(1, rows, 3)
        torch.testing.assert_close(alone[0], k, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(alone[1], v, rtol=1e-2, atol=1e-2)


def test_engines_take_turns_on_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators of different engines, one token each in turn: each waits for its own token only."""
    monkeypatch.setattr(program, "_SLOTS", 2)  # so that slots are used again while tokens lie unread
    model = micro.load()
    specs = ("standard", "markov-rs:rows=host")
    prompts = (IDS[:14], IDS[20:26])
    alone = []
    for spec, prompt in zip(specs, prompts, strict=True):
        engine = lk.build_engine(spec, model)
        logits = engine.logits(engine.prefill(prompt))
        tokens = [int(logits.argmax())]
        while len(tokens) < 3:
            tokens.append(choose(engine, tokens[-1]))
        alone.append(tokens)
    streams = [lk.build_engine(s, model).generate(p, 3) for s, p in zip(specs, prompts, strict=True)]
    turns = [[token.id for token in turn] for turn in zip(*streams, strict=True)]
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == alone


def test_a_seed_repeats_the_drawn_text() -> None:
    engine = lk.build_engine("standard", micro.shared())

    def drawn(seed: int, count: int = 3, **options: Any) -> list[int]:
        options |= {"temperature": 1.5, "top_p": 0.95, "seed": seed}
        engine.reset()  # so that every run makes its first logits by one pass
        return [token.id for token in engine.generate(IDS[:5], count, **options)]

    text = drawn(3)
    assert engine.tokens == IDS[:5] + text[:2]
    assert drawn(3, with_logits=True) == text, "also where the host sees the logits"
    assert drawn(4) != text
    assert len(drawn(3, 1, repetition_penalty=1.3)) == 1


def test_a_stop_token_ends_the_text_where_it_stands() -> None:
    model = micro.load()
    engine = lk.build_engine("standard", model)
    free = [token.id for token in engine.generate(IDS[:9], 3)]
    assert len(set(free)) > 1, "this test needs a text that does not repeat one token"
    stop = next(token for token in free[1:] if token != free[0])
    at = free.index(stop)
    engine.model.tokenizer = micro.load(stop).tokenizer
    tokens = list(engine.generate(IDS[:9], 9))
    assert [token.id for token in tokens] == free[: at + 1]
    assert tokens[-1].finish == "stop"
    assert engine.tokens == IDS[:9] + free[:at]
    stream = engine.generate(IDS[:9], 9, ignore_stop_tokens=True)
    taken = list(itertools.islice(stream, 2))
    stream.close()  # type: ignore[attr-defined]
    assert engine.tokens == [*IDS[:9], taken[0].id]
    assert choose(engine, taken[1].id) == free[2]


def test_a_step_given_up_half_way_leaves_the_next_ones_right(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, witness = build("standard"), build("standard")
    expected = list(witness.decode_ahead(2, 7))

    def interrupted(self: program.StepProgram) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(program.StepProgram, "replay", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.decode_ahead(2, 7)
    assert engine.tokens == IDS[:14]
    assert list(engine.decode_ahead(2, 7)) == expected


def test_the_ledger_lists_what_engines_share_once() -> None:
    engine, other = build("markov-rs", 3), build("standard", 3)
    engine.decode_step(5)
    decoder = engine.model.decoder
    shared = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensors in decoder.workspaces().values()
        for tensor in tensors
    }
    for sides in ((engine,), (engine, other)):
        own = held_storages(*sides)
        together = Ledger.combined([side.ledger() for side in sides])
        assert together.capacity == sum((own | shared).values())
    names = {row["name"] for row in engine.ledger().rows() if row["role"] == "workspace"}
    assert {"step buffers (shared)", "unpacked weights (shared)"} <= names
    assert lk.build_engine("standard", engine.model).ledger().total(role="canonical") == 0


def test_a_dropped_conversation_is_not_kept_by_the_graphs() -> None:
    engine = build("markov-rs:rows=host")
    list(engine.decode_ahead(1, 7))
    rows = engine._state.step_rows()
    assert rows is not None
    gone = weakref.ref(rows.kv[0])
    del engine, rows
    gc.collect()
    assert gone() is None


def test_stage_timers_run_layer_by_layer_and_wait_for_the_device() -> None:
    engine = build("standard")
    engine.profile()
    logits = engine.logits(engine.decode_step(7))
    summary = engine.stage_summary()
    assert summary is not None
    assert min(summary.microseconds[stage] for stage in ("embed", "attention", "ffn", "head")) > 0
    assert engine.info.backend == "cuda eager"
    captured = build("standard")
    assert torch.allclose(captured.logits(captured.decode_step(7)), logits, atol=0.05, rtol=0.02)
