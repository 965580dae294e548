"""`larql` as a process: signals, pipes, terminals, and the time to the first token."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import TEMPLATE, make_chat_model
from tests.models import needs_smollm2

LARQL = [sys.executable, "-m", "larql_kv.cli.main"]
ENV = {**os.environ, "TERM": "xterm", "LARQL_KV_ENGINE": "", "LARQL_RAW_PROMPT": ""}
PATIENCE = 120  # seconds: a fresh machine compiles its kernels first


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that talks for minutes."""
    return make_chat_model(tmp_path_factory.mktemp("endless") / "m", TEMPLATE, context=100_000)


@pytest.fixture
def start() -> Iterator:
    running = []

    def run(*words: str | Path, **options) -> subprocess.Popen:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen([*LARQL, *map(str, words)], env=ENV, **streams)
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_a_run_with_130(start, endless):
    process = start("run", endless, "hi", "-n", "90000", "--dtype", "float32")
    assert process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"interrupted" in errors


def test_ctrl_c_before_the_first_token(start, endless):
    # The pipe on stdin is open and empty: a chat that waits for its first line.
    process = start("run", endless, "--dtype", "float32")
    process.stdin.write(b"/help\n")
    process.stdin.flush()
    assert b"/help" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_a_closed_pipe_ends_quietly(start, endless):
    process = start("run", endless, "hi", "-n", "90000", "--dtype", "float32")
    assert process.stdout.read(8)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 141
    assert process.stderr.read() == b""


_ESCAPES = re.compile(rb"\x1b\[[^A-Za-z]*[A-Za-z]|[\r\n]")  # the line editor's own, not the answer's


class Screen:
    """The other side of a terminal."""

    def __init__(self, handle: int) -> None:
        self.handle, self.seen = handle, b""

    def wait(self, done: Callable[[bytes], bool], press: bytes = b"") -> None:
        """Until `done` with what was seen, which is forgotten then. `press` is typed again every second:
        a key that comes while the line editor sets up the terminal is lost."""
        end = time.monotonic() + PATIENCE
        next_press = time.monotonic()
        while not done(self.seen):
            assert time.monotonic() < end, self.seen[-2000:]
            if press and time.monotonic() >= next_press:
                os.write(self.handle, press)
                next_press = time.monotonic() + 1.0
            if select.select([self.handle], [], [], 0.2)[0]:
                self.seen += os.read(self.handle, 65536)
        self.seen = b""

    def wait_for(self, text: bytes, press: bytes = b"") -> None:
        self.wait(lambda seen: text in seen, press)

    def settle(self) -> None:
        """Until nothing has come for longer than keys are pressed again: a late Ctrl-C would take what is
        typed next with it."""
        while select.select([self.handle], [], [], 1.5)[0]:
            os.read(self.handle, 65536)
        self.seen = b""

    def say(self, line: bytes) -> None:
        """Type a line, and wait until its answer streams."""
        self.settle()
        os.write(self.handle, line + b"\n")
        self.wait(lambda seen: len(_ESCAPES.sub(b"", seen.partition(line + b"\r\n")[2])) > 3)


def test_chat_at_a_terminal(endless):
    """Ctrl-C at the prompt stays, in an answer stops it, and the next turn goes on; Ctrl-D leaves."""
    child, handle = pty.fork()
    if child == 0:
        os.execve(sys.executable, [*LARQL, "run", str(endless), "-n", "90000", "--dtype", "float32"], ENV)
    screen = Screen(handle)
    status = None
    try:
        screen.wait_for(b"> ")
        screen.wait_for(b"leaves", press=b"\x03")
        screen.say(b"one")
        screen.wait_for(b"interrupted", press=b"\x03")
        screen.say(b"two")
        again = re.compile(rb"reused [1-9]\d* of .*interrupted", re.DOTALL)
        screen.wait(lambda seen: again.search(seen) is not None, press=b"\x03")
        end = time.monotonic() + PATIENCE
        while status is None and time.monotonic() < end:
            os.write(handle, b"\x04")
            time.sleep(0.5)
            finished, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if finished else None
        assert status == 0
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(handle)


def test_help_and_errors_need_no_torch():
    code = (
        "import sys\nfrom larql_kv.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\nassert not {'torch', 'numba'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=ENV, timeout=PATIENCE)


@pytest.mark.real
@needs_smollm2
def test_the_demo_model_answers(start):
    process = start("run", "What is the capital of France?", "-n", "16", "--json")
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    result = json.loads(out)
    assert "Paris" in result["text"]
    assert result["finish"] == "stop"
