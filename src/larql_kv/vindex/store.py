"""Opening vindexes, the print of a model, and how anything is written into a vindex's directory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from larql_kv.errors import StoreError
from larql_kv.model.catalog import is_vindex
from larql_kv.model.config import ModelConfig
from larql_kv.model.shapes import BIASES, layer_shapes
from larql_kv.model.tensors import TensorSource
from larql_kv.model.vindex_config import config_print
from larql_kv.model.vindex_files import read_manifest
from larql_kv.model.vindex_source import PatchedTensors, VindexTensors, open_vindex
from larql_kv.vindex.index import TopTokens, VectorIndex

if TYPE_CHECKING:
    from larql_kv.model.model import Model

_HASH_CHUNK = 4 << 20
_PRINTS: WeakKeyDictionary[TensorSource, str] = WeakKeyDictionary()


def vindex_path(directory: str | os.PathLike[str]) -> Path:
    """The directory of a vindex. Raises StoreError when it is none."""
    path = Path(directory).expanduser()
    if not is_vindex(path):
        raise StoreError(f"{path}: is no vindex (no index.json); make one with `larql vindex build`")
    return path


def open_index(directory: str | os.PathLike[str]) -> VectorIndex:
    """See `VectorIndex.open`."""
    base, overlay = open_vindex(vindex_path(directory))
    return VectorIndex(base.config, base, lambda: base.print, overlay, _top_tokens(base))


def index_of_model(
    model: Model, directory: str | os.PathLike[str] | None = None, down_form: str = "f32"
) -> VectorIndex:
    """See `VectorIndex.of_model`."""
    tensors, overlay = model.tensors, None
    if isinstance(tensors, PatchedTensors):
        tensors, overlay = tensors.base, tensors.overlay
    if directory is not None:
        index = open_index(directory)
        mine = model_print(model.config, tensors)
        if mine not in (index.base_print, read_manifest(vindex_path(directory)).model_print):
            raise StoreError(
                f"{os.fspath(directory)}: is of another model (print {index.base_print[:16]}) than "
                f"{model.source} (print {mine[:16]}); make one of it with `larql vindex build`"
            )
        return index
    top = _top_tokens(tensors) if isinstance(tensors, VindexTensors) else None
    return VectorIndex(
        model.config, tensors, lambda: model_print(model.config, tensors), overlay, top, down_form
    )


def _top_tokens(base: VindexTensors) -> TopTokens:
    held = lru_cache(maxsize=None)(base.down_meta)

    def top_tokens(layer: int, feature: int) -> list[tuple[int, float]]:
        meta = held(layer)
        if meta is None:
            return []
        return list(zip(meta[0][feature].tolist(), meta[1][feature].tolist(), strict=True))

    return top_tokens


def tensor_names(config: ModelConfig, tensors: TensorSource) -> list[str]:
    """The canonical names that a model of that config has, in a fixed order."""
    names = ["embed", "final_norm", *(() if config.tied else ("head",))]
    suffixes = [*layer_shapes(config), *BIASES]
    for layer in range(config.layer_count):
        names += [f"layers.{layer}.{suffix}" for suffix in suffixes if f"layers.{layer}.{suffix}" in tensors]
    return names


def model_print(config: ModelConfig, tensors: TensorSource) -> str:
    """BLAKE2b (64 hex digits) of the config without its name, and of every tensor's type, shape and bytes.

    A vindex knows its own; of other sources all weights are read, once a process.
    """
    known = getattr(tensors, "print", None) or _PRINTS.get(tensors)
    if known is None:
        hashed = hashlib.blake2b(config_print(config).encode(), digest_size=32)
        for name in tensor_names(config, tensors):
            raw = tensors.get(name)
            hashed.update(f"\n{name} {raw.kind} {raw.shape} ".encode())
            data = raw.data.reshape(raw.data.shape[0], -1)
            step = max(1, _HASH_CHUNK // max(1, data.shape[1]))
            for first in range(0, len(data), step):
                hashed.update(data[first : first + step].tobytes())
        known = _PRINTS[tensors] = hashed.hexdigest()
    return known


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or not at all. Raises StoreError."""
    with named_errors(path):
        path.parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Errors of the file system in here become StoreErrors about `path`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One writer at a time in `directory`. Raises StoreError when another one is at work."""
    with named_errors(directory), open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"{directory}: another process is changing it; try again when it is done"
            ) from None
        yield
