"""What engines that hold codes cost in quality: KL against `standard` in float32 on the same text.

    python benchmarks/coded_kl.py [--engine SPEC ...] [--models smollm2-135m,gemma3-270m]
    python benchmarks/coded_kl.py --models smollm2-135m --engine turbo-quant --tokens 2000 --bucket 250
        --steps

Teacher-forced: `--tokens` positions past the first `--skip` ones (past every window) of this package's own
prose (the bench text, then documents; its hash is in the result). In the float32 form on the CPU the logits
of a row do not depend on how the text came in (tests/contracts), so those of one prefill are the logits of
decode steps; `--steps` takes them as steps all the same. The run says how much of what was read was codes.
`--bucket` gives the KL of every so many positions too: whether it grows with the text.
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
from larql_kv.engine.base import KvEngine
from larql_kv.model.model import Model

DOCUMENTS = ("state-policy.md", "forms.md", "files.md")  # after the bench text, which is 800 tokens long
ENGINES = (
    "turbo-quant",
    "turbo-quant:code=uniform",
    "turbo-quant:bits=3",
    "turbo-quant:bits=2",
    "turbo-quant:k_bits=4,v_bits=3",
    "turbo-quant:k_bits=3,v_bits=4",
    "markov-rs:kv=turbo4",
    *(
        f"markov-rs-codec:window={window},codec={codec}"
        for window in (128, 64, 16)
        for codec in ("bf16", "int8", "int4")
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engine", action="append", metavar="SPEC")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--skip", type=int, default=260)
    parser.add_argument("--bucket", type=int, metavar="N", help="KL of every N positions too")
    parser.add_argument("--steps", action="store_true", help="decode steps after the first --skip tokens")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--output-file", type=Path, help="default: results/<date>-<machine>-coded-kl[-drift].json"
    )
    arguments = parser.parse_args()
    docs = Path(__file__).parents[1] / "docs"
    prose = TEXT + "".join((docs / name).read_text() for name in DOCUMENTS)
    rows = []
    for name in arguments.models.split(","):
        model = lk.load_model(name, dtype="float32")
        ids = text_ids(model, arguments.skip + arguments.tokens, prose)
        reference = _Reference(model, ids, arguments.skip, arguments.bucket, arguments.steps)
        for spec in arguments.engine or ENGINES:
            rows.append({"model": name, **reference.compare(spec)})
            if not arguments.json:
                print(_line(rows[-1]), flush=True)
    result = {"text": hashlib.sha256(prose.encode()).hexdigest()[:16], "rows": rows}
    path = save_results("coded-kl-drift" if arguments.bucket else "coded-kl", result, arguments.output_file)
    if arguments.json:
        print(json.dumps(result, indent=1))
    print(f"results in {path}", file=sys.stderr)


class _Reference:
    """The logits of `standard` on one text, and what an engine's differ by."""

    def __init__(self, model: Model, ids: list[int], skip: int, bucket: int | None, steps: bool) -> None:
        self.model, self.ids, self.skip, self.bucket, self.steps = model, ids, skip, bucket, steps
        self.hidden = self._hidden(lk.build_engine("standard", model))

    def _hidden(self, engine: KvEngine) -> torch.Tensor:
        if not self.steps:
            return engine.prefill_rows(self.ids)[self.skip :]
        engine.prefill(self.ids[: self.skip])
        return torch.cat([engine.decode_step(token) for token in self.ids[self.skip :]])

    def compare(self, spec: str) -> dict[str, Any]:
        begin = time.perf_counter()
        engine = lk.build_engine(spec, self.model)
        hidden = self._hidden(engine)
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
            "buckets": [
                {"mean_kl": float(part.mean()), "max_kl": float(part.max())}
                for part in (nats.split(self.bucket) if self.bucket else ())
            ],
            "seconds": time.perf_counter() - begin,
        }


def _line(row: dict[str, Any]) -> str:
    buckets = "".join(f"\n  mean {part['mean_kl']:.2e}  max {part['max_kl']:.2e}" for part in row["buckets"])
    return (
        f"{row['model']:<13} {row['engine']:<42} mean {row['mean_kl']:.2e}  p99 {row['p99_kl']:.2e}"
        f"  max {row['max_kl']:.2e}  top-1 {row['top1']:.1%}  coded {row['coded_share'] or 0:.0%}"
        f"  bound {row['bound']:g}{buckets}"
    )


if __name__ == "__main__":
    main()
