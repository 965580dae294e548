"""What cuda_check.py asks of a model: closeness to the CPU, determinism, running ahead, the ledger.

Each function gives a dict with `ok` and the figures behind it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import w10_parity

import larql_kv as lk
from larql_kv.backends.cuda.weights import DEFAULT_ACTIVATIONS
from larql_kv.bench.text import text_ids
from larql_kv.errors import ModelError
from larql_kv.state.ledger import Ledger

if TYPE_CHECKING:
    from larql_kv.model.model import Model

MEAN_KL = 2e-3  # nats against the CPU's float32 run, at the default activations
TOP1 = {"smollm2-135m": 0.95, "gemma3-270m": 0.97}
QUESTION = "What is the capital of France? Answer in one sentence."
LEDGER_SPECS = ("standard", "markov-rs", "markov-rs:rows=host", "markov-rs:rows=none")
LEDGER_SHARE, LEDGER_BYTES = 0.02, 4 << 20  # the ledger may be off by the larger of the two
_ROWS = 64  # logit rows compared at once


@dataclass
class Apart:
    """How far logits are from the reference's, row by row, in float64."""

    reference: np.ndarray  # (rows, vocab) float32, mapped
    kl: list[float] = field(default_factory=list)
    agreed: int = 0

    def add(self, first: int, logits: torch.Tensor) -> None:
        """`logits` (n, vocab) are rows first.. of the reference."""
        for start in range(0, len(logits), _ROWS):
            given = logits[start : start + _ROWS]
            rows = self.reference[first + start : first + start + len(given)]
            expected = torch.from_numpy(np.array(rows)).to(given.device)
            a, b = (torch.log_softmax(item.double(), -1) for item in (expected, given))
            self.kl += (a.exp() * (a - b)).sum(-1).clamp_min(0.0).tolist()
            self.agreed += int((expected.argmax(-1) == given.argmax(-1)).sum())

    def figures(self) -> dict[str, Any]:
        return {
            "rows": len(self.kl),
            "mean_kl": float(np.mean(self.kl)),
            "max_kl": float(np.max(self.kl)),
            "top1": self.agreed / len(self.kl),
        }


def closeness(
    model: Model, prompt: int, answer: int, count: int, reference: Callable[[], np.ndarray]
) -> dict[str, Any]:
    """Prefill of `count` tokens in one pass, and decode in teacher-forced graph steps after `prompt` tokens.

    `reference()` waits for the CPU's logits of the same text.
    """
    ids = text_ids(model, count)
    hidden = lk.build_engine("standard", model).prefill_rows(ids)
    engine, executor = lk.build_engine("standard", model), model.decoder.step_executor  # type: ignore[attr-defined]
    engine.prefill(ids[:prompt])
    before, begin = executor.steps, time.perf_counter()
    stepped = [model.logits(engine.decode_step(token)) for token in ids[prompt:]]
    wait(model)
    seconds = time.perf_counter() - begin
    found = {"graph_steps": executor.steps - before, "graphs": executor.captures, "decode_seconds": seconds}
    found["answer"] = _answer(model, answer)
    expected = reference()
    prefill, decode = Apart(expected), Apart(expected)
    for first in range(0, count, _ROWS):
        prefill.add(first, model.logits(hidden[first : first + _ROWS]))
    for first in range(0, len(stepped), _ROWS):
        decode.add(prompt + first, torch.cat(stepped[first : first + _ROWS]))
    return {"prefill": prefill.figures(), "decode": decode.figures(), **found}


def close_enough(name: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`closeness` of a model by precision of activations; the bounds hold for the default one."""
    bound = {"activations": DEFAULT_ACTIVATIONS, "mean_kl": MEAN_KL, "top1": TOP1.get(name, 0.0)}
    default = rows[DEFAULT_ACTIVATIONS]
    kept = "error" not in default and all(
        default[kind]["mean_kl"] <= bound["mean_kl"] and default[kind]["top1"] >= bound["top1"]
        for kind in ("prefill", "decode")
    )
    in_graph = all(row.get("graph_steps") == row.get("decode", {}).get("rows") for row in rows.values())
    whole = not any("error" in row for row in rows.values())
    return {"ok": kept and in_graph and whole, "bound": bound, "rows": rows}


def _answer(model: Model, tokens: int) -> str:
    """The greedy answer to a question, for a reader's eye; of a base model, what follows it."""
    from larql_kv.model.chat import ChatTemplate

    prompt: list[int] | str = QUESTION
    try:
        template = ChatTemplate.from_tokenizer(model.tokenizer)
        text = template.render([{"role": "user", "content": QUESTION}])
        prompt = model.tokenizer.encode(text, add_special=False)
    except ModelError:
        pass
    said = lk.build_engine("standard", model).generate(prompt, max_tokens=tokens)
    return "".join(token.text for token in said)


def determinism(model: Model, ids: Sequence[int], steps: int) -> dict[str, Any]:
    """The same bits again; graph against kernel by kernel, across the window; running ahead against stepping;
    the capture masks against each other."""
    prompt = straddling(model, len(ids), steps)
    executor = model.decoder.step_executor  # type: ignore[attr-defined]
    before = executor.captures
    first = _steps(model, ids, prompt, steps)
    graphs = executor.captures - before
    again = _steps(model, ids, prompt, steps)
    with kernel_by_kernel(model.decoder):
        eager = _steps(model, ids, prompt, steps)
    stepped, last_logits, after = _greedy(model, ids[:prompt], steps, ahead=False)
    ahead, ahead_logits, ahead_after = _greedy(model, ids[:prompt], steps, ahead=True)
    masks = w10_parity.compare(model, ids[:prompt], max(1, steps // 2))
    found = {
        "twice_same_bits": torch.equal(first, again),
        "graph_same_bits_as_eager": torch.equal(first, eager),
        "ahead_same_tokens": ahead == stepped,
        "ahead_same_bits": torch.equal(after, ahead_after),
        "masks_same": w10_parity.identical(masks),
    }
    return {
        "ok": all(found.values()),
        **found,
        "positions": [prompt, prompt + steps],
        "window": _window(model),
        "graphs_captured": graphs,
        "eager_max_difference": float((first - eager).abs().max()),
        # A step's own head norms the row by another sum than the head alone does, where there is a post-norm.
        "ahead_logits_max_difference": float((last_logits - ahead_logits).abs().max()),
        "masks": masks,
    }


def straddling(model: Model, limit: int, steps: int) -> int:
    """A prompt length from which `steps` steps cross the sliding window; without one, a short one."""
    window = _window(model)
    wanted = window - steps // 2 if window else steps
    return max(1, min(wanted, limit - steps))


def _window(model: Model) -> int:
    """The widest window that a text can outgrow, 0 for none."""
    windows = [layer.window or 0 for layer in model.config.layers]
    return max((item for item in windows if item < model.config.context), default=0)


def _steps(model: Model, ids: Sequence[int], prompt: int, steps: int) -> torch.Tensor:
    """Logits (steps, vocab) of teacher-forced steps after `prompt` tokens."""
    engine = lk.build_engine("standard", model)
    engine.prefill(ids[:prompt])
    return torch.cat([model.logits(engine.decode_step(token)) for token in ids[prompt : prompt + steps]])


def _greedy(
    model: Model, prompt: Sequence[int], steps: int, ahead: bool
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Greedy tokens, the logits that the last one was chosen from, and the hidden of one more step."""
    engine = lk.build_engine("standard", model)
    token = int(engine.logits(engine.prefill(prompt)).argmax())
    if ahead:
        tokens = list(engine.decode_ahead(steps, token))
        logits = model.decoder.step_executor.logits()  # type: ignore[attr-defined]
        return tokens, logits, engine.decode_step(tokens[-1])
    tokens = []
    logits = torch.empty(0)
    for _ in range(steps):
        logits = engine.logits(engine.decode_step(token))
        token = int(logits.argmax())
        tokens.append(token)
    return tokens, logits, engine.decode_step(token)


def trace(model: Model, ids: Sequence[int], count: int) -> dict[str, Any]:
    """`decode_ahead` enqueues every step before the first token is read: what was enqueued when, and which
    tokens came. The events' times are milliseconds since the call."""
    engine, executor = lk.build_engine("standard", model), model.decoder.step_executor  # type: ignore[attr-defined]
    token = int(engine.logits(engine.prefill(ids)).argmax())
    for _ in engine.decode_ahead(2, token):  # captures
        pass
    engine.trim(len(ids))
    wait(model)
    before, begin = executor.steps, time.perf_counter()
    tokens = engine.decode_ahead(count, token)
    events = [_event("enqueued", executor.steps - before, begin)]
    for chosen in tokens:
        events.append(_event("token", executor.steps - before, begin) | {"id": chosen})
    enqueued = [event["steps_enqueued"] for event in events]
    return {"ok": enqueued == [count] * (count + 1), "steps": count, "events": events}


def _event(name: str, enqueued: int, begin: float) -> dict[str, Any]:
    ms = round((time.perf_counter() - begin) * 1e3, 3)
    return {"event": name, "steps_enqueued": enqueued, "ms": ms}


def wait(model: Model) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def allocated(model: Model) -> int:
    """Device bytes in use, by the allocator; in the interpreter those of every tensor that is alive."""
    if model.device.type == "cuda":
        return torch.cuda.memory_allocated(model.device)
    storages = (item.untyped_storage() for item in gc.get_objects() if isinstance(item, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def ledger(model: Model, ids: Sequence[int]) -> dict[str, Any]:
    """What an engine's ledger says it holds on the device, against the allocator: while it lives, and after.

    A first engine stays alive meanwhile: what engines on a model share is its, then.
    """
    place = "host" if model.device.type == "cpu" else "device"
    rows = {}
    for spec in LEDGER_SPECS:
        shared = _filled(model, spec, ids)
        gc.collect()
        before = allocated(model)
        engine = _filled(model, spec, ids)
        taken = allocated(model) - before
        both = Ledger.combined([shared.ledger(), engine.ledger()])
        held = both.total(place=place, capacity=True) - shared.ledger().total(place=place, capacity=True)
        del engine, both
        gc.collect()
        left = allocated(model) - before
        bound = max(LEDGER_SHARE * held, LEDGER_BYTES)
        rows[spec] = {
            "ok": abs(taken - held) <= bound and abs(left) <= bound,
            "ledger_bytes": held,
            "allocator_bytes": taken,
            "off": round(taken / held - 1, 5) if held else None,
            "left_when_deleted": left,
        }
    return {"ok": all(row["ok"] for row in rows.values()), "tokens": len(ids), "rows": rows}


def _filled(model: Model, spec: str, ids: Sequence[int]) -> lk.KvEngine:
    engine = lk.build_engine(spec, model)
    engine.prefill(ids)
    _step(engine)
    return engine


def _step(engine: lk.KvEngine) -> None:
    engine.decode_step(11)
    wait(engine.model)


@contextlib.contextmanager
def kernel_by_kernel(decoder: Any) -> Iterator[None]:
    """Inside, the decoder's steps are launched one kernel at a time; no graph is captured or replayed."""
    from larql_kv.backends.cuda import step

    graphs = step.StepProgram
    step.StepProgram = functools.partial(graphs, capture=False, pdl=False)  # type: ignore[misc,assignment]
    decoder.step_executor.forget()
    try:
        yield
    finally:
        step.StepProgram = graphs  # type: ignore[misc]
        decoder.step_executor.forget()
