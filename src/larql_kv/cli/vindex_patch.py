"""`larql vindex patch apply | list | remove | bake`: edits of features, laid over a read-only base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from larql_kv.cli.console import add_row, console, note, print_json, table

DIRECTORY = Annotated[Path, typer.Argument(help="Directory of the vindex.")]
JSON = Annotated[bool, typer.Option("--json", help="One JSON object.")]

app = typer.Typer(help="Edits of features, laid over a vindex that stays as it is.", no_args_is_help=True)


@app.command("apply")
def apply_command(
    directory: DIRECTORY,
    patch: Annotated[Path, typer.Argument(help="The .vlp file.")],
    name: Annotated[str | None, typer.Option(help="Name to keep it under [the file's].")] = None,
    any_base: Annotated[
        bool, typer.Option("--any-base", help="Apply a patch that was made for another base.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Apply a patch. Later patches win over earlier ones."""
    from larql_kv.vindex.patch import apply_patch

    placed = apply_patch(directory, patch, name, any_base)
    places = [{"op": op.op, "layer": op.layer, "feature": op.feature} for op in placed.operations]
    if as_json:
        print_json({"name": placed.name, "operations": places})
        return
    for place in places[:20]:
        note(f"{place['op']} layer {place['layer']} feature {place['feature']}")
    console().print(
        f"{placed.name}: applied, {len(places)} operations", markup=False, highlight=False, soft_wrap=True
    )


@app.command("list")
def list_command(directory: DIRECTORY, as_json: JSON = False) -> None:
    """List the applied patches, in the order in which they win."""
    from larql_kv.vindex.index import VectorIndex

    index = VectorIndex.open(directory)
    entries = [
        {
            "name": patch.name,
            "digest": patch.digest,
            "operations": [
                {"op": op.op, "layer": op.layer, "feature": op.feature, **op.notes} for op in patch.operations
            ],
        }
        for patch in index.patches
    ]
    if as_json:
        print_json({"path": str(directory), "epoch": index.epoch, "patches": entries})
        return
    shown = table("Patches", ("patch", "op", "layer", "feature", "note"), right=("layer", "feature"))
    for entry in entries:
        for op in entry["operations"]:
            words = [str(op[key]) for key in ("entity", "relation", "target", "reason") if op.get(key)]
            add_row(shown, entry["name"], op["op"], str(op["layer"]), str(op["feature"]), " ".join(words))
    console().print(shown if entries else "no patch is applied")


@app.command("remove")
def remove_command(
    directory: DIRECTORY,
    name: Annotated[str, typer.Argument(help="Name of an applied patch.")],
    as_json: JSON = False,
) -> None:
    """Take a patch out of force."""
    from larql_kv.vindex.patch import remove_patch

    remove_patch(directory, name)
    if as_json:
        print_json({"removed": name})
    else:
        console().print(f"{name}: removed", markup=False, highlight=False, soft_wrap=True)


@app.command("bake")
def bake_command(
    directory: DIRECTORY,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the new vindex goes.")],
    as_json: JSON = False,
) -> None:
    """Make a new base with every gate, up and down edit in it, and compare it with the patched one."""
    from larql_kv.cli.vindex import shown_progress
    from larql_kv.vindex.patch import bake

    with shown_progress() as progress:
        manifest = bake(directory, out, progress)
    if as_json:
        print_json({"path": str(out), "print": manifest.print, "bytes": manifest.nbytes})
        return
    console().print(
        f"{out}: baked, equal to the patched vindex bit by bit, print {manifest.print[:16]}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
