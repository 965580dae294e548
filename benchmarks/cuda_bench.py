"""Speed of the CUDA backend on one card, against the card's own ceilings. One command:

    PYTHONPATH=src python benchmarks/cuda_bench.py --output benchmarks/results/NAME.json

Random weights of a shape (`--shape gemma3-4b`), batch 1. Every figure is a median; whole tokens are timed
on the host's clock (step, head, choice, and the token read on the host). Parts can be chosen with --parts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from larql_kv.backends.cuda.bandwidth import matrix_rate, milliseconds, stream_bandwidth
from larql_kv.engine import build_engine
from larql_kv.model.model import Model
from larql_kv.model.shape_models import random_model

PARTS = ("decode", "masks", "prefill", "contexts", "kernels", "load", "activations", "bf16")
RUNS, TOKENS = 5, 128


def ids(model: Model, count: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(10, model.config.vocab - 10, (count,), generator=random).tolist()


def kv_bytes(model: Model, position: float) -> float:
    """K/V bytes that a step at `position` reads: windows count as windows."""
    row = 2 * model.config.kv_dim * 2
    return sum(row * min(position, layer.window or position) for layer in model.config.layers)


class Decode:
    """One engine at one context: it decodes, is trimmed back, and decodes again."""

    def __init__(self, model: Model, spec: str, context: int, mask: str | None = None) -> None:
        self.model, self.context = model, context
        self.engine = build_engine(spec, model)
        if mask is not None:
            self.engine.set_capture(mask)
        self.engine.prefill(ids(model, context))
        self.seconds: list[float] = []
        self.run(8)
        self.seconds.clear()

    def run(self, tokens: int = TOKENS) -> None:
        """`tokens` greedy tokens, each read on the host as it lands."""
        widest = self.engine.widest_window
        if widest == 0 or self.engine.length <= widest:  # going back is free: the same context every time
            self.engine.trim(self.context)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in self.engine.decode_ahead(tokens, 11):
            pass
        self.seconds.append((time.perf_counter() - begin) / tokens)

    def figures(self, bandwidth: float, file_bytes: int) -> dict[str, Any]:
        ms = statistics.median(self.seconds) * 1e3
        middle = self.engine.length - TOKENS / 2
        bound = (file_bytes + kv_bytes(self.model, middle)) / bandwidth / 1e6
        return {
            "context": self.context,
            "ms_per_token": round(ms, 4),
            "tok_per_s": round(1e3 / ms, 1),
            "bound_ms": round(bound, 4),
            "of_bound": round(bound / ms, 3),
            "runs_ms": [round(item * 1e3, 4) for item in self.seconds],
        }


def together(field: dict[str, Decode]) -> None:
    """Every contestant in turn, RUNS times."""
    for _ in range(RUNS):
        for contestant in field.values():
            contestant.run()


def file_bytes(model: Model) -> int:
    """Bytes of the file's tensors: what the bound counts, whatever layout the kernels use."""
    return sum(tensor.nbytes for tensor in model_source(model).values())


def model_source(model: Model) -> dict[str, Any]:
    from larql_kv.model.shape_models import RandomSource, parse_shape

    source = RandomSource(parse_shape(model.source.split(" ")[0]))
    return source.file.tensors


def part_decode(model: Model, result: dict[str, Any]) -> None:
    bandwidth, size = result["read_gb_s"], result["file_bytes"]
    field = {"standard": Decode(model, "standard", 512)}
    together(field)
    result["decode"] = {name: item.figures(bandwidth, size) for name, item in field.items()}
    engine = field["standard"].engine
    sampled = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 1}
    for name, settings in (("generate", {}), ("generate_sampled", sampled)):
        for _ in range(2):  # the first one compiles; each goes on from the first new token
            tokens = engine.generate([*engine.tokens, 11], TOKENS, ignore_stop_tokens=True, **settings)
            next(tokens)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            count = sum(1 for _ in tokens)
            rate = count / (time.perf_counter() - begin)
        result["decode"][f"{name}_tok_per_s"] = round(rate, 1)
    executor = model.decoder.step_executor
    result["decode"]["graphs"] = executor.captures
    result["decode"]["capture_seconds"] = [round(item, 3) for item in executor.capture_seconds]


def part_masks(model: Model, result: dict[str, Any]) -> None:
    bandwidth, size = result["read_gb_s"], result["file_bytes"]
    field = {"standard": Decode(model, "standard", 512)}
    for mask in ("none", "h_only", "full"):
        field[f"markov-rs {mask}"] = Decode(model, "markov-rs", 512, mask)
    field["markov-rs:rows=none"] = Decode(model, "markov-rs:rows=none", 512)
    field["markov-rs:rows=host"] = Decode(model, "markov-rs:rows=host", 512)
    together(field)
    rows = {}
    for name, item in field.items():
        ledger = item.engine.ledger()
        rows[name] = item.figures(bandwidth, size) | {
            "host_bytes": sum(entry.capacity for entry in ledger if entry.place == "host"),
            "of_standard": round(
                statistics.median(field["standard"].seconds) / statistics.median(item.seconds), 4
            ),
        }
    result["masks"] = rows


def part_contexts(model: Model, result: dict[str, Any]) -> None:
    bandwidth, size = result["read_gb_s"], result["file_bytes"]
    rows = {}
    for context in (512, 8192, 32768, 130000):
        if context + RUNS * TOKENS > model.config.context:
            continue
        begin = time.perf_counter()
        decode = Decode(model, "standard", context)
        filled = time.perf_counter() - begin
        for _ in range(RUNS):
            decode.run()
        rows[str(context)] = decode.figures(bandwidth, size) | {"fill_seconds": round(filled, 2)}
        del decode
        gc.collect()
    short = rows["512"]["ms_per_token"]
    for context, row in rows.items():
        extra = (kv_bytes(model, int(context)) - kv_bytes(model, 512)) / bandwidth / 1e6
        row["over_short_step_plus_kv"] = round(row["ms_per_token"] / (short + extra), 3)
    result["contexts"] = rows


def part_prefill(model: Model, result: dict[str, Any]) -> None:
    count = 4096
    prompt = ids(model, count)
    engine = build_engine("standard", model)

    def run() -> None:
        engine.reset()
        engine.prefill(prompt)

    ms = milliseconds(run)
    config = model.config
    per_layer = (
        config.hidden * (2 * config.q_dim + 2 * config.kv_dim) + 3 * config.hidden * config.intermediate
    )
    result["prefill_kernels"] = kernel_table(run)
    flops = 2 * count * per_layer * config.layer_count
    rate = flops / ms / 1e9
    result["prefill"] = {
        "tokens": count,
        "ms": round(ms, 2),
        "tok_per_s": round(count / ms * 1e3),
        "dense_tflop_s": round(rate, 1),
        "of_matrix_rate": round(rate / result["matrix_tflop_s"], 3),
    }


def kernel_table(run: Any, most: int = 14) -> dict[str, Any]:
    """Device time by kernel name of one run, milliseconds and calls, and how long the whole took."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    wall = (time.perf_counter() - begin) * 1e3
    rows = sorted(trace.key_averages(), key=lambda row: -row.device_time_total)
    table = {row.key[:60]: [round(row.device_time_total / 1e3, 3), row.count] for row in rows[:most]}
    return {"wall_ms": round(wall, 2)} | table


def part_activations(model: Model, result: dict[str, Any]) -> None:
    """The same packed weights met by 8 or 16 bits."""
    from larql_kv.backends.cuda.linear import RowLinear
    from larql_kv.backends.cuda.weights import ACTIVATIONS, ROLES

    weights, executor = model.decoder.weights, model.decoder.step_executor
    rows = {}
    for name in ("int8", "int16"):
        bits = ACTIVATIONS[name]

        def again(linear: RowLinear, role: str, bits: Any = bits) -> RowLinear:
            return RowLinear(linear.matrices, linear.bias, bits[role], linear.plain_bias)

        weights.layers = [
            dataclasses.replace(layer, **{role: again(getattr(layer, role), role) for role in ROLES[:-1]})
            for layer in weights.layers
        ]
        weights.head = again(weights.head, "head")
        executor.forget()
        executor._buffers = None
        decode = Decode(model, "standard", 512)
        for _ in range(RUNS):
            decode.run()
        rows[name] = decode.figures(result["read_gb_s"], result["file_bytes"])
    result["activations"] = rows


def part_kernels(model: Model, result: dict[str, Any]) -> None:
    """Every kernel of a step alone: one graph with the launches of one role over all layers, so that each
    reads its own weights and starts as in a step. Their sum is no step: there they overlap."""
    from larql_kv.backends.cuda.program import Ending, StepProgram

    engine = build_engine("standard", model)
    engine.prefill(ids(model, 512))
    list(engine.decode_ahead(4, 11))
    decoder, config = model.decoder, model.config
    buffers = decoder.step_executor._buffers
    state_rows = engine._state.step_rows()
    for pages in state_rows.kv:  # replays go on past the text
        pages.reserve(0, 1024)
    buffers.upload(state_rows)
    step = StepProgram(decoder, buffers, state_rows, engine.length, Ending.GREEDY, capture=False)
    layers = range(config.layer_count)
    post = decoder.weights.layers[0].post_ffn_norm
    roles = {
        "qkv": lambda: [step.qkv(layer, 0, buffers.after_ffn, post) for layer in layers],
        "attention": lambda: [step.attention(layer) for layer in layers],
        "o": lambda: [step.o(layer) for layer in layers],
        "gate_up": lambda: [step.gate_up(layer, 1) for layer in layers],
        "down": lambda: [step.down(layer) for layer in layers],
        "last_norm": lambda: step.last_norm(0, buffers.after_ffn, post),
        "head": step.head,
        "choose": lambda: buffers.choose(Ending.GREEDY, True),
        "embed": step.embed,
        "step": step.launch,
    }
    rows = {}
    for role, launch in roles.items():
        buffers.set_position(engine.length)
        ms = graph_milliseconds(launch)
        linear = role in ("qkv", "o", "gate_up", "down")
        if linear:
            size = sum(getattr(layer, role).nbytes for layer in decoder.weights.layers)
        elif role == "head":
            size = decoder.weights.head.nbytes
        else:
            size = kv_bytes(model, engine.length) if role == "attention" else 0
        count = len(layers) if linear or role == "attention" else 1
        rows[role] = {
            "launches": count,
            "us_each": round(ms * 1e3 / count, 2),
            "us_all": round(ms * 1e3, 1),
            "bytes_all": size,
            "tb_per_s": round(size / ms / 1e9, 2),
        }
    buffers.realign()  # launches outside of steps chose tokens, too
    result["kernels"] = rows


def graph_milliseconds(launch: Any) -> float:
    """Time of a captured graph of these launches."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    torch.cuda.synchronize()
    return min(milliseconds(lambda: [graph.replay() for _ in range(10)]) / 10 for _ in range(3))


def part_bf16(model: Model, result: dict[str, Any]) -> None:
    shape = result["shape"].split(":")[0] + ":bf16"
    other = random_model(shape, "cuda")
    size = file_bytes(other)
    decode = Decode(other, "standard", 512)
    for _ in range(RUNS):
        decode.run()
    result["bf16"] = {"file_bytes": size} | decode.figures(result["read_gb_s"], size)


def part_load(model: Model, result: dict[str, Any]) -> None:
    from larql_kv.model.shape_gguf import write_random_gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shape.gguf")
        write_random_gguf(path, result["shape"])
        code = (
            "import time,resource; t0=time.perf_counter()\n"
            "import larql_kv as lk\n"
            "t1=time.perf_counter()\n"
            f"m=lk.load_model({str(path)!r},device='cuda'); import torch; torch.cuda.synchronize()\n"
            "t2=time.perf_counter()\n"
            "e=lk.build_engine('standard',m)\n"
            "out=[t.id for t in e.generate(list(range(20,40)),max_tokens=3,ignore_stop_tokens=True)]\n"
            "t3=time.perf_counter()\n"
            "peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024\n"
            "print(t1-t0,t2-t1,t3-t2,peak,m.decoder.step_executor.capture_seconds)\n"
        )
        rows = []
        for _ in range(2):  # the second finds the kernels compiled and the file in the page cache
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            rows.append(done.stdout.strip() or done.stderr[-800:])
        result["load"] = {"file_bytes": path.stat().st_size, "import_load_first3_peak": rows}


def write(result: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")


@contextlib.contextmanager
def saved(result: dict[str, Any], output: Path | None) -> Iterator[None]:
    """Whatever happens, what was measured is written."""
    try:
        yield
    finally:
        write(result, output)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--shape", default="gemma3-4b:q4_k_m")
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument("--output", type=Path)
    options.add_argument("--seconds", type=float, default=450.0, help="start no part after this")
    given = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA card")
    start = begin = time.perf_counter()
    result: dict[str, Any] = {
        "command": "PYTHONPATH=src python " + " ".join(sys.argv),
        "commit": os.environ.get("LARQL_COMMIT", ""),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": given.shape,
        "read_gb_s": round(stream_bandwidth("cuda"), 1),
        "matrix_tflop_s": round(matrix_rate("cuda"), 1),
    }
    model = random_model(given.shape, "cuda")
    result["file_bytes"] = file_bytes(model)
    result["facts"] = model.decoder.facts()
    result["load_random_seconds"] = round(time.perf_counter() - begin, 1)
    print(json.dumps(result), flush=True)
    with saved(result, given.output):
        for part in given.parts.split(","):
            begin = time.perf_counter()
            if begin - start > given.seconds:
                result[part] = {"failed": "no time left"}
                continue
            try:
                globals()[f"part_{part}"](model, result)
            except Exception as error:  # the other parts still count
                result[part] = {"failed": f"{type(error).__name__}: {error}"}
            write(result, given.output)
            print(part, f"{time.perf_counter() - begin:.1f} s", json.dumps(result.get(part)), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
