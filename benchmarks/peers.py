"""larql beside Hugging Face transformers and llama.cpp: same file, same ids, one run, in turns.

    python benchmarks/peers.py                                    # both real models
    python benchmarks/peers.py --llama-python /path/to/venv/bin/python

128 prompt tokens, 64 new ones (greedy, end-of-text not honoured); prefill also at 512. Every system is a
process of its own (its peak resident set is its own; mapped files count), and gets its turn in rotating
order. Beside every speed stands how far the logits are from transformers' float32 on the same weights:
`mean KL` over 200 decode steps, `prefill KL` over one pass. transformers computes the head for the last
position only in prefill, as the others do. llama.cpp is built as README.md says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from contest import Settings, contest, grid, larql_system, llama_systems, transformers_system
from harness import MODELS, save_results

from larql_kv.bench.plot import bar_chart
from larql_kv.bench.report import write_text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default="standard", help="larql engine specs, separated by ';'")
    parser.add_argument("--llama-python", default=sys.executable, help="interpreter that has llama_cpp")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--quiet", type=float, default=0.0, metavar="S", help="wait up to S s for a quiet machine"
    )
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    parser.add_argument("--output-file", type=Path, help="default: results/<date>-<machine>-peers.json")
    parser.add_argument("--plot", type=Path, help="SVG of the decode speeds of the last model")
    arguments = parser.parse_args()
    settings = Settings(new=arguments.new, repeats=arguments.repeats, quiet_seconds=arguments.quiet)
    llama = has_llama(arguments.llama_python)
    if not llama:
        print(f"llama_cpp is not importable by {arguments.llama_python}: left out", file=sys.stderr)
    results = []
    for model in arguments.models.split(","):
        systems = [
            larql_system(model, engine, dtype)
            for engine in arguments.engines.split(";")
            for dtype in ("auto", "float32")
        ]
        systems += [transformers_system(model, dtype) for dtype in ("bfloat16", "float32")]
        systems += llama_systems(model, arguments.llama_python) if llama else []
        results.append(contest(model, systems, settings))
        if not arguments.json:
            print(f"\n{grid(results[-1], 'HF bf16').plain()}\n", flush=True)
    path = save_results("peers", {"results": results}, arguments.output_file)
    if arguments.plot:
        speeds = {row["system"]: row["decode_tok_per_s"] for row in results[-1]["rows"] if "error" not in row}
        write_text(arguments.plot, bar_chart(speeds, f"{results[-1]['model']}: decode speed", "tok/s"))
    if arguments.json:
        print(json.dumps({"results": results}, indent=1))
    print(f"results in {path}", file=sys.stderr)


def has_llama(python: str) -> bool:
    done = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    main()
