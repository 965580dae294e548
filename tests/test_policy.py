"""The verdicts of a contract check: engines that lie are called broken, runs that prove nothing are named."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import larql_kv as lk
from larql_kv.policy import Contract, StateKind, StatePolicy, Verdict, divergence
from larql_kv.spec import EngineSpec
from larql_kv.state.kv import KvLayout, KVState
from larql_kv.state.residual import ResidualState
from tests import tiny_models
from tests.models import tiny


class _Rounded(KVState):
    """K/V rounded to bfloat16 on the way in: close, and not exact."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(layer, q, k.bfloat16().float(), v.bfloat16().float())


class _Shifted(KVState):
    """Every position one too late from the 20th on."""

    def begin(self, first: int, count: int) -> None:
        super().begin(first, count)
        if first >= 20:
            self.first = first + 1


class _Dropping(KVState):
    """Forgets row 3 as soon as it left the prompt."""

    def commit(self, length: int) -> None:
        super().commit(length)
        for pages in (rows.hot for rows in self.rows):
            if pages.ring is None:
                pages.block(0)[:, :, 3].zero_()


class _GarbageCanon(ResidualState):
    """Claims residual rows, keeps zeros: nothing shows until K/V have to come from them."""

    def observe(self, layer: int, rows: torch.Tensor) -> None:
        super().observe(layer, torch.zeros_like(rows))


class _Coded(KVState):
    share = 1.0

    def coded_share(self) -> float | None:
        return self.share


class _HalfCoded(_Coded):
    share = 0.5


def _engine(state: type[KVState], contract: Contract, family: str = "llama", layout: KvLayout | None = None):
    @dataclasses.dataclass(frozen=True)
    class Double(EngineSpec):
        """A test double."""

        @property
        def policy(self) -> StatePolicy:
            return StatePolicy(StateKind.KV, StateKind.NOTHING, contract)

        def build_state(self, model: lk.Model) -> KVState:
            return state(model) if layout is None else state(model, layout)

    return lk.build_engine(Double(), tiny(family))


def _check(engine, count: int = 40, **options):
    ids = tiny_models.sample_ids(count, engine.model.config.vocab)
    return engine.policy.contract.check(engine, ids, **{"free_tokens": 4, **options})


@pytest.mark.parametrize("state", [_Rounded, _Shifted, _Dropping])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_engine_that_is_not_exact_is_called_broken(state: type[KVState], family: str) -> None:
    report = _check(_engine(state, lk.Exact(), family))
    assert report.verdict == Verdict.BROKEN
    assert not report.ok
    assert report.to_dict()["ok"] is False


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_derivative_state_has_to_come_from_the_canonical(family: str) -> None:
    assert _check(_engine(_GarbageCanon, lk.Exact(), family)).verdict == Verdict.BROKEN
    assert _check(_engine(ResidualState, lk.Exact(), family)).verdict == Verdict.BITS


def test_a_window_that_pretends_to_be_whole_is_broken() -> None:
    report = _check(_engine(KVState, lk.Exact(), layout=KvLayout(window=8)))
    assert report.verdict == Verdict.BROKEN


def test_bounded_kl_has_a_bound() -> None:
    measured = _check(_engine(_Rounded, lk.BoundedKL(1.0))).teacher_forced.max_kl
    assert 0 < measured < 0.1
    assert _check(_engine(_Rounded, lk.BoundedKL(2 * measured))).verdict == Verdict.HOLDS
    broken = _check(_engine(_Rounded, lk.BoundedKL(measured / 2)))
    assert broken.verdict == Verdict.BROKEN
    assert ">" in broken.reason
    assert broken.contract == f"BoundedKL(nats={measured / 2:g})"


def test_a_codec_that_was_hardly_read_proves_nothing() -> None:
    assert _check(_engine(_Coded, lk.BoundedKL(0.1))).verdict == Verdict.BITS
    report = _check(_engine(_HalfCoded, lk.BoundedKL(0.1)))
    assert report.verdict == Verdict.NOT_EXERCISED
    assert "50%" in report.reason
    assert not report.ok


def test_a_window_that_is_never_passed_proves_nothing() -> None:
    engine = lk.build_engine("standard:window=30", tiny("llama"))
    assert _check(engine, 30).verdict == Verdict.NOT_EXERCISED
    assert _check(engine, 40).verdict == Verdict.BITS
    model_window = lk.build_engine("standard", tiny("gemma3"))
    assert model_window.widest_window == 8
    assert _check(model_window, 8).verdict == Verdict.NOT_EXERCISED
    assert lk.build_engine("no-cache", tiny("gemma3")).widest_window == 0


def test_a_promise_about_a_window_that_the_context_cannot_pass() -> None:
    engine = lk.build_engine("standard:window=512", tiny("llama"))  # its context is 256
    assert _check(engine, 40).verdict == Verdict.NOT_EXERCISED


@pytest.mark.parametrize("nats", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_must_bound(nats: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        lk.BoundedKL(nats)


def test_a_task_level_contract_is_not_judged_by_logits() -> None:
    assert _check(_engine(KVState, lk.TaskLevel())).verdict == Verdict.NOT_EXERCISED


def test_logits_that_are_no_numbers_are_broken() -> None:
    nan = torch.full((3, 5), math.nan)
    apart = divergence(torch.zeros(3, 5), nan)
    assert not apart.same_bits
    report = lk.Exact()._judge(lk.build_engine("markov-rs", tiny("llama")), apart, divergence(nan, nan))
    assert report[0] == Verdict.BROKEN


def test_divergence_is_the_textbooks() -> None:
    left, right = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 9)
    p = torch.softmax(left.double(), -1)
    expected = (p * (p.log() - math.log(1 / 9))).sum(-1)
    apart = divergence(left, right)
    assert apart.max_kl == pytest.approx(float(expected.max()))
    assert apart.mean_kl == pytest.approx(float(expected.mean()))
    assert apart.max_abs_logit == pytest.approx(float(left.abs().max()))
    assert apart.steps == 6
    same = divergence(left, left.clone())
    assert same.same_bits
    assert same.max_kl == 0
    assert same.first_top1_divergence is None


@pytest.mark.parametrize("prompt_tokens", [0, 40, -1])
def test_a_check_needs_a_prompt_and_a_rest(prompt_tokens: int) -> None:
    with pytest.raises(ValueError, match="prompt_tokens"):
        _check(lk.build_engine("standard", tiny("llama")), prompt_tokens=prompt_tokens)
    with pytest.raises(ValueError, match="at least 4"):
        _check(lk.build_engine("standard", tiny("llama")), count=3)
