"""What a user waits for before the first token: import, header, tokenizer, packing, a whole process."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import Result

from larql_kv.errors import ModelError
from larql_kv.model.catalog import HubId, resolve
from larql_kv.model.config_gguf import config_from_gguf
from larql_kv.model.gguf_file import GgufFile
from larql_kv.model.load import load_model
from larql_kv.model.tokenizer import Tokenizer

MODELS = ("smollm2-135m", "gemma3-270m")
_FIRST = """
import larql_kv as lk
model = lk.load_model({path!r})
engine = lk.build_engine("standard", model)
print(next(engine.generate("The capital of France is", max_tokens=1)).id)
"""


def run(quick: bool, roof: float) -> list[Result]:
    """`roof` is not used. Quick: the tiny model of the examples instead of the real ones."""
    repeats = 1 if quick else 5
    results = [_timed("import larql_kv", lambda: _python("import larql_kv"), repeats)]
    results.append(_timed("bare interpreter", lambda: _python("pass"), repeats))
    results.append(_timed("import torch", lambda: _python("import torch"), repeats))
    if quick:
        sys.path.append(str(Path(__file__).parents[2] / "examples"))
        from tiny_model import write_tiny_model

        with tempfile.TemporaryDirectory() as folder:
            path = write_tiny_model(Path(folder))
            results.append(_timed("tiny: load", lambda: load_model(path), repeats))
            results.append(_timed("tiny: process to first token", lambda: _first(path), repeats))
        return results
    for model in MODELS:
        try:
            path = resolve(model)
        except ModelError:
            continue
        assert not isinstance(path, HubId)
        results += _of_file(model, path, repeats)
    return results


def _of_file(model: str, path: Path, repeats: int) -> list[Result]:
    file = GgufFile.open(path)
    header = _timed(f"{model}: header", lambda: GgufFile.open(path), repeats)
    config = _timed(f"{model}: config", lambda: config_from_gguf(file), repeats)
    tokenizer = _timed(f"{model}: tokenizer", lambda: Tokenizer.from_gguf(file), repeats)
    whole = _timed(f"{model}: load_model, all of it", lambda: load_model(path), repeats)
    packing = whole.microseconds - header.microseconds - config.microseconds - tokenizer.microseconds
    rest = Result("startup", f"{model}: packing weights (the rest)", packing)
    first = _timed(f"{model}: process to first token", lambda: _first(path), repeats)
    return [header, config, tokenizer, rest, whole, first]


def _timed(case: str, call: Callable[[], object], repeats: int) -> Result:
    times = []
    for _ in range(repeats + 1):  # the first one warms the page cache
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return Result("startup", case, 1e6 * statistics.median(times[1:]))


def _python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def _first(path: Path) -> None:
    _python(_FIRST.format(path=str(path)))
