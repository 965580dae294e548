"""The parity gate of the capture masks: what is staged to the host changes no token and no bit of a logit.

    python benchmarks/w10_parity.py                                     # SmolLM2-135M on the CPU
    python benchmarks/w10_parity.py --model FILE.gguf --device cuda
    python benchmarks/w10_parity.py --shape gemma3-4b:q4_k_m --device cuda    # random weights

markov-rs under `full`, `h_only` and `none`, with rows on the host under the masks that serve it, and
without rows: greedy steps one by one, then steps that run ahead of their tokens. Exit code 1 on any
difference from the first row. A backend that cannot leave anything out stages in full: column `in force`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import larql_kv as lk
from larql_kv.bench.stats import id_hash
from larql_kv.bench.table import Grid
from larql_kv.bench.text import text_ids

if TYPE_CHECKING:
    from larql_kv.model.model import Model

VARIANTS: tuple[tuple[str, str | None], ...] = (
    ("markov-rs", "full"),
    ("markov-rs", "h_only"),
    ("markov-rs", "none"),
    ("markov-rs:rows=host", "full"),
    ("markov-rs:rows=host", "h_only"),
    ("markov-rs:rows=none", None),  # stages nothing, ever
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default="smollm2-135m", help="short name, .gguf file or directory")
    source.add_argument("--shape", help="random weights of a shape instead, such as gemma3-4b:q4_k_m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", type=int, default=500, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=40, help="greedy steps; as many again run ahead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.shape:
        from larql_kv.model.shape_models import random_model

        model = random_model(arguments.shape, arguments.device)
    else:
        model = lk.load_model(arguments.model, device=arguments.device)
    rows = compare(model, text_ids(model, arguments.prompt), arguments.steps)
    if arguments.json:
        print(json.dumps({"model": model.source, "device": arguments.device, "rows": rows}, indent=1))
    else:
        print(grid(model.source, rows).plain())
    sys.exit(0 if identical(rows) else 1)


def compare(model: Model, prompt: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Every variant beside the first one: tokens, logits of each step, bytes that it holds on the host."""
    first: Run | None = None
    rows = []
    for spec, mask in VARIANTS:
        run = Run(model, spec, mask, prompt, steps)
        first = first or run
        rows.append(run.facts() | run.against(first))
    return rows


class Run:
    """One variant's greedy run: `steps` steps one by one, then `steps` enqueued at once."""

    def __init__(self, model: Model, spec: str, mask: str | None, prompt: Sequence[int], steps: int) -> None:
        self.spec, self.mask = spec, mask
        engine = lk.build_engine(spec, model)
        if mask is not None:
            engine.set_capture(mask)
        self.in_force = str(engine.capture)
        self.logits = [engine.logits(engine.prefill(prompt))]
        self.tokens = [int(self.logits[0].argmax())]
        for _ in range(steps):
            self.logits.append(engine.logits(engine.decode_step(self.tokens[-1])))
            self.tokens.append(int(self.logits[-1].argmax()))
        self.tokens += list(engine.decode_ahead(steps, self.tokens[-1]))
        self.logits.append(engine.logits(engine.decode_step(self.tokens[-1])))
        ledger = engine.ledger()
        self.bytes = {place: ledger.total(place=place, capacity=True) for place in ("device", "host")}

    def facts(self) -> dict[str, Any]:
        return {
            "engine": self.spec,
            "mask": self.mask,
            "in_force": self.in_force,
            "tokens": len(self.tokens),
            "ids": id_hash(self.tokens),
            "device_bytes": self.bytes["device"],
            "host_bytes": self.bytes["host"],
        }

    def against(self, other: Run) -> dict[str, Any]:
        pairs = list(zip(self.logits, other.logits, strict=True))
        differs = [index for index, (mine, theirs) in enumerate(pairs) if not torch.equal(mine, theirs)]
        return {
            "same_tokens": self.tokens == other.tokens,
            "same_logits": not differs,
            "first_difference": differs[0] if differs else None,  # step
            "max_difference": max(float((mine - theirs).abs().max()) for mine, theirs in pairs),
        }


def identical(rows: list[dict[str, Any]]) -> bool:
    return all(row["same_tokens"] and row["same_logits"] for row in rows)


def grid(title: str, rows: list[dict[str, Any]]) -> Grid:
    cells = [
        [
            row["engine"],
            row["mask"] or "-",
            row["in_force"],
            str(row["tokens"]),
            row["ids"],
            "same" if row["same_tokens"] else "DIFFER",
            "same bits" if row["same_logits"] else f"DIFFER from step {row['first_difference']}",
            f"{row['device_bytes'] / 2**20:.2f}",
            f"{row['host_bytes'] / 2**20:.2f}",
        ]
        for row in rows
    ]
    columns = ["engine", "mask", "in force", "tokens", "ids", "ids are", "logits are"]
    return Grid(f"{title}: parity of the capture masks", [*columns, "device MiB", "host MiB"], cells)


if __name__ == "__main__":
    main()
