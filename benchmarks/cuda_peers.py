"""The peers on a CUDA card, at the sizes that `larql bench --device cuda --shape ...` is run at.

    python benchmarks/cuda_peers.py                                   # transformers, about 3 minutes
    python benchmarks/cuda_peers.py --llama-bench /path/to/llama-bench

Random weights of the shape, since they need no network: transformers in bfloat16 (`generate` eager, and with
its static cache and its own compile; prefill by one forward pass with SDPA), llama.cpp by llama-bench on a
GGUF file with the quantisation mix of the shape, written here first. One row a system; a system that is
missing or fails is a row that says so. The file is rewritten after every row, so a time limit does not cut
off all of it. LARQL_COMMIT names the commit where there is no git checkout.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, StoppingCriteria

from larql_kv.bench.machine import machine_facts
from larql_kv.errors import ModelError
from larql_kv.model.shape_recipes import SHAPES, Shape, parse_shape

RESULTS = Path(__file__).parent / "results"
_SHAPES = [name for name, shape in SHAPES.items() if shape.architecture == "gemma3"]


@dataclass(frozen=True)
class Settings:
    """Counts are tokens; `seconds` is the limit of the whole run."""

    prompt: int = 512
    new: int = 64
    prefill: int = 4096
    depths: tuple[int, ...] = (512, 8192, 32768)  # of llama.cpp; transformers decodes at `prompt`
    repeats: int = 3
    seconds: float = 480.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", default="gemma3-4b", help=f"{' or '.join(_SHAPES)}, with :mix for llama.cpp"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--llama-bench", help="the llama-bench program; without it that row stays empty")
    parser.add_argument("--repeats", type=int, default=Settings.repeats)
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="limit of the whole run")
    parser.add_argument("--output", type=Path, help="default: results/<date>-<card>-cuda-peers.json")
    arguments = parser.parse_args()
    try:
        shape = parse_shape(arguments.shape)
        if shape.name not in _SHAPES:
            raise ModelError(f"--shape {shape.name}: the peers run {' and '.join(_SHAPES)}")
    except ModelError as error:
        parser.error(str(error))
    device = torch.device(arguments.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(f"no such CUDA card: {device}")
    settings = Settings(repeats=arguments.repeats, seconds=arguments.seconds)
    output = arguments.output or default_output(arguments.device)
    result = run(shape, arguments.device, settings, arguments.llama_bench, output)
    print(f"\n{table(result)}\n\nresults in {output}")


def run(
    shape: Shape, device: str, settings: Settings, llama_bench: str | None, output: Path
) -> dict[str, Any]:
    """Measure every peer and write `output`, after each of them again."""
    begin = time.perf_counter()
    result: dict[str, Any] = {
        "kind": "cuda-peers",
        "timestamp": str(int(time.time())),
        "machine": card_facts(device),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "shape": shape.label,
        "settings": asdict(settings) | {"depths": list(settings.depths)},
        "rows": [],
    }

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        result["wall_s"] = time.perf_counter() - begin
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"[{result['wall_s']:.0f} s] {row['system']}: {summary(row)}", file=sys.stderr, flush=True)

    try:
        model = random_hf_model(shape, device)
    except Exception as error:
        keep({"system": "HF bf16", "error": f"{type(error).__name__}: {error}"})
    else:
        measure(model, settings, keep)
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    keep(llama_row(llama_bench, shape, settings, settings.seconds - (time.perf_counter() - begin)))
    return result


def random_hf_model(shape: Shape, device: str) -> Any:
    """transformers' Gemma 3 of that shape, bfloat16 and SDPA, initialised at random."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_base}
    if shape.linear_factor != 1.0:
        rope |= {"rope_type": "linear", "factor": shape.linear_factor}
    config = Gemma3TextConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        sliding_window=shape.window,
        query_pre_attn_scalar=shape.head_dim,
        rope_parameters={
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Gemma3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    generation = model.generation_config
    assert generation is not None
    generation.eos_token_id = None  # a random model may say anything: it is never the end
    generation.pad_token_id = 0
    return model.eval()


def measure(model: Any, settings: Settings, keep: Callable[[dict[str, Any]], None]) -> None:
    """One row for each way transformers runs: prefill and eager decode, then static cache and compile."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(4, vocabulary, (1, max(settings.prompt, settings.prefill)), device=model.device)
    prompt = ids[:, : settings.prompt]
    eager: dict[str, Any] = {"system": "HF bf16 eager"}
    for name, work in (
        ("prefill", lambda: prefill(model, ids[:, : settings.prefill], settings.repeats)),
        ("decode", lambda: {str(settings.prompt): decode(model, prompt, settings, None)}),
    ):
        _guarded(eager, name, work)
    keep(eager)
    static: dict[str, Any] = {"system": "HF bf16 static cache, compiled"}
    _guarded(static, "decode", lambda: {str(settings.prompt): decode(model, prompt, settings, "static")})
    keep(static)


def _guarded(row: dict[str, Any], name: str, work: Callable[[], dict[str, Any]]) -> None:
    """A peer that fails (out of memory, a compiler that is missing) is a figure less, not the run's end."""
    try:
        row[name] = work()
    except Exception as error:
        row["error"] = f"{name}: {type(error).__name__}: {str(error)[:500]}"


@torch.inference_mode()
def prefill(model: Any, ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Tokens per second of one forward pass over ids (1, n) that fills a cache; logits of the last row."""
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        begin = _now(model)
        model(input_ids=ids, use_cache=True, logits_to_keep=1)
        seconds.append(_now(model) - begin)
    rates = [ids.shape[1] / value for value in seconds[1:]]
    return {str(ids.shape[1]): _figure(rates), "first_s": seconds[0]}


def decode(model: Any, prompt: torch.Tensor, settings: Settings, cache: str | None) -> dict[str, Any]:
    """Tokens per second of `generate` (greedy) from its first new token to its last."""
    rates, ids = [], None
    warm = _now(model)
    for turn in range(settings.repeats + 1):  # the first one warms up, and compiles
        clock = StepClock(model, settings.new)
        ids = model.generate(
            prompt,
            max_new_tokens=settings.new,
            do_sample=False,
            cache_implementation=cache,
            stopping_criteria=[clock],
        )
        if ids.shape[1] != prompt.shape[1] + settings.new:
            raise RuntimeError(f"{ids.shape[1] - prompt.shape[1]} new tokens, expected {settings.new}")
        if turn == 0:
            warm = _now(model) - warm
        else:
            rates.append((settings.new - 1) / (clock.last - clock.first))
    assert ids is not None
    return _figure(rates) | {"first_s": warm, "ids": ids[0, prompt.shape[1] :].tolist()[:16]}


class StepClock(StoppingCriteria):
    """Never stops; notes when the first and the `count`-th new token were there (those two wait for the
    device, the others do not)."""

    def __init__(self, model: Any, count: int) -> None:
        self._model, self._count, self._calls = model, count, 0
        self._no = torch.zeros(1, dtype=torch.bool, device=model.device)
        self.first = self.last = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._calls += 1
        if self._calls == 1:
            self.first = _now(self._model)
        elif self._calls == self._count:
            self.last = _now(self._model)
        return self._no


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _figure(rates: list[float]) -> dict[str, Any]:
    return {"tok_per_s": statistics.median(rates), "range": [min(rates), max(rates)], "raw": rates}


def llama_row(binary: str | None, shape: Shape, settings: Settings, seconds: float) -> dict[str, Any]:
    """llama-bench on a file of the shape: decode at each depth and prefill, flash attention on, all layers on
    the card. Without the program the row is empty and says why."""
    row: dict[str, Any] = {"system": f"llama.cpp {shape.mix}", "decode": {}, "prefill": {}}
    program = shutil.which(binary) if binary else None
    if program is None:
        return row | {"note": f"no llama-bench at {binary}" if binary else "no --llama-bench was given"}
    end = time.perf_counter() + seconds
    try:
        from larql_kv.model.shape_gguf import write_random_gguf

        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            path = write_random_gguf(Path(folder, f"{shape.name}.gguf"), shape)
            row |= {"file_bytes": path.stat().st_size, "write_s": time.perf_counter() - begin}
            depths = ",".join(map(str, settings.depths))
            for test in (
                ["-p", "0", "-n", str(settings.new), "-d", depths],
                ["-p", str(settings.prefill), "-n", "0"],
            ):
                command = [program, "-m", str(path), "-ngl", "99", "-fa", "1", "-o", "json"]
                command += ["-r", str(settings.repeats), *test]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=max(end - time.perf_counter(), 1)
                )
                if done.returncode:
                    raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-500:]}")
                read_llama_bench(done.stdout, row)
    except (ImportError, OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def read_llama_bench(text: str, row: dict[str, Any]) -> None:
    """Put the entries of llama-bench's JSON into `row`. Raises ValueError for what is none."""
    entries = json.loads(text[text.index("[") : text.rindex("]") + 1])
    for entry in entries:
        samples = entry.get("samples_ts") or [entry["avg_ts"]]
        place, at = ("decode", entry.get("n_depth", 0)) if entry["n_gen"] else ("prefill", entry["n_prompt"])
        row[place][str(at)] = _figure(samples)
        row["build"] = f"{entry.get('build_commit')} ({entry.get('build_number')})"


def card_facts(device: str) -> dict[str, Any]:
    """`machine_facts`, the card and its driver, and the versions that matter here."""
    facts = machine_facts() | {
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "driver": None,
    }
    facts["commit"] = os.environ.get("LARQL_COMMIT") or facts["commit"]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if facts["gpu"] and shutil.which(query[0]):
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        facts["driver"] = done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
    return facts


def default_output(device: str) -> Path:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    card = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return RESULTS / f"{datetime.now(UTC).date().isoformat()}-{card}-cuda-peers.json"


def summary(row: dict[str, Any]) -> str:
    """One line: every speed, then what went wrong."""
    words = [
        f"{kind} at {at}: {figure['tok_per_s']:.1f} tok/s"
        for kind in ("decode", "prefill")
        for at, figure in row.get(kind, {}).items()
        if isinstance(figure, dict)
    ]
    return ", ".join(words + [row[key] for key in ("note", "error") if key in row])


def table(result: dict[str, Any]) -> str:
    """The rows under each other, medians in tok/s, `-` where there is none."""
    settings = result["settings"]
    columns = [("decode", str(depth)) for depth in sorted({settings["prompt"], *settings["depths"]})]
    columns.append(("prefill", str(settings["prefill"])))
    lines = [["tok/s, random weights", *(f"{kind} {at}" for kind, at in columns), "remark"]]
    for row in result["rows"]:
        figures = (row.get(kind, {}).get(at) for kind, at in columns)
        cells = ["-" if figure is None else f"{figure['tok_per_s']:.1f}" for figure in figures]
        lines.append([row["system"], *cells, row.get("error") or row.get("note") or ""])
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]) - 1)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]
        ).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    main()
