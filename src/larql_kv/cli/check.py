"""`larql check`: measure the promises of engines on the user's own model."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larql_kv.cli.choose import ACTIVATIONS_HELP, DEVICE_HELP, ENGINE_VARIABLE
from larql_kv.cli.console import EXIT_ENGINE, add_row, console, print_json, table, warn
from larql_kv.errors import EngineError, ModelError, SpecError
from larql_kv.policy import Verdict

if TYPE_CHECKING:
    from larql_kv.model.model import Model
    from larql_kv.policy import ContractReport
    from larql_kv.spec import EngineSpec

_COLUMNS = ("engine", "verdict", "max KL", "mean KL", "top-1", "apart at")  # fits 80 columns
_RIGHT = _COLUMNS[2:]
_TOKENS, _STEPS = 256, 64  # text run by default, and how much of it step by step


@dataclass(frozen=True)
class Outcome:
    """One engine's report, or the reason why there is none."""

    spec: EngineSpec
    report: ContractReport | None
    error: Exception | None
    seconds: float

    @property
    def label(self) -> str:
        """The verdict, or why there is none in one word."""
        if self.report is not None:
            return str(self.report.verdict)
        return "failed" if self.failed else "refused"

    @property
    def failed(self) -> bool:
        """A broken promise, or an engine that broke down; a skipped one has not failed."""
        if self.report is not None:
            return self.report.verdict == Verdict.BROKEN
        return isinstance(self.error, EngineError) and not self.error.is_recoverable

    def to_dict(self) -> dict[str, Any]:
        error = self.error and {"kind": type(self.error).__name__, "message": str(self.error)}
        report = self.report.to_dict() if self.report else None
        return {"engine": self.spec.text, "report": report, "error": error, "seconds": round(self.seconds, 3)}


def check_command(
    model: Annotated[
        str, typer.Argument(help="Short name, GGUF file, directory or hub id.")
    ] = "smollm2-135m",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help=f"Engine spec, repeatable, or several with `;`. Default: {ENGINE_VARIABLE}, else all.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=4, help="Tokens of text to run [256, or more to pass the widest window]."),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of these, prefilled at once; the others step by step [all but 64]."),
    ] = None,
    free_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the free-running comparison.")] = 32,
    context_window: Annotated[int, typer.Option(min=0, help="Window of the legacy windowed names.")] = 0,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="Text to run, UTF-8.")
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, or auto.", show_default="auto")
    ] = None,
    activations: Annotated[str | None, typer.Option(help=ACTIVATIONS_HELP, show_default="mixed")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check what engines promise: teacher-forced and free-running, against the contract's own reference.

    Exit code 1 when a contract is broken. KL is in nats; the floor is what two shapes of the same
    computation differ by.
    """
    if prompt_tokens is not None and tokens is not None and prompt_tokens >= tokens:
        raise typer.BadParameter(f"--prompt-tokens {prompt_tokens} must be less than --tokens {tokens}")
    specs = chosen_specs(engine, context_window or None)
    from larql_kv.bench.machine import device_facts
    from larql_kv.model.load import load_model

    loaded = load_model(model, device=device, dtype=dtype, activations=activations)
    ids = text_of(loaded, check_length(loaded, specs, tokens, free_tokens), text)
    if prompt_tokens is None:
        prompt_tokens = max(len(ids) // 2, len(ids) - _STEPS)
    if prompt_tokens >= len(ids):
        raise typer.BadParameter(f"--prompt-tokens {prompt_tokens}: the text has only {len(ids)} tokens")
    outcomes = run_checks(loaded, specs, ids, prompt_tokens, free_tokens)
    if as_json:
        checks = [outcome.to_dict() for outcome in outcomes]
        facts = {"kv_dtype": str(loaded.kv_dtype).removeprefix("torch."), **device_facts(loaded)}
        print_json({"model": loaded.source, **facts, "tokens": len(ids), "checks": checks})
    else:
        _print(outcomes, f"{loaded.source}, {len(ids)} tokens")
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(EXIT_ENGINE)


def chosen_specs(given: Sequence[str] | None, context_window: int | None = None) -> list[EngineSpec]:
    """The specs to check: those given, else LARQL_KV_ENGINE, else every engine with per-token state.

    Raises SpecError for a bad spec and for a retrieval engine: its contract is a task, not logits.
    """
    from larql_kv.engine import engines, parse_spec
    from larql_kv.spec import split_specs

    texts = list(given or ()) or list(filter(None, [os.environ.get(ENGINE_VARIABLE)]))
    if not texts:
        return [entry.spec_class() for entry in engines() if entry.kind == "kv"]
    specs = [parse_spec(piece, context_window) for text in texts for piece in split_specs(text)]
    if not specs:
        raise SpecError("--engine is empty; see `larql engines`")
    for spec in specs:
        if spec.kind == "retrieval":
            raise SpecError(f"engine {spec.engine_name!r} promises nothing about logits: see `larql bench`")
    return specs


def check_length(model: Model, specs: Sequence[EngineSpec], tokens: int | None, free_tokens: int) -> int:
    """`tokens`, or enough to pass every window in play. Raises ModelError for more than the context holds."""
    from larql_kv.engine import build_engine

    room = model.config.context - free_tokens
    if tokens is None:
        widest = 0
        for spec in specs:
            with contextlib.suppress(ModelError):  # refused: said when it is checked
                widest = max(widest, build_engine(spec, model).widest_window)
        return min(max(_TOKENS, widest + _STEPS), room)
    if tokens > room:
        raise ModelError(
            f"--tokens {tokens} and {free_tokens} free tokens do not fit the model's context of "
            f"{model.config.context}"
        )
    return tokens


def text_of(model: Model, count: int, path: Path | None = None) -> list[int]:
    """`count` ids of the text at `path`, or of the text that comes with the package, repeated as needed.

    A file is never repeated: a shorter one gives fewer ids, with a warning. Raises ModelError when it
    gives fewer than 4.
    """
    if path is None:
        from larql_kv.bench.text import text_ids

        return text_ids(model, count)
    ids = model.tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"))[:count]
    if len(ids) < 4:
        raise ModelError(f"{path}: the text has {len(ids)} tokens, a check needs at least 4")
    if len(ids) < count:
        warn(f"{path} has only {len(ids)} of {count} tokens")
    return ids


def run_checks(
    model: Model, specs: Sequence[EngineSpec], ids: list[int], prompt_tokens: int | None, free_tokens: int
) -> list[Outcome]:
    """Check each engine in turn; one that cannot be checked is an outcome too."""
    from larql_kv.engine import build_engine

    outcomes = []
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(console(stderr=True).status("")) if sys.stderr.isatty() else None
        for index, spec in enumerate(specs, 1):
            if progress is not None:
                progress.update(f"checking {spec.text} ({index} of {len(specs)})")
            began = time.perf_counter()
            report, error = None, None
            try:
                built = build_engine(spec, model)
                report = built.policy.contract.check(built, ids, prompt_tokens, free_tokens)
            except (EngineError, ModelError) as caught:
                error = caught
            outcomes.append(Outcome(spec, report, error, time.perf_counter() - began))
    return outcomes


def _print(outcomes: Sequence[Outcome], title: str) -> None:
    shown = table("Contracts", _COLUMNS, right=_RIGHT)
    notes = [title]
    for outcome in outcomes:
        name, report = outcome.spec.text, outcome.report
        if report is None:
            add_row(shown, name, outcome.label, "", "", "", "")
            notes.append(f"{name}: {type(outcome.error).__name__}: {outcome.error}")
            continue
        forced = report.teacher_forced
        apart = "never" if report.first_divergence is None else f"token {report.first_divergence}"
        numbers = (f"{forced.max_kl:.1e}", f"{forced.mean_kl:.1e}", f"{forced.top1_agreement:.1%}", apart)
        add_row(shown, name, outcome.label, *numbers)
        forms = ", ".join(f"{form} {share:.0%}" for form, share in report.forms.items())
        notes.append(
            f"{name}: {report.contract}: {report.reason}; noise floor {report.noise_floor.max_kl:.1e} nats; "
            f"rows read as {forms}; {outcome.seconds:.1f} s"
        )
    out = console()
    out.print(shown)
    for text in notes:
        out.print(text, markup=False, soft_wrap=True)
