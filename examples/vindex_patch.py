"""Insert a fact into a real model as one feature of one layer, and take it away again.

A feature is a gate row (when does it fire?), an up row (how strongly?) and a down row (what does it write?).
The gate and up rows are fitted so that they are 1 on the FFN input of "The capital of Atlantis is" and 0 on
those of other texts; the down row points at the answer's row of the head.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import larql_kv as lk
from larql_kv.bench.text import text_ids
from larql_kv.model.load import open_files
from larql_kv.model.vindex_edits import Patch
from larql_kv.vindex.build import BuildSettings, build_vindex
from larql_kv.vindex.index import VectorIndex
from larql_kv.vindex.patch import apply_patch, bake, insert, remove_patch

FACT, ANSWER, LAYER = "The capital of Atlantis is", " Neptune", 20
NEAR = ("The capital of France is", "The capital of Spain is", "Atlantis is a city")
CONTROLS = ("The capital of Japan is", "The capital of Peru is", "The largest planet is")  # not fitted on
FIRES, WRITES = 10.0, 320.0  # gate score on the fact, length of what is written


def answers(model: lk.Model) -> dict[str, tuple[str, float]]:
    """Prompt -> the next token and its probability."""
    found = {}
    for prompt in (FACT, *CONTROLS):
        engine = lk.build_engine("standard", model)
        probabilities = engine.logits(engine.prefill(model.tokenizer.encode(prompt)))[-1].softmax(0)
        token = int(probabilities.argmax())
        found[prompt] = model.tokenizer.token_text(token), float(probabilities[token])
    return found


def ffn_inputs(model: lk.Model, ids: list[int]) -> torch.Tensor:
    """The FFN inputs of LAYER, (n, hidden)."""
    kept = {}

    class Recorder(lk.DenseFfn):
        def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            kept[layer] = x.clone()
            return super().forward(layer, x)

    lk.build_engine("standard", model, Recorder(model)).prefill(ids)
    return kept[LAYER]


def detector(model: lk.Model) -> torch.Tensor:
    """The direction (hidden,) whose product is 1 with the fact's FFN input, and 0 with others (ridge fit)."""
    encode = model.tokenizer.encode
    fact = ffn_inputs(model, encode(FACT))
    others = [fact[1:-1], ffn_inputs(model, text_ids(model, 400))[4:]]
    others += [ffn_inputs(model, encode(prompt))[1:] for prompt in NEAR]
    rows = torch.cat([fact[-1:], *others]).double()
    rows[0] *= len(rows) ** 0.5  # one row against hundreds
    products = rows.T @ rows
    products += 0.1 * products.trace() / len(products) ** 2 * torch.eye(len(products)).double()
    return torch.linalg.solve(products, rows[0] * len(rows) ** 0.5).float()


def writer(model: lk.Model) -> torch.Tensor:
    """The unit direction (hidden,) that raises ANSWER's logit over those of the model's own answers."""
    head = torch.from_numpy(np.array(model.tensors.get("embed").dequantize()))  # this model's head is tied
    engine = lk.build_engine("standard", model)
    usual = engine.logits(engine.prefill(model.tokenizer.encode(FACT)))[-1].topk(50).indices
    norm = torch.from_numpy(np.array(model.tensors.get("final_norm").dequantize()))
    direction = (head[answer_id(model)] - head[usual].mean(0)) * norm
    return direction / direction.norm()


def answer_id(model: lk.Model) -> int:
    (token,) = model.tokenizer.encode(ANSWER)
    return token


def show(title: str, found: dict[str, tuple[str, float]]) -> None:
    print(title)
    for prompt, (text, probability) in found.items():
        print(f"  {prompt:<28}{text!r:<12}{probability:.1%}")


began = time.perf_counter()
with tempfile.TemporaryDirectory(prefix="larql-vindex-") as folder:
    directory = Path(folder, "smollm2")
    build_vindex(open_files("smollm2-135m"), directory, BuildSettings(down_features="bf16"))
    model = lk.load_model(directory, dtype="float32")
    before = answers(model)
    show("before", before)

    direction = detector(model)
    operation = insert(
        LAYER,
        gate=FIRES * direction,
        up=direction,
        down=WRITES / FIRES * writer(model),
        writes=(ANSWER, answer_id(model), WRITES),
        entity="Atlantis",
        relation="capital",
        target=ANSWER.strip(),
    )
    base = VectorIndex.open(directory).print
    patch = Patch("atlantis", (operation,), {"base_checksum": base, "description": "a capital that is not"})
    file = Path(folder, "atlantis.vlp")
    file.write_bytes(patch.to_bytes())
    placed = apply_patch(directory, file)
    print(
        f"atlantis.vlp, {file.stat().st_size:,} bytes: layer {LAYER} feature {placed.operations[0].feature}"
    )

    after = answers(lk.load_model(directory, dtype="float32"))
    show("after", after)
    assert after[FACT][0] == ANSWER
    assert all(after[prompt][0] == before[prompt][0] for prompt in CONTROLS)

    baked = bake(directory, Path(folder, "baked"))
    assert answers(lk.load_model(Path(folder, "baked"), dtype="float32")) == after
    remove_patch(directory, "atlantis")
    assert answers(lk.load_model(directory, dtype="float32")) == before
    print(f"baked: the same answers, print {baked.print[:16]}; removed: the answers from before")
print(f"{time.perf_counter() - began:.0f} s")
