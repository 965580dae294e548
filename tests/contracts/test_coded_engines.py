"""Engines that hold codes: what they attend is what a float64 formula makes of their codes; nothing is coded
twice; how the text came in, forks, trims and drops change no bit that they should not."""

from __future__ import annotations

import math

import pytest
import torch

import larql_kv as lk
from larql_kv.model.model import Model
from larql_kv.policy import StateKind
from larql_kv.state.coded_rows import CodedRows
from larql_kv.state.kv import KvLayout, KVState
from larql_kv.state.kv_code import KvCoding
from larql_kv.state.kv_rows import KvRows
from larql_kv.state.ledger import Ledger
from tests import tiny_models
from tests.models import CODED_SPECS, tiny
from tests.storages import held_storages

LENGTH = 230
combinations = pytest.mark.parametrize(
    ("family", "spec"), [(family, spec) for family in ("llama", "gemma3") for spec in CODED_SPECS]
)


def _ids(model: Model, count: int = LENGTH, seed: int = 3) -> list[int]:
    return tiny_models.sample_ids(count, model.config.vocab, seed)


# -- the state against a formula -----------------------------------------------------------------------


def formula(
    k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, rows: KvRows, scale: float, sinks: int
) -> torch.Tensor:
    """float64 attention of all queries (n, heads, d), each over the coded or the full row of every position
    by the rule of the format; codes by the torch codec alone."""
    code = rows.code
    assert code is not None
    n, heads, d = q.shape
    held, channel = [], torch.ones_like(k[0])
    if code.scaled:
        first = k[sinks : (sinks // 64 + 1) * 64]
        spread = (first - first.mean(0)).square().mean(0)
        channel = (spread + 1e-3 * spread.mean(-1, keepdim=True)) ** 0.25
        channel = (channel / channel.square().mean(-1, keepdim=True).sqrt()).clamp(1 / 8, 8)
        torch.testing.assert_close(rows.scale, channel, rtol=1e-4, atol=1e-6)
        channel = rows.scale  # its last bits decide codes
    for x, form in ((k / channel, code.k), (v, code.v)):
        turned = form.rotate(x)
        centre = torch.zeros_like(turned)
        for start in range(0, n, 64) if code.centred and x is not v else ():
            rows_of_block = turned[max(start, sinks) : start + 64]
            centre[start : start + 64] = rows_of_block.mean(0).bfloat16().float()
        coded = form.decode(*form.encode(turned, centre), centre)
        full = form.rotate(k) if x is not v else turned
        held.append((full.double(), coded.double()))
    position = torch.arange(n)
    edge = (position - code.recent).clamp_min(0) // 64 * 64
    is_coded = (position[None] < edge[:, None]) & (position[None] >= sinks)
    seen = position[None] <= position[:, None]
    if rows.window is not None:
        seen &= position[None] > position[:, None] - rows.window
    group = heads // k.shape[1]
    (k_full, k_coded), (v_full, v_coded) = (
        tuple(t.repeat_interleave(group, 1) for t in pair) for pair in held
    )
    scores = torch.where(
        is_coded,
        torch.einsum(
            "qhd,khd->hqk", code.k.rotate(q * channel.repeat_interleave(group, 0)).double(), k_coded
        ),
        torch.einsum("qhd,khd->hqk", code.k.rotate(q).double(), k_full),
    )
    weights = (scores * scale).masked_fill(~seen, -math.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights * is_coded, v_coded)
    out += torch.einsum("hqk,khd->qhd", weights * ~is_coded, v_full)
    return code.v.rotate(out.float()).reshape(n, heads * d)


@pytest.mark.parametrize(
    "coding",
    [
        KvCoding(),
        KvCoding(4, 4, recent=0, sinks=0),
        KvCoding(3, 4, "uniform", recent=37, sinks=9),
        KvCoding(4, 2, recent=128, sinks=4, centred=False, scaled=False),
        KvCoding(2, 3, recent=5, sinks=100),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("sizes", [[300], [1] * 300, [7, 64, 1, 128, 57, 43]], ids=["one", "steps", "parts"])
def test_attention_on_codes_is_the_formula_of_the_format(
    coding: KvCoding, window: int | None, sizes: list[int]
) -> None:
    model = tiny("llama")
    config = model.config
    generator = torch.Generator().manual_seed(5)
    shape = (300, config.kv_heads, config.head_dim)
    k = torch.randn(*shape, generator=generator) + 3 * torch.randn(1, *shape[1:], generator=generator)
    v = torch.randn(*shape, generator=generator)
    q = torch.randn(300, config.heads, config.head_dim, generator=generator)
    state = KVState(model, KvLayout(window, coding=coding))
    outs, first = [], 0
    for size in sizes:
        part = slice(first, first + size)
        state.begin(first, size)
        outs.append(state.attend(0, q[part].contiguous(), k[part].contiguous(), v[part].contiguous()))
        state.commit(first + size)
        first += size
    rows = state.rows[0]
    expected = formula(k, v, q, rows, config.attention_scale, coding.sinks)
    torch.testing.assert_close(torch.cat(outs), expected, rtol=0, atol=2e-5)
    assert rows.coded == rows.code.edge(299)


def test_no_full_precision_copy_of_the_past_is_held() -> None:
    """Codes of all but the recent rows, a ring of recent rows, four sinks; nothing else."""
    model = tiny("llama")
    engine = lk.build_engine("turbo-quant:recent=0", model)
    engine.prefill(_ids(model, 50))
    engine.prefill(_ids(model, 200))
    config = model.config
    state = engine._state
    full = sum(row["live"] for row in engine.ledger().rows() if row["name"] == "K/V rows")
    codes = sum(row["live"] for row in engine.ledger().rows() if row["name"] == "K/V codes")
    vector = 2 * config.kv_heads * config.layer_count
    coded = state.rows[0].coded
    assert 250 - coded <= 127
    means = coded / 64 * 2 * config.head_dim * config.kv_heads * config.layer_count
    assert codes == coded * vector * (config.head_dim // 2 + 4) + means
    assert full <= (250 - coded + 4) * vector * config.head_dim * 4
    assert engine.ledger().capacity == sum(held_storages(engine).values())
    assert engine.ledger().capacity < 250 * vector * config.head_dim * 4


# -- engines -------------------------------------------------------------------------------------------


@combinations
def test_a_check_says_what_was_read(family: str, spec: str) -> None:
    """Bounds are for trained models (tests/real); here the report has to be whole and to tell the forms."""
    engine = lk.build_engine(spec, tiny(family))
    report = engine.policy.contract.check(engine, _ids(engine.model, 250), prompt_tokens=200, free_tokens=4)
    assert report.teacher_forced.max_kl < 20
    assert report.teacher_forced.same_bits is False
    assert sum(report.forms.values()) == pytest.approx(1)
    assert any(name.startswith("turbo") or "rows" in name for name in report.forms), report.forms


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_codes_in_a_window_are_judged_by_that_window(family: str) -> None:
    """The same rows are attended, sinks too: with 4 bits the tiny models are nearer to that run than to
    `standard`."""
    model = tiny(family)
    ids = _ids(model)
    engine = lk.build_engine("turbo-quant:window=90,recent=10,sinks=5", model)
    contract = engine.policy.contract
    assert (contract.mask, contract.reference_window) == ({"window": 90, "sinks": 5}, 90)
    got = engine.prefill_rows(ids)[150:]
    references = engine.reference(), lk.build_engine("standard", model)
    by_window, full = (each.prefill_rows(ids)[150:] for each in references)
    assert (got - by_window).square().mean() < (got - full).square().mean()


@combinations
def test_any_chunks_give_the_same_bits(family: str, spec: str) -> None:
    model = tiny(family)
    ids = _ids(model)
    whole = lk.build_engine(spec, model).prefill_rows(ids)
    for sizes in ([100, 130], [63, 1, 64, 65, 37], [1] * 130 + [100]):
        engine = lk.build_engine(spec, model)
        start, rows = 0, []
        for size in sizes:
            rows.append(engine.prefill_rows(ids[start : start + size]))
            start += size
        assert torch.equal(torch.cat(rows), whole), sizes


@combinations
def test_drop_derivative_changes_nothing(family: str, spec: str) -> None:
    model = tiny(family)
    ids = _ids(model, 180)
    kept, dropped = lk.build_engine(spec, model), lk.build_engine(spec, model)
    if kept.policy.derivative == StateKind.NOTHING:
        assert dropped.drop_derivative() == 0
        return
    kept.prefill(ids[:150])
    dropped.prefill(ids[:150])
    for step, token in enumerate(ids[150:]):
        if step % 7 == 0:
            assert dropped.drop_derivative() > 0
            assert dropped.ledger().total(role="derivative", capacity=True) == 0
        assert torch.equal(dropped.decode_step(token), kept.decode_step(token)), step


@combinations
@pytest.mark.parametrize("keep", [1, 63, 64, 100, 129, 200])
def test_trim_keeps_codes_as_they_are(family: str, spec: str, keep: int) -> None:
    """What was coded stays coded, by the same bits; where codes are derivative, a trim leaves no trace."""
    model = tiny(family)
    ids, other = _ids(model), _ids(model, 50, seed=4)
    engine = lk.build_engine(spec, model)
    engine.prefill(ids)
    before = _codes(engine)
    recomputed = engine.trim(keep)
    assert engine.tokens == ids[:keep]
    assert engine.ledger().capacity == sum(held_storages(engine).values())
    got = engine.prefill_rows(other)
    assert torch.isfinite(got).all()
    if engine.policy.canonical in (StateKind.KV_CODES, StateKind.RESIDUAL_CODES) and not recomputed:
        for old, new in zip(before, _codes(engine), strict=True):
            assert all(torch.equal(new[position], row) for position, row in old.items() if position < keep)
    else:
        assert torch.equal(got, lk.build_engine(spec, model).prefill_rows(ids[:keep] + other)[keep:])


def test_channel_scales_go_with_the_last_row_that_was_coded() -> None:
    model = tiny("llama")
    ids, other = _ids(model), _ids(model, 200, seed=4)
    engine, fresh = lk.build_engine("turbo-quant", model), lk.build_engine("turbo-quant", model)
    engine.prefill(ids[:3] + other)
    engine.trim(3)  # within the sinks
    assert torch.equal(engine.prefill_rows(ids[3:]), fresh.prefill_rows(ids)[3:])


def _codes(engine: lk.KvEngine) -> list[dict[int, torch.Tensor]]:
    """What the codes of every layer that keeps all rows decode to, by position."""
    listed = []
    for rows in [*getattr(engine._state, "rows", []), *getattr(engine._state, "pages", [])]:
        decoded: list[torch.Tensor] | torch.Tensor = []
        first = 0
        if isinstance(rows, KvRows) and rows.code is not None and rows.window is None:
            first = rows.kept_sinks
            decoded = rows.decoded(first, rows.coded)[0] if rows.coded > first else []
        elif isinstance(rows, CodedRows) and rows.ring is None and rows.coded:
            decoded = rows.read(0, rows.coded)
        listed.append({first + index: row for index, row in enumerate(decoded)})
    return listed


@combinations
def test_fork_shares_codes_and_leaves_the_parent_intact(family: str, spec: str) -> None:
    model = tiny(family)
    ids, other = _ids(model, 240), _ids(model, 40, seed=5)
    parent, witness = lk.build_engine(spec, model), lk.build_engine(spec, model)
    parent.prefill(ids[:200])
    witness.prefill(ids[:200])
    child = parent.fork()
    together = Ledger.combined([parent.ledger(), child.ledger()])
    assert together.capacity == sum(held_storages(parent, child).values())
    assert together.capacity < 1.7 * parent.ledger().capacity
    for mine, theirs in zip(ids[200:], other, strict=True):
        forked = child.decode_step(theirs)
        assert torch.equal(parent.decode_step(mine), witness.decode_step(mine))
    fresh = lk.build_engine(spec, model)
    assert torch.equal(forked, fresh.prefill(ids[:200] + other))
    together = Ledger.combined([parent.ledger(), child.ledger()])
    assert together.capacity == sum(held_storages(parent, child).values())


@combinations
def test_ledger_equals_the_storages_found(family: str, spec: str) -> None:
    model = tiny(family)
    engine = lk.build_engine(spec, model)
    for size in (1, 62, 1, 1, 70, 3, 64, 1):
        engine.prefill(_ids(model, size))
        assert engine.ledger().capacity == sum(held_storages(engine).values())
        assert engine.ledger().live <= engine.ledger().capacity


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_row_is_coded_once(bits: int) -> None:
    """Codes of a block never change again, and are those of its full-precision rows: there is no drift."""
    model = tiny("llama")
    config = model.config
    k, v = (torch.randn(2000, config.kv_heads, config.head_dim) for _ in range(2))
    q = torch.randn(2000, config.heads, config.head_dim)
    state = KVState(model, KvLayout(coding=KvCoding(bits, bits, centred=False, scaled=False)))
    rows, kept = state.rows[0], {}
    for first in range(0, 2000, 50):
        part = slice(first, first + 50)
        state.begin(first, 50)
        state.attend(0, q[part], k[part], v[part])
        state.commit(first + 50)
        if rows.coded > 64:
            kept.setdefault(64, rows.decoded(64, rows.coded)[0][:1].clone())
            assert torch.equal(rows.decoded(64, rows.coded)[0][:1], kept[64])
    code = KvCoding(bits, bits).code(config).k
    turned = code.rotate(k[4 : rows.coded])
    assert torch.equal(rows.decoded(4, rows.coded)[0], code.decode(*code.encode(turned)))


@combinations
def test_a_failed_call_leaves_no_trace(family: str, spec: str) -> None:
    """Codes that it made go, by running the ids again: the next step has the bits it would have had."""
    model = tiny(family)
    ids = _ids(model)

    class Failing(lk.DenseFfn):
        def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer == model.config.layer_count - 1 and len(x) > 60:
                raise lk.RemoteError("the last layer is gone")
            return super().forward(layer, x)

    engine, witness = lk.build_engine(spec, model, ffn=Failing(model)), lk.build_engine(spec, model)
    engine.prefill(ids[:50])
    witness.prefill(ids[:50])
    with pytest.raises(lk.BackendFailure):
        engine.prefill(ids[50:200])
    assert engine.tokens == ids[:50]
    assert torch.equal(engine.decode_step(ids[50]), witness.decode_step(ids[50]))
    assert engine.ledger().capacity == sum(held_storages(engine).values())
