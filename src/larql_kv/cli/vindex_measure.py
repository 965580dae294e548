"""`larql vindex recall | compare`: an approximate index against the exact one, a vindex against another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larql_kv.cli.console import add_row, console, print_json, table
from larql_kv.errors import ModelError

if TYPE_CHECKING:
    import torch

    from larql_kv.model.model import Model
    from larql_kv.vindex.compare import Difference

PROMPTS = (
    "The capital of France is",
    "The largest planet of the solar system is",
    "Water boils at a temperature of",
    "The author of Hamlet is",
    "Two plus two equals",
    "The opposite of hot is",
    "In the beginning God created the",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Once upon a time there was a",
    "The chemical symbol of gold is",
    "Monday, Tuesday, Wednesday,",
    "Je m'appelle",
)
JSON = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def recall_command(
    directory: Annotated[Path, typer.Argument(help="Directory of the vindex.")],
    top_k: Annotated[int, typer.Option(min=1, help="Features asked for.")] = 100,
    layers: Annotated[
        list[int] | None, typer.Option("--layer", help="Layer, repeatable [first, middle, last].")
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="FFN inputs of the package's text to ask with.")] = 128,
    as_json: JSON = False,
) -> None:
    """Measure how much of the exact top k an approximate index finds, on real FFN inputs (needs usearch)."""
    from larql_kv.vindex.approximate import measure_recall
    from larql_kv.vindex.index import VectorIndex

    index = VectorIndex.open(directory)
    count = index.layer_count
    chosen = sorted(set(layers or (0, count // 2, count - 1)))
    for layer in chosen:
        index.features(layer)  # refuses a layer that the model lacks before anything is run
    inputs = ffn_inputs(str(directory), chosen, queries)
    found = [measure_recall(index, layer, inputs[layer], top_k) for layer in chosen]
    if as_json:
        print_json({"path": str(directory), "recall": [item.to_dict() for item in found]})
        return
    columns = ("layer", "recall", "worst", "exact us", "approximate us", "build s")
    shown = table(f"Recall of the top {top_k} by |gate score|, {queries} queries", columns, right=columns)
    for item in found:
        times = f"{item.exact_us:.0f}", f"{item.approximate_us:.0f}", f"{item.build_s:.2f}"
        add_row(shown, str(item.layer), f"{item.recall:.3f}", f"{item.worst:.3f}", *times)
    console().print(shown)


def ffn_inputs(model: str, layers: list[int], count: int) -> dict[int, torch.Tensor]:
    """The FFN inputs (count, hidden) float32 of those layers, of the package's text."""
    from larql_kv.bench.text import text_ids
    from larql_kv.engine import build_engine
    from larql_kv.ffn.base import DenseFfn
    from larql_kv.model.load import load_model

    loaded = load_model(model)
    kept: dict[int, torch.Tensor] = {}

    class Recorder(DenseFfn):
        """The model's own FFN, its inputs kept."""

        def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer in layers:
                kept[layer] = x.clone()
            return super().forward(layer, x)

    if count > loaded.config.context:
        raise ModelError(f"{count} queries do not fit the model's context of {loaded.config.context}")
    build_engine("standard", loaded, Recorder(loaded)).prefill(text_ids(loaded, count))
    return kept


def compare_command(
    a: Annotated[str, typer.Argument(help="A vindex, or any model.")],
    b: Annotated[str, typer.Argument(help="Another one of the same vocabulary.")],
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="Prompts, one a line, UTF-8."),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Tokens compared as a set.")] = 5,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt that are used, from its start.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, or auto.", show_default="auto")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Compare what two vindexes answer after the same prompts, dense FFN, the last position's logits."""
    from larql_kv.model.load import load_model
    from larql_kv.vindex.compare import aggregate, compare

    texts = list(PROMPTS) if prompts is None else _lines(prompts)
    first, second = load_model(a, dtype=dtype), load_model(b, dtype=dtype)
    found = compare(first, second, texts, last_logits, top_k, max_seq_len)
    total = aggregate(found)
    if as_json:
        each = [item.to_dict() for item in found]
        print_json({"a": first.source, "b": second.source, "top_k": top_k, "prompts": each, "total": total})
    else:
        _print_comparison(found, total, top_k)


def last_logits(model: Model, ids: list[int]) -> torch.Tensor:
    """Logits (vocab,) after `ids`, by the engine `standard`."""
    from larql_kv.engine import build_engine

    engine = build_engine("standard", model)
    return engine.logits(engine.prefill(ids))[-1]


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def _print_comparison(found: list[Difference], total: dict[str, float], top_k: int) -> None:
    columns = ("prompt", "cosine", f"top {top_k}", "KL a|b", "KL b|a", "a", "b")
    shown = table("Comparison", columns, right=columns[1:5])
    for item in found:
        numbers = f"{item.cosine:.5f}", f"{item.overlap:.2f}"
        kl = f"{item.kl_forward:.1e}", f"{item.kl_reverse:.1e}"
        answers = repr(item.top_a[0][1]), repr(item.top_b[0][1])
        add_row(shown, item.prompt[:24].replace("\n", " "), *numbers, *kl, *answers)
    out = console()
    out.print(shown)
    out.print(
        f"{total['prompts']} prompts: argmax agreement {total['argmax_agreement']:.1%}, mean top-{top_k} "
        f"overlap {total['mean_overlap']:.3f}, mean cosine {total['mean_cosine']:.6f}, symmetric KL mean "
        f"{total['kl_mean']:.1e}, p95 {total['kl_p95']:.1e}, max {total['kl_max']:.1e} nats",
        soft_wrap=True,
    )
