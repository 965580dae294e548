"""Capture masks: which one is in force, and that logits, tokens and history do not depend on it."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

import larql_kv as lk
from larql_kv.engine.base import KvEngine
from larql_kv.policy import StateKind, Verdict
from larql_kv.state import bridge, transit
from larql_kv.state.bridge import CaptureMask
from larql_kv.state.ledger import Ledger
from tests import tiny_models
from tests.contracts.test_state_machine import EngineMachine, families
from tests.lanes import LateLane, staging
from tests.models import tiny
from tests.storages import held_storages

MASKS = ("none", "h_only", "full")
CASCADE = [
    *[("markov-rs", mask) for mask in MASKS],
    *[("markov-rs:window=13", "full")],
    *[("markov-rs:rows=host", mask) for mask in MASKS[1:]],
    *[("markov-rs:window=13,rows=host", "h_only")],
    *[("markov-rs:rows=none", mask) for mask in MASKS],
]
_KV_NAMES = ("K/V rows", "K/V rows (host copy)")
each_mask = pytest.mark.parametrize(("spec", "mask"), CASCADE)


@pytest.fixture(params=["late", "plain"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host happen as late as they may, or at once; the ring is small."""
    monkeypatch.setattr(bridge, "SLOTS", 6)
    if request.param == "late":
        monkeypatch.setattr(transit, "PlainLane", LateLane)


def _engine(spec: str, mask: str, family: str = "gemma3", dtype: str = "float32") -> KvEngine:
    engine = lk.build_engine(spec, staging(family, dtype))
    engine.set_capture(mask)
    return engine


def _logits(engine: KvEngine, ids: list[int], prompt: int = 21) -> torch.Tensor:
    steps = [engine.logits(engine.prefill(ids[:prompt]))]
    return torch.cat([*steps, *(engine.logits(engine.decode_step(token)) for token in ids[prompt:])])


def test_the_best_mask_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(spec: str) -> str:
        return lk.build_engine(spec, staging("llama")).capture

    best = {
        "markov-rs": "none",
        "markov-rs:window=13": "none",
        "markov-rs:rows=host": "h_only",
        "markov-rs:rows=none": "none",
        "standard": "none",
        "no-cache": "none",
    }
    assert {spec: chosen(spec) for spec in best} == best
    monkeypatch.setenv("LARQL_W10_HONLY", "1")  # accepted, and without effect
    monkeypatch.setenv("LARQL_W10_DISABLE", "0")
    assert {spec: chosen(spec) for spec in best} == best
    monkeypatch.setenv("LARQL_W10_DISABLE", "1")
    cascade = {spec: "full" if spec.startswith("markov") else "none" for spec in best}
    assert {spec: chosen(spec) for spec in best} == cascade
    engine = lk.build_engine("markov-rs", staging("llama"))
    engine.set_capture("none")
    assert engine.capture == "none", "what the caller asks for counts more than the environment"


def test_on_the_cpu_everything_is_on_the_host_already() -> None:
    for spec in ("markov-rs", "markov-rs:rows=host", "markov-rs:rows=none"):
        engine = lk.build_engine(spec, tiny("llama"))
        assert engine.capture == CaptureMask.FULL
        engine.set_capture("h_only")
        assert engine.capture == CaptureMask.FULL, "it cannot be left out"
        engine.prefill([5, 6, 7])
        assert not any("capture" in item.name or "copy" in item.name for item in engine.ledger())
        assert engine.info.capture == "full"
        assert {item.place for item in engine.ledger()} == {"host"}
    assert lk.build_engine("standard", tiny("llama")).info.capture == "none"


def test_masks_that_do_not_serve_are_refused() -> None:
    for spec in ("standard", "no-cache"):
        engine = lk.build_engine(spec, staging("llama"))
        engine.set_capture("none")
        with pytest.raises(lk.SpecError, match=f"{spec}.*stages nothing"):
            engine.set_capture("full")
    for model in (staging("llama"), tiny("llama")):
        engine = lk.build_engine("markov-rs:rows=host", model)
        with pytest.raises(lk.SpecError, match="at least h_only"):
            engine.set_capture("none")
        with pytest.raises(lk.SpecError, match=r"'half'.*full, h_only, none"):
            engine.set_capture("half")
        engine.prefill([5, 6])
        with pytest.raises(lk.InvariantViolation, match="reset"):
            engine.set_capture("full")
        engine.reset()
        engine.set_capture("full")
    assert lk.build_engine("markov-rs:rows=host", staging("llama")).fresh().capture == "h_only"
    assert _engine("markov-rs", "full", "llama").fresh().capture == "full"
    assert _engine("markov-rs", "full", "llama").reference().capture == "none"


def test_rows_none_leaves_no_rows_to_place() -> None:
    with pytest.raises(lk.SpecError, match=r"window=9 .*rows=none"):
        lk.parse_spec("markov-rs:rows=none,window=9")
    with pytest.raises(lk.SpecError, match="rows='disk' is not one of device, host, none"):
        lk.parse_spec("markov-rs:rows=disk")
    assert lk.parse_spec("markov-rs:rows=none,window=0") == lk.parse_spec("markov-rs:rows=none")
    policy = lk.parse_spec("markov-rs:rows=none").policy
    assert (policy.canonical, policy.derivative) == (StateKind.TOKEN_IDS, StateKind.KV)
    assert lk.parse_spec("markov-rs:rows=host").policy == lk.parse_spec("markov-rs").policy


@pytest.mark.usefixtures("lane")
@each_mask
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_and_tokens_are_the_same_under_every_mask(spec: str, mask: str, dtype: str) -> None:
    ids = tiny_models.sample_ids(90, 128)
    plain = lk.build_engine("standard", tiny("gemma3", dtype))
    assert torch.equal(_logits(_engine(spec, mask, dtype=dtype), ids), _logits(plain, ids))
    engine, other = _engine(spec, mask, dtype=dtype), lk.build_engine("standard", tiny("gemma3", dtype))
    tokens = [token.id for token in engine.generate(ids[:9], 30, ignore_stop_tokens=True)]
    assert tokens == [token.id for token in other.generate(ids[:9], 30, ignore_stop_tokens=True)]


@pytest.mark.usefixtures("lane")
@each_mask
def test_the_contract_holds_under_every_mask(spec: str, mask: str) -> None:
    engine = _engine(spec, mask)
    ids = tiny_models.sample_ids(40, 128)
    report = engine.policy.contract.check(engine, ids, prompt_tokens=11, free_tokens=8)
    assert report.verdict == Verdict.BITS, report


@pytest.mark.usefixtures("lane")
@each_mask
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_host_holds_what_the_mask_says(spec: str, mask: str, family: str) -> None:
    """Nothing under none; the rows that attention and the residual pages hold on the device, otherwise."""
    engine = _engine(spec, mask, family)
    ids = tiny_models.sample_ids(80, 128)
    engine.prefill(ids[:66])
    for token in ids[66:]:
        engine.decode_step(token)
    names = {row["name"]: row for row in engine.ledger().rows()}
    copies = {name for name in names if name.endswith("(host copy)")}
    owns = "rows=host" in spec  # its residual rows on the host are no copy
    expected = {"full": {"K/V rows (host copy)"}, "h_only": set(), "none": set()}[mask]
    if mask != "none" and not owns:
        expected = expected | {"residual rows (host copy)"}
    assert copies == expected
    assert all(names[name]["role"] == "derivative" for name in copies)
    assert ("capture ring" in names) == ("capture staging" in names) == (mask != "none")
    assert ("residual rows" in names) == ("rows=none" not in spec)
    if "K/V rows (host copy)" in names:
        live = [sum(item.live for item in engine.ledger() if item.name == name) for name in _KV_NAMES]
        assert live[0] == live[1] > 0
    if mask != "none":
        compare_host_with_device(engine, len(ids))


def compare_host_with_device(engine: KvEngine, length: int) -> None:
    state = engine._state
    held = state.bridge
    held.drain()
    for layer, pages in enumerate(rows.hot for rows in state.kv.rows):
        first = length - pages.live_rows(length)
        if held.full:
            heads = engine.model.config.kv_heads
            both = held.kv[layer].read(first, length).view(length - first, 2, heads, -1)
            for position in range(first, length):
                slot = position if pages.ring is None else position % pages.ring
                block, row = divmod(slot, 64)
                assert torch.equal(pages.block(block)[:, :, row], both[position - first])
        witness = lk.build_engine("markov-rs", tiny_of(engine))
        witness.prefill(engine.tokens)
        assert torch.equal(
            held.rows[layer].read(first, length), witness._state.pages[layer].read(first, length)
        )


def tiny_of(engine: KvEngine) -> lk.Model:
    return next(tiny(family) for family in ("llama", "gemma3") if tiny(family).config == engine.model.config)


@pytest.mark.usefixtures("lane")
@each_mask
def test_dropping_lets_the_copies_go_and_they_come_back(spec: str, mask: str) -> None:
    engine, witness = _engine(spec, mask), lk.build_engine("standard", tiny("gemma3"))
    ids = tiny_models.sample_ids(50, 128)
    engine.prefill(ids[:30])
    witness.prefill(ids[:30])
    for step, token in enumerate(ids[30:]):
        if step % 4 == 0:
            before = engine.ledger().total(role="derivative", capacity=True)
            assert engine.drop_derivative() == before > 0
            assert engine.ledger().total(role="derivative", capacity=True) == 0
        assert torch.equal(engine.decode_step(token), witness.decode_step(token))
    engine.ledger()
    if mask != "none":
        compare_host_with_device(engine, len(ids))


@each_mask
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_failed_step_takes_its_row_back(spec: str, mask: str, family: str, monkeypatch) -> None:
    monkeypatch.setattr(transit, "PlainLane", LateLane)
    model = staging(family)

    class Breaking(lk.DenseFfn):
        left = 10**9

        def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().forward(layer, x)

    ffn = Breaking(model)
    engine = lk.build_engine(spec, model, ffn=ffn)
    engine.set_capture(mask)
    ids = tiny_models.sample_ids(30, 128)
    engine.prefill(ids[:20])
    for call in (
        lambda: engine.decode_step(7),
        lambda: engine.prefill(ids[:9]),
        lambda: engine.decode_step(8),
    ):
        ffn.left = 3
        with pytest.raises(KeyboardInterrupt):
            call()
    for token in ids[20:]:
        engine.decode_step(token)
    engine.ledger()
    if mask != "none":
        compare_host_with_device(engine, len(ids))


@pytest.mark.parametrize(("spec", "mask"), [pair for pair in CASCADE if pair[1] != "none"])
def test_any_history_under_a_late_bridge_equals_the_reference(
    spec: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transit, "PlainLane", LateLane)
    monkeypatch.setattr(bridge, "SLOTS", 5)

    class Machine(EngineMachine):
        @initialize(family=st.sampled_from(families))
        def start(self, family: str) -> None:
            super().start(family)
            self.model = staging(family)
            self.engine = lk.build_engine(spec, self.model)
            self.engine.set_capture(mask)

        @rule()
        def look(self) -> None:
            super().ledger_is_true()

        def ledger_is_true(self) -> None:
            """Not after every action: the ledger waits for what is under way."""

    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=checks
        ),
    )


def test_a_fork_has_the_rows_that_were_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transit, "PlainLane", LateLane)
    parent, witness = _engine("markov-rs:rows=host", "h_only"), lk.build_engine("standard", tiny("gemma3"))
    ids = tiny_models.sample_ids(20, 128)
    witness.prefill(ids)
    parent.prefill(ids[:-1])
    parent.decode_step(ids[-1])
    child = parent.fork()
    child.drop_derivative()
    assert torch.equal(child.decode_step(7), witness.decode_step(7))
    parent.decode_step(9)
    parent.reset()
    assert {row["live"] for row in parent.ledger().rows() if row["role"] != "workspace"} == {0}
    assert parent.ledger().total(role="canonical", capacity=True) == parent._tokens._ids.nbytes


def test_forks_count_the_buffers_once() -> None:
    parent = _engine("markov-rs:rows=host", "full")
    parent.prefill(tiny_models.sample_ids(20, 128))
    child = parent.fork()
    child.decode_step(5)
    parent.decode_step(6)
    together = Ledger.combined([parent.ledger(), child.ledger()])
    assert together.capacity == sum(held_storages(parent, child).values())
    assert sum(item.name == "capture ring" for item in together) == 1


def test_engines_on_one_model_share_the_buffers_and_keep_their_rows_apart(monkeypatch) -> None:
    monkeypatch.setattr(transit, "PlainLane", LateLane)
    model, ids = staging("gemma3"), tiny_models.sample_ids(40, 128)
    left, right = (lk.build_engine("markov-rs:rows=host", model) for _ in range(2))
    left.prefill(ids[:9])
    right.prefill(ids[9:20])
    for step in range(12):
        left.decode_step(ids[step])
        right.decode_step(ids[20 + step])
        if step % 5 == 0:
            left.drop_derivative()
    assert left._state.bridge.staging.data_ptr() == right._state.bridge.staging.data_ptr()
    together = Ledger.combined([left.ledger(), right.ledger()])
    assert together.capacity == sum(held_storages(left, right).values())
    for engine in (left, right):
        compare_host_with_device(engine, engine.length)


def test_run_tells_the_mask(larql_run) -> None:
    assert larql_run("markov-rs")["capture"] == "full"
    assert larql_run("standard")["capture"] == "none"


@pytest.fixture
def larql_run():
    from typer.testing import CliRunner

    from larql_kv.cli.main import app

    def run(spec: str) -> dict:
        base = tiny_models.model_dir("llama")
        options = ["run", str(base), "w5 w6", "-n", "2", "--engine", spec, "--json", "--dtype", "float32"]
        return json.loads(CliRunner().invoke(app, options).stdout)

    return run
