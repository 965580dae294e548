"""`larql run` in this process, on tiny models: JSON, warnings, exit codes, and the chat over a pipe."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
import torch

from larql_kv import engine as engine_module
from larql_kv.errors import BackendFailure, InvariantViolation
from tests.cli.conftest import make_chat_model

F32 = ("--dtype", "float32")


def reused(stderr: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"reused (\d+) of (\d+) prompt tokens", stderr)]


def test_json(larql, chat_model):
    result = larql.json(
        "run", chat_model, "tell me", "-n", 7, "--engine", "markov-rs:window=64", "--top", 3, "-v", *F32
    )
    assert result["engine"] == "markov-rs:window=64"
    assert result["policy"] == {"canonical": "residual rows", "derivative": "K/V rows", "contract": "Exact"}
    assert len(result["token_ids"]) == result["generated_tokens"] == 7
    assert result["finish"] == "length"
    assert re.fullmatch("[0-9a-f]{12}", result["token_hash"])
    assert result["reused_tokens"] == 0
    assert result["prompt_tokens"] > len("tell me") // 2
    assert result["template"] is True
    assert result["ledger"]["live"] == sum(result["ledger"]["roles"].values())
    assert result["prefill_ms"] > 0
    assert result["first_token_s"] > 0
    assert result["tokens_per_second"] > 0
    assert result["stages"]["total"] > 0
    assert [set(item) for item in result["top"]] == [{"id", "text", "p"}] * 3
    assert result["top"][0]["id"] == result["token_ids"][0]
    assert result["warnings"] == []


def test_every_engine_says_the_same(larql, chat_model):
    runs = [
        larql.json("run", chat_model, "tell me", "-n", 12, "--engine", spec, *F32)
        for spec in ("standard", "no-cache", "markov-rs")
    ]
    assert len({run["token_hash"] for run in runs}) == 1


def test_text_goes_to_stdout_and_the_rest_to_stderr(larql, chat_model):
    options = ("run", chat_model, "tell me", "-n", 9, *F32)
    text = larql.json(*options)["text"]
    result = larql(*options, "-v", "--top", 2)
    assert result.exit_code == 0
    assert result.stdout == text + ("" if text.endswith("\n") else "\n")
    assert "standard [cpu] · 9 tokens · " in result.stderr
    assert "state " in result.stderr
    assert "canonical" in result.stderr
    for table in ("Ledger", "Stages", "  1. "):
        assert table in result.stderr


def test_raw_and_template(larql, chat_model, base_model):
    wrapped = larql.json("run", chat_model, "hi", "-n", 1)
    raw = larql.json("run", chat_model, "hi", "-n", 1, "--raw")
    by_environment = larql.json("run", chat_model, "hi", "-n", 1, LARQL_RAW_PROMPT="1")
    assert wrapped["prompt_tokens"] > raw["prompt_tokens"] == by_environment["prompt_tokens"]
    assert "no chat template" not in larql("run", chat_model, "hi", "-n", 1, "--raw").stderr
    result = larql("run", base_model, "hi", "-n", 1, "--system", "be brief")
    assert "no chat template" in result.stderr
    assert "warning: --system needs a chat template" in result.stderr
    assert (
        larql.json("run", chat_model, "hi", "-n", 1, "--system", "S")["prompt_tokens"]
        > wrapped["prompt_tokens"]
    )


def test_engine_and_kv_cache_together_warn(larql, chat_model):
    both = ("run", chat_model, "hi", "-n", 1, "--engine", "no-cache", "--kv-cache", "standard")
    assert "warning: both --engine 'no-cache' and --kv-cache 'standard'" in larql(*both).stderr
    assert larql.json(*both)["engine"] == "no-cache"
    assert len(larql.json(*both)["warnings"]) == 1
    assert larql.json("run", chat_model, "hi", "-n", 1, LARQL_KV_ENGINE="no_cache")["engine"] == "no-cache"
    legacy = ("run", chat_model, "hi", "-n", 1, "--kv-cache", "bounded", "--context-window", 16)
    assert larql.json(*legacy)["engine"] == "standard:window=16"


def test_sampling(larql, chat_model):
    options = ("run", chat_model, "tell me", "-n", 12, "--temperature", 1.5, "--top-k", 40, "--seed")
    first, again, other = (larql.json(*options, seed)["token_ids"] for seed in (1, 1, 2))
    assert first == again != other
    whole = larql.json("run", chat_model, "tell me", "-n", 12)["text"]
    cut = larql.json("run", chat_model, "tell me", "-n", 12, "--stop", whole[3:5])
    assert (cut["text"], cut["finish"]) == (whole[: whole.index(whole[3:5])], "stop")
    assert larql.json("run", chat_model, "tell me", "-n", 0)["token_ids"] == []


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (("--engine", "standrad"), "SpecError", "did you mean 'standard'"),
        (("--engine", "sliding"), "SpecError", "--context-window"),
        (("--ffn", "wolk"), "SpecError", "did you mean 'walk'"),
        (("--temperature", "-1"), "UsageError", "temperature"),
        (("--top-p", "0"), "UsageError", "top_p"),
        (("--dtype", "int3"), "ModelError", "int3"),
        (("--bogus",), "UsageError", "--bogus"),
        (("-n", "x"), "UsageError", "x"),
        (("and", "a", "third"), "UsageError", "quote the prompt"),
    ],
)
def test_wrong_usage_exits_2(larql, chat_model, words, kind, says):
    result = larql("run", chat_model, "hi", *words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""
    as_json = larql("run", chat_model, "hi", *words, "--json")
    assert as_json.exit_code == 2
    error = json.loads(as_json.stdout)["error"]
    assert error["kind"] == kind
    assert says in error["message"]


def test_models_that_cannot_be_run_exit_2(larql, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 40)
    for words in (
        ("run", broken, "hi"),
        ("run", "smollm3-135m", "hi"),
        ("run", "./missing"),
        ("info", broken),
    ):
        result = larql(*words)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
    assert json.loads(larql("info", broken, "--json").stdout)["error"]["kind"] == "ModelError"
    assert larql("run", "--json").exit_code == 2  # a chat has no single result


def test_too_long_a_prompt_exits_2(larql, chat_model):
    result = larql("run", chat_model, "long " * 300)
    assert result.exit_code == 2
    assert "context of 256" in result.stderr


@pytest.fixture
def failing(monkeypatch):
    """Engines whose forward pass fails with the error that is set."""

    def fail_with(error):
        def run(self, token_ids, keep, query=False):
            raise error

        monkeypatch.setattr(engine_module.KvEngine, "_run", run)

    return fail_with


def test_engine_failures_exit_1(larql, chat_model, failing, monkeypatch):
    failing(BackendFailure("out of memory"))
    result = larql("run", chat_model, "hi", "--json")
    assert (result.exit_code, result.stderr) == (1, "error: out of memory\n")
    assert json.loads(result.stdout)["error"] == {"kind": "BackendFailure", "message": "out of memory"}
    assert larql("run", chat_model, stdin="hi\nthere\n").exit_code == 1  # a chat ends with it, too
    traced = larql("run", chat_model, "hi", LARQL_TRACEBACK="1")
    assert isinstance(traced.exception, BackendFailure)


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_device_that_is_not_here(larql, chat_model, monkeypatch, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = [command, chat_model, *(["hi"] if command == "run" else []), "--device", "cuda"]
    result = larql(*words, TRITON_INTERPRET=None)
    assert result.exit_code == 1
    assert "error: device 'cuda' was asked for, but torch" in result.stderr
    assert "finds no CUDA card" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--activations", "int8"), "activations 'int8' is a setting of device 'cuda'"),
        (("--device", "cuda", "--dtype", "float32"), "device 'cuda' has no float32 form"),
        (("--device", "cuda", "--activations", "int9"), "offered: int8, mixed, int16"),
    ],
)
def test_what_a_device_does_not_offer(larql, chat_model, words, message):
    pytest.importorskip("triton")
    result = larql("run", chat_model, "hi", *words, TRITON_INTERPRET="1")
    assert result.exit_code == 1
    assert message in result.stderr


# -- chat --------------------------------------------------------------------------------------------------


def test_chat_reuses_what_was_said(larql, chat_model):
    result = larql("run", chat_model, "-n", 10, *F32, stdin="one\n\ntwo\nthree")
    assert result.exit_code == 0
    turns = reused(result.stderr)
    assert len(turns) == 3
    assert turns[0][0] == 0
    for (_, before), (kept, prompt) in pairwise(turns):
        # All of the earlier prompt and answer, but for its last token, which was never run.
        assert kept == before + 10 - 1
        assert prompt > kept


def test_chat_says_what_a_single_run_says(larql, chat_model):
    prompt = "tell me"
    text = larql.json("run", chat_model, prompt, "-n", 10, *F32)["text"]
    assert larql("run", chat_model, "-n", 10, *F32, stdin=prompt + "\n").stdout.startswith(text)


def test_chat_without_a_template_continues(larql, base_model):
    result = larql("run", base_model, "-n", 5, *F32, stdin="one\ntwo\n")
    assert "no chat template" in result.stderr
    turns = reused(result.stderr)
    assert turns[0][0] == 0
    assert turns[1][0] >= turns[0][1]


def test_chat_commands(larql, chat_model):
    result = larql(
        "run", chat_model, "-n", 3, stdin="one\n/ledger\n/reset\n/help\n/what\ntwo\n/QUIT\nthree\n"
    )
    assert result.exit_code == 0
    assert [kept for kept, _ in reused(result.stderr)] == [0, 0]
    for said in ("K/V rows", "started over", "/reset", "unknown command /what"):
        assert said in result.stderr


def test_chat_survives_a_turn_that_is_too_long(larql, chat_model):
    result = larql("run", chat_model, "-n", 3, "-v", stdin="one\n" + "long " * 300 + "\ntwo\n")
    assert result.exit_code == 0
    assert "error: " in result.stderr
    assert "this turn is dropped" in result.stderr
    (_, first), (kept, second) = reused(result.stderr)
    assert kept == first + 2
    assert second < 100


def test_ctrl_c_before_the_first_token_drops_the_turn(larql, chat_model, failing):
    failing(KeyboardInterrupt())
    result = larql("run", chat_model, stdin="hi\nthere\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.count("this turn is dropped") == 2


def test_chat_dies_of_a_broken_engine_only(larql, chat_model, failing):
    failing(InvariantViolation("broken"))
    assert larql("run", chat_model, stdin="hi\n").exit_code == 1


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}"])
def test_templates_that_refuse(larql, tmp_path, template):
    model = make_chat_model(tmp_path / "m", template)
    assert larql("run", model, "hi").exit_code == 2
    # Broken for good is an error; what the template refuses costs only the turn.
    assert larql("run", model, stdin="hi\n").exit_code == (0 if "raise" in template else 2)
