"""The chat: one line in, one answer out; the engine keeps its state between turns."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING

from larql_kv.cli.answer import Answer, stream_answer
from larql_kv.cli.console import fail, note, write
from larql_kv.cli.report import print_ledger, print_stages, reuse_line, summary_line
from larql_kv.errors import EngineError, ModelError

if TYPE_CHECKING:
    from larql_kv.cli.run import Settings
    from larql_kv.cli.session import Session

HELP = """/help    this text
/ledger  what the engine holds, byte by byte
/reset   start over (a system message stays)
/quit    leave (so does Ctrl-D); Ctrl-C stops an answer"""


def chat(session: Session, settings: Settings) -> None:
    """Answer lines from stdin until it ends or /quit. Prompts are shown only to a person at a terminal."""
    interactive = sys.stdin.isatty()
    settings.notice.stop()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        note(f"{session.engine.info.summary} · {session.engine.model.source} · /help for commands")
    while True:
        try:
            line = _read_line(interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise
            sys.stderr.write("\n")
            note("Ctrl-D or /quit leaves")
            continue
        if line is None:
            return
        line = line.strip()
        if not line:
            continue
        if re.fullmatch(r"/[A-Za-z]+", line):
            if not _command(line.lower(), session, settings):
                return
        else:
            turn(session, line, settings)


def turn(session: Session, line: str, settings: Settings) -> None:
    """One answer. What only concerns this turn is shown and the turn dropped; worse is raised."""

    def answer_ids(ids: list[int]) -> Answer:
        return stream_answer(
            session.engine, ids, settings.max_tokens, settings.options, settings.show, began=settings.began
        )

    try:
        answer = session.ask(line, answer_ids)
    except (ModelError, EngineError) as error:
        if isinstance(error, EngineError) and not error.is_recoverable:
            raise
        fail(f"{error} (this turn is dropped; /reset starts over)")
        return
    if answer.finish == "interrupted" and not answer.token_ids:
        note("interrupted: this turn is dropped")
        return
    if answer.text and not answer.text.endswith("\n"):
        write("\n")
    note(reuse_line(answer))
    note(summary_line(session.engine, answer))
    if settings.verbose:
        print_ledger(session.engine.ledger())
        print_stages(session.engine.stage_summary())


def _read_line(interactive: bool) -> str | None:
    """The next line, or None at the end of input."""
    if interactive and sys.stdout.isatty():
        try:
            return input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return None
    if interactive:  # stdout goes to a file: the prompt must not
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line or None


def _command(name: str, session: Session, settings: Settings) -> bool:
    """Run a /command; False to leave."""
    if name in ("/quit", "/exit"):
        return False
    if name == "/reset":
        session.reset()
        note("started over")
    elif name == "/ledger":
        print_ledger(session.engine.ledger())
        print_stages(session.engine.stage_summary())
    elif name == "/help":
        note(HELP)
    else:
        note(f"unknown command {name}\n{HELP}")
    return True
