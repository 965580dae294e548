"""What the activation caches cost and how often they hit.

    python benchmarks/ffn_cache.py --model smollm2-135m --iters 200
    python benchmarks/ffn_cache.py --shape gemma3-4b:q8_0 --top-k 8092     # random weights: latency only

Latency of one row's FFN in one layer: no cache, cold (every row is new and is stored), warm (every row was
seen), and rotating (16 rows in turn). All of them take turns, layer by layer, and so does the gate scoring
alone: what a hit by features cannot save. Then the hit rates of the seed's table on real prompts, and the
relative error of the hits by features: every hit is recomputed there, one over the bound counts as a miss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ffn_cache_prompts import SCENARIOS, Scenario
from harness import save_results
from walk_speed import shape_model

from larql_kv.bench.machine import OtherLoad, machine_facts
from larql_kv.bench.table import Grid
from larql_kv.bench.text import text_ids
from larql_kv.engine import build_engine
from larql_kv.errors import LarqlError, SpecError
from larql_kv.ffn.base import FfnBackend
from larql_kv.ffn.cache import FfnCache, FfnL1Cache, HitCheck
from larql_kv.ffn.walk import WalkFfn, is_dense
from larql_kv.model.load import load_model
from larql_kv.model.model import Model
from larql_kv.vindex.index import VectorIndex

DEFAULT_SHARE = 0.7902  # of the features: the seed's 8092 of 10240
ROTATING = 16
TOKENS = 12  # generated for each prompt
MODES = ("features", "exact")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--vindex", help="walk on this vindex of the model instead of its own tensors")
    parser.add_argument("--shape", help="random weights of this shape instead of a model")
    parser.add_argument("--top-k", type=int, help=f"features walked; default {DEFAULT_SHARE:g} of them")
    parser.add_argument("--iters", type=int, default=200, help="timed turns of each kind")
    parser.add_argument("--hit-ks", default="0.7902,0.1,0.01", help="K of the hit rates, as shares")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output-file", type=Path, help="default: results/<date>-<machine>-ffn-cache.json")
    arguments = parser.parse_args()
    try:
        report = run(arguments)
    except LarqlError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print(report["machine"]["cpu"])
        for grid in grids(report):
            print("\n" + grid.plain())
    save_results("ffn-cache", report, arguments.output_file)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    model = shape_model(arguments.shape) if arguments.shape else load_model(arguments.model)
    index = VectorIndex.of_model(model, arguments.vindex, down_form="q8_0" if arguments.shape else "f32")
    top_k = check_top_k(arguments.top_k, index.features(0))
    report: dict[str, Any] = {
        "machine": machine_facts(),
        "model": arguments.shape or arguments.model,
        "top_k": top_k,
        "features": index.features(0),
        "tokens": TOKENS,
        "latency": latencies(model, index, top_k, arguments.iters, random_rows=bool(arguments.shape)),
        "hit_rates": [],
    }
    if not arguments.shape:
        for share in map(float, arguments.hit_ks.split(",")):
            count = max(1, int(share * index.features(0)))
            report["hit_rates"] += [hit_rates(model, index, count, scenario) for scenario in SCENARIOS]
    return report


def check_top_k(top_k: int | None, features: int) -> int:
    """The K to bench. Raises SpecError for one at which no cache fires."""
    top_k = int(DEFAULT_SHARE * features) if top_k is None else top_k
    if top_k < 1 or is_dense(top_k, features):
        raise SpecError(
            f"--top-k {top_k}: from 4/5 of {features} features on a layer is computed whole and no cache is "
            f"asked; give 1 to {-(-4 * features // 5) - 1}"
        )
    return top_k


# -- latency -----------------------------------------------------------------------------------------------


class Recorder(FfnBackend):
    """The dense FFN, keeping the rows that each layer was given."""

    name = "recorder"

    def __init__(self, ffn: FfnBackend) -> None:
        self._ffn = ffn
        self.rows: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        self.rows[layer] += list(x.clone().split(1))
        return self._ffn.forward(layer, x)


def row_stream(model: Model, index: VectorIndex, random_rows: bool) -> Iterator[list[torch.Tensor]]:
    """Rows (1, hidden), one a layer: inputs of the FFN in the bench's text, or random ones; without end, all
    different."""
    generator = torch.Generator().manual_seed(0)
    layers, hidden = model.config.layer_count, model.config.hidden
    real: list[list[torch.Tensor]] = []
    if not random_rows:
        recorder = Recorder(WalkFfn(model, index))
        build_engine("standard", model, ffn=recorder).prefill(text_ids(model, min(model.config.context, 256)))
        real = [recorder.rows[layer] for layer in range(layers)]
    turn = 0
    while True:
        if real:
            lap, at = divmod(turn, len(real[0]))  # from the second lap on, rows like those of the text
            noise = 0.1 * torch.randn(hidden, generator=generator) if lap else torch.zeros(hidden)
            yield [rows[at] * (1 + noise) for rows in real]
        else:
            yield list(torch.randn(layers, hidden, generator=generator).split(1))
        turn += 1


@dataclass
class Lane:
    """One kind of call: seconds of each layer's row, turn by turn."""

    name: str
    call: Callable[[int, torch.Tensor], Any]
    rows: Callable[[], list[torch.Tensor]]  # of the next turn
    cache: FfnCache | None = None


def latencies(
    model: Model, index: VectorIndex, top_k: int, iters: int, random_rows: bool
) -> list[dict[str, Any]]:
    """Microseconds a call of every lane, medians over turns and layers."""
    layers = model.config.layer_count
    stream = row_stream(model, index, random_rows)
    known = [next(stream) for _ in range(ROTATING)]
    plain = WalkFfn(model, index, top_k)
    lanes = [
        Lane("no cache", plain.forward, lambda: next(stream)),
        Lane("gate scoring", lambda layer, x: plain.sparse(layer).scores(x), lambda: next(stream)),
        Lane(
            "gate scoring and top-k",
            lambda layer, x: plain.sparse(layer).score_and_select(x, top_k),
            lambda: next(stream),
        ),
    ]
    for mode in MODES:
        for kind in ("cold", "warm", "rotating"):
            cache = FfnL1Cache(layers, mode=mode)
            walk = WalkFfn(model, index, top_k).with_cache(cache)
            lanes.append(Lane(f"{kind}, {mode}", walk.forward, _rows_of(kind, known, stream), cache))
            if kind == "warm":  # the first hit of an entry by features is recomputed
                for _ in range(3):
                    for layer in range(layers):
                        walk.forward(layer, known[0][layer])
    return _timed(lanes, layers, iters)


def _rows_of(
    kind: str, known: list[list[torch.Tensor]], stream: Iterator[list[torch.Tensor]]
) -> Callable[[], list[torch.Tensor]]:
    turns = iter(range(1 << 60))
    return {
        "cold": lambda: next(stream),
        "warm": lambda: known[0],
        "rotating": lambda: known[next(turns) % ROTATING],
    }[kind]


def _timed(lanes: list[Lane], layers: int, iters: int) -> list[dict[str, Any]]:
    others = OtherLoad()
    seconds: dict[str, list[list[float]]] = {lane.name: [] for lane in lanes}
    before = {lane.name: lane.cache.counts if lane.cache else (0, 0) for lane in lanes}
    for turn in range(iters + 2):
        shift = turn % len(lanes)
        for lane in [*lanes[shift:], *lanes[:shift]]:
            rows = lane.rows()
            spent = []
            for layer in range(layers):
                start = time.perf_counter()
                lane.call(layer, rows[layer])
                spent.append(time.perf_counter() - start)
            if turn >= 2:
                seconds[lane.name].append(spent)
    other_cores = others.cores()
    results = []
    medians = {
        name: statistics.median(value for turn in turns for value in turn) for name, turns in seconds.items()
    }
    for lane in lanes:
        turns = seconds[lane.name]
        result: dict[str, Any] = {
            "lane": lane.name,
            "median_us": 1e6 * medians[lane.name],
            "mean_us": 1e6 * statistics.fmean(value for turn in turns for value in turn),
            "of_walk": paired(turns, seconds["no cache"]),
            "of_gate": paired(turns, seconds["gate scoring"]),
            "of_knn": paired(turns, seconds["gate scoring and top-k"]),
            "hit_rate": None,
            "other_cores": other_cores,
        }
        if lane.cache is not None:
            hits, misses = (a - b for a, b in zip(lane.cache.counts, before[lane.name], strict=True))
            result |= {"hit_rate": hits / (hits + misses), "stats": lane.cache.stats()}
        results.append(result)
    return results


def paired(turns: list[list[float]], base: list[list[float]]) -> float:
    """Median over turns of the ratio of whole turns: what the machine did meanwhile is in both."""
    return statistics.median(sum(a) / sum(b) for a, b in zip(turns, base, strict=True))


# -- hit rates ---------------------------------------------------------------------------------------------


def hit_rates(model: Model, index: VectorIndex, top_k: int, scenario: Scenario) -> dict[str, Any]:
    """Hit rates of a scenario: an L1 for each prompt, and one L2 that the scenario's other prompts warmed."""
    result: dict[str, Any] = {"scenario": scenario.name, "seed": scenario.seed, "k": top_k}
    layers = model.config.layer_count
    for mode in MODES:
        check = HitCheck(every=1)
        shared = FfnCache(layers, mode=mode, check=check)
        for prompt in scenario.warm:
            generate(model, WalkFfn(model, index, top_k).with_cache(shared), prompt)
        warmed = shared.stats()
        l1 = {"hits": 0, "total": 0}
        for prompt in scenario.asked:
            walk = WalkFfn(model, index, top_k).with_l1_cache(mode=mode, check=check)
            generate(model, walk, prompt)
            hits, misses = walk.l1_cache_stats() or (0, 0)
            l1 = {"hits": l1["hits"] + hits, "total": l1["total"] + hits + misses}
        for prompt in scenario.asked:
            generate(model, WalkFfn(model, index, top_k).with_cache(shared), prompt)
        stats = shared.stats()
        hits, total, rejected = (stats[name] - warmed[name] for name in ("hits", "total", "rejected"))
        result[mode] = {
            "l1": l1["hits"] / l1["total"],
            "l2": hits / total,
            "l2_rejected": rejected / total,
            "mean_error": stats["mean_error"],
            "max_error": stats["max_error"],
            "entries": stats["entries"],
            "bytes": stats["bytes"],
        }
    return result


def generate(model: Model, ffn: FfnBackend, prompt: str) -> None:
    engine = build_engine("standard", model, ffn=ffn)
    token = int(model.logits(engine.prefill(model.tokenizer.encode(prompt))).argmax())
    for _ in range(TOKENS):
        token = int(model.logits(engine.decode_step(token)).argmax())


# -- showing -----------------------------------------------------------------------------------------------


def grids(report: dict[str, Any]) -> list[Grid]:
    columns = ["", "median us", "mean us", "of the walk", "of gate scoring", "of gate + top-k", "hit rate"]
    title = f"{report['model']}: one row, one layer, K = {report['top_k']} of {report['features']}"
    latency = Grid(title, columns)
    for item in report["latency"]:
        rate = "-" if item["hit_rate"] is None else f"{item['hit_rate']:.1%}"
        ratios = [f"{item[name]:.2f}x" for name in ("of_walk", "of_gate", "of_knn")]
        latency.rows.append(
            [item["lane"], f"{item['median_us']:.1f}", f"{item['mean_us']:.1f}", *ratios, rate]
        )
    made = [latency]
    if report["hit_rates"]:
        columns = [
            "scenario",
            "K",
            "seed L1 / L2",
            "features L1 / L2",
            "over bound",
            "mean / max error",
            "exact L1 / L2",
        ]
        rates = Grid("Hit rates (by features: hits within the bound, every one recomputed)", columns)
        for item in report["hit_rates"]:
            near, exact = item["features"], item["exact"]
            errors = (
                "-" if near["mean_error"] is None else f"{near['mean_error']:.3f} / {near['max_error']:.3f}"
            )
            rates.rows.append(
                [
                    *(item["scenario"], str(item["k"]), item["seed"]),
                    f"{near['l1']:.1%} / {near['l2']:.1%}",
                    *(f"{near['l2_rejected']:.1%}", errors),
                    f"{exact['l1']:.1%} / {exact['l2']:.1%}",
                ]
            )
        made.append(rates)
    return made


if __name__ == "__main__":
    main()
