"""What reaches a terminal, a pipe, and a JSON reader."""

from __future__ import annotations

import io
import json
import sys

import pytest

from larql_kv import errors
from larql_kv.bench.stats import format_bytes
from larql_kv.cli import console


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (2_400, "2.4 kB"),
        (141_000, "141 kB"),
        (999_600, "1.0 MB"),
        (1_900_000, "1.9 MB"),
        (98_362_432, "98.4 MB"),
        (1_340_000_000, "1.34 GB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def test_clean_takes_escape_sequences_away():
    assert console.clean("a\x1b[2Jb\tc\nd\x07\x9b\r") == "a\ufffd[2Jb\tc\nd\ufffd\ufffd\ufffd"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_model_text_cannot_steer_a_terminal(monkeypatch):
    screen, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    console.write("\x1b[2Jhi")
    monkeypatch.setattr(sys, "stdout", pipe)
    console.write("\x1b[2Jhi")
    assert screen.getvalue() == "\ufffd[2Jhi"
    assert pipe.getvalue() == "\x1b[2Jhi"


@pytest.mark.parametrize(("variable", "styled"), [(None, True), ("NO_COLOR", False), ("TERM", False)])
def test_style_is_for_terminals_that_want_it(monkeypatch, variable, styled):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if variable:
        monkeypatch.setenv(variable, "dumb")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    console.warn("w")
    console.note("n")
    console.fail("f\x1b[2J")
    assert ("\x1b[" in screen.getvalue()) is styled
    assert "[2J" in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


def test_slow_notice(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    stopped, slow = console.SlowNotice(0.05), console.SlowNotice(0.0)
    stopped.start()
    stopped.stop()
    slow.start()
    slow._timer.join()
    assert screen.getvalue().count("compiles its kernels") == 1
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    quiet = console.SlowNotice(0.0)
    quiet.start()
    assert quiet._timer is None
    quiet.stop()


def test_terminals_without_utf8(monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    console.prepare_streams()
    console.write("é ok\n")
    console.print_json({"text": "é"})
    lines = raw.getvalue().decode("ascii").splitlines()
    assert lines[0] == "? ok"
    assert json.loads(lines[1]) == {"text": "é"}


def test_json_has_no_infinities(capsys):
    console.print_json(
        {"a": float("inf"), "b": [float("nan"), 1.5, True], 3: {"x"}, "p": io.DEFAULT_BUFFER_SIZE}
    )
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [None, 1.5, True],
        "3": ["x"],
        "p": io.DEFAULT_BUFFER_SIZE,
    }


def test_exit_codes():
    assert console.exit_code(errors.SpecError("x")) == 2
    assert console.exit_code(errors.ModelError("x")) == 2
    assert console.exit_code(errors.BackendFailure("x")) == 1
    assert console.exit_code(errors.StoreError("x")) == 1
