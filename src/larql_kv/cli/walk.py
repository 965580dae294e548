"""`larql walk`: which features a prompt's last token walks through, and what they write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larql_kv.cli.choose import DEVICE_HELP, ENGINE_VARIABLE, FFN_HELP, check_ffn, choose_engine
from larql_kv.cli.console import add_row, console, note, print_json, table, warn, write
from larql_kv.errors import SpecError

if TYPE_CHECKING:
    from larql_kv.cli.choose import EngineChoice
    from larql_kv.engine import KvEngine
    from larql_kv.ffn.policy import FfnPolicy
    from larql_kv.ffn.trace import RecordingFfn
    from larql_kv.vindex.index import VectorIndex

SHOWN = 10  # features a layer


def walk_command(
    model: Annotated[
        str | None, typer.Argument(help="Short name, GGUF file, vindex or Hugging Face directory, or hub id.")
    ] = None,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="The text, taken as it is.")] = "",
    index: Annotated[
        Path | None, typer.Option("--index", help="Vindex of the model to walk on. Default: its own tensors.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("-k", "--top-k", min=1, help="Features walked a layer.", show_default="unlimited"),
    ] = None,
    ffn: Annotated[
        str | None, typer.Option("--ffn", metavar="SPEC", help=FFN_HELP, show_default="walk")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("-l", "--layers", help='Layers shown: "26,27" or "24-33". Default: all.')
    ] = None,
    down_top_k: Annotated[
        int, typer.Option("--down-top-k", min=0, help="Tokens shown of what a feature writes.")
    ] = 5,
    predict: Annotated[bool, typer.Option("--predict", help="Also show what comes next.")] = False,
    predict_top_k: Annotated[
        int, typer.Option("--predict-top-k", min=1, help="Best next tokens shown with --predict.")
    ] = 10,
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", min=1, help="Tokens generated with --predict.")
    ] = 1,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also compare with the dense FFN at every position.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option(metavar="SPEC", help=f"Engine spec (also {ENGINE_VARIABLE}).")
    ] = None,
    kv_cache: Annotated[
        str | None, typer.Option(help="Legacy: standard, markov-bounded or none. --engine wins.")
    ] = None,
    context_window: Annotated[int, typer.Option(min=0, help="Window of the legacy names.")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (deterministic), bfloat16, or auto.", show_default="auto")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Run a prompt with a walked FFN; show the strongest features of every layer at its last token: gate
    score, activation, and the tokens that the feature writes."""
    if not prompt:
        raise typer.BadParameter("a walk needs a prompt: -p TEXT")
    if ffn is not None and top_k is not None:
        raise SpecError(
            f"--top-k {top_k} and --ffn {ffn!r} are given: say k in the spec, as in walk:k={top_k}"
        )
    policy = check_ffn(ffn or f"walk:k={'none' if top_k is None else top_k}")
    choice = choose_engine(engine, kv_cache, context_window)
    spans = parse_layers(layers)
    for text in choice.warnings:
        warn(text)
    engine_, recorded, walked = _build(model, choice, policy, index, device, dtype)
    shown = _shown_layers(spans, engine_.model.config.layer_count)
    result = walk_dict(engine_, recorded, walked, prompt, shown, min(top_k or SHOWN, SHOWN), down_top_k)
    result["warnings"] = list(choice.warnings)
    if compare:  # first: what is generated must not stand in the rows that are compared
        result["compare"] = compare_dict(engine_, prompt)
    if predict:
        result["predict"] = predict_dict(engine_, prompt, max_tokens, predict_top_k)
    if as_json:
        print_json(result)
    else:
        _show(result)


def parse_layers(text: str | None) -> list[tuple[int, int]]:
    """`26,27` or `24-33` -> inclusive ranges, none for None. Raises SpecError for anything else."""
    spans = []
    for piece in text.split(",") if text is not None else []:
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", piece.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SpecError(f'--layers {text!r} is not a list of layers such as "26,27" or "24-33"')
        spans.append((int(match[1]), int(match[2] or match[1])))
    return spans


def _shown_layers(spans: list[tuple[int, int]], count: int) -> list[int]:
    layers = sorted({layer for first, last in spans for layer in range(first, min(last, count) + 1)})
    if layers and layers[-1] >= count:
        raise SpecError(f"--layers names layer {layers[-1]}; the model has layers 0-{count - 1}")
    return layers or list(range(count))


def _build(
    model: str | None,
    choice: EngineChoice,
    policy: FfnPolicy,
    directory: Path | None,
    device: str,
    dtype: str | None,
) -> tuple[KvEngine, RecordingFfn, VectorIndex]:
    from larql_kv.engine import build_engine
    from larql_kv.ffn.policy import build_ffn
    from larql_kv.ffn.trace import RecordingFfn
    from larql_kv.model.load import DEFAULT_MODEL, load_model
    from larql_kv.vindex.index import VectorIndex

    loaded = load_model(model or DEFAULT_MODEL, device=device, dtype=dtype)
    index = VectorIndex.of_model(loaded, directory)
    recorded = RecordingFfn(build_ffn(policy, loaded, index))
    return build_engine(choice.spec, loaded, recorded), recorded, index


def walk_dict(
    engine: KvEngine,
    recorded: RecordingFfn,
    index: VectorIndex,
    prompt: str,
    layers: list[int],
    features: int,
    tokens: int,
) -> dict[str, Any]:
    """Prefill the prompt and trace its last token."""
    from larql_kv.cli.report import ffn_dict
    from larql_kv.ffn.trace import layer_trace
    from larql_kv.ffn.walk import WalkFfn

    model = engine.model
    ids = model.tokenizer.encode(prompt)
    engine.prefill(ids)
    walk = WalkFfn(model, index)
    text_of, vocabulary = model.tokenizer.token_text, model.tokenizer.vocab_size
    traced = []
    for layer in layers:
        found = layer_trace(walk, layer, recorded.inputs[layer], features, tokens)
        items = [
            {
                **item._asdict(),
                "tokens": [
                    {
                        "id": token.id,
                        "text": text_of(token.id) if token.id < vocabulary else "",
                        "score": token.score,
                    }
                    for token in written
                ],
            }
            for item, written in found
        ]
        traced.append({"layer": layer, "path": recorded.path(layer).path, "features": items})
    return {
        "model": model.source,
        "engine": engine.spec.text,
        **ffn_dict(engine),
        "prompt": prompt,
        "prompt_tokens": len(ids),
        "trace": traced,
    }


def compare_dict(engine: KvEngine, prompt: str) -> dict[str, Any]:
    """This FFN's logits against the dense one's, both on the same engine, at every position of the prompt."""
    from larql_kv.engine import KvEngine
    from larql_kv.policy import divergence

    model, ids = engine.model, engine.model.tokenizer.encode(prompt)
    dense = KvEngine(engine.spec, model)
    apart = divergence(model.logits(dense.prefill_rows(ids)), model.logits(engine.fresh().prefill_rows(ids)))
    return {
        "positions": apart.steps,
        "mean_kl": apart.mean_kl,
        "max_kl": apart.max_kl,
        "top1_agreement": apart.top1_agreement,
        "same_bits": apart.same_bits,
    }


def predict_dict(engine: KvEngine, prompt: str, max_tokens: int, top: int) -> dict[str, Any]:
    """The best next tokens, and the greedy continuation."""
    from larql_kv.cli.answer import best_tokens

    ids = engine.model.tokenizer.encode(prompt)
    best: list[tuple[int, str, float]] = []
    tokens, pieces = [], []
    for token in engine.generate(ids, max_tokens, with_logits=True):
        if not best and token.logits is not None:
            best = best_tokens(engine, token.logits, top)
        tokens.append(token.id)
        pieces.append(token.text)
    return {
        "text": "".join(pieces),
        "token_ids": tokens,
        "top": [dict(zip(("id", "text", "p"), item, strict=True)) for item in best],
    }


def _show(result: dict[str, Any]) -> None:
    """The trace as tables on stdout; the rest beside it."""
    from larql_kv.cli.report import print_wire

    out = console()
    for entry in result["trace"]:
        shown = table(
            f"Layer {entry['layer']} ({entry['path']})",
            ("feature", "gate score", "activation", "writes"),
            right=("feature", "gate score", "activation"),
        )
        for item in entry["features"]:
            words = " ".join(repr(token["text"]) for token in item["tokens"])
            score, activation = f"{item['score']:.3f}", f"{item['activation']:.3f}"
            add_row(shown, str(item["feature"]), score, activation, words)
        out.print(shown)
    if "compare" in result:
        apart = result["compare"]
        write(
            f"walk against dense over {apart['positions']} positions: mean KL {apart['mean_kl']:.3g}, max KL "
            f"{apart['max_kl']:.3g} nats, same next token {apart['top1_agreement']:.1%}\n"
        )
    if "predict" in result:
        for rank, item in enumerate(result["predict"]["top"], 1):
            write(f"{rank:>3}. {item['p']:7.2%}  {item['text']!r} ({item['id']})\n")
        write(f"{result['prompt']}{result['predict']['text']}\n")
    paths = ", ".join(
        f"{entry['path']}{' k=' + str(entry['k']) if 'k' in entry else ''} on {entry['layers']}"
        for entry in result["ffn_paths"]
    )
    print_wire(result["ffn_wire"])
    note(f"{result['engine']} · ffn {result['ffn']} ({paths}) · {result['prompt_tokens']} prompt tokens")
