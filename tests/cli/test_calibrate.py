"""`larql calibrate` in this process, and its record in `larql run`, `check` and `bench`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from larql_kv.bench.text import TEXT
from larql_kv.cli import calibrate as command
from larql_kv.codec.rows import row_codec
from larql_kv.engine.calibration import read_record
from tests.cli.conftest import Larql

SMALL = ("--window", 4, "--tokens", 150, "--samples", 2, "--dtype", "float32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def record(base_model: Path, corpus: Path) -> Path:
    """A record whose budget allows everything."""
    path = corpus.with_name("record.json")
    result = Larql()("calibrate", base_model, "--corpus", corpus, "--budget-nats", 1000, "-o", path, *SMALL)
    assert result.exit_code == 0, result.output
    return path


def test_it_writes_the_record_and_says_what_it_found(larql: Larql, base_model: Path, corpus: Path) -> None:
    path = corpus.with_name("own.json")
    words = ("calibrate", base_model, "--corpus", corpus, "--budget-nats", 1000, "-o", path, *SMALL)
    result = larql(*words, "--codecs", "int8")
    assert result.exit_code == 0, result.output
    made = read_record(path)
    int8 = row_codec("int8").name
    assert made.policy.codecs == (int8,) * 4
    assert made.policy.summary in result.stdout
    assert f"{int8} max" in result.stdout
    assert f"held out: {made.held_out.steps} steps" in result.stdout
    assert f"{made.saving:.0%} less than bf16 rows" in result.stdout
    assert f"boundary-per-layer:window=4,policy={path}" in result.stdout
    assert "why not more" not in result.stdout
    assert result.stderr == ""
    value = larql.json(*words, "--codecs", " int8 , bf16,int8")
    assert value == json.loads(path.read_text())
    assert value["policy"]["codecs"] == [int8] * 4


def test_a_policy_that_saves_little_says_why(larql: Larql, base_model: Path, corpus: Path) -> None:
    path = corpus.with_name("small.json")
    words = ("calibrate", base_model, "--corpus", corpus, "-o", path, "--window", 4, "--tokens", 150)
    result = larql(*words, "--samples", 2, "--dtype", "bfloat16", "--budget-nats", 1e-6)
    assert result.exit_code == 0, result.output
    assert "4 x bf16" in result.stdout
    assert "why not more: with " in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget-nats", 0.1, "-o", "a,b.json"), "no policy=... could name it"),
        (("--budget-nats", 0.1, "-o", "no/such/place/r.json"), "there is no directory"),
        (("--budget-nats", 0, "-o", "r.json"), "a budget of 0 nats"),
        (("--budget-nats", 0.1, "-o", "r.json", "--codecs", "int9"), "unknown codec 'int9'"),
        (("--budget-nats", 0.1, "-o", "r.json", "--tokens", 100), "never read a coded row"),
    ],
)
def test_what_cannot_work_ends_before_the_model_is_loaded(
    larql: Larql, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = larql("calibrate", "nowhere/to/be/found", "--corpus", corpus, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_record_serves_a_run(larql: Larql, base_model: Path, record: Path) -> None:
    spec = f"boundary-per-layer:window=4,policy={record}"
    words = ("run", base_model, TEXT[:200], "-n", 5, "--dtype", "float32", "--engine", spec)
    run = larql.json(*words)
    assert run["engine"] == spec
    assert run["policy"]["contract"].startswith("BoundedKLPerLayer(nats=")
    assert run["note"].startswith(read_record(record).policy.summary)
    assert run["note"] in larql(*words).stderr.replace("\n", " ")
    narrow = larql(*words[:-1], spec.replace("window=4", "window=2"))
    assert narrow.exit_code == 1
    assert "measured with window=4, and window=2" in narrow.stderr
    missing = larql(*words[:-1], f"boundary-per-layer:policy={record}.not")
    assert missing.exit_code == 1
    assert "cannot be read as a calibration record" in missing.stderr
    assert larql.json(*words[:-1], "standard")["note"] == ""


def test_the_record_serves_a_check_and_a_bench(larql: Larql, base_model: Path, record: Path) -> None:
    spec = f"boundary-per-layer:window=4,policy={record}"
    options = ("--tokens", 150, "--prompt-tokens", 140, "--free-tokens", 2, "--dtype", "float32")
    report = larql.json("check", base_model, "--engine", spec, *options)["checks"][0]["report"]
    bound = read_record(record).kl_bound_nats
    assert report["contract"] == f"BoundedKLPerLayer(nats={bound:g})"
    assert 0 < report["teacher_forced"]["max_kl"] <= bound
    fast = ("--tokens", 2, "--repeats", 1, "--warmup", 0, "--no-check", "--dtype", "float32")
    row = larql.json("bench", base_model, "-e", f"{spec};markov-rs-codec:window=4", *fast)["results"]
    assert read_record(record).policy.summary in row[0]["note"]
    assert "plain K/V in float32" in row[1]["note"]


def test_progress_shows_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    with command._progress() as progress:
        progress("unseen")
    assert capsys.readouterr().err == ""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with command._progress() as progress:
        progress("int8 on layer 3 of 30")
    assert "int8 on layer 3 of 30" in screen.getvalue() or "\x1b" in screen.getvalue()
