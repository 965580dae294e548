"""The chat's prompt and the entry point, in this process, with a terminal that is only pretended."""

from __future__ import annotations

import builtins
import io
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from larql_kv.cli import chat, main, timing


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def turns(monkeypatch) -> list[str]:
    """The lines that became turns."""
    lines: list[str] = []
    monkeypatch.setattr(chat, "turn", lambda session, line, settings: lines.append(line))
    return lines


def talk() -> None:
    engine: Any = SimpleNamespace(info=SimpleNamespace(summary="standard"), model=SimpleNamespace(source="m"))
    session: Any = SimpleNamespace(engine=engine)
    chat.chat(session, SimpleNamespace(notice=SimpleNamespace(stop=lambda: None)))  # type: ignore[arg-type]


def keys(monkeypatch, *presses: str | type[BaseException]) -> None:
    left = iter(presses)

    def read(prompt=""):
        press = next(left)
        if isinstance(press, str):
            return press
        raise press

    monkeypatch.setattr(builtins, "input", read)


def test_keys_at_the_prompt(monkeypatch, capsys, turns):
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    keys(monkeypatch, "one", KeyboardInterrupt, "  ", "/etc/hosts says what?", EOFError)
    talk()
    assert turns == ["one", "/etc/hosts says what?"]
    errors = capsys.readouterr().err
    assert "/help for commands" in errors
    assert "Ctrl-D or /quit leaves" in errors


def test_the_prompt_stays_out_of_a_file(monkeypatch, capsys, turns):
    monkeypatch.setattr(sys, "stdin", Terminal("one\n"))
    talk()
    captured = capsys.readouterr()
    assert turns == ["one"]
    assert captured.out == ""
    assert captured.err.count("> ") == 2


def test_ctrl_c_ends_a_chat_over_a_pipe(monkeypatch, turns):
    def interrupted(interactive):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_read_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        talk()


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError(), 141), (KeyboardInterrupt(), 130)])
@pytest.mark.parametrize("as_json", [False, True])
def test_ways_to_end(larql, monkeypatch, error, code, as_json):
    dropped = []

    def end():
        raise error

    monkeypatch.setattr("larql_kv.engine.engines", end)
    monkeypatch.setattr(main, "_drop_stdout", lambda: dropped.append(True))
    result = larql("engines", *(["--json"] if as_json else []))
    assert result.exit_code == code
    assert len(dropped) == (code == 141)
    assert ("interrupted" in result.stderr) is (code == 130)
    assert ('"kind": "KeyboardInterrupt"' in result.stdout) is (code == 130 and as_json)


def test_a_dropped_stdout_takes_more_text(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        main._drop_stdout()
        file.write("lost")
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize("ends", [SystemExit(0), KeyboardInterrupt()])
def test_main_ends_the_process(monkeypatch, ends):
    monkeypatch.setattr(timing, "_started", None)

    def run(**options):
        raise ends

    monkeypatch.setattr(main, "app", run)
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code == (130 if isinstance(ends, KeyboardInterrupt) else 0)
    assert timing.seconds_since_start(time.perf_counter()) > 0


def test_without_proc_the_command_begins_now(monkeypatch):
    def refuse(name):
        raise ValueError

    monkeypatch.setattr(os, "sysconf", refuse)
    monkeypatch.setattr(timing, "_started", None)
    assert timing.process_age() is None
    timing.command_started_with_process()
    assert timing.seconds_since_start(0.0) < 60
