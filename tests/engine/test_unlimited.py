"""unlimited-context: what a window keeps and forgets, in exact bits and bytes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import larql_kv as lk
from larql_kv.engine.kv_forms import nats_of
from larql_kv.errors import BackendUnavailable, ModelError, SpecError
from larql_kv.policy import BoundedKL, ExactWithinWindow, StateKind, TaskLevel, Verdict
from larql_kv.state.kv import KvLayout, KVState
from larql_kv.state.kv_code import KvCoding
from tests.engine.live_rows import FAMILIES, check_replays, ids_of, recorded, roomy
from tests.models import tiny
from tests.storages import held_storages

# -- the compatible mode ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [1, 2, 8, 64])
def test_exact_within_windows_of_any_size(family: str, window: int) -> None:
    engine = lk.build_engine(f"unlimited-context:window={window}", tiny(family))
    contract = engine.policy.contract
    assert contract == ExactWithinWindow(window, tumbling=True)
    report = contract.check(engine, ids_of(engine.model, 150), prompt_tokens=70, free_tokens=10)
    assert report.verdict == Verdict.BITS, report
    assert report.first_divergence is None


def test_the_first_window_is_standard_and_what_follows_is_not() -> None:
    model = tiny("llama")
    ids = ids_of(model, 20)
    standard = lk.build_engine("standard", model).prefill_rows(ids)
    rows = lk.build_engine("unlimited-context:window=13", model).prefill_rows(ids)
    assert torch.equal(rows[:13], standard[:13])
    assert torch.equal(rows[13], standard[13]) is False


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_have_the_live_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lk.build_engine("unlimited-context:window=13", tiny(family))
    ids = ids_of(engine.model, 13 * 6)
    with recorded(engine, monkeypatch) as live:
        engine.prefill(ids[:50])
        for token in ids[50:]:
            engine.decode_step(token)
        check_replays(engine, live)
    stats = engine.windows.stats()
    assert (stats.replayed_windows, stats.replayed_tokens) == (6, 78)
    for bad in (-1, 6):
        with pytest.raises(IndexError, match=f"no closed window {bad}: 6 are archived"):
            engine.windows.replay_window(bad)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["window=13", "window=13,replay=3", "window=9,replay=2,score=keys"])
def test_any_history_leaves_replays_and_ledger_true(
    family: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trims, forks, drops, flushes and a reset; with replay, windows that attended replays themselves."""
    draw = random.Random(f"{family}{spec}")
    engine = lk.build_engine(f"unlimited-context:{spec}", roomy(family))
    with recorded(engine, monkeypatch) as live:
        engine.prefill(ids_of(engine.model, 100))
        engine.reset()
        for _ in range(40):
            what = draw.choice(("prefill", "prefill", "decode", "trim", "fork", "drop", "flush"))
            if what == "prefill":
                engine.prefill(ids_of(engine.model, draw.randrange(1, 40), draw.randrange(1000)))
            elif what == "decode" and engine.length:
                for token in ids_of(engine.model, draw.randrange(1, 20), draw.randrange(1000)):
                    engine.decode_step(token)
            elif what == "trim":
                length = draw.randrange(engine.length // 2, engine.length + 1)
                assert engine.trim(length) < 13
            elif what == "fork":
                live.engine = engine = engine.fork()
            elif what == "drop":
                before = engine.ledger().total(role="derivative", capacity=True)
                assert engine.drop_derivative() == before
                assert engine.ledger().total(role="derivative", capacity=True) == 0
            elif what == "flush":
                engine.windows.flush()
            ledger = engine.ledger()
            assert ledger.capacity == sum(held_storages(engine).values()), what
            assert ledger.live <= ledger.capacity
        count = engine.windows.stats().archived_windows
        assert count > 4
        check_replays(engine, live, sorted({0, 1, count // 2, count - 1}))


@pytest.mark.parametrize("family", FAMILIES)
def test_trim_runs_one_window_again_at_most(family: str) -> None:
    model = tiny(family)
    ids, other = ids_of(model, 100), ids_of(model, 5, seed=8)
    for keep in (1, 12, 13, 14, 51, 52, 53, 95, 99):
        engine, fresh = (lk.build_engine("unlimited-context:window=13", model) for _ in range(2))
        engine.prefill(ids)
        recomputed = engine.trim(keep)
        assert recomputed <= keep % 13
        assert engine.held_positions == keep
        fresh.prefill(ids[:keep])
        assert torch.equal(engine.prefill_rows(other), fresh.prefill_rows(other)), keep


def test_flush_begins_a_window_behind_itself() -> None:
    """Against a state that keeps every row, masked to the windows that the flushes make."""
    model = tiny("gemma3")
    ids = ids_of(model, 60)
    cuts, sizes = [0, 13, 20, 33, 34, 47, 60], [20, 14, 26]

    class Masked(KVState):
        def _span(self, position: int) -> tuple[int, int]:
            return next((a, b) for a, b in itertools.pairwise(cuts) if a <= position < b)

    engine = lk.build_engine("unlimited-context:window=13", model)
    masked = KVState(model, KvLayout(tumbling=13, retire=False))
    got, flushed, at = [], [], 0
    for size in sizes:
        got.append(engine.prefill_rows(ids[at : at + size]))
        at += size
        flushed.append(engine.windows.flush())
    masked.__class__ = Masked
    masked.begin(0, 60)
    expected = model.forward(model.embed(ids), 0, masked, engine.ffn)
    assert torch.equal(torch.cat(got), expected)
    assert flushed == [1, 3, None]  # the last window is full: there is nothing to close
    assert [item.first for item in engine.windows.archive()] == cuts[:-1]
    assert engine.windows.flush() is None
    engine.trim(34)
    assert engine.windows.stats().archived_windows == 4
    engine.trim(33)
    assert [item.first for item in engine.windows.archive()] == [0, 13, 20]


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_one_window_checkpoints_and_ids(family: str) -> None:
    model = roomy(family)
    engine = lk.build_engine("unlimited-context:window=16", model)
    sizes = {}
    for window in range(50):
        engine.prefill(ids_of(model, 16, seed=window))
        ledger = engine.ledger()
        assert ledger.capacity == sum(held_storages(engine).values())
        sizes[window] = sum(row["capacity"] for row in ledger.rows() if row["name"] == "K/V rows")
    engine.prefill([5])
    row = 2 * model.config.layer_count * model.config.kv_dim * 4
    ring = sum(min(17, layer.window or 17) for layer in model.config.layers)
    assert set(sizes.values()) == {row // model.config.layer_count * ring, sizes[0]}
    stats = engine.windows.stats()
    assert stats.archived_windows == stats.current_window_id == 50
    assert (stats.total_tokens, stats.current_window_tokens) == (801, 1)
    assert stats.checkpoint_bytes == 50 * row
    assert stats.archive_bytes == 4 * 800
    assert stats.total_boundary_bytes == 50 * row + 3200
    assert stats.equivalent_kv_bytes == 801 * row // 2
    assert stats.compression_ratio == stats.equivalent_kv_bytes / stats.total_boundary_bytes
    assert stats.held_bytes == sum(held_storages(engine).values())
    checkpoints = [row for row in engine.ledger().rows() if row["name"] == "checkpoints"]
    assert [(item["role"], item["live"]) for item in checkpoints] == [("canonical", 50 * row)]
    assert stats.to_dict()["scores"] is None


# -- codes, specs, other engines -------------------------------------------------------------------


def test_codes_in_windows_stay_exact_in_replays_and_trims(monkeypatch: pytest.MonkeyPatch) -> None:
    model = roomy("llama")
    ids = ids_of(model, 330)
    engine = lk.build_engine("unlimited-context:window=150,kv=turbo4", model)
    assert engine.policy.contract == BoundedKL(nats_of(KvCoding()), tumbling=150)
    with recorded(engine, monkeypatch) as live:
        engine.prefill(ids[:310])
        check_replays(engine, live)
        for keep in (305, 299, 290, 160, 149, 60):
            fresh = lk.build_engine("unlimited-context:window=150,kv=turbo4", model)
            fresh.prefill(ids[:keep])
            engine.trim(keep)
            assert torch.equal(engine.fork().prefill(ids[5:80]), fresh.prefill(ids[5:80])), keep
        engine.prefill(ids[60:200])
        assert engine.windows.flush() == 1
        engine.prefill(ids[:140])
        assert engine.windows.flush() == 2
        check_replays(engine, live)
    ledger = engine.ledger()
    assert ledger.capacity == sum(held_storages(engine).values())
    assert any(row["name"] == "K/V codes" for row in ledger.rows())


def test_fewer_bits_in_windows_are_further_from_full_windows() -> None:
    found = {}
    for kv in ("turbo4", "turbo3", "turbo2"):
        engine = lk.build_engine(f"unlimited-context:window=200,kv={kv}", roomy("llama"))
        contract, ids = engine.policy.contract, ids_of(engine.model, 500)
        report = contract.check(engine, ids, prompt_tokens=250, free_tokens=2)
        found[kv] = report.teacher_forced.mean_kl
        assert 0.2 < report.forms[kv] < 0.3
    assert 0 < found["turbo4"] < found["turbo3"] < found["turbo2"]


@pytest.mark.parametrize("name", ["unlimited-context", "unlimited", "unlimited_context"])
def test_names(name: str) -> None:
    spec = lk.parse_spec(f"{name}:window=256")
    assert spec.text == "unlimited-context:window=256"
    assert lk.parse_spec(name).text == "unlimited-context"
    assert lk.parse_spec(f"{name}:replay=0") == lk.parse_spec(f"{name}:replay=none") == lk.parse_spec(name)


def test_policies() -> None:
    plain, replay = (lk.parse_spec(spec).policy for spec in ("unlimited", "unlimited:replay=2"))
    assert plain.canonical == replay.canonical == StateKind.KV_WINDOW
    assert (plain.derivative, replay.derivative) == (StateKind.NOTHING, StateKind.KV)
    assert plain.contract == ExactWithinWindow(512, tumbling=True)
    assert replay.contract == TaskLevel()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("window=0", "window must be at least 1, got 0"),
        ("replay=65", "replay must be at most 64, got 65"),
        ("score=keys", "give replay=N too"),
        ("replay=2,kv=turbo4", "give one of the two"),
        ("window=128,kv=turbo3", "kv=turbo3 needs window > 128"),
        ("score=words", "'both' or|one of both, tokens, keys"),
    ],
)
def test_bad_specs_are_refused(text: str, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        lk.parse_spec(f"unlimited-context:{text}")


def test_engines_without_windows_say_so() -> None:
    with pytest.raises(BackendUnavailable, match="'standard' keeps no windows"):
        _ = lk.build_engine("standard", tiny("llama")).windows


def test_a_model_of_sliding_layers_only_has_nowhere_to_bring_windows_back_to() -> None:
    model = tiny("mistral")
    assert all(layer.window for layer in model.config.layers)
    with pytest.raises(ModelError, match="every layer of this mistral has a window of its own"):
        lk.build_engine("unlimited-context:window=13,replay=1", model)
    lk.build_engine("unlimited-context:window=13", model)
