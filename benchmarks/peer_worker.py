"""One system under test in a process of its own; commands come as JSON lines on stdin, answers go to stdout.

Runs under any interpreter that has the system: nothing but numpy is imported beside it. Commands:

    {"do": "run", "ids": [...], "new": N}   from empty state: prefill (up to the first id), then N timed steps
    {"do": "logits", "ids": [...], "prefill": P, "path": FILE}   P < len: steps P-1..; P == len: one pass
    {"do": "memory"}                        peak resident bytes so far

A step is the whole token: the forward pass, the head, and the choice of the next id.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np


class System(ABC):
    """An inference system on one model. `prefill` starts from empty state."""

    @abstractmethod
    def prefill(self, ids: list[int]) -> int:
        """Run the prompt, logits for its last position only; the greedy next id."""

    @abstractmethod
    def step(self, token: int) -> int:
        """Append one token; the greedy next id."""

    @abstractmethod
    def last_logits(self) -> np.ndarray:
        """(vocab,) float32 that the last id was chosen from."""

    @abstractmethod
    def all_logits(self, ids: list[int]) -> np.ndarray:
        """(len(ids), vocab) float32 of one pass from empty state."""


class Larql(System):
    def __init__(self, model: str, engine: str, dtype: str) -> None:
        import larql_kv as lk

        self._build = lambda: lk.build_engine(engine, self._model)
        self._model = lk.load_model(model, dtype=None if dtype == "auto" else dtype)

    def prefill(self, ids: list[int]) -> int:
        self._engine = self._build()
        return self._choose(self._engine.prefill(ids))

    def step(self, token: int) -> int:
        return self._choose(self._engine.decode_step(token))

    def _choose(self, hidden: Any) -> int:
        self._logits = self._model.logits(hidden)
        return int(self._logits.argmax())

    def last_logits(self) -> np.ndarray:
        return self._logits[0].numpy()

    def all_logits(self, ids: list[int]) -> np.ndarray:
        return self._model.logits(self._build().prefill_rows(ids)).numpy()


class Transformers(System):
    """A manual loop with DynamicCache, the fastest way that needs no compilation."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        self._torch = torch
        torch.set_grad_enabled(False)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._new_cache = lambda: DynamicCache(config=self._model.config)
        # transformers 5.24 renamed the argument; the old name goes in 5.40.
        named = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"

    def prefill(self, ids: list[int]) -> int:
        self._cache = self._new_cache()
        return self._run(ids)

    def step(self, token: int) -> int:
        return self._run([token])

    def _run(self, ids: list[int]) -> int:
        with self._torch.inference_mode():
            rows = self._torch.tensor([ids])
            cache = {self._cache_argument: self._cache}
            out = self._model(rows, use_cache=True, logits_to_keep=1, **cache)
            self._logits = out.logits[0, -1]
            return int(self._logits.argmax())

    def last_logits(self) -> np.ndarray:
        return self._logits.float().numpy()

    def all_logits(self, ids: list[int]) -> np.ndarray:
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


class LlamaCpp(System):
    """llama.cpp through its low-level API: `llama_decode` and an argmax over the logits it points to."""

    _BATCH = 512

    def __init__(self, model: str, flash: bool, threads: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._llama = llama_cpp.Llama(
            model_path=model,
            n_ctx=2048,
            n_batch=self._BATCH,
            n_ubatch=self._BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash,
            verbose=False,
        )
        self._context = self._llama.ctx
        self._vocab = self._llama.n_vocab()

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def prefill(self, ids: list[int]) -> int:
        self._clear()
        return self._run(ids)

    def step(self, token: int) -> int:
        return self._run([token])

    def _run(self, ids: list[int]) -> int:
        tokens = (self._lib.llama_token * len(ids))(*ids)
        self._decode(self._lib.llama_batch_get_one(tokens, len(ids)))
        return int(self.last_logits().argmax())

    def _decode(self, batch: Any) -> None:
        code = self._lib.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def last_logits(self) -> np.ndarray:
        at = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(at, shape=(self._vocab,))

    def all_logits(self, ids: list[int]) -> np.ndarray:
        self._clear()
        rows = []
        for start in range(0, len(ids), self._BATCH):
            part = ids[start : start + self._BATCH]
            batch = self._lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for index, token in enumerate(part):
                batch.token[index], batch.pos[index] = token, start + index
                batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
            self._decode(batch)
            at = self._lib.llama_get_logits(self._context)
            rows.append(np.ctypeslib.as_array(at, shape=(len(part), self._vocab)).copy())
            self._lib.llama_batch_free(batch)
        return np.concatenate(rows)


def cpu_seconds() -> tuple[float, float, float]:
    """(wall, of every process, of this one): what others do meanwhile shows in the timings."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, time.process_time()


def run(system: System, ids: list[int], new: int) -> dict[str, Any]:
    before = cpu_seconds()
    begin = time.perf_counter()
    tokens = [system.prefill(ids)]
    prefill, seconds = time.perf_counter() - begin, []
    for _ in range(new):
        begin = time.perf_counter()
        tokens.append(system.step(tokens[-1]))
        seconds.append(time.perf_counter() - begin)
    wall, busy, own = (now - then for now, then in zip(cpu_seconds(), before, strict=True))
    others = max(0.0, busy - own) / wall
    return {"prefill_s": prefill, "step_s": seconds, "ids": tokens, "other_cores": others}


def logits(system: System, ids: list[int], prefill: int, path: str) -> dict[str, Any]:
    if prefill == len(ids):
        rows = system.all_logits(ids)
    else:
        system.prefill(ids[:prefill])
        kept = [system.last_logits().copy()]
        for token in ids[prefill:-1]:
            system.step(token)
            kept.append(system.last_logits().copy())
        rows = np.stack(kept)
    np.save(path, rows)
    return {"rows": len(rows)}


def peak_rss() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def build(arguments: argparse.Namespace) -> System:
    if arguments.system == "larql":
        return Larql(arguments.model, arguments.engine, arguments.dtype)
    if arguments.system == "transformers":
        return Transformers(arguments.model, arguments.dtype)
    return LlamaCpp(arguments.model, arguments.flash, arguments.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--system", choices=("larql", "transformers", "llama.cpp"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default="standard")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--flash", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    out, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer

    def answer(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    begin = time.perf_counter()
    try:
        system = build(arguments)
        answer({"load_s": time.perf_counter() - begin})
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "run":
                answer(run(system, command["ids"], command["new"]))
            elif command["do"] == "logits":
                answer(logits(system, command["ids"], command["prefill"], command["path"]))
            else:
                answer({"peak_rss": peak_rss()})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
