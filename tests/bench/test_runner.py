"""The bench protocol: turns, whole tokens, true bytes, ids that agree, failures as rows."""

from __future__ import annotations

from typing import Any

import pytest

import larql_kv as lk
from larql_kv.bench import runner
from larql_kv.bench.plan import RECOMPUTE_STEPS
from larql_kv.bench.report import row_dict
from larql_kv.bench.runner import standard_kv_bytes
from larql_kv.bench.text import text_ids
from larql_kv.engine import build_engine
from tests.bench.bench_runs import SPECS, full_report, make_plan, run
from tests.models import tiny


def test_engines_take_turns_in_rotating_order() -> None:
    order = [turn for turn in full_report().order if turn[1] in ("prefill", "decode")]
    for repeat in (0, 1):
        turns = [(phase, spec) for number, phase, spec in order if number == repeat]
        rotated = [*SPECS[repeat:], *SPECS[:repeat]]
        assert [spec for phase, spec in turns if phase == "prefill"] == rotated
        # 12 steps in groups of 5: three rounds; the engine that recomputes has 8, so two.
        decodes = [spec for phase, spec in turns if phase == "decode"]
        assert decodes == rotated + rotated + [spec for spec in rotated if spec != "no-cache"]


def test_every_timed_step_is_kept_and_warm_up_is_not() -> None:
    for row in full_report().rows:
        count = RECOMPUTE_STEPS if row.spec == "no-cache" else 12
        warmup = 1 if row.spec == "no-cache" else 2
        assert [len(steps) for steps in row.step_seconds] == [count, count]
        assert len(row.prefill_seconds) == 2
        assert len(row.ids) == 1 + warmup + count
        assert all(seconds > 0 for seconds in row.all_steps)


def test_exact_engines_generate_what_standard_does() -> None:
    by_spec = {row.spec: row for row in full_report().rows}
    assert by_spec["markov-rs"].ids == by_spec["standard"].ids
    assert by_spec["no-cache"].ids == by_spec["standard"].ids[: len(by_spec["no-cache"].ids)]
    assert all(by_spec[spec].equals_standard for spec in ("standard", "markov-rs", "no-cache"))
    assert by_spec["standard:window=8"].equals_standard is False
    hashes = {spec: row_dict(row, 10.0, 20)["ids"]["hash"] for spec, row in by_spec.items()}
    assert hashes["markov-rs"] == hashes["standard"] != hashes["standard:window=8"]
    assert all(row.same_in_every_repeat for row in by_spec.values())


def test_ids_are_compared_with_standard_even_when_it_is_not_measured() -> None:
    (row,) = run(["markov-rs"], check=False, repeats=1).rows
    assert row.equals_standard is True


def test_bytes_moved_are_the_weights_and_the_live_kv_rows() -> None:
    model = tiny("llama")
    row_bytes = 2 * model.config.kv_dim * 4 * model.config.layer_count
    by_spec = {row.spec: row for row in full_report().rows}
    # Held when timing starts: 20 of the prompt and 2 of warm-up; when it ends: 12 more.
    assert by_spec["standard"].state_bytes_read == row_bytes * (22 + 34) / 2
    assert by_spec["markov-rs"].state_bytes_read == row_bytes * (22 + 34) / 2
    assert by_spec["standard:window=8"].state_bytes_read == row_bytes * 8
    assert by_spec["no-cache"].state_bytes_read is None
    weights = model.decoder.facts()["bytes_per_step"]
    shown = row_dict(by_spec["standard"], 10.0, 20)
    assert shown["bytes_per_step"]["weights"] == weights
    expected = (weights + row_bytes * 28) * shown["tok_per_s"] / 1e9
    assert shown["gb_per_s"] == pytest.approx(expected)
    assert shown["bandwidth_share"] == pytest.approx(expected / 10.0)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("tokens", [3, 8, 30])
def test_the_baseline_of_ratios_is_what_standard_holds(family: str, tokens: int) -> None:
    engine = build_engine("standard", tiny(family))
    engine.prefill(text_ids(tiny(family), tokens))
    held = sum(item.live for item in engine.ledger() if item.name == "K/V rows")
    assert standard_kv_bytes(tiny(family), tokens) == held


def test_recomputed_tokens_are_counted() -> None:
    by_spec = {row.spec: row for row in full_report().rows}
    assert by_spec["no-cache"].recomputed[:RECOMPUTE_STEPS] == list(range(21, 21 + RECOMPUTE_STEPS))
    assert set(by_spec["standard"].recomputed) == set(by_spec["markov-rs"].recomputed) == {0}


def test_a_capped_engine_says_so() -> None:
    by_spec = {row.spec: row for row in full_report().rows}
    assert by_spec["no-cache"].notes == [
        f"{RECOMPUTE_STEPS} of 12 tokens: every step runs the whole text again, O(n^2)"
    ]
    assert by_spec["standard"].notes == []


def test_contracts_are_checked_past_the_window() -> None:
    contracts = {row.spec: row.contract for row in full_report().rows}
    for spec, contract in contracts.items():
        assert contract is not None, spec
        assert contract["ok"], (spec, contract)
        assert contract["steps"] == 24
    assert contracts["standard:window=8"]["name"] == "ExactWithinWindow(window=8)"
    assert all(row.contract is None for row in run(["standard"], check=False, repeats=1).rows)


def test_stages_sum_to_the_whole_token() -> None:
    for row in full_report().rows:
        assert row.stages is not None
        parts = {stage: spent for stage, spent in row.stages.items() if stage != "total"}
        assert sum(parts.values()) == pytest.approx(row.stages["total"])
        assert min(parts.values()) >= -1e-6
        for stage in ("embed", "attention", "ffn", "head"):
            assert parts[stage] > 0
        assert (parts["state_capture"] > 0) == (row.spec == "markov-rs")
    assert run(["standard"], check=False, repeats=1).rows[0].stages is None


def test_the_sweep_has_a_point_a_length_and_a_line() -> None:
    for row in full_report().rows:
        steps = 2 if row.spec == "no-cache" else 3
        middle = 1 + (steps + 1) / 2
        assert [point.context for point in row.sweep] == [16 + middle, 32 + middle, 64 + middle]
        assert {point.steps for point in row.sweep} == {2 * steps}
        assert row.sweep_line is not None
    phases = [phase for _, phase, _ in full_report().order if phase.startswith("context")]
    assert phases == sorted(phases, key=lambda phase: int(phase.split()[1]))


class Broken:
    """Stands for an engine that fails at a chosen point."""

    def __init__(self, engine: Any, when: str, error: Exception) -> None:
        self._engine, self._when, self._error = engine, when, error

    def __getattr__(self, name: str) -> Any:
        if name == self._when:
            raise self._error
        return getattr(self._engine, name)


def _broken(monkeypatch: pytest.MonkeyPatch, when: str, error: Exception) -> None:
    def build(spec: Any, model: Any) -> Any:
        engine = build_engine(spec, model)
        if engine.spec.text != "markov-rs":
            return engine
        if when == "build":
            raise error
        return Broken(engine, when, error)

    monkeypatch.setattr(runner, "build_engine", build)


@pytest.mark.parametrize("when", ["build", "prefill", "decode_step", "ledger"])
@pytest.mark.parametrize(
    ("error", "recoverable"),
    [
        (lk.BackendUnavailable("no such kernel"), True),
        (lk.RetrievalMiss("no store"), True),
        (lk.BackendFailure("out of memory"), False),
        (lk.InvariantViolation("out of order"), False),
        (lk.ModelError("refused: the norm keeps state"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_engine_that_fails_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, when: str, error: Exception, recoverable: bool
) -> None:
    _broken(monkeypatch, when, error)
    report = run(["standard", "markov-rs", "no-cache"], check=False, repeats=1)
    standard, markov, none = report.rows
    assert standard.failure is none.failure is None
    assert len(standard.all_steps) == 12
    assert markov.failure is not None
    assert markov.failure.to_dict() == {
        "kind": type(error).__name__,
        "message": str(error),
        "recoverable": recoverable,
    }
    assert report.exit_code == (0 if recoverable else 1)


def test_a_bug_is_not_taken_for_an_engines_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, "prefill", AttributeError("a typo"))
    with pytest.raises(AttributeError, match="a typo"):
        run(["standard", "markov-rs"], check=False, repeats=1)


def test_an_empty_prompt_is_a_recoverable_row() -> None:
    plan = make_plan(check=False)
    empty = type(plan)((), "", plan.tokens)
    report = runner.run_bench(tiny("llama"), [lk.parse_spec("standard")], empty)
    assert report.rows[0].failure is not None
    assert report.rows[0].failure.kind == "EmptyPrompt"
    assert report.exit_code == 0


@pytest.mark.parametrize("changes", [{"tokens": 250}, {"contexts": (16, 254)}])
def test_what_does_not_fit_the_context_is_refused_before_any_work(changes: dict[str, Any]) -> None:
    with pytest.raises(lk.ModelError, match="more than the model's context of 256"):
        run(["standard"], **changes)


def test_text_ids_repeat_the_text_but_not_its_start_tokens() -> None:
    model = tiny("llama")
    body = model.tokenizer.encode("abc", add_special=False)
    ids = text_ids(model, 50, "abc")
    assert len(ids) == 50
    assert ids[-len(body) :] in (body, *[body[n:] + body[:n] for n in range(len(body))])
    with pytest.raises(lk.ModelError, match="has no tokens"):
        text_ids(model, 5, "")
