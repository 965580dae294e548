"""What cuda_check.py runs in processes of their own; each but the first prints one line of JSON at the end.

reference FOLDER COUNT NAME PATH                     the CPU's float32 logits, to FOLDER/NAME.npy
closeness FOLDER COUNT NAME PATH ACTIVATIONS PROMPT ANSWER
behaviour PATH PARTS PROMPT COUNT STEPS AHEAD        determinism, trace, ledger of one model
load PATH                                            peak host memory of loading a GGUF file
steps                                                a few steps of a tiny random model, for compute-sanitizer
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import larql_kv as lk

_ROWS = 64  # logit rows made at once: a large vocabulary times 1,000 rows is a gigabyte


def reference(folder: str, count: str, name: str, path: str) -> None:
    """Logits (count, vocab) float32 of one pass over the benchmarks' text; the file appears when whole."""
    from larql_kv.bench.text import text_ids

    model = lk.load_model(path, dtype="float32")
    ids = text_ids(model, int(count))
    hidden = lk.build_engine("standard", model).prefill_rows(ids)
    part = Path(folder, f"{name}.part.npy")
    out = np.lib.format.open_memmap(part, "w+", np.float32, (len(ids), model.config.vocab))
    for first in range(0, len(ids), _ROWS):
        out[first : first + _ROWS] = model.logits(hidden[first : first + _ROWS]).numpy()
    out.flush()
    part.replace(Path(folder, f"{name}.npy"))


def closeness(
    folder: str, count: str, name: str, path: str, activations: str, prompt: str, answer: str
) -> dict[str, Any]:
    import cuda_check_models

    def wait_for_reference() -> np.ndarray:
        whole, failed = Path(folder, f"{name}.npy"), Path(folder, f"{name}.failed")
        while not whole.exists():  # for as long as the parent lets this process live
            if failed.exists():
                raise RuntimeError(f"the CPU's run failed: {failed.read_text()}")
            time.sleep(0.1)
        return np.load(whole, mmap_mode="r")

    model = lk.load_model(path, device="cuda", activations=activations)
    return cuda_check_models.closeness(model, int(prompt), int(answer), int(count), wait_for_reference)


def behaviour(path: str, parts: str, prompt: str, count: str, steps: str, ahead: str) -> dict[str, Any]:
    """Each part of `parts` by its name; one that fails is an error of its own."""
    import cuda_check_models as checks

    from larql_kv.bench.text import text_ids

    model = lk.load_model(path, device="cuda")
    ids = text_ids(model, int(count))
    every = {
        "determinism": lambda: checks.determinism(model, ids, int(steps)),
        "trace": lambda: checks.trace(model, ids[: int(prompt)], int(ahead)),
        "ledger": lambda: checks.ledger(model, ids),
    }
    found: dict[str, Any] = {}
    for part in parts.split(","):
        begin = time.perf_counter()
        try:
            found[part] = every[part]()
        except Exception as error:
            found[part] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        found[part]["seconds"] = round(time.perf_counter() - begin, 1)
    return found


def load(path: str) -> dict[str, Any]:
    """Load twice: what the libraries take once a process (kernels loaded lazily) is in the first figure only.

    The tokenizer is made before and counted apart: in a small model it is a third of the file, and no weight.
    """
    from larql_kv.model.config_gguf import config_from_gguf
    from larql_kv.model.gguf_file import GgufFile
    from larql_kv.model.gguf_source import GgufSource
    from larql_kv.model.load import Form, assemble
    from larql_kv.model.tokenizer import Tokenizer

    form = Form("cuda")
    if torch.cuda.is_available():
        ones = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
        torch.mm(ones, ones, out_dtype=torch.float32)
        torch.cuda.synchronize()
    before = _status("VmRSS")
    tokenizer = Tokenizer.from_gguf(GgufFile.open(Path(path)))
    result: dict[str, Any] = {
        "file_bytes": os.path.getsize(path),
        "tokenizer_bytes": _status("VmRSS") - before,
    }
    for run in ("first", "again"):
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):  # the peak starts again; where it cannot, it comes out too high
            Path("/proc/self/clear_refs").write_text("5")
        before, begin = _status("VmRSS"), time.perf_counter()
        file = GgufFile.open(Path(path))
        config = config_from_gguf(file)
        model = assemble(config, GgufSource(file, config), tokenizer, form, path)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        result[run] = {"seconds": seconds, "peak_bytes": _status("VmHWM") - before, "before": before}
        del model, file, config
    return result


def _status(field: str) -> int:
    """Bytes, from /proc/self/status; a peak falls back on getrusage."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def steps() -> dict[str, Any]:
    """Prefill past a window and a block, two steps and two run ahead, launched kernel by kernel, while
    nothing and while everything is staged."""
    from cuda_check_models import kernel_by_kernel

    from larql_kv.model.shape_models import random_model
    from larql_kv.model.shape_recipes import SHAPES

    small: dict[str, Any] = {"hidden": 256, "intermediate": 512, "heads": 2, "head_dim": 64, "vocab": 512}
    if os.environ.get("TRITON_INTERPRET") == "1":
        small |= {"hidden": 32, "intermediate": 32, "heads": 1, "head_dim": 32, "vocab": 288, "mix": "q8_0"}
    shape = replace(SHAPES["gemma3-270m"], name="tiny", layers=1, context=256, window=64, **small)
    model = random_model(shape, "cuda")
    ids = []
    with kernel_by_kernel(model.decoder):
        for spec, mask in (("standard", None), ("markov-rs", "full")):
            engine = lk.build_engine(spec, model)
            if mask is not None:
                engine.set_capture(mask)
            engine.prefill([20 + index for index in range(70)])
            for token in (30, 31):
                engine.logits(engine.decode_step(token))
            ids.append(list(engine.decode_ahead(2, 32)))
    return {"ids": ids}


VERBS = {item.__name__: item for item in (reference, closeness, behaviour, load, steps)}

if __name__ == "__main__":
    made = VERBS[sys.argv[1]](*sys.argv[2:])
    if made is not None:
        print(json.dumps(made))
