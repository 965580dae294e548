"""`larql bench`: its options, and what goes to the screen. Light to import: torch comes with the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larql_kv.cli.choose import ACTIVATIONS_HELP, DEVICE_HELP, FFN_HELP, check_ffn
from larql_kv.errors import SpecError

if TYPE_CHECKING:
    from larql_kv.bench.plan import Plan, Progress
    from larql_kv.model.model import Model
    from larql_kv.spec import EngineSpec

DEFAULT_PROMPT_TOKENS = 128


def bench_command(
    model: Annotated[
        str | None, typer.Argument(help="Short name, .gguf file, Hugging Face directory or hub id.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            help="Random weights of this shape instead of a model: gemma3-4b, gemma3-270m, qwen3-4b, "
            "llama3.1-8b; with :q4_k_m (default), :q8_0, :q4_0, :bf16, ... behind it.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine", "-e", help="Engine spec, or a list of them; repeatable. Default: every engine."
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Prompt text. Default: the bench's own text.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            min=1,
            help="Cut or repeat the prompt to this many tokens. Default: 128, or all of --prompt.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Timed steps a repeat.")] = 50,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Steps discarded before the timed ones.")
    ] = 3,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Times all of it is run, in rotating order.")
    ] = 3,
    context: Annotated[
        str | None,
        typer.Option("--context", help="Context lengths of the sweep, e.g. 128,512,2048. Default: none."),
    ] = None,
    context_window: Annotated[
        int,
        typer.Option(
            "--context-window", min=0, help="Window of the engine names that need one (sliding, ...)."
        ),
    ] = 0,
    device: Annotated[str, typer.Option("--device", help=DEVICE_HELP)] = "cpu",
    dtype: Annotated[
        str, typer.Option("--dtype", help="Execution form: auto, float32 or bfloat16.")
    ] = "auto",
    activations: Annotated[
        str | None, typer.Option("--activations", help=ACTIVATIONS_HELP, show_default="mixed")
    ] = None,
    ffn: Annotated[str, typer.Option("--ffn", metavar="SPEC", help=FFN_HELP)] = "dense",
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Also check each engine's contract, on a short run.")
    ] = True,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also time the stages of a step, in a run of their own.")
    ] = False,
    mask: Annotated[
        bool,
        typer.Option("--mask", help="Also run engines under the capture mask full, beside their best one."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    output_file: Annotated[
        Path | None, typer.Option("--output-file", help="Write the JSON report to this file as well.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Write a picture (SVG): the context sweep, or decode speed without one."),
    ] = None,
) -> None:
    """Measure engines side by side: speed, bytes, share of memory bandwidth, contract, token ids.

    Engines take turns, pages are warm, and whole tokens are timed (head and choice included; end-of-text is
    not honoured). An engine that fails is a labelled row; the exit code is 1 when one failed in a way that
    is not recoverable, or broke its contract.
    """
    contexts = parse_contexts(context)
    policy = check_ffn(ffn)
    specs = parse_engines(engine or [], context_window)
    from larql_kv.bench.report import report_dict, to_json, write_text
    from larql_kv.bench.runner import run_bench
    from larql_kv.ffn.policy import build_ffn, walk_index

    turns = 2 + len(specs) * (2 + profile + repeats * ((1 + mask) * (1 + -(-tokens // 10)) + len(contexts)))
    with _progress(not json, turns) as progress:
        progress("load")
        loaded, name = load(model, shape, device, None if dtype == "auto" else dtype, activations)
        plan = make_plan(
            *(loaded, prompt, prompt_tokens, tokens, warmup, repeats, contexts),
            check=check,
            profile=profile,
            masks=mask,
        )
        plan.check_context(loaded.config.context)
        progress("memory bandwidth")
        own = policy.text == "dense"
        make_ffn = None if own else partial(build_ffn, policy, loaded, walk_index(policy, loaded))
        report = run_bench(loaded, specs, plan, name, measured_bandwidth(loaded), progress, make_ffn)
    plain = report_dict(report)
    text = to_json(plain)
    if output_file is not None:
        write_text(output_file, text)
    if plot is not None:
        from larql_kv.bench.plot import report_chart

        write_text(plot, report_chart(plain))
    if json:
        sys.stdout.write(text)
    else:
        show(plain)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def load(
    model: str | None, shape: str | None, device: str, dtype: str | None, activations: str | None = None
) -> tuple[Model, str]:
    """The model asked for and what the report calls it: by its name, or random weights of a shape.

    Raises SpecError when both are given, ModelError and BackendUnavailable as the loaders do.
    """
    if shape is None:
        from larql_kv.model.load import DEFAULT_MODEL, load_model

        name = model or DEFAULT_MODEL
        return load_model(name, device=device, dtype=dtype, activations=activations), name
    if model is not None:
        raise SpecError(f"--shape {shape!r} and a model ({model!r}) were given: name one of them")
    from larql_kv.model.shape_models import random_model

    made = random_model(shape, device=device, dtype=dtype, activations=activations)
    return made, made.source


def parse_contexts(text: str | None) -> tuple[int, ...]:
    """`128,512,2048` -> increasing lengths. Raises SpecError for anything else."""
    from larql_kv.bench.stats import is_increasing

    if not text:
        return ()
    try:
        lengths = [int(piece) for piece in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < 1 or not is_increasing(lengths):
        raise SpecError(f"--context {text!r} is not a list of increasing lengths such as 128,512,2048")
    return tuple(lengths)


def parse_engines(texts: list[str], context_window: int = 0) -> list[EngineSpec]:
    """Every spec of every `--engine`, each once; all registered engines when there is none.

    Raises SpecError for a bad spec.
    """
    from larql_kv.engine import engines, parse_spec
    from larql_kv.spec import split_specs

    names = [piece for text in texts for piece in split_specs(text)]
    if texts and not names:
        raise SpecError("--engine is empty: name an engine, see `larql engines`")
    names = names or [entry.name for entry in engines()]
    return list(dict.fromkeys(parse_spec(name, context_window or None) for name in names))


def make_plan(
    model: Model,
    prompt: str | None,
    prompt_tokens: int | None,
    tokens: int,
    warmup: int,
    repeats: int,
    contexts: tuple[int, ...] = (),
    **switches: bool,
) -> Plan:
    """The plan of these options. Without a text the bench's own is used; an empty one stays empty, for the
    engines to refuse."""
    from larql_kv.bench.plan import Plan
    from larql_kv.bench.text import text_ids

    if prompt is None:
        ids = text_ids(model, prompt_tokens or DEFAULT_PROMPT_TOKENS)
    elif prompt_tokens is None or not prompt:
        ids = model.tokenizer.encode(prompt)
    else:
        ids = text_ids(model, prompt_tokens, prompt)
    shown = "bench text" if prompt is None else prompt
    return Plan(tuple(ids), shown, tokens, warmup, repeats, contexts, **switches)


def measured_bandwidth(model: Model) -> float | None:
    """Read bandwidth in GB/s of the memory that the model's weights are in (on the CPU by the kernels' own
    threads), or None where it cannot be measured: kernels are missing, no room, or an interpreter."""
    import torch

    try:
        if model.device.type == "cuda":  # pragma: cuda only
            from larql_kv.backends.cuda import bandwidth

            return bandwidth.stream_bandwidth(model.device)
        if model.decoder.name != model.device.type:
            return None
        from larql_kv.backends.cpu.ops import stream_bandwidth

        return stream_bandwidth()
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        return None


def show(report: dict[str, Any]) -> None:
    """The tables: by rich on a terminal, plain in a pipe."""
    from larql_kv.bench.table import grids, heading, remarks

    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        console.print(heading(report), markup=False)
        for grid in grids(report):
            console.print(grid.rich())
        for line in remarks(report):
            console.print(line, markup=False)
    else:
        blocks = [heading(report), *(grid.plain() for grid in grids(report)), "\n".join(remarks(report))]
        print("\n\n".join(filter(None, blocks)))


@contextmanager
def _progress(wanted: bool, turns: int) -> Iterator[Progress]:
    """A bar with the current stage on a terminal's stderr; nothing anywhere else.

    It is redrawn between turns only: a bar that animates itself would take time from what is timed.
    """
    if not (wanted and sys.stderr.isatty()):
        yield lambda label: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("bench", total=turns)

        def show_stage(label: str) -> None:
            bar.update(task, advance=1, description=escape(label), refresh=True)

        yield show_stage
