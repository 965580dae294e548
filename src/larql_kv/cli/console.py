"""Writing to a terminal, a pipe or a file: plain text out, notes and warnings on stderr, errors by name."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from larql_kv.bench.stats import plain_json
from larql_kv.errors import LarqlError, ModelError, SpecError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXIT_ENGINE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def prepare_streams() -> None:
    """Characters that the terminal's encoding lacks become `?` instead of an exception; streams that the
    caller closed (`>&-`) become empty ones."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def clean(text: str) -> str:
    """`text` without control characters other than newline and tab: a model or a file must not be able
    to steer the user's terminal."""
    return _CONTROL.sub("\ufffd", text)


def write(text: str) -> None:
    """Model text to stdout, at once. Control characters pass only where no terminal listens."""
    sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A dim line on stderr."""
    _line(text, "2")


def warn(text: str) -> None:
    """A visible warning on stderr."""
    _line(f"warning: {text}", "33")


def fail(text: str) -> None:
    """An error line on stderr."""
    _line(f"error: {text}", "31")


def _line(text: str, style: str) -> None:
    # rich would do, but it costs 60 ms of the time to the first token.
    text = clean(text)
    sys.stderr.write(f"\x1b[{style}m{text}\x1b[0m\n" if styled(sys.stderr) else text + "\n")
    sys.stderr.flush()


class SlowNotice:
    """A line for whoever waits at a terminal: the first run on a machine compiles its kernels."""

    TEXT = "still preparing: the first run on a machine compiles its kernels, the next ones start at once"

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Say so after some seconds, unless `stop` comes first."""
        if self._timer is None and sys.stderr.isatty():
            self._timer = threading.Timer(self._seconds, note, (self.TEXT,))
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """Something was shown, or went wrong: nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()


def styled(stream: TextIO) -> bool:
    """Whether escape sequences belong on `stream` (https://no-color.org, and dumb terminals)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def console(stderr: bool = False) -> Console:
    """A rich console on stdout or stderr, for tables and progress."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    """An empty rich table; columns named in `right` are right-aligned. Cells take text, not markup."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title), title_justify="left")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def add_row(to: Table, *cells: str) -> None:
    """Add cells as text: square brackets in them are no markup, control characters do no harm."""
    from rich.text import Text

    to.add_row(*(Text(clean(cell)) for cell in cells))


def print_json(value: Any) -> None:
    """One JSON object on stdout. Numbers that JSON lacks (inf, nan) become null."""
    ascii_only = "utf" not in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    sys.stdout.write(json.dumps(plain_json(value), ensure_ascii=ascii_only, allow_nan=False) + "\n")
    sys.stdout.flush()


def exit_code(error: LarqlError) -> int:
    """2 for what the user asked wrongly or the model's files cannot do, 1 for what failed in running."""
    return EXIT_USAGE if isinstance(error, SpecError | ModelError) else EXIT_ENGINE


def report_error(kind: str, message: str, as_json: bool) -> None:
    """One `error:` line on stderr, and with --json the same as an object on stdout."""
    fail(message)
    if as_json:
        print_json({"error": {"kind": kind, "message": message}})
