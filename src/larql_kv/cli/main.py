"""`larql`: the entry point, its commands, and how errors leave the process.

Nothing here or in the command modules imports torch at the top: `larql --help` is fast, and a command
pays only for what it uses.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from larql_kv import __version__
from larql_kv.cli import bench, calibrate, check, engines, info, run, serve, timing, vindex, walk
from larql_kv.cli.console import (
    EXIT_ENGINE,
    EXIT_INTERRUPTED,
    EXIT_PIPE,
    EXIT_USAGE,
    exit_code,
    note,
    prepare_streams,
    report_error,
)
from larql_kv.errors import LarqlError

_UsageError: Any = typer.BadParameter.__base__  # click's; typer carries its own copy of click


class LarqlGroup(TyperGroup):
    """The command group. Errors end here, so that tests meet the same behaviour as a shell does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ends = args.index("--") if "--" in args else len(args)
        ctx.meta["larql.json"] = "--json" in args[:ends]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        prepare_streams()
        with _named_errors(ctx.meta.get("larql.json", False)):
            try:
                return super().invoke(ctx)
            finally:
                # Here, not at the interpreter's exit, where a closed pipe could not be handled.
                sys.stdout.flush()


@contextlib.contextmanager
def _named_errors(as_json: bool) -> Iterator[None]:
    try:
        yield
    except LarqlError as error:
        if os.environ.get("LARQL_TRACEBACK") == "1":
            raise
        report_error(type(error).__name__, str(error), as_json)
        raise typer.Exit(exit_code(error)) from error
    except _UsageError as error:
        if as_json:  # typer prints its own message on stderr
            report_error("UsageError", error.format_message(), as_json)
            raise typer.Exit(EXIT_USAGE) from error
        raise
    except BrokenPipeError:
        _drop_stdout()
        raise typer.Exit(EXIT_PIPE) from None
    except OSError as error:  # a full disk under the output; files of the model are ModelErrors
        _drop_stdout()
        report_error("OSError", f"the output cannot be written: {error}", False)
        raise typer.Exit(EXIT_ENGINE) from error
    except KeyboardInterrupt:
        with contextlib.suppress(BrokenPipeError):
            if as_json:
                report_error("KeyboardInterrupt", "interrupted", as_json)
            else:
                note("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _drop_stdout() -> None:
    """Point stdout at nothing: what is still buffered must not fail again when the interpreter exits."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


app = typer.Typer(
    cls=LarqlGroup,
    name="larql",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run a real model with the state engine you pick, and prove its promise.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"larql-kv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    return


app.command("run")(run.run_command)
app.command("engines")(engines.engines_command)
app.command("info")(info.info_command)
app.command("walk")(walk.walk_command)
app.command("check")(check.check_command)
app.command("calibrate")(calibrate.calibrate_command)
app.command("bench")(bench.bench_command)
app.add_typer(vindex.app, name="vindex")
app.command("serve")(serve.serve_command)


def main() -> None:
    """Entry point of the `larql` script; exits the process."""
    timing.command_started_with_process()
    prepare_streams()
    try:
        app(prog_name="larql")
    except KeyboardInterrupt:  # between the blocks that handle it
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
