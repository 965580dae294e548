"""The FFN of a decode step, walked against dense, on the shape of Gemma 3 4B with random weights.

    python benchmarks/walk_speed.py                 # K = 10 % of the features, q8_0 and bf16

Several layers in turn, so that weights come from memory and not from a cache; walk and dense take turns row
by row (a pair shares whatever else the machine does), and the median of the pairs' ratios is printed.
`ceiling` is the ratio of the bytes: no kernel that is bound by memory can do better. With --model, beside it,
what it costs: KL and same next token against the dense FFN over 256 positions of the bench's text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import save_results

from larql_kv.backends.cpu.ops import stream_bandwidth
from larql_kv.backends.cpu.sparse import dense_bytes
from larql_kv.bench.machine import OtherLoad, machine_facts
from larql_kv.bench.table import Grid
from larql_kv.bench.text import text_ids
from larql_kv.engine import build_engine
from larql_kv.ffn.base import DenseFfn, FfnBackend
from larql_kv.ffn.walk import WalkFfn
from larql_kv.model.load import load_model
from larql_kv.model.model import Model
from larql_kv.model.shape_models import random_model
from larql_kv.model.shape_recipes import parse_shape
from larql_kv.policy import Divergence, divergence
from larql_kv.vindex.index import VectorIndex

POSITIONS = 256
MIN_BYTES = 450e6  # weights in turn: more than a core's share of the last-level cache


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="gemma3-4b")
    parser.add_argument("--mixes", default="q8_0,bf16", help="weight formats of the shape")
    parser.add_argument("--model", help="a real model instead of a shape")
    parser.add_argument("--shares", default="0.1", help="K as shares of the features")
    parser.add_argument("--rounds", type=int, default=30, help="turns over all layers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output-file", type=Path, help="default: results/<date>-<machine>-walk-speed.json")
    arguments = parser.parse_args()
    shares = [float(share) for share in arguments.shares.split(",")]
    results: list[dict[str, Any]] = []
    bandwidth = stream_bandwidth()
    for name in [arguments.model] if arguments.model else arguments.mixes.split(","):
        model = load_model(name) if arguments.model else shape_model(f"{arguments.shape}:{name}")
        results += [compare(model, name, share, arguments.rounds) for share in shares]
        del model
    report = {"machine": machine_facts(), "bandwidth_gb_per_s": bandwidth, "results": results}
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{report['machine']['cpu']}, memory reads at {bandwidth:.1f} GB/s")
        print(grid(results).plain())
    save_results("walk-speed", report, arguments.output_file)


def shape_model(text: str) -> Model:
    """A few layers of that shape, with a small vocabulary."""
    shape = parse_shape(text)
    shape = replace(shape, layers=1, vocab=2048)
    layer = dense_bytes(random_model(shape).decoder, 0)  # type: ignore[arg-type]
    return random_model(replace(shape, layers=max(2, round(MIN_BYTES / layer))))


def compare(model: Model, name: str, share: float, rounds: int) -> dict[str, Any]:
    """Milliseconds a layer of both, and what they read."""
    config = model.config
    top_k = max(1, round(share * config.intermediate))
    walk = WalkFfn(model, VectorIndex.of_model(model, down_form="q8_0"), top_k)
    dense = DenseFfn(model)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(16, config.hidden, generator=generator)
    decoder: Any = model.decoder
    read = {"dense": 0, "walk": 0}
    for layer in range(config.layer_count):  # builds the walk's rows, touches every page
        for ffn in (dense, walk):
            ffn.forward(layer, rows[:1])
        read["dense"] += dense_bytes(decoder, layer)
        read["walk"] += walk.sparse(layer).step_bytes(top_k)
    others = OtherLoad()
    pairs = [
        turn(dense, walk, rows[[i % len(rows)]], range(config.layer_count), i % 2 == 1) for i in range(rounds)
    ]
    dense_s, walk_s = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    layers = config.layer_count
    apart = None if "random weights" in model.source else quality(model, walk)
    return {
        "weights": name,
        "down_rows": walk.sparse(0).down.kind,
        "layers": layers,
        "features": config.intermediate,
        "k": top_k,
        "dense_ms_per_layer": 1e3 * dense_s / layers,
        "walk_ms_per_layer": 1e3 * walk_s / layers,
        "dense_bytes_per_layer": read["dense"] // layers,
        "walk_bytes_per_layer": read["walk"] // layers,
        "dense_gb_per_s": read["dense"] / dense_s / 1e9,
        "walk_gb_per_s": read["walk"] / walk_s / 1e9,
        "speedup": statistics.median(a / b for a, b in pairs),
        "ceiling": read["dense"] / read["walk"],
        "other_cores": others.cores(),
        "path": walk.path(0).path,
        "quality": apart and {"mean_kl": apart.mean_kl, "max_kl": apart.max_kl, "top1": apart.top1_agreement},
    }


def quality(model: Model, walk: WalkFfn) -> Divergence:
    """The walk's logits against the dense FFN's on the same text."""
    ids = text_ids(model, min(POSITIONS, model.config.context))
    dense, walked = (
        model.logits(build_engine("standard", model, ffn=ffn).prefill_rows(ids)) for ffn in (None, walk)
    )
    return divergence(dense, walked)


def turn(
    dense: FfnBackend, walk: FfnBackend, row: torch.Tensor, layers: range, walk_first: bool
) -> tuple[float, float]:
    """Seconds of one row through all layers, by both."""
    passes: dict[str, Callable[[], float]] = {
        "dense": lambda: timed(dense, row, layers),
        "walk": lambda: timed(walk, row, layers),
    }
    order = ("walk", "dense") if walk_first else ("dense", "walk")
    seconds = {name: passes[name]() for name in order}
    return seconds["dense"], seconds["walk"]


def timed(ffn: FfnBackend, row: torch.Tensor, layers: range) -> float:
    start = time.perf_counter()
    for layer in layers:
        ffn.forward(layer, row)
    return time.perf_counter() - start


def grid(results: list[dict[str, Any]]) -> Grid:
    columns = [
        "weights",
        "down rows",
        "layers",
        "K",
        "dense ms (GB/s)",
        "walk ms (GB/s)",
        "MB",
        "speed",
        "ceiling",
        "mean KL",
        "top-1",
    ]
    made = Grid("FFN of one row, by layer", columns, left=frozenset({0, 1}))
    for item in results:
        sizes = "/".join(f"{item[f'{ffn}_bytes_per_layer'] / 1e6:.1f}" for ffn in ("dense", "walk"))
        made.rows.append(
            [
                *(item["weights"], item["down_rows"], str(item["layers"])),
                f"{item['k']} of {item['features']}",
                f"{item['dense_ms_per_layer']:.2f} ({item['dense_gb_per_s']:.1f})",
                f"{item['walk_ms_per_layer']:.2f} ({item['walk_gb_per_s']:.1f})",
                *(sizes, f"{item['speedup']:.2f}x", f"{item['ceiling']:.2f}x"),
                *(
                    ("-", "-")
                    if item["quality"] is None
                    else (f"{item['quality']['mean_kl']:.3g}", f"{item['quality']['top1']:.1%}")
                ),
            ]
        )
    return made


if __name__ == "__main__":
    main()
