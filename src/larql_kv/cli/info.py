"""`larql info`: what a model's files hold, and whether it runs here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from larql_kv.bench.stats import format_bytes
from larql_kv.cli.console import add_row, console, print_json, table
from larql_kv.errors import ModelError

if TYPE_CHECKING:
    from larql_kv.model.config import ModelConfig


def info_command(
    model: Annotated[
        str, typer.Argument(help="Short name, GGUF file, directory or hub id.")
    ] = "smollm2-135m",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what a model's files hold: no weights are read."""
    from larql_kv.model.load import describe

    facts = describe(model)
    try:
        facts["config"], facts["refused"] = config_facts(read_config(facts["path"])), None
    except ModelError as error:  # the file can be described, the model cannot be run
        facts["config"], facts["refused"] = None, str(error)
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def read_config(path: str) -> ModelConfig:
    """The config that a file or directory gives. Raises ModelError for what is not supported."""
    from pathlib import Path

    from larql_kv.model.catalog import is_vindex

    if is_vindex(Path(path)):
        from larql_kv.model.vindex_files import read_manifest

        return read_manifest(Path(path)).config
    if Path(path).is_dir():
        from larql_kv.model.config_hf import config_from_directory

        return config_from_directory(Path(path))
    from larql_kv.model.config_gguf import config_from_gguf
    from larql_kv.model.gguf_file import GgufFile

    return config_from_gguf(GgufFile.open(path))


def config_facts(config: ModelConfig) -> dict[str, Any]:
    """The shapes that decide what a token of state costs."""
    windows = [layer.window for layer in config.layers if layer.window is not None]
    return {
        "layers": config.layer_count,
        "sliding_layers": len(windows),
        "window": windows[0] if windows else None,
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate,
        "vocab": config.vocab,
        "rope": sorted(
            {f"base {layer.rope.base:g}, scaling {layer.rope.scaling}" for layer in config.layers}
        ),
        "tied_head": config.tied,
        "kv_elements_per_token": 2 * config.kv_dim * config.layer_count,
        "residual_elements_per_token": config.hidden * config.layer_count,
    }


def _print(facts: dict[str, Any]) -> None:
    shown = table("", ("field", "value"))
    shown.title, shown.show_header = None, False
    for name, value in facts.items():
        if name in ("tensor_types", "config", "refused"):
            continue
        add_row(
            shown,
            name.replace("_", " "),
            f"{value:,} ({format_bytes(value)})" if name == "size" else _show(value),
        )
    for kind, counts in (facts.get("tensor_types") or {}).items():
        add_row(shown, f"tensors {kind}", f"{counts['count']:,}, {format_bytes(counts['bytes'])}")
    shown.add_section()
    for name, value in (facts["config"] or {}).items():
        add_row(shown, name.replace("_", " "), _show(value))
    if facts["refused"]:
        add_row(shown, "runs here", f"no: {facts['refused']}")
    console().print(shown)


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
