"""`larql engines`, `info` and `check`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from larql_kv import policy
from larql_kv.cli import check, engines
from larql_kv.errors import BackendFailure, BackendUnavailable, ModelError, SpecError
from tests import tiny_models


def test_engines_come_from_the_registry(larql):
    listed = json.loads(larql("engines", "--json").stdout)["engines"]
    shown, markdown = larql("engines").stdout, larql("engines", "--markdown").stdout
    assert {"standard", "no-cache", "markov-rs"} <= {entry["name"] for entry in listed}
    for entry in listed:
        assert entry["name"] in shown
        assert f"`{entry['name']}`" in markdown
        for text in (*entry["aliases"], *(key["help"] for key in entry["keys"].values())):
            assert text in shown
            assert text in markdown
    assert "ExactWithinWindow(window=512)" in markdown
    assert len({line.count("|") - 2 * line.count("\\|") for line in markdown.splitlines()[1:] if line}) == 1


def test_retrieval_engines_are_marked():
    import larql_kv as lk

    entry = replace(next(item for item in lk.engines() if item.name == "no-cache"), kind="retrieval")
    assert engines.cells(entry)[0] == "no-cache (bench only)"


def test_info(larql, base_model, tmp_path):
    facts = json.loads(larql("info", base_model, "--json").stdout)
    assert facts["config"]["layers"] == 4
    assert facts["config"]["kv_elements_per_token"] == 2 * 2 * 16 * 4
    assert facts["refused"] is None
    shown = larql("info", base_model)
    assert shown.exit_code == 0
    assert "safetensors" in shown.stdout
    gguf = tiny_models.write_tiny_gguf("gemma3", tmp_path / "tiny.gguf")
    facts = json.loads(larql("info", gguf, "--json").stdout)
    assert (facts["architecture"], facts["config"]["window"]) == ("gemma3", 8)


def test_info_of_a_model_that_does_not_run(larql, tmp_path, monkeypatch):
    from larql_kv.cli import info

    def refuse(path):
        raise ModelError("architecture 'rwkv' is not supported")

    monkeypatch.setattr(info, "read_config", refuse)
    gguf = tiny_models.write_tiny_gguf("llama", tmp_path / "tiny.gguf")
    result = larql("info", gguf)
    assert result.exit_code == 0
    assert "rwkv" in result.stdout


def test_check_holds(larql, base_model):
    result = larql("check", base_model, "--tokens", 40, "--free-tokens", 4, "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["tokens"] == 40
    assert {"standard", "no-cache", "markov-rs"} <= {item["engine"] for item in report["checks"]}
    for item in report["checks"]:
        assert item["report"]["ok"] or item["report"]["verdict"] == "not exercised", item
    several = ("--engine", "standard:window=13;no-cache", "--engine", "sliding", "--context-window", 9)
    shown = larql("check", base_model, "--tokens", 24, "--free-tokens", 2, "--dtype", "float32", *several)
    assert shown.exit_code == 0
    for text in ("standard:window=13", "standard:window=9", "no-cache"):
        assert f"{text}: " in shown.stdout


def test_a_broken_contract_exits_1(larql, base_model, monkeypatch):
    monkeypatch.setattr(policy, "divergence", _far_apart)
    few = ("--tokens", 12, "--free-tokens", 2, "--prompt-tokens", 5, "--dtype", "float32")
    result = larql("check", base_model, "--engine", "standard", *few)
    assert result.exit_code == 1
    assert "broken" in result.stdout
    assert larql("check", base_model, "--engine", "standard", *few, "--json").exit_code == 1


def _far_apart(reference, candidate):
    return policy.Divergence(len(reference), 1.0, 0.5, 0.5, 3.0, False, 2)


@pytest.mark.parametrize(
    ("error", "code"),
    [(BackendUnavailable("no such thing"), 0), (ModelError("precondition"), 0), (BackendFailure("boom"), 1)],
)
def test_engines_that_cannot_be_checked(larql, base_model, monkeypatch, error, code):
    def refuse(self, *args):
        raise error

    monkeypatch.setattr(policy.Contract, "check", refuse)
    result = larql("check", base_model, "--engine", "standard")
    assert result.exit_code == code
    assert f"{type(error).__name__}: {error}" in result.stdout
    report = json.loads(larql("check", base_model, "--engine", "standard", "--json").stdout)
    assert report["checks"][0]["error"]["message"] == str(error)


def test_more_tokens_than_the_context_is_refused_before_any_check(larql, base_model):
    result = larql("check", base_model, "--tokens", 5000, "--engine", "standard")
    assert result.exit_code == 2
    assert "do not fit the model's context of 256" in result.stderr


def test_the_default_length_passes_the_models_window(larql):
    report = json.loads(
        larql("check", tiny_models.model_dir("gemma3"), "--engine", "standard", "--json").stdout
    )
    assert report["checks"][0]["report"]["verdict"] != "not exercised"


def test_check_of_a_text(larql, base_model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words")
    few = ("--engine", "standard", "--free-tokens", 1)
    result = larql("check", base_model, "--text", text, *few)
    assert "warning: " in result.stderr
    assert result.exit_code == 0
    assert larql("check", base_model, "--text", text, "--prompt-tokens", 200, *few).exit_code == 2
    text.write_text("")
    assert larql("check", base_model, "--text", text, *few).exit_code == 2
    assert larql("check", base_model, "--text", tmp_path / "none", *few).exit_code == 2
    assert larql("check", base_model, "--tokens", 8, "--prompt-tokens", 8).exit_code == 2


def test_chosen_specs(monkeypatch):
    monkeypatch.setenv("LARQL_KV_ENGINE", "no-cache")
    assert [spec.text for spec in check.chosen_specs(None)] == ["no-cache"]
    with pytest.raises(SpecError, match="empty"):
        check.chosen_specs([" ; "])
    with pytest.raises(SpecError, match="standard"):
        check.chosen_specs(["standrad"])


def test_sample_text_is_real_text():
    from larql_kv.bench.text import TEXT

    assert 500 < len(TEXT.split()) < 900


def test_root(larql):
    from larql_kv import __version__

    assert larql("--version").stdout.strip() == f"larql-kv {__version__}"
    assert "run" in larql("--help").stdout
    assert "bench" in larql("--help").stdout
    assert larql("bogus").exit_code == 2


def test_the_engines_page_is_the_registrys(larql):
    page = Path(__file__).parents[2] / "docs" / "engines-table.md"
    assert larql("engines", "--markdown").stdout == page.read_text(), (
        "regenerate it: larql engines --markdown > docs/engines-table.md"
    )
