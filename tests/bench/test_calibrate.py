"""Calibration: the ladder against brute force, partial runs against whole ones, records against contracts."""

from __future__ import annotations

import hashlib
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import larql_kv as lk
from larql_kv.bench import calibrate as calibration
from larql_kv.bench.calibrate import (
    HEADROOM,
    Move,
    PolicyRuns,
    Settings,
    Steps,
    calibrate,
    climb,
    ladder,
    longest_fitting,
    read_excerpts,
)
from larql_kv.bench.text import TEXT, text_ids
from larql_kv.codec.rows import row_codec
from larql_kv.engine.calibration import write_record
from larql_kv.model.model import Model
from larql_kv.policy import divergence
from tests import tiny_models
from tests.engine.test_boundary_per_layer import long_context
from tests.models import tiny

BYTES = {"bf16": 16, "a": 9, "b": 8, "c": 5}


# -- the ladder ----------------------------------------------------------------------------------------


def saved_by(policy: tuple[str, ...]) -> int:
    return sum(BYTES["bf16"] - BYTES[name] for name in policy)


@pytest.mark.parametrize("seed", range(40))
def test_the_ladder_is_within_one_move_of_the_best_mix(seed: int) -> None:
    """Against every mix of four layers: what a budget's beginning of the ladder saves, and the move after it
    would save, is at least what the best mix within that budget saves."""
    draw = random.Random(seed)
    table = {
        layer: {name: draw.choice([0.0, draw.random()]) * BYTES["bf16"] / BYTES[name] for name in "abc"}
        for layer in range(4)
    }
    moves = ladder(table, BYTES)
    costs = [{"bf16": 0.0, **table[layer]} for layer in range(4)]
    for budget in (0.0, 0.3, 1.0, 2.5, 100.0):
        best = max(
            saved_by(policy)
            for policy in itertools.product(BYTES, repeat=4)
            if sum(costs[layer][name] for layer, name in enumerate(policy)) <= budget + 1e-12
        )
        count = climb(moves, budget)
        policy = dict.fromkeys(range(4), "bf16") | {move.layer: move.codec for move in moves[:count]}
        spent = sum(costs[layer][name] for layer, name in policy.items())
        assert spent <= budget + 1e-9
        saved = saved_by(tuple(policy.values()))
        assert saved == sum(move.saved for move in moves[:count])
        assert saved <= best <= saved + (moves[count].saved if count < len(moves) else 0)


def test_the_ladder_by_hand() -> None:
    """Layer 0 goes to c by a; layer 1 straight to c, for a costs more than that; b is free on layer 2."""
    table = {0: {"a": 0.07, "c": 0.15}, 1: {"a": 0.3, "c": 0.22}, 2: {"b": 0.0}}
    assert ladder(table, BYTES) == [
        Move(2, "b", 8, 0.0),
        Move(0, "a", 7, 0.07),
        Move(0, "c", 4, pytest.approx(0.08)),
        Move(1, "c", 11, 0.22),
    ]
    assert ladder({}, BYTES) == []


def test_a_layers_moves_keep_their_order_where_rates_are_equal() -> None:
    """0.1 + 0.2 is above 0.3: the second move's rate comes out higher than the first's."""
    for scale in (0.1, 0.3, 0.7, 1 / 3):
        table = {0: {"a": 7 * scale, "b": 8 * scale, "c": 11 * scale}}
        sizes = [BYTES[move.codec] for move in ladder(table, BYTES)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] == BYTES["c"]


@pytest.mark.parametrize("moves", [0, 1, 2, 7, 60])
def test_the_longest_beginning_that_fits_is_found_in_few_runs(moves: int) -> None:
    for edge in range(-1, moves + 1):
        for start in {0, moves // 2, moves}:
            asked: list[int] = []

            def fits(count: int, edge: int = edge, asked: list[int] = asked) -> bool:
                asked.append(count)
                return count <= edge

            assert longest_fitting(moves, start, fits) == (edge if edge >= 0 else None)
            assert len(asked) == len(set(asked)) <= 8


# -- measuring -----------------------------------------------------------------------------------------


def test_steps_are_compared_as_a_contract_does() -> None:
    reference, logits = 3 * torch.randn(2, 21, 300)
    steps = Steps()
    steps.add(reference[:13], logits[:13])
    steps.add(reference[13:], logits[13:])
    expected, got = divergence(reference, logits), steps.measured
    assert got.steps == expected.steps == 21
    assert got.max_kl == pytest.approx(expected.max_kl, rel=1e-12)
    assert got.mean_kl == pytest.approx(expected.mean_kl, rel=1e-12)
    assert got.top1_agreement == pytest.approx(expected.top1_agreement)
    assert got.mean_kl < got.p99_kl <= got.max_kl
    p, q = (torch.softmax(rows.double(), -1) for rows in (reference[0], logits[0]))
    assert steps.kl[0] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-9)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_run_from_the_layer_on_has_the_bits_of_the_whole(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    monkeypatch.setattr(model.decoder, "prefill_rows", 90, raising=False)  # more than one chunk
    runs = PolicyRuns(model, 4 if family == "llama" else 20)
    if family == "gemma3":  # its sliding layers never hold a row that is not hot
        windows = [layer.window for layer in model.config.layers]
        assert runs.layers == [layer for layer, window in enumerate(windows) if window is None]
    ids = tiny_models.sample_ids(200, model.config.vocab)
    rows = runs.rows_in_base(ids)
    for layer in runs.layers:
        codecs = ["bf16"] * model.config.layer_count
        codecs[layer] = "int4"
        assert torch.equal(runs.alone(layer, "int4", rows), runs.policy(codecs, ids)), layer
    standard = lk.build_engine("standard", model).prefill_rows(ids)
    assert torch.equal(runs.reference(ids), standard[runs.first_coded :])
    whole = lk.build_engine(f"markov-rs-codec:window={runs.window},codec=int8", model).prefill_rows(ids)
    assert torch.equal(runs.policy(["int8"] * len(rows), ids), whole[runs.first_coded :])
    plain = lk.build_engine("markov-rs", model).prefill_rows(ids)
    before = slice(runs.first_coded - 1, runs.first_coded)
    assert torch.equal(whole[before], plain[before])
    assert not torch.equal(whole[runs.first_coded], plain[runs.first_coded])


def test_a_model_that_would_code_nothing_is_refused() -> None:
    with pytest.raises(lk.ModelError, match=r"no layer of .* keeps more than window"):
        PolicyRuns(tiny("mistral"), 8)


# -- the text ------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


def test_excerpts_are_spread_over_the_text(corpus: Path) -> None:
    model = tiny("llama")
    excerpts, digest = read_excerpts(model, corpus, 3, 100)
    assert digest == hashlib.sha256(TEXT.encode()).hexdigest()
    share = len(TEXT) // 3
    for index, ids in enumerate(excerpts):
        assert ids == model.tokenizer.encode(TEXT[index * share :][:1600])[:100]
    corpus.write_bytes(b"\xff" + TEXT.encode())
    assert len(read_excerpts(model, corpus, 2, 50)[0][0]) == 50


def test_texts_that_do_not_serve_are_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    with pytest.raises(lk.ModelError, match="exceed the model's context of 256"):
        read_excerpts(model, corpus, 2, 257)
    with pytest.raises(lk.ModelError, match="No such file"):
        read_excerpts(model, corpus.with_name("missing"), 2, 50)
    with pytest.raises(lk.ModelError, match=r"part 1 of 400 has .* tokens, 200 are needed"):
        read_excerpts(model, corpus, 400, 200)
    monkeypatch.setattr(calibration, "_MAX_CORPUS", 1000)
    with pytest.raises(lk.ModelError, match="larger than"):
        read_excerpts(model, corpus, 2, 50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_nats": 0.0}, "a budget of 0 nats"),
        ({"budget_nats": float("nan")}, "a budget of nan nats"),
        ({"budget_nats": float("inf")}, "a budget of inf nats"),
        ({"samples": 1}, "2 excerpts, one of them held out"),
        ({"window": 0}, "a window of at least 1 row"),
        ({"tokens": 128}, "never read a coded row: give more than window"),
        ({"codecs": ("bf16", "int9")}, "unknown codec 'int9'"),
        ({"codecs": ("float32",)}, "saves nothing against bf16"),
        ({"codecs": ("bf16",)}, "nothing to choose from"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(lk.SpecError, match=message):
        Settings(**{"budget_nats": 0.1} | changes)


# -- calibrating ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return lk.load_model(long_context("llama", tmp_path_factory.mktemp("long") / "llama"), dtype="float32")


def settings(budget: float, **changes: Any) -> Settings:
    return Settings(**{"budget_nats": budget, "window": 8, "tokens": 600, "samples": 2} | changes)


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def budget(model: Model, long_text: Path) -> float:
    """Nats that some layers but not all may be int4 under."""
    runs = PolicyRuns(model, 8)
    excerpts, _ = read_excerpts(model, long_text, 2, 600)
    found = []
    for codec in ("int8", "int4"):
        steps = Steps()
        for ids in excerpts:
            hidden = runs.policy([codec] * model.config.layer_count, ids)
            steps.add(model.logits(runs.reference(ids)), model.logits(hidden))
        found.append(steps.measured.max_kl)
    return HEADROOM * (found[0] * found[1]) ** 0.5


def test_a_record_holds_what_a_contract_check_finds(
    model: Model, long_text: Path, tmp_path: Path, budget: float
) -> None:
    said: list[str] = []
    record = calibrate(model, long_text, settings(budget), said.append)
    int4 = row_codec("int4").name
    assert int4 in record.policy.codecs
    assert len(set(record.policy.codecs)) > 1
    assert record.saving >= 0.15
    assert record.reason is None
    assert len(record.fragility) == 8
    assert record.kl_bound_nats <= budget
    assert record.kl_bound_nats == 2 * max(record.chosen_on.max_kl, record.held_out.max_kl)
    assert record.bytes.kv == 4 * 2 * 32 * 4
    assert any("on layer 3 of 4" in label for label in said)
    path = tmp_path / "record.json"
    write_record(path, record)
    engine = lk.build_engine(f"boundary-per-layer:window=8,policy={path}", model)
    found = []
    for ids in (text_ids(model, 672), read_excerpts(model, long_text, 2, 600)[0][1]):
        # The check compares the logits after ids[prompt - 1] .. ids[-2]; the record, those from row 72 on.
        report = engine.policy.contract.check(engine, [*ids, 5], prompt_tokens=73, free_tokens=1)
        assert report.verdict == "holds", report
        assert report.contract.startswith("BoundedKLPerLayer")
        found.append(report.teacher_forced)
    expected = record.held_out
    assert sum(steps.steps for steps in found) == expected.steps
    assert max(steps.max_kl for steps in found) == pytest.approx(expected.max_kl, rel=1e-9)
    kl = sum(steps.mean_kl * steps.steps for steps in found) / expected.steps
    assert kl == pytest.approx(expected.mean_kl, rel=1e-9)
    agreed = sum(steps.top1_agreement * steps.steps for steps in found) / expected.steps
    assert agreed == pytest.approx(expected.top1_agreement)


def test_it_backs_off_until_the_held_out_text_fits(
    model: Model, long_text: Path, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mix that was chosen too boldly is judged by the held-out text alone."""
    bold = [lambda moves, start, fits: moves, longest_fitting]
    monkeypatch.setattr(calibration, "longest_fitting", lambda *given: bold.pop(0)(*given))
    said: list[str] = []
    record = calibrate(model, long_text, settings(4 * budget / 3, tokens=300), said.append)
    tried = [label for label in said if label.startswith("held-out")]
    assert len(tried) >= 2
    assert 2 * max(record.held_out.max_kl, record.chosen_on.max_kl) <= 4 * budget / 3
    assert bold == []


def test_a_small_saving_says_why(model: Model, long_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = settings(1e3, tokens=150, codecs=("int8",))
    monkeypatch.setattr(calibration, "WORTHWHILE", 0.9)
    record = calibrate(model, long_text, made)
    assert set(record.policy.codecs) == {row_codec("int8").name}
    assert record.reason == "every layer has its smallest codec"
    with pytest.raises(lk.SpecError, match="not met by bf16 rows alone"):
        calibrate(model, long_text, settings(1e-6, tokens=150))
    bf16 = max(record_of_base(model, long_text))
    record = calibrate(model, long_text, settings(2.1 * bf16, tokens=150, codecs=("int4",)))
    assert set(record.policy.codecs) == {"bf16"}
    assert record.saving == 0
    assert record.reason is not None
    assert record.reason.startswith(f"with {row_codec('int4').name} on layer")


def record_of_base(model: Model, text: Path) -> list[float]:
    """The largest KL of bf16 rows, by excerpt."""
    runs = PolicyRuns(model, 8)
    found = []
    for ids in [*read_excerpts(model, text, 2, 150)[0], text_ids(model, 222)]:
        steps = Steps()
        hidden = runs.policy(["bf16"] * model.config.layer_count, ids)
        steps.add(model.logits(runs.reference(ids)), model.logits(hidden))
        found.append(steps.measured.max_kl)
    return found


def test_a_bf16_model_has_the_least_bound_where_nothing_differs(tmp_path: Path, long_text: Path) -> None:
    """Rows are bf16 already: all-bf16 is off by nothing, and a bound has to be above 0."""
    fast = lk.load_model(tiny_models.model_dir("llama"), dtype="bfloat16")
    record = calibrate(fast, long_text, settings(1e-6, tokens=150))
    assert record.held_out.max_kl == record.chosen_on.max_kl == 0
    assert record.kl_bound_nats == 1e-6
    path = tmp_path / "record.json"
    write_record(path, record)
    assert lk.build_engine(f"boundary-pl:policy={path}", fast).policy.contract.nats_allowed == 1e-6
