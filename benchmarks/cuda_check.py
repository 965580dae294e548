"""Proves the CUDA backend right on a card: one run, one JSON file that says so for exactly this source.

    PYTHONPATH=src python benchmarks/cuda_check.py --models /tmp/models --output check.json

tests        the kernel tests, on the card
closeness    both real models against the CPU's float32 logits: KL and top-1, prefill and graph steps
determinism  the same bits again; graph against single launches; running ahead; the capture masks
trace        steps that run ahead are enqueued before their first token is read
ledger       an engine's ledger against the allocator
load         peak host memory of loading a GGUF file
sanitizer    compute-sanitizer memcheck over a few steps, where the machine has it

Parts run at the same time, in processes of their own (most of their time is compiling kernels); none of them
is a timing. One that fails does not stop the others; the file is rewritten as they end. The models are
NAME.gguf in the folder --models (default .models/), else wherever the package finds them (`carry_models.py`
carries them). Exit code 1 unless every part asked for passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cuda_check_models as checks
from cuda_check_report import default_output, grid, header, sanitizer_verdict, summary

from larql_kv.backends.cuda.weights import ACTIVATIONS
from larql_kv.bench.report import write_text
from larql_kv.errors import ModelError
from larql_kv.model.catalog import HubId, resolve

HERE = Path(__file__).parent
ROOT = HERE.parent
NAMES = ("smollm2-135m", "gemma3-270m")
PARTS = ("tests", "closeness", "determinism", "trace", "ledger", "load", "sanitizer")
LOAD_BOUND = 1.3  # peak host memory of a load, in sizes of the file
_BEHAVIOUR = ("determinism", "trace", "ledger")  # one process a model
_SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
_SANITIZER_SECONDS = 90.0

Row = dict[str, Any]  # a part's result, or one model's in it


@dataclass(frozen=True)
class Settings:
    """Counts are tokens unless said otherwise. A model whose file is missing is None."""

    models: dict[str, Path | None]
    tokens: int = 1000
    prompt: int = 32
    steps: int = 64
    ahead: int = 32
    answer: int = 40
    workers: int = 8  # processes of the tests
    jobs: int = 24  # processes at the same time, the tests being one of them
    tests: tuple[str, ...] = ("tests/cuda", "tests/state/test_bridge.py")
    seconds: float = 470.0  # of the whole run
    allow_missing: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=ROOT / ".models", metavar="FOLDER")
    parser.add_argument("--parts", default=",".join(PARTS), help="of: " + ",".join(PARTS))
    parser.add_argument("--tokens", type=int, default=Settings.tokens, help="compared with the CPU's")
    parser.add_argument("--workers", type=int, default=Settings.workers, help="processes of the tests")
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="limit of the whole run")
    parser.add_argument("--allow-missing", action="store_true", help="a missing model fails nothing")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="a result of this source and card: its other parts count"
    )
    parser.add_argument("--output", type=Path, help="default: results/<date>-<card>-cuda-check.json")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    settings = Settings(
        {name: find_model(name, arguments.models) for name in NAMES},
        tokens=arguments.tokens,
        workers=arguments.workers,
        seconds=arguments.seconds,
        allow_missing=arguments.allow_missing,
    )
    output = arguments.output or default_output()
    result = Check(settings, output, parts, arguments.keep).run()
    print(f"\n{grid(result).plain()}\n\nresults in {output}")
    sys.exit(0 if all(result["parts"][part]["ok"] for part in parts) else 1)


def find_model(name: str, folder: Path) -> Path | None:
    """NAME.gguf in `folder`, or what the package knows by that name; None where it is not here."""
    path = folder / f"{name}.gguf"
    if path.is_file():
        return path
    try:
        found = resolve(name)
    except ModelError:
        return None
    return None if isinstance(found, HubId) else found


class Check:
    """One run: its jobs, and the file that their results are written to."""

    def __init__(
        self, settings: Settings, output: Path, parts: Sequence[str] = PARTS, keep: Path | None = None
    ) -> None:
        self.settings, self.output, self.parts, self.keep = settings, output, parts, keep
        self.models = {name: path for name, path in settings.models.items() if path is not None}
        self.count = settings.prompt + settings.tokens
        self.children: list[subprocess.Popen[str]] = []

    def run(self) -> dict[str, Any]:
        """Every part's result; a part ends when its last process has."""
        self._begin = time.perf_counter()
        models = {name: path and str(path) for name, path in self.settings.models.items()}
        sizes = asdict(self.settings) | {"models": models, "tests": list(self.settings.tests)}
        self.result = header(sizes)
        with (
            tempfile.TemporaryDirectory(prefix="larql-check-") as folder,
            ThreadPoolExecutor(self.settings.jobs) as pool,
        ):
            self.folder = Path(folder)
            try:
                jobs = self._start(pool)
                for part in PARTS:
                    if part in self.parts:
                        self._write(part, self._collected(part, jobs))
            finally:
                for child in self.children:
                    _stop(child)
        return self.result

    def left(self) -> float:
        """Seconds until the run has to end."""
        return max(0.1, self.settings.seconds - (time.perf_counter() - self._begin))

    # -- jobs ------------------------------------------------------------------------------------------

    def _start(self, pool: ThreadPoolExecutor) -> dict[tuple[str, ...], Future[Row]]:
        """The jobs by (part, model, precision); `behaviour` stands for the parts that share a process."""
        jobs: dict[tuple[str, ...], Future[Row]] = {}

        def start(key: tuple[str, ...], job: Callable[..., Row], *words: Any) -> None:
            jobs[key] = pool.submit(_guarded, job, *words)

        if "closeness" in self.parts:  # first: the others wait for it
            for name, path in self.models.items():
                start(("reference", name), self._reference, name, path)
                for activations in ACTIVATIONS:
                    start(("closeness", name, activations), self._closeness, name, path, activations)
        shared = [part for part in _BEHAVIOUR if part in self.parts]
        for name, path in self.models.items():
            if shared:
                start(("behaviour", name), self._behaviour, path, shared)
            if "load" in self.parts:
                start(("load", name), self._load, path)
        if "tests" in self.parts:
            start(("tests",), self._tests)
        if "sanitizer" in self.parts:
            start(("sanitizer",), self._sanitizer)
        return jobs

    def _collected(self, part: str, jobs: dict[tuple[str, ...], Future[Row]]) -> Row:
        """The part's result, of all its jobs."""
        if (part,) in jobs:
            return jobs[part,].result()
        rows: dict[str, Row] = {}
        for name, path in self.settings.models.items():
            if path is None:
                rows[name] = {"ok": self.settings.allow_missing, "missing": True}
            elif part == "closeness":
                found = {kind: jobs[part, name, kind].result() for kind in ACTIVATIONS}
                rows[name] = checks.close_enough(name, found)
            elif part in _BEHAVIOUR:
                every = jobs["behaviour", name].result()
                rows[name] = every if "error" in every else every[part]
            else:
                rows[name] = jobs[part, name].result()
        return {"ok": all(row["ok"] for row in rows.values()), "models": rows}

    def _write(self, part: str, found: Row) -> None:
        found["after_seconds"] = round(time.perf_counter() - self._begin, 1)
        self.result["parts"] |= self._kept() | {part: found}
        self.result["ok"] = all(self.result["parts"].get(name, {}).get("ok") for name in PARTS)
        write_text(self.output, json.dumps(self.result, indent=1) + "\n")
        print(f"[{found['after_seconds']} s] {part}: {summary(found)}", file=sys.stderr, flush=True)

    def _kept(self) -> dict[str, Row]:
        """The other parts that `keep` holds by now (its run may go on beside this one)."""
        if self.keep is None or not self.keep.exists():
            return {}
        old = json.loads(self.keep.read_text())
        if any(old[key] != self.result[key] for key in ("backends_cuda_hash", "card", "commit")):
            return {}
        return {part: found for part, found in old["parts"].items() if part not in self.parts}

    def _tests(self) -> Row:
        report = self.folder / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-n", str(self.settings.workers)] if self.settings.workers > 1 else []
        code, said = self._child([*command, *self.settings.tests])
        cases = ET.parse(report).findall(".//testcase") if report.exists() else []
        failed = {
            f"{case.get('classname')}::{case.get('name')}": (found.get("message") or "")[:300]
            for case in cases
            for found in case
            if found.tag in ("failure", "error")
        }
        skipped = sum(found.tag == "skipped" for case in cases for found in case)
        passed = len(cases) - len(failed) - skipped
        ok = code == 0 and not failed and passed > 0
        if not ok:
            print(said[-6000:], file=sys.stderr, flush=True)
        found: Row = {"ok": ok, "passed": passed, "failed": len(failed), "skipped": skipped}
        return found | ({} if ok else {"exit_code": code, "failures": failed, "tail": said[-2000:]})

    def _reference(self, name: str, path: Path) -> Row:
        """The CPU's logits; those who wait for them are told when they will not come."""
        try:
            alone = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
            self._verb("reference", self.folder, self.count, name, path, extra=alone)
        except Exception as error:
            Path(self.folder, f"{name}.failed").write_text(str(error))
            raise
        return {"ok": True}

    def _closeness(self, name: str, path: Path, activations: str) -> Row:
        sizes = (self.settings.prompt, self.settings.answer)
        return self._verb("closeness", self.folder, self.count, name, path, activations, *sizes)

    def _behaviour(self, path: Path, parts: Sequence[str]) -> Row:
        sizes = (self.settings.prompt, self.count, self.settings.steps, self.settings.ahead)
        return self._verb("behaviour", path, ",".join(parts), *sizes)

    def _load(self, path: Path) -> Row:
        found = self._verb("load", path)
        share = found["again"]["peak_bytes"] / found["file_bytes"]
        return {"ok": share <= LOAD_BOUND, "peak_over_file": round(share, 3), "bound": LOAD_BOUND} | found

    def _sanitizer(self) -> Row:
        program = next(filter(None, map(shutil.which, _SANITIZERS)), None)
        if program is None:
            return {"ok": True, "status": "not available: no compute-sanitizer on this machine"}
        self._verb("steps")  # by itself first: compiles the kernels
        # Every tensor an allocation of its own, or writes past one land in a neighbour and are not seen.
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        begin = time.perf_counter()
        tool = [program, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "99"]
        try:
            code, said = self._child([*tool, *_words("steps")], alone, _SANITIZER_SECONDS)
        except subprocess.TimeoutExpired:
            return {"ok": True, "status": f"not finished within {_SANITIZER_SECONDS:g} s"}
        return sanitizer_verdict(code, said) | {"tool_seconds": round(time.perf_counter() - begin, 1)}

    # -- processes -------------------------------------------------------------------------------------

    def _verb(self, verb: str, *words: Any, extra: dict[str, str] | None = None) -> Row:
        """What that verb of cuda_check_child.py answers. Raises RuntimeError with its last words."""
        code, said = self._child(_words(verb, *words), extra)
        if code:
            *before, last = said.strip().splitlines() or [""]
            raise RuntimeError("\n".join([f"{verb}: exit code {code}: {last}", *before[-12:]]))
        answers = [line for line in said.splitlines() if line.startswith("{")]
        return json.loads(answers[-1]) if answers else {}

    def _child(
        self, command: Sequence[str], extra: dict[str, str] | None = None, seconds: float = float("inf")
    ) -> tuple[int, str]:
        """Exit code and what it printed; it and its children end with the time. Raises TimeoutExpired."""
        child = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=child_environment() | (extra or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.children.append(child)
        try:
            said, _ = child.communicate(timeout=min(seconds, self.left()))
        except BaseException:
            _stop(child)
            raise
        return child.returncode, said


def _guarded(job: Callable[..., Row], *words: Any) -> Row:
    """A failure is a result."""
    try:
        return job(*words)
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def _words(verb: str, *words: Any) -> list[str]:
    return [sys.executable, str(HERE / "cuda_check_child.py"), verb, *map(str, words)]


def _stop(child: subprocess.Popen[str]) -> None:
    """End a process that was started here, and its children."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def child_environment() -> dict[str, str]:
    """This process's, with the package's source on the path; one thread each, for there are many of them."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    main()
