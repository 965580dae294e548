"""`larql bench` as a command: options, what is printed, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import larql_kv as lk
from larql_kv.bench import runner
from larql_kv.cli import bench as cli
from larql_kv.cli.main import app
from tests.models import tiny
from tests.tiny_models import model_dir

FAST = ("--tokens", "4", "--repeats", "1", "--warmup", "1", "--no-check", "--dtype", "float32")


@pytest.fixture(autouse=True)
def no_bandwidth_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "measured_bandwidth", lambda model: 10.0)


def bench(*words: str) -> Result:
    return CliRunner().invoke(app, ["bench", str(model_dir("llama")), *FAST, *words])


def test_every_registered_engine_by_default_as_plain_text() -> None:
    result = bench("--prompt-tokens", "16")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    for entry in lk.engines():
        assert f"\n{entry.name} " in result.output
    assert "prompt of 16 tokens" in result.output


def test_json_is_one_object_and_goes_to_the_file_too(tmp_path: Path) -> None:
    result = bench("--engine", "standard,markov-rs:window=4", "-e", "standard", "--json",
                   "--output-file", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg"),
                   "--context", "8,24")  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["engine"] for row in report["results"]] == ["standard", "markov-rs:window=4"]
    assert report["prompt_tokens"] == 128
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    assert all(len(row["sweep"]["points"]) == 2 for row in report["results"])


def test_a_prompt_is_taken_whole_or_repeated() -> None:
    ids = lk.load_model(model_dir("llama")).tokenizer.encode("the cat and the hat")
    whole = json.loads(bench("-e", "standard", "--json", "--prompt", "the cat and the hat").stdout)
    assert (whole["prompt_tokens"], whole["prompt"]) == (len(ids), "the cat and the hat")
    repeated = bench("-e", "standard", "--json", "--prompt", "the cat", "--prompt-tokens", "40")
    assert json.loads(repeated.stdout)["prompt_tokens"] == 40


def test_an_empty_prompt_is_a_labelled_row_and_no_failure() -> None:
    result = bench("--prompt", "")
    assert result.exit_code == 0, result.output
    assert result.output.count("skipped: EmptyPrompt: prefill needs") == len(lk.engines())


def test_the_window_option_serves_the_windowed_names() -> None:
    result = bench("-e", "sliding", "--context-window", "8", "--json")
    assert json.loads(result.stdout)["results"][0]["engine"] == "standard:window=8"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-e", "standart"), "did you mean 'standard'"),
        (("-e", "sliding"), "needs window=N"),
        (("-e", ""), "--engine is empty"),
        (("--context", "512,128"), "increasing lengths"),
        (("--context", "a"), "increasing lengths"),
        (("--context", "0"), "increasing lengths"),
        (("--context", "300"), "more than the model's context of 256"),
        (("--prompt-tokens", "300"), "more than the model's context of 256"),
        (("--dtype", "int3"), "int3"),
    ],
)
def test_what_cannot_be_asked_exits_2(words: tuple[str, ...], message: str) -> None:
    result = bench(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Speed" not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "mps"), "no backend for device 'mps'"),
        (("--device", "cuda:7"), "device 'cuda:7'"),
        (("--activations", "int8"), "a setting of device 'cuda'"),
    ],
)
def test_what_no_backend_serves_is_named(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", str(model_dir("llama")), *words])
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(lk.BackendUnavailable("no kernel"), 0), (lk.BackendFailure("out of memory"), 1)]
)
@pytest.mark.parametrize("form", ["table", "json"])
def test_a_failure_is_printed_in_its_row_and_then_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, form: str
) -> None:
    def build(spec: Any, model: Any) -> Any:
        if spec.engine_name == "markov-rs":
            raise error
        return lk.build_engine(spec, model)

    monkeypatch.setattr(runner, "build_engine", build)
    result = bench(*(["--json"] if form == "json" else []))
    assert result.exit_code == code
    if form == "json":
        rows = {row["engine"]: row for row in json.loads(result.stdout)["results"]}
        assert rows["markov-rs"]["error"]["message"] == str(error)
        assert rows["standard"]["tok_per_s"] > 0
    else:
        assert f"{type(error).__name__}: {error}" in result.stdout
        assert "\nno-cache " in result.stdout


def test_bandwidth_that_cannot_be_measured_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from larql_kv.backends.cpu import ops

    def fails() -> float:
        raise MemoryError

    monkeypatch.setattr(ops, "stream_bandwidth", fails)
    assert cli.measured_bandwidth(tiny("llama")) is None
    monkeypatch.setattr(ops, "stream_bandwidth", lambda: 12.5)
    assert cli.measured_bandwidth(tiny("llama")) == 12.5


def test_a_terminal_gets_rich_tables_and_a_spinner(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from larql_kv.bench.report import report_dict
    from tests.bench.bench_runs import full_report

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    cli.show(report_dict(full_report()))
    out = capsys.readouterr().out
    assert "────" in out
    assert "Promise" in out
    with cli._progress(True, 3) as progress:
        progress("decode [x]")
