"""What engines that hold codes cost in quality: KL against `standard` in float32 on the same text.

    python benchmarks/coded_kl.py [--engine SPEC ...] [--models smollm2-135m,gemma3-270m]

Teacher-forced: `--tokens` positions past the first `--skip` ones (past every window) of this package's own
prose (the bench text, then docs/state-policy.md; its hash is printed). In the float32 form on the CPU the
logits of a row do not depend on how the text came in (tests/contracts), so those of one prefill are the
logits of decode steps, and the run says how much of what was read was codes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness import MODELS, save_results

import larql_kv as lk
from larql_kv.bench.text import TEXT, text_ids
from larql_kv.model.model import Model

ENGINES = (
    "turbo-quant",
    "turbo-quant:code=uniform",
    "turbo-quant:bits=3",
    "turbo-quant:bits=2",
    "turbo-quant:k_bits=4,v_bits=3",
    "turbo-quant:k_bits=3,v_bits=4",
    "markov-rs:kv=turbo4",
    "markov-rs-codec:window=128",
    "markov-rs-codec:window=128,codec=int8",
    "markov-rs-codec:window=128,codec=int4",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engine", action="append", metavar="SPEC")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--skip", type=int, default=260)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output-file", type=Path, help="default: results/<date>-<machine>-coded-kl.json")
    arguments = parser.parse_args()
    prose = TEXT + (Path(__file__).parents[1] / "docs" / "state-policy.md").read_text()
    rows = []
    for name in arguments.models.split(","):
        model = lk.load_model(name, dtype="float32")
        ids = text_ids(model, arguments.skip + arguments.tokens, prose)
        reference = _Reference(model, ids, arguments.skip)
        for spec in arguments.engine or ENGINES:
            rows.append({"model": name, **reference.compare(spec)})
            if not arguments.json:
                print(_line(rows[-1]), flush=True)
    result = {"text": hashlib.sha256(prose.encode()).hexdigest()[:16], "rows": rows}
    path = save_results("coded-kl", result, arguments.output_file)
    if arguments.json:
        print(json.dumps(result, indent=1))
    print(f"results in {path}", file=sys.stderr)


class _Reference:
    """The logits of `standard` on one text, and what an engine's differ by."""

    def __init__(self, model: Model, ids: list[int], skip: int) -> None:
        self.model, self.ids, self.skip = model, ids, skip
        self.hidden = lk.build_engine("standard", model).prefill_rows(ids)[skip:]

    def compare(self, spec: str) -> dict[str, Any]:
        begin = time.perf_counter()
        engine = lk.build_engine(spec, self.model)
        hidden = engine.prefill_rows(self.ids)[self.skip :]
        kl, agree = [], []
        for first in range(0, len(hidden), 128):  # logits of a large vocabulary, a piece at a time
            expected, got = (
                torch.log_softmax(self.model.logits(rows[first : first + 128]).double(), -1)
                for rows in (self.hidden, hidden)
            )
            kl.append((expected.exp() * (expected - got)).sum(-1).clamp_min(0))
            agree.append(expected.argmax(-1) == got.argmax(-1))
        nats = torch.cat(kl)
        ledger = {row["name"]: row["live"] for row in engine.ledger().rows()}
        return {
            "engine": spec,
            "tokens": len(nats),
            "mean_kl": float(nats.mean()),
            "p99_kl": float(nats.quantile(0.99)),
            "max_kl": float(nats.max()),
            "top1": float(torch.cat(agree).double().mean()),
            "coded_share": engine.coded_share(),
            "bound": engine.policy.contract.nats_allowed,
            "ledger": ledger,
            "seconds": time.perf_counter() - begin,
        }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:<13} {row['engine']:<42} mean {row['mean_kl']:.2e}  p99 {row['p99_kl']:.2e}"
        f"  max {row['max_kl']:.2e}  top-1 {row['top1']:.1%}  coded {row['coded_share'] or 0:.0%}"
        f"  bound {row['bound']:g}"
    )


if __name__ == "__main__":
    main()
