"""Systems side by side on one model: same ids, in turns, in one run. Used by `peers.py` and `forms.py`."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import CACHE, KL_BOUND, Worker, WorkerError, compare_logits, reference_directory

import larql_kv as lk
from larql_kv.bench.machine import OtherLoad
from larql_kv.bench.stats import id_hash, percentile, round_robin
from larql_kv.bench.table import Grid
from larql_kv.bench.text import text_ids
from larql_kv.model.catalog import resolve

_PAUSE = 0.3  # seconds between turns: the last system's threads stop spinning
QUIET_CORES = 0.3  # others' use of the machine up to which a turn counts as undisturbed
_STEPS = 200  # teacher-forced steps whose logits are compared
REFERENCE = "HF f32"


@dataclass(frozen=True)
class System:
    """A system to start: its label, its worker's arguments, and the interpreter that has it."""

    label: str
    arguments: tuple[str, ...]
    python: str = sys.executable


@dataclass(frozen=True)
class Settings:
    prompt: int = 128
    long_prompt: int = 512
    new: int = 64
    repeats: int = 5
    quiet_seconds: float = (
        0.0  # wait up to this long for a quiet machine before a turn, and try it again once
    )


def larql_system(model: str, engine: str, dtype: str) -> System:
    label = f"larql {engine} {dtype}"
    return System(label, ("--system=larql", f"--model={model}", f"--engine={engine}", f"--dtype={dtype}"))


def transformers_system(model: str, dtype: str) -> System:
    label = {"float32": REFERENCE, "bfloat16": "HF bf16"}[dtype]
    path = reference_directory(model)
    return System(label, ("--system=transformers", f"--model={path}", f"--dtype={dtype}"))


def llama_systems(model: str, python: str) -> list[System]:
    arguments = ("--system=llama.cpp", f"--model={resolve(model)}")
    return [
        System("llama.cpp f16", arguments, python),
        System("llama.cpp f16 fa", (*arguments, "--flash"), python),
    ]


def contest(model: str, systems: list[System], settings: Settings) -> dict[str, Any]:
    """Speed, memory and closeness to the float32 reference of each system; one that fails is a row with its
    error. The reference must be among the systems."""
    CACHE.mkdir(parents=True, exist_ok=True)
    loaded = lk.load_model(model)
    ids = text_ids(loaded, max(settings.long_prompt, settings.prompt + _STEPS + 1))
    vocabulary = loaded.config.vocab
    del loaded
    rows: dict[str, dict[str, Any]] = {system.label: {"system": system.label} for system in systems}
    workers: dict[str, Worker] = {}
    for system in systems:
        _say(model, f"load {system.label}")
        try:
            worker = Worker(system.label, list(system.arguments), system.python)
            worker.ask(do="run", ids=ids[: settings.prompt], new=4)  # pages, lazy forms, kernels
            worker.ask(do="run", ids=ids[: settings.long_prompt], new=0)
            workers[system.label] = worker
            rows[system.label]["load_s"] = worker.loaded["load_s"]
        except WorkerError as error:
            rows[system.label]["error"] = str(error)
    runs = _speed(model, workers, ids, settings)
    for label, worker in workers.items():
        rows[label] |= _summary(runs[label], settings) | {"peak_rss": worker.ask(do="memory")["peak_rss"]}
    _closeness(model, workers, rows, ids[: settings.prompt + _STEPS + 1], settings.prompt)
    for worker in workers.values():
        worker.close()
    return {"model": model, "vocab": vocabulary, "settings": vars(settings), "rows": list(rows.values())}


def _speed(
    model: str, workers: dict[str, Worker], ids: list[int], settings: Settings
) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in workers}
    for repeat in range(settings.repeats):
        _say(model, f"repeat {repeat + 1} of {settings.repeats}")
        for label in round_robin(list(workers), repeat):
            runs[label].append(_turn(workers[label], ids, settings))
    return runs


def _turn(worker: Worker, ids: list[int], settings: Settings) -> dict[str, Any]:
    """One turn of a system; with `quiet_seconds`, the less disturbed of up to two, never the faster one."""
    turns: list[dict[str, Any]] = []
    while not turns or (settings.quiet_seconds and len(turns) < 2 and turns[-1]["other_cores"] > QUIET_CORES):
        time.sleep(_PAUSE)
        _wait_for_quiet(settings.quiet_seconds)
        run = worker.ask(do="run", ids=ids[: settings.prompt], new=settings.new)
        long = worker.ask(do="run", ids=ids[: settings.long_prompt], new=0)
        others = max(run["other_cores"], long["other_cores"])
        turns.append(run | {"long_s": long["prefill_s"], "other_cores": others})
    return min(turns, key=lambda turn: turn["other_cores"])


def _wait_for_quiet(limit: float) -> None:
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        others = OtherLoad()
        time.sleep(0.25)
        if (others.cores() or 0.0) < QUIET_CORES:
            return


def _summary(runs: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    quiet = [run for run in runs if run["other_cores"] <= QUIET_CORES]
    every, runs = runs, quiet if len(quiet) >= 2 else runs
    rates = [settings.new / sum(run["step_s"]) for run in runs]
    steps = [seconds for run in runs for seconds in run["step_s"]]
    short = [settings.prompt / run["prefill_s"] for run in runs]
    long = [settings.long_prompt / run["long_s"] for run in runs]
    return {
        "decode_tok_per_s": statistics.median(rates),
        "decode_range": [min(rates), max(rates)],
        "decode_p50_ms": 1e3 * percentile(steps, 0.5),
        f"prefill_{settings.prompt}_tok_per_s": statistics.median(short),
        f"prefill_{settings.prompt}_range": [min(short), max(short)],
        f"prefill_{settings.long_prompt}_tok_per_s": statistics.median(long),
        f"prefill_{settings.long_prompt}_range": [min(long), max(long)],
        "other_cores": statistics.median(run["other_cores"] for run in runs),
        "id_hash": id_hash(runs[0]["ids"]),
        "ids": runs[0]["ids"],
        "same_ids_in_every_repeat": all(run["ids"] == every[0]["ids"] for run in every),
        "runs_used": len(runs),  # the quiet ones where there are two, else all
        "raw": every,
    }


def _closeness(
    model: str, workers: dict[str, Worker], rows: dict[str, dict[str, Any]], ids: list[int], prompt: int
) -> None:
    """KL of each system's decode (prompt, then one token at a time) and of its one-pass logits."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        reference, candidate = Path(folder, "reference.npy"), Path(folder, "candidate.npy")
        workers[REFERENCE].ask(do="logits", ids=ids, prefill=len(ids), path=str(reference))
        for label, worker in workers.items():
            _say(model, f"logits of {label}")
            worker.ask(do="logits", ids=ids, prefill=prompt, path=str(candidate))
            rows[label]["decode_vs_f32"] = compare_logits(reference, candidate, prompt - 1, -1)
            worker.ask(do="logits", ids=ids, prefill=len(ids), path=str(candidate))
            rows[label]["prefill_vs_f32"] = compare_logits(reference, candidate, 0, None)


def grid(result: dict[str, Any], base: str | None) -> Grid:
    """The result as a table; ratios are of the system `base`."""
    settings = result["settings"]
    short, long = (f"prefill_{settings[name]}_tok_per_s" for name in ("prompt", "long_prompt"))
    by_label = {row["system"]: row for row in result["rows"]}
    against = by_label.get(base or "", {})
    columns = ["system", "decode tok/s", "range", f"x {base}", "p50 ms"]
    columns += [
        f"prefill {settings['prompt']}",
        f"x {base}",
        f"prefill {settings['long_prompt']}",
        f"x {base}",
    ]
    columns += [
        "peak MB",
        "load s",
        "mean KL",
        "top-1",
        "prefill KL",
        "top-1",
        "ids",
        "turns",
        "others' cores",
    ]
    made = Grid(
        f"{result['model']}: prompt {settings['prompt']}, {settings['new']} new tokens, median of "
        f"the quiet turns (KL in nats against {REFERENCE}; bound of dtype=None {KL_BOUND:g})",
        columns,
    )
    for row in result["rows"]:
        if "error" in row:
            made.rows.append([row["system"], row["error"], *["-"] * (len(columns) - 2)])
            continue

        def ratio(key: str, row: dict[str, Any] = row) -> str:
            return f"{row[key] / against[key]:.2f}" if key in against else "-"

        low, high = row["decode_range"]
        decode, prefill = row["decode_vs_f32"], row["prefill_vs_f32"]
        made.rows.append(
            [
                *(row["system"], f"{row['decode_tok_per_s']:.1f}", f"{low:.1f}-{high:.1f}"),
                *(ratio("decode_tok_per_s"), f"{row['decode_p50_ms']:.2f}"),
                *(f"{row[short]:.0f}", ratio(short), f"{row[long]:.0f}", ratio(long)),
                *(f"{(row['peak_rss'] or 0) / 1e6:.0f}", f"{row['load_s']:.2f}"),
                *(f"{decode['mean_kl']:.1e}", f"{decode['top1']:.3f}"),
                *(f"{prefill['mean_kl']:.1e}", f"{prefill['top1']:.3f}", row["id_hash"]),
                *(f"{row['runs_used']}/{settings['repeats']}", f"{row['other_cores']:.1f}"),
            ]
        )
    return made


def _say(model: str, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{model}: {what}", end="", file=sys.stderr, flush=True)
    else:
        print(f"{model}: {what}", file=sys.stderr, flush=True)
