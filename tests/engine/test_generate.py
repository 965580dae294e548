"""Generation: the loop, prefix reuse, sampling, stopping, streaming."""

from __future__ import annotations

import itertools

import pytest
import torch

import larql_kv as lk
from larql_kv.engine.sampling import Sampler, SamplingOptions, filtered, penalised
from larql_kv.state.ledger import Ledger
from tests import tiny_models
from tests.models import SPECS, tiny

each_engine = pytest.mark.parametrize("spec", SPECS)


def _greedy(model, ids: list[int], count: int) -> list[int]:
    """transformers' greedy continuation, by its own generate()."""
    reference = tiny_models._reference(str(tiny_models.model_dir("llama")))
    out = reference.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


@each_engine
def test_greedy_equals_transformers(spec: str) -> None:
    if lk.parse_spec(spec).policy.contract.mask:
        pytest.skip("its contract is the window, not the full run")
    model = tiny("llama")
    ids = tiny_models.sample_ids(9, model.config.vocab)
    engine = lk.build_engine(spec, model)
    tokens = [token.id for token in engine.generate(ids, 20, ignore_stop_tokens=True)]
    assert tokens == _greedy(model, ids, 20)
    seen: list[tuple[int, str]] = []
    again = lk.generate_with_engine(
        lk.build_engine(spec, model), None, ids, 5, lambda *pair: seen.append(pair)
    )
    assert again == [token for token, _ in seen]
    assert again == tokens[: len(again)]


@each_engine
def test_the_longest_common_prefix_is_reused_and_changes_nothing(spec: str) -> None:
    model = tiny("gemma3")
    ids = tiny_models.sample_ids(60, model.config.vocab)
    engine = lk.build_engine(spec, model)
    keeps = "no-cache" not in spec
    list(engine.generate(ids[:40], 4, ignore_stop_tokens=True))
    held = engine.tokens
    assert len(held) == 43  # the last token chosen was not run
    for prompt in (held + ids[40:50], [*ids[:39], 5], ids[:20] + ids[30:40], ids[50:], held):
        common = len(
            list(
                itertools.takewhile(lambda pair: pair[0] == pair[1], zip(engine.tokens, prompt, strict=False))
            )
        )
        common = min(common, len(prompt) - 1)
        got = [token.id for token in engine.generate(prompt, 3, ignore_stop_tokens=True)]
        fresh = lk.build_engine(spec, model)
        assert got == [token.id for token in fresh.generate(prompt, 3, ignore_stop_tokens=True)]
        assert fresh.reused_tokens == 0
        assert 0 <= engine.reused_tokens <= (common if keeps else 0)
    engine.reset()
    list(engine.generate(ids[:10], 2, ignore_stop_tokens=True))
    list(engine.generate([*ids[:10], 9], 2, ignore_stop_tokens=True))
    assert engine.reused_tokens == (10 if keeps else 0), "appending must never lose the prefix"


def test_stops_at_stop_tokens_and_says_why() -> None:
    model = tiny("llama")
    engine = lk.build_engine("standard", model)
    ids = tiny_models.sample_ids(9, model.config.vocab)
    free = [token.id for token in engine.generate(ids, 12, ignore_stop_tokens=True)]
    tokens = list(engine.generate(ids, 12, ignore_stop_tokens=True))
    assert [token.finish for token in tokens] == [None] * 11 + ["length"]
    assert list(engine.generate(ids, 0)) == []
    stops = model.tokenizer.stop_ids
    assert 2 in stops  # </s>
    expected = list(itertools.takewhile(lambda token: token not in stops, free))
    got = list(engine.generate(ids, 12))
    assert [token.id for token in got][: len(expected)] == expected


def test_ends_at_the_models_context() -> None:
    model = tiny("llama")
    engine = lk.build_engine("standard", model)
    prompt = [5] * (model.config.context - 2)
    tokens = list(engine.generate(prompt, 50, ignore_stop_tokens=True))
    assert len(tokens) == 3
    assert tokens[-1].finish == "context"


def test_stop_strings_cut_the_text_and_are_never_shown() -> None:
    model = tiny("llama")
    engine = lk.build_engine("standard", model)
    ids = tiny_models.sample_ids(9, model.config.vocab)
    text = "".join(token.text for token in engine.generate(ids, 30, ignore_stop_tokens=True))
    assert len(text) > 12
    for stop in (text[6:9], text[6:7], [text[8:10], "not there"]):
        first = min(text.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text)
        tokens = list(engine.generate(ids, 30, stop=stop, ignore_stop_tokens=True))
        assert "".join(token.text for token in tokens) == text[:first]
        assert tokens[-1].finish == "stop"
    unmatched = "".join(
        t.text for t in engine.generate(ids, 30, stop=text[-2:] + "☃", ignore_stop_tokens=True)
    )
    assert unmatched == text, "text held back for a stop string that never came must be flushed"


def test_text_is_the_decoded_ids() -> None:
    model = tiny("llama")
    tokens = list(lk.build_engine("standard", model).generate([5, 6, 7], 40, ignore_stop_tokens=True))
    assert "".join(token.text for token in tokens) == model.tokenizer.decode([token.id for token in tokens])


def test_interrupting_a_generation_keeps_what_was_run() -> None:
    model = tiny("llama")
    engine = lk.build_engine("standard", model)
    ids = tiny_models.sample_ids(9, model.config.vocab)
    stream = engine.generate(ids, 20, ignore_stop_tokens=True)
    taken = [next(stream).id for _ in range(5)]
    stream.close()  # type: ignore[attr-defined]
    assert engine.tokens == ids + taken[:4]
    engine.prefill(taken[4:])
    fresh = lk.build_engine("standard", model)
    assert torch.equal(engine.decode_step(7), fresh.prefill([*ids, *taken, 7]))


def test_an_engine_used_for_something_else_stops_the_text() -> None:
    model = tiny("llama")
    engine = lk.build_engine("standard", model)
    first = engine.generate([5, 6, 7], 6, ignore_stop_tokens=True)
    next(first)
    second = engine.generate([9, 10, 11], 6, ignore_stop_tokens=True)
    next(second)
    with pytest.raises(lk.InvariantViolation, match="used for something else"):
        next(first)
    next(second)
    engine.trim(2)
    with pytest.raises(lk.InvariantViolation, match="used for something else"):
        next(second)


def test_seeded_sampling_repeats_and_differs_by_seed() -> None:
    model = tiny("llama")
    engine = lk.build_engine("standard", model)

    def run(seed: int) -> list[int]:
        options = {"temperature": 1.5, "seed": seed, "ignore_stop_tokens": True}
        return [token.id for token in engine.generate([5, 6, 7], 20, **options)]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampler = Sampler(SamplingOptions(temperature=0.7, seed=0))
    nothing = torch.empty(0, dtype=torch.int64)
    counts = torch.bincount(torch.tensor([sampler.choose(logits, nothing) for _ in range(4000)]), minlength=4)
    expected = torch.softmax(logits[0] / 0.7, -1)
    assert (counts / 4000 - expected).abs().max() < 0.03


def test_filters() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))

    def kept(**options) -> list[int]:
        return filtered(logits, SamplingOptions(temperature=1.0, **options)).nonzero().flatten().tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=9) == [0, 1, 2, 3]
    assert kept(top_p=0.5) == [0]
    assert kept(top_p=0.51) == [0, 1]
    assert kept(top_p=1e-9) == [0]
    assert kept(min_p=0.29) == [0, 1, 2]
    assert kept(top_k=3, top_p=0.6) == [0, 1]  # 0.5 / 0.9 < 0.6 <= 0.75 / 0.9


def test_repetition_penalty() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    assert penalised(logits, torch.tensor([0, 1, 0]), 2.0).tolist() == [[1.0, -4.0, 1.0]]
    assert logits.tolist() == [[2.0, -2.0, 1.0]]


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}),
        *(
            {"min_p": 1},
            {"repetition_penalty": 0},
            {"repetition_penalty": 1e-320},
            {"seed": 2**64},
            {"seed": 1.5},
            {"stop": ""},
            {"stop": ["a", ""]},
        ),
    ],
)
def test_options_out_of_range(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingOptions(**bad)


def test_logits_are_handed_out_on_request() -> None:
    model = tiny("llama")
    tokens = list(
        lk.build_engine("standard", model).generate([5, 6], 3, with_logits=True, ignore_stop_tokens=True)
    )
    assert all(token.logits.shape == (1, model.config.vocab) for token in tokens)
    assert all(int(token.logits.argmax()) == token.id for token in tokens)
    assert next(iter(lk.build_engine("standard", model).generate([5, 6], 1))).logits is None


@each_engine
def test_profile_and_info(spec: str) -> None:
    engine = lk.build_engine(spec, tiny("llama"))
    assert engine.stage_summary() is None
    engine.profile()
    engine.prefill([5, 6, 7])
    engine.decode_step(5)
    summary = engine.stage_summary()
    assert summary is not None
    assert summary.steps == 2
    stages = {name for name, spent in summary.microseconds.items() if spent > 0}
    assert {"embed", "attention", "ffn", "state_append"} <= stages
    assert ("state_capture" in stages) == (engine.policy.canonical == "residual rows")
    assert summary.total == pytest.approx(sum(summary.microseconds.values()))
    engine.profile(False)
    assert engine.stage_summary() is None
    info = engine.info
    assert info.backend == "cpu"
    assert info.summary.startswith(f"{info.name} [cpu]")
    assert engine.window_tokens == (getattr(engine.spec, "window", None) or 0)
    assert isinstance(engine.ledger(), Ledger)


def test_cold_tier_is_whole_blocks_that_left_the_window() -> None:
    model = tiny("llama")
    engine = lk.build_engine("markov-rs:window=13", model)
    engine.prefill([5] * 70)
    assert engine.cold_bytes == 0  # 70 - 13 = 57: no whole block of 64 yet
    engine.prefill([5] * 7)
    config = model.config
    block = 64 * config.layer_count * 4
    assert engine.cold_bytes == block * config.hidden + block * 2 * config.kv_dim
    assert lk.build_engine("standard", model).cold_bytes == 0


def test_stage_timers_wait_for_a_device_that_runs_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    model = tiny("llama")
    monkeypatch.setattr(model.decoder, "synchronize", lambda: waits.append("wait"), raising=False)
    engine = lk.build_engine("standard", model)
    engine.prefill([5, 6, 7])
    assert not waits
    engine.profile()
    engine.logits(engine.decode_step(5))
    assert len(waits) >= 3 + 3 * model.config.layer_count, "at the end of every stage"
