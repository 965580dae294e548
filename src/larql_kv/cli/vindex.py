"""`larql vindex build | info | verify`: a model as a vector index on disk."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larql_kv.bench.stats import format_bytes
from larql_kv.cli import vindex_measure, vindex_patch
from larql_kv.cli.console import EXIT_ENGINE, add_row, console, fail, note, print_json, table

if TYPE_CHECKING:
    from larql_kv.model.vindex_files import Manifest

DIRECTORY = Annotated[Path, typer.Argument(help="Directory of the vindex.")]
JSON = Annotated[bool, typer.Option("--json", help="One JSON object.")]

app = typer.Typer(
    help="A model as a vector index on disk: build, check, patch and compare.", no_args_is_help=True
)


@app.command("build")
def build_command(
    model: Annotated[str, typer.Argument(help="Short name, GGUF file, directory or hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the vindex goes.")],
    format: Annotated[
        str, typer.Option("--format", help="stored (the model's own blocks, bit for bit), f32 or bf16.")
    ] = "stored",
    down_meta: Annotated[
        bool, typer.Option(help="Store the tokens that each feature writes (slow on a large model).")
    ] = False,
    down_top_k: Annotated[int, typer.Option(min=1, max=1000, help="Tokens kept of a feature.")] = 10,
    down_features: Annotated[
        str, typer.Option(help="Down rows of a quantised model stored as it is: f32, bf16 or q8_0.")
    ] = "f32",
    as_json: JSON = False,
) -> None:
    """Build a vindex. One that was stopped goes on; asked for again, it only adds what is missing."""
    from larql_kv.model.load import open_files
    from larql_kv.vindex.build import BuildSettings, build_vindex
    from larql_kv.vindex.down_meta import add_down_meta
    from larql_kv.vindex.verify import vindex_facts

    settings = BuildSettings(format, down_features)
    with shown_progress() as progress:
        manifest = build_vindex(open_files(model), out, settings, progress)
        if down_meta:
            add_down_meta(out, down_top_k, progress)
    if as_json:
        print_json(vindex_facts(out))
        return
    _print_built(out, manifest)
    if not down_meta and manifest.down_meta is None:
        note("no down-meta: which tokens a feature writes is not known; add it with --down-meta")


@app.command("info")
def info_command(directory: DIRECTORY, as_json: JSON = False) -> None:
    """Show what a vindex holds: no weights are read."""
    from larql_kv.vindex.verify import vindex_facts

    facts = vindex_facts(directory)
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts)


@app.command("verify")
def verify_command(directory: DIRECTORY, as_json: JSON = False) -> None:
    """Read every file and check it against index.json. Exit code 1 when anything is wrong."""
    from larql_kv.vindex.verify import verify_vindex

    with shown_progress() as progress:
        problems = verify_vindex(directory, progress)
    if as_json:
        print_json({"path": str(directory), "problems": [problem.to_dict() for problem in problems]})
    else:
        for problem in problems:
            fail(f"{problem.file}: {problem.what}")
        if not problems:
            console().print(f"{directory}: every file is what was written", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(EXIT_ENGINE)


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the model", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _print_built(out: Path, manifest: Manifest) -> None:
    text = f"{out}: {manifest.config.layer_count} layers of {manifest.config.intermediate:,} features, "
    console().print(
        f"{text}{manifest.format}, {format_bytes(manifest.nbytes)}, print {manifest.print[:16]}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for part, error in manifest.errors.items():
        note(f"{part}: rounded, relative error {error:.1e}")


def _print_facts(facts: dict[str, Any]) -> None:
    shown = table("", ("field", "value"))
    shown.title, shown.show_header = None, False
    for name in ("path", "model", "source", "format"):
        add_row(shown, name, str(facts[name]))
    add_row(shown, "print", facts["print"][:16])
    add_row(shown, "layers", f"{facts['layers']:,} of {facts['features_per_layer']:,} features")
    add_row(shown, "hidden", f"{facts['hidden']:,}")
    add_row(shown, "size", f"{facts['bytes']:,} ({format_bytes(facts['bytes'])})")
    for part, nbytes in facts["bytes_by_part"].items():
        add_row(shown, f"  {part}", format_bytes(nbytes))
    shown.add_section()
    for part in ("gate", "up", "down", "down_features", "embed"):
        counts = facts["kinds"].get(part)
        if counts:
            error = facts["errors"].get(part)
            text = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
            add_row(shown, part.replace("_", " "), text + (f", relative error {error:.1e}" if error else ""))
    meta = facts["down_meta"]
    text = f"{meta['top_k']} tokens a feature, {meta['layers']} layers" if meta else "not built"
    add_row(shown, "down-meta", text)
    shown.add_section()
    add_row(shown, "patches", f"{len(facts['patches'])} applied, epoch {facts['epoch']}")
    for patch in facts["patches"]:
        layers = ", ".join(map(str, patch["layers"]))
        add_row(shown, f"  {patch['name']}", f"{patch['operations']} operations on layers {layers}")
    if facts["held_as_float32"]:
        add_row(shown, "dequantised for patches", ", ".join(facts["held_as_float32"]))
    console().print(shown)


app.command("recall")(vindex_measure.recall_command)
app.command("compare")(vindex_measure.compare_command)
app.add_typer(vindex_patch.app, name="patch")
