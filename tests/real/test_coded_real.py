"""Engines that hold codes, on the real models: under the bounds they declare, with the codes really read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import larql_kv as lk
from larql_kv.bench.text import TEXT, text_ids
from larql_kv.policy import Verdict, divergence
from tests.models import needs_gemma, needs_smollm2, real

PROSE = TEXT + (Path(__file__).parents[2] / "docs" / "state-policy.md").read_text()
pytestmark = pytest.mark.real


def _divergence(name: str, spec: str, tokens: int, skip: int = 200):
    """Of every position past the first `skip`: in float32 on the CPU one prefill has the bits of steps."""
    model = real(name)
    ids = text_ids(model, tokens, PROSE)
    engine = lk.build_engine(spec, model)
    expected, got = (each.prefill_rows(ids)[skip:] for each in (lk.build_engine("standard", model), engine))
    return divergence(model.logits(expected), model.logits(got)), engine


@pytest.mark.parametrize(
    ("name", "spec", "mean", "top1"),
    [
        pytest.param("smollm2-135m", "turbo-quant", 0.01, 0.92, marks=needs_smollm2),
        pytest.param("gemma3-270m", "turbo-quant", 0.01, 0.92, marks=needs_gemma),
        pytest.param("smollm2-135m", "markov-rs-codec:window=64", 1e-4, 0.99, marks=needs_smollm2),
        pytest.param("smollm2-135m", "markov-rs-codec:window=64,codec=int4", 0.01, 0.92, marks=needs_smollm2),
    ],
)
def test_codes_stay_near_standard(name: str, spec: str, mean: float, top1: float) -> None:
    measured, engine = _divergence(name, spec, 500)
    assert measured.mean_kl < mean
    assert measured.top1_agreement > top1
    assert measured.max_kl <= engine.policy.contract.nats_allowed
    assert (engine.coded_share() or 0) > 0.5
    assert measured.mean_kl > 0, "equal logits: nothing was coded"


@needs_smollm2
def test_a_contract_is_checked_in_decode_with_drops() -> None:
    model = real("smollm2-135m")
    engine = lk.build_engine("markov-rs-codec:window=8,codec=int8", model)
    report = engine.policy.contract.check(engine, text_ids(model, 620, PROSE), 560, free_tokens=4)
    assert report.verdict == Verdict.HOLDS, report
    assert report.teacher_forced.max_kl > report.noise_floor.max_kl
    assert any("int8" in form for form in report.forms)


@needs_smollm2
def test_known_bad_codes_break_the_bound() -> None:
    """The check can fail: 2-bit codes measured by the promise of 4-bit ones."""
    measured, engine = _divergence("smollm2-135m", "turbo-quant:bits=2", 500)
    assert measured.max_kl > lk.parse_spec("turbo-quant").policy.contract.nats_allowed
    assert measured.max_kl <= engine.policy.contract.nats_allowed


@needs_smollm2
def test_turbo_memory_is_what_the_allocator_gives() -> None:
    model = real("smollm2-135m")
    engine = lk.build_engine("turbo-quant", model)
    full = lk.build_engine("standard", model)
    ids = text_ids(model, 1200, PROSE)
    for each in (engine, full):
        each.prefill(ids)
    assert engine.ledger().capacity < 0.35 * full.ledger().capacity
    hidden = engine.decode_step(5)
    assert torch.isfinite(hidden).all()
