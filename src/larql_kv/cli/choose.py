"""Which engine, and which model and prompt: everything that the words on the command line decide."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from larql_kv.errors import ModelError, SpecError

if TYPE_CHECKING:
    from larql_kv.ffn.policy import FfnPolicy
    from larql_kv.spec import EngineSpec

ENGINE_VARIABLE, RAW_VARIABLE = "LARQL_KV_ENGINE", "LARQL_RAW_PROMPT"
DEVICE_HELP = "Where to run: cpu, cuda or cuda:N."
FFN_HELP = (
    "FFN by layer: dense, walk:k=N, remote-walk:endpoint=URL (or a URL), null, "
    "or {walk:k=N}@layers=14-27;{dense}@otherwise."
)
ACTIVATIONS_HELP = "On cuda, what meets quantised weights in a step: int8, mixed or int16."


@dataclass(frozen=True)
class EngineChoice:
    """The engine to build, where the choice came from, and what the user should know about it."""

    spec: EngineSpec
    source: str  # --engine, LARQL_KV_ENGINE, --kv-cache or default
    warnings: tuple[str, ...] = ()


def choose_engine(
    engine: str | None = None,
    kv_cache: str | None = None,
    context_window: int = 0,
    environ: Mapping[str, str] | None = None,
) -> EngineChoice:
    """--engine, else LARQL_KV_ENGINE, else --kv-cache, else `standard`.

    Raises SpecError for a bad spec, and for a retrieval engine, which only the bench drives.
    """
    from larql_kv.engine import parse_spec
    from larql_kv.spec import kv_cache_spec

    environ = os.environ if environ is None else environ
    window = context_window or None
    warnings = []
    text, source = engine, "--engine"
    if text is None and environ.get(ENGINE_VARIABLE):
        text, source = environ[ENGINE_VARIABLE], ENGINE_VARIABLE
    if text is not None:
        spec = parse_spec(text, window)
        unused = bool(window) and _same_without_window(text, spec)
        if kv_cache is not None:
            warnings.append(
                f"both {source} {text!r} and --kv-cache {kv_cache!r} are given: {source} wins, "
                "--kv-cache is ignored"
            )
    else:
        source = "default" if kv_cache is None else "--kv-cache"
        spec = kv_cache_spec(kv_cache or "standard", context_window)
        unused = bool(window) and getattr(spec, "window", None) != window
    if unused:
        warnings.append(
            f"--context-window {context_window} has no effect on {spec.text!r}: it serves the names that "
            "need a window (sliding, bounded, markov-bounded)"
        )
    if spec.kind == "retrieval":
        raise SpecError(
            f"engine {spec.engine_name!r} retrieves instead of continuing a text and is for the bench only: "
            f"larql bench --engine {spec.text}"
        )
    return EngineChoice(spec, source, tuple(warnings))


def _same_without_window(text: str, spec: EngineSpec) -> bool:
    from larql_kv.engine import parse_spec

    try:
        return parse_spec(text) == spec
    except SpecError:  # a name that needs the window
        return False


@dataclass(frozen=True)
class Request:
    """What `larql run` was asked for: no prompt means a chat."""

    model: str
    prompt: str | None


def choose_request(words: Sequence[str]) -> Request:
    """The positional words of `larql run`: nothing, MODEL, PROMPT, or MODEL PROMPT.

    One word is a model when it is a short name, a GGUF file or a model's directory; else a prompt for the
    demo model. Raises ModelError for a single word that can only be meant as a path and is none.
    """
    from larql_kv.model.load import DEFAULT_MODEL

    if not words:
        return Request(DEFAULT_MODEL, None)
    if len(words) == 1:
        return Request(words[0], None) if names_model(words[0]) else Request(DEFAULT_MODEL, words[0])
    return Request(words[0], words[1])


def names_model(word: str) -> bool:
    """Whether a lone word is meant as a model. Raises ModelError for a path-like word without a file."""
    from larql_kv.model.catalog import is_vindex, short_names

    if word.lower() in short_names():
        return True
    if not word or len(word) > 4096 or "\0" in word or "\n" in word:
        return False
    try:
        path = Path(word).expanduser()
        if path.is_dir():
            return (path / "config.json").is_file() or is_vindex(path) or _path_like(word)
        if path.is_file() and path.suffix.lower() == ".gguf":
            return True
    except (OSError, RuntimeError):  # a name too long for a path; no such user's home
        return False
    if _path_like(word):
        raise ModelError(
            f"{word}: no GGUF file and no directory with a model is there; to use it as a prompt, name "
            "the model before it"
        )
    return False


def _path_like(word: str) -> bool:
    """One word that starts like a path or ends like a model file."""
    return not re.search(r"\s", word) and bool(re.match(r"~?/.|\.\.?/.", word) or word.endswith(".gguf"))


def raw_wanted(flag: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the prompt goes in as it is: --raw, or LARQL_RAW_PROMPT=1."""
    value = (os.environ if environ is None else environ).get(RAW_VARIABLE, "")
    return flag or value.strip().lower() in ("1", "true", "yes", "on")


def check_ffn(spec: str) -> FfnPolicy:
    """The policy that `--ffn` says, before anything is loaded. Raises SpecError."""
    from larql_kv.ffn.policy import parse_ffn

    return parse_ffn(spec)
