"""Generated from the registry: every engine x every family keeps its promise. No engine is named here."""

from __future__ import annotations

import pytest
import torch

import larql_kv as lk
from larql_kv.policy import StateKind, Verdict
from larql_kv.state.ledger import Ledger
from tests import tiny_models
from tests.models import FAMILIES, SPECS, tiny
from tests.storages import held_storages

LENGTH = 40
# A mask of the engine's own is the same on every family with windows, and on every one without.
combinations = pytest.mark.parametrize(
    ("family", "spec"),
    [
        (family, spec)
        for family in FAMILIES
        for spec in SPECS
        if family in ("llama", "gemma3") or not ("sinks" in spec or "unlimited" in spec)
    ],
)


def _ids(model, count: int = LENGTH, seed: int = 3) -> list[int]:
    return tiny_models.sample_ids(count, model.config.vocab, seed)


@combinations
def test_contract_holds_in_bits(family: str, spec: str) -> None:
    """In float32 on the CPU, an exact engine has the bits of its reference, in prefill and in decode."""
    engine = lk.build_engine(spec, tiny(family))
    report = engine.policy.contract.check(engine, _ids(engine.model), prompt_tokens=11, free_tokens=20)
    assert report.verdict == Verdict.BITS, report
    assert report.noise_floor.max_kl == 0
    assert report.noise_floor.same_bits
    assert report.first_divergence is None
    assert sum(report.forms.values()) == pytest.approx(1)


@combinations
def test_any_chunks_give_the_same_bits(family: str, spec: str) -> None:
    model = tiny(family)
    ids = _ids(model)
    whole = lk.build_engine(spec, model).prefill_rows(ids)
    for sizes in ([1] * LENGTH, [13, 1, 26], [39, 1], [7, 8, 9, 16]):
        engine = lk.build_engine(spec, model)
        start, rows = 0, []
        for size in sizes:
            rows.append(engine.prefill_rows(ids[start : start + size]))
            start += size
        assert torch.equal(torch.cat(rows), whole), sizes


@combinations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drop_derivative_changes_nothing(family: str, spec: str, dtype: str) -> None:
    """In the bfloat16 form too: K/V are projected from the row as stored, by one row-invariant kernel.

    K/V that come from bare token ids are one pass over all of them, and have the bits of that.
    """
    model = tiny(family, dtype)
    ids = _ids(model)
    kept, dropped = lk.build_engine(spec, model), lk.build_engine(spec, model)
    kept.prefill(ids[:20])
    dropped.prefill(ids[:20])
    has_derivative = dropped.policy.derivative != StateKind.NOTHING
    from_ids = has_derivative and dropped.policy.canonical == StateKind.TOKEN_IDS
    for step, token in enumerate(ids[20:]):
        if step % 3 == 0:
            before = dropped.ledger().total(role="derivative", capacity=True)
            assert dropped.drop_derivative() == before
            assert (before > 0) == has_derivative
            assert dropped.ledger().total(role="derivative", capacity=True) == 0
        got, expected = dropped.decode_step(token), kept.decode_step(token)
        if has_derivative:
            assert dropped.recomputed_tokens == (20 + step if from_ids and step % 3 == 0 else 0)
        if from_ids and dtype != "float32":  # only there one pass and single steps have the same bits
            expected = lk.build_engine(spec, model).prefill(ids[: 21 + step]) if step % 3 == 0 else got
        assert torch.equal(got, expected)


@combinations
def test_trim_then_continue_equals_a_fresh_run(family: str, spec: str) -> None:
    model = tiny(family)
    ids, other = _ids(model), _ids(model, seed=4)
    for keep in (0, 1, 7, 30, 39, 40, 50):
        engine = lk.build_engine(spec, model)
        engine.prefill(ids)
        recomputed = engine.trim(keep)
        kept = ids[:keep]
        assert engine.tokens == kept
        assert 0 <= recomputed <= len(kept)
        fresh = lk.build_engine(spec, model)
        if kept:
            fresh.prefill(kept)
        assert torch.equal(engine.prefill(other[:3]), fresh.prefill(other[:3])), keep
        assert torch.equal(engine.decode_step(other[3]), fresh.decode_step(other[3])), keep


@combinations
def test_fork_leaves_the_parent_intact_and_shares_bytes(family: str, spec: str) -> None:
    model = tiny(family)
    ids, other = _ids(model), _ids(model, seed=5)
    parent, witness = lk.build_engine(spec, model), lk.build_engine(spec, model)
    parent.prefill(ids[:30])
    witness.prefill(ids[:30])
    child = parent.fork()
    alone = parent.ledger().total(role="canonical", capacity=True)
    together = Ledger.combined([parent.ledger(), child.ledger()])
    if parent.policy.canonical != StateKind.TOKEN_IDS:
        assert together.total(role="canonical", capacity=True) < 1.5 * alone
    for mine, theirs in zip(ids[30:], other, strict=False):
        forked = child.decode_step(theirs)
        assert torch.equal(parent.decode_step(mine), witness.decode_step(mine))
    fresh = lk.build_engine(spec, model)
    assert torch.equal(forked, fresh.prefill(ids[:30] + other[:10]))
    assert parent.tokens == ids
    assert child.tokens == ids[:30] + other[:10]
    together = Ledger.combined([parent.ledger(), child.ledger()])
    assert together.capacity == sum(held_storages(parent, child).values())


@combinations
def test_ledger_equals_the_storages_found(family: str, spec: str) -> None:
    model = tiny(family)
    engine = lk.build_engine(spec, model)
    for token in _ids(model, 80):
        engine.prefill([token])
        found = held_storages(engine)
        assert engine.ledger().capacity == sum(found.values())
        assert engine.ledger().live <= engine.ledger().capacity
    assert engine.memory_bytes == engine.ledger().capacity


@combinations
def test_sliding_layers_hold_only_their_window(family: str, spec: str) -> None:
    """Dead rows are free: the K/V bytes are those of min(n, window) rows on every layer, to the byte."""
    model = tiny(family)
    engine = lk.build_engine(spec, model)
    mask = engine.policy.contract.mask
    if mask.get("sinks") or mask.get("tumbling"):
        pytest.skip("keeps rows beside its window: see the tests of that engine")
    own = (
        engine.spec.window
        if hasattr(engine.spec, "window") and engine.policy.canonical == StateKind.KV
        else None
    )
    ids = _ids(model, 70)
    engine.prefill(ids)
    rows = 0
    for layer in model.config.layers:
        limits = [limit for limit in (layer.window, own) if limit is not None]
        rows += min([len(ids), *limits])
    expected = rows * 2 * model.config.kv_dim * model.kv_dtype.itemsize
    live = sum(row["live"] for row in engine.ledger().rows() if row["name"] == "K/V rows")
    assert live == (expected if engine.held_positions else 0)


@combinations
def test_a_returned_hidden_is_never_overwritten(family: str, spec: str) -> None:
    model = tiny(family)
    engine = lk.build_engine(spec, model)
    first = engine.prefill(_ids(model, 9))
    copy = first.clone()
    for token in _ids(model, 9, seed=9):
        engine.decode_step(token)
    engine.reset()
    engine.prefill(_ids(model, 30, seed=8))
    assert torch.equal(first, copy)


@combinations
def test_every_engine_uses_the_ffn_it_was_given(family: str, spec: str) -> None:
    model = tiny(family)

    class Counting(lk.DenseFfn):
        calls = 0

        def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(layer, x) * 0.5

    ffn = Counting(model)
    engine = lk.build_engine(spec, model, ffn=ffn)
    halved = engine.prefill(_ids(model, 6))
    assert ffn.calls == model.config.layer_count
    assert not torch.equal(halved, lk.build_engine(spec, model).prefill(_ids(model, 6)))
    engine.decode_step(1)
    assert ffn.calls == 2 * model.config.layer_count
