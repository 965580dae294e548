"""Facts planted in archived windows: who still answers? `standard`, unlimited-context, and that with replay.

    python benchmarks/needle_windows.py                         # SmolLM2, 52 windows of 64 tokens
    python benchmarks/needle_windows.py --model gemma3-270m --window 128

A text of plain sentences holds a needle ("The access code of the Elmsea light is 7 4 1 9."), or with
`--needles` several of that form, so that windows compete. Every engine reads the text, then is asked for each
needle on a fork; an answer counts when its digits are right, all four, greedily. A needle that `standard`
misses says nothing about windows and is left out. The question is a prefill of its own, and the query is the
question; with `--in-text` text and question are one prefill, and the query is what of it lies in the open
window.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import save_results

import larql_kv as lk
from larql_kv.bench.machine import machine_facts
from larql_kv.bench.table import Grid
from larql_kv.engine.base import KvEngine
from larql_kv.model.load import load_model
from larql_kv.model.model import Model

NAMES = "Elmsea|Dunmore|Harwick|Oakby|Tarnvale|Penrith|Kestrel|Wexmoor|Brindle|Calder|Lowick|Ashby"
WHO = "The miller|A carter|The old captain|Her sister|The schoolmaster|A young clerk|The baker|A stranger"
DID = "walked to|looked at|talked about|waited near|painted|forgot|wrote a letter about|sat beside"
WHAT = "the river|the market|the bridge|the stone wall|the harbour|the orchard|the church|the narrow road"
WHEN = "in the morning|before the rain came|after supper|while the bells rang|on a cold day|with great care"
SCORES = ("tokens", "keys", "both")


@dataclass(frozen=True)
class Needle:
    """`window` is the one that the fact ends in."""

    name: str
    question: list[int]
    answer: list[int]
    window: int


def sentences(draw: random.Random) -> Iterator[str]:
    while True:
        yield " " + " ".join(draw.choice(part.split("|")) for part in (WHO, DID, WHAT, WHEN)) + "."


def haystack(
    model: Model, window: int, windows: int, needles: int, seed: int
) -> tuple[list[int], list[Needle]]:
    """Ids of `windows` windows and a few tokens of the next; needles at even depths, none in the last two."""
    draw = random.Random(seed)
    filler = sentences(draw)

    def ids_of(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special=False)

    ids = model.tokenizer.encode("Notes of the harbour office.")
    planted: list[Needle] = []
    length = windows * window + window // 3
    for name in draw.sample(NAMES.split("|"), needles):
        depth = (len(planted) + draw.random()) / needles * (windows - 2) * window
        while len(ids) < depth:
            ids += ids_of(next(filler))
        code = "".join(f" {draw.randrange(10)}" for _ in range(4))
        question = f" The access code of the {name} light is"
        ids += ids_of(f"{question}{code}.")
        planted.append(Needle(name, ids_of(question), ids_of(code), (len(ids) - 1) // window))
    while len(ids) < length:
        ids += ids_of(next(filler))
    return ids[:length], planted


def answers(engine: KvEngine, needle: Needle) -> bool:
    """Whether the greedy continuation of what was asked is the code. Ends what the engine is used for."""
    hidden = engine.prefill(needle.question)
    for token in needle.answer:
        if int(engine.model.logits(hidden).argmax()) != token:
            return False
        hidden = engine.decode_step(token)
    return True


def ask(model: Model, spec: str, ids: list[int], needles: list[Needle], alone: bool) -> dict[str, Any]:
    """Reads the text once and asks for every needle on a fork of it (or reads it again for each)."""
    start = time.perf_counter()
    reader = lk.build_engine(spec, model)
    if alone:
        reader.prefill(ids)
    read_s = time.perf_counter() - start
    hits, chosen, replayed, seconds = [], [], 0, []
    for needle in needles:
        start = time.perf_counter()
        engine = reader.fork()
        if not alone:
            needle = Needle(needle.name, ids + needle.question, needle.answer, needle.window)
        hits.append(answers(engine, needle))
        seconds.append(time.perf_counter() - start)
        if spec != "standard":
            stats = engine.windows.stats()
            chosen.append(needle.window in stats.shown_windows)
            replayed = max(replayed, stats.replayed_tokens)
    held = reader.memory_bytes
    return {
        "spec": spec, "hits": hits, "window_chosen": chosen, "replayed_tokens": replayed, "held_bytes": held,
        "read_s": read_s, "ask_s": sum(seconds) / len(seconds),
    }  # fmt: skip


def specs(window: int, counts: list[int]) -> list[str]:
    base = f"unlimited-context:window={window}"
    replays = [f"{base},replay={count},score={score}" for score in SCORES for count in counts]
    return ["standard", base, *replays]


def grid(title: str, results: list[dict[str, Any]]) -> Grid:
    known = results[0]["hits"]
    rows = []
    for result in results:
        hits = sum(hit for hit, counts in zip(result["hits"], known, strict=True) if counts)
        chosen = result["window_chosen"]
        rows.append(
            [
                result["spec"],
                f"{hits}/{sum(known)}",
                f"{sum(chosen)}/{len(chosen)}" if chosen else "",
                f"{result['held_bytes'] / 1e6:.1f}",
                str(result["replayed_tokens"]),
                f"{result['read_s']:.1f}",
                f"{result['ask_s']:.2f}",
            ]
        )
    header = ["engine", "answered", "right window chosen", "MB held", "tokens replayed", "read s", "ask s"]
    return Grid(title, header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: what the model runs in")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--windows", type=int, default=52, help="windows that are archived")
    parser.add_argument("--needles", type=int, default=1, help="in a text")
    parser.add_argument("--replay", default="1,2,4", help="windows brought back")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--in-text", action="store_true", help="ask in the text, not alone")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--output-file", type=Path, help="default: results/<date>-<machine>-<model>-needle-windows.json"
    )
    arguments = parser.parse_args()
    model = load_model(arguments.model, dtype=arguments.dtype)
    counts = [int(count) for count in arguments.replay.split(",")]
    results: dict[str, dict[str, Any]] = {}
    for seed in range(arguments.texts):
        ids, needles = haystack(model, arguments.window, arguments.windows, arguments.needles, seed)
        for spec in specs(arguments.window, counts):
            found = ask(model, spec, ids, needles, not arguments.in_text)
            known = results.setdefault(spec, {**found, "hits": [], "window_chosen": []})
            known["hits"] += found["hits"]
            known["window_chosen"] += found["window_chosen"]
    report = {
        "machine": machine_facts(),
        "model": model.config.name,
        "kv_dtype": str(model.kv_dtype),
        "settings": {key: value for key, value in vars(arguments).items() if key != "output_file"},
        "results": list(results.values()),
    }
    title = f"{model.config.name}: {arguments.windows} archived windows of {arguments.window} tokens"
    print(json.dumps(report, indent=1) if arguments.json else grid(title, report["results"]).plain())
    save_results(f"{arguments.model}-needle-windows", report, arguments.output_file)


if __name__ == "__main__":
    main()
