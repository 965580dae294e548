"""Every execution form on this machine, beside float32: the evidence for what `dtype=None` picks.

    python benchmarks/forms.py

`dtype=None` must be the fastest form whose mean KL against transformers' float32 on the same weights stays
under 1.5e-3 nats, over 200 decode steps of real text and over one pass of it. The last line says which form
that is here, and whether `None` picks it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from contest import Settings, contest, grid, larql_system, transformers_system
from harness import KL_BOUND, MODELS, save_results

from larql_kv.model.load import is_exact

FORMS = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--quiet", type=float, default=0.0, metavar="S", help="wait up to S s for a quiet machine"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    parser.add_argument("--output-file", type=Path, help="default: results/<date>-<machine>-forms.json")
    arguments = parser.parse_args()
    results = []
    for model in arguments.models.split(","):
        systems = [larql_system(model, "standard", form) for form in FORMS]
        settings = Settings(repeats=arguments.repeats, quiet_seconds=arguments.quiet)
        result = contest(model, [*systems, transformers_system(model, "float32")], settings)
        results.append(result | verdict(result))
        if not arguments.json:
            print(f"\n{grid(result, f'larql standard {FORMS[0]}').plain()}")
            print(
                f"fastest form under {KL_BOUND:g}: {results[-1]['fastest']}; None picks {picked()}",
                flush=True,
            )
    path = save_results("forms", {"results": results}, arguments.output_file)
    if arguments.json:
        print(json.dumps({"results": results}, indent=1))
    print(f"results in {path}", file=sys.stderr)


def picked() -> str:
    """The form that `load_model(dtype=None)` takes here."""
    return "float32" if is_exact(None) else "bfloat16"


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """Which forms keep the bound, and the fastest of them on the time of a 512-token prompt and 64 tokens."""
    settings = result["settings"]
    seconds: dict[str, float] = {}
    kept: dict[str, bool] = {}
    for row in result["rows"]:
        form = row["system"].removeprefix("larql standard ")
        if form not in FORMS or "error" in row:
            continue
        kept[form] = max(row["decode_vs_f32"]["mean_kl"], row["prefill_vs_f32"]["mean_kl"]) < KL_BOUND
        prefill = row[f"prefill_{settings['long_prompt']}_tok_per_s"]
        seconds[form] = settings["long_prompt"] / prefill + settings["new"] / row["decode_tok_per_s"]
    allowed = [form for form in seconds if kept[form]]
    fastest = min(allowed, key=seconds.__getitem__) if allowed else None
    return {"kept_bound": kept, "seconds": seconds, "fastest": fastest, "none_picks": picked()}


if __name__ == "__main__":
    main()
