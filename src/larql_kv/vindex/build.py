"""Building a vindex: tensor by tensor in bounded memory, into DIR.partial, which then becomes DIR."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from larql_kv.errors import ModelError, SpecError, StoreError
from larql_kv.model.catalog import is_vindex
from larql_kv.model.load import ModelFiles
from larql_kv.model.safetensors_file import read_json
from larql_kv.model.tensors import RawTensor
from larql_kv.model.vindex_files import (
    FORMATS,
    FileEntry,
    Manifest,
    TensorEntry,
    file_of,
    read_manifest,
)
from larql_kv.model.vindex_rows import DOWN_FORMS, FLOAT_KINDS, Rows, feature_major_kind, row_bytes
from larql_kv.vindex.store import locked, model_print, named_errors, sync_directory, tensor_names, write_whole
from larql_kv.vindex.tensor_file import file_checksum, write_tensors
from larql_kv.vindex.tokenizer_files import tokenizer_files

PROGRESS = "progress.json"
Progress = Callable[[str, int, int], None]  # what is written, how much is done, of how much


def silent(what: str, done: int, total: int) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class BuildSettings:
    """How weights are held: `format` stored, f32 or bf16; `down_features` f32, bf16 or q8_0 (quantised
    models stored as they are)."""

    format: str = "stored"
    down_features: str = "f32"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise SpecError(f"unknown format {self.format!r}; choose one of {', '.join(FORMATS)}")
        if self.down_features not in DOWN_FORMS:
            raise SpecError(f"down features cannot be {self.down_features!r}; choose {', '.join(DOWN_FORMS)}")


@dataclass
class _Plan:
    """What is to be written."""

    settings: BuildSettings
    model_print: str
    files: dict[str, list[tuple[str, Rows]]]

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for tensors in self.files.values() for _, rows in tensors)

    @property
    def down_features(self) -> str | None:
        """The chosen precision, where any tensor took it."""
        both = {name for tensors in self.files.values() for name, _ in tensors}
        return self.settings.down_features if any(name.endswith(".down") for name in both) else None

    @property
    def identity(self) -> dict[str, Any]:
        """What a build that goes on must have in common with the one that was stopped."""
        return {
            "model": self.model_print,
            "format": self.settings.format,
            "down_features": self.settings.down_features,
        }


@dataclass
class _Done:
    """Finished files of a build, kept in DIR.partial."""

    identity: dict[str, Any]
    files: dict[str, FileEntry] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def save(self, partial: Path) -> None:
        files = {name: [entry.nbytes, entry.blake2b] for name, entry in self.files.items()}
        value = {"identity": self.identity, "files": files, "errors": self.errors}
        write_whole(partial / PROGRESS, json.dumps(value).encode())

    @classmethod
    def load(cls, partial: Path, identity: dict[str, Any]) -> _Done:
        """What was finished and is still whole. Raises StoreError for a build of something else."""
        path = partial / PROGRESS
        if not path.exists():
            return cls(identity)
        try:
            value = read_json(path)
            files = {name: FileEntry(*entry) for name, entry in value["files"].items()}
            errors, found = dict(value["errors"]), value["identity"]
        except (ModelError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path}: is damaged ({error}); remove {partial} and build again") from error
        if found != identity:
            raise StoreError(
                f"{partial}: holds an unfinished build of another model or with other settings; "
                "remove it, or give the same model and settings to go on with it"
            )
        whole = {name: entry for name, entry in files.items() if _is_whole(partial / name, entry)}
        return cls(identity, whole, errors)


def _is_whole(path: Path, entry: FileEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.nbytes and file_checksum(path) == entry.blake2b


def build_vindex(
    files: ModelFiles,
    directory: Path,
    settings: BuildSettings | None = None,
    progress: Progress = silent,
) -> Manifest:
    """Write `files` as a vindex into `directory`, which must not exist, or hold this very vindex already.

    A build that was stopped goes on with the files it had finished. Memory: one tensor's chunk. Raises
    StoreError for a directory with something else in it, a full disk, another process at work.
    """
    settings = settings or BuildSettings()
    directory = directory.expanduser().absolute()
    files.tokenizer()  # refuses a model without one before anything is written
    plan = _plan(files, settings)
    if directory.exists():
        return _existing(directory, plan)
    partial = directory.with_name(directory.name + ".partial")
    with named_errors(partial):
        partial.mkdir(parents=True, exist_ok=True)
    with locked(partial):
        done = _Done.load(partial, plan.identity)
        _check_room(partial, plan, done)
        _write_files(partial, plan, done, progress)
        for name, data in tokenizer_files(files.path).items():
            write_whole(partial / name, data)
            done.files[name] = FileEntry(len(data), file_checksum(partial / name))
        manifest = _manifest(files, plan, done)
        write_whole(partial / "index.json", json.dumps(manifest.to_json()).encode())
        with named_errors(directory):
            for left in (PROGRESS, ".lock"):
                (partial / left).unlink(missing_ok=True)
            sync_directory(partial)
            os.rename(partial, directory)
            sync_directory(directory.parent)
    return manifest


def _plan(files: ModelFiles, settings: BuildSettings) -> _Plan:
    grouped: dict[str, list[tuple[str, Rows]]] = {}
    for name in tensor_names(files.config, files.tensors):
        for held, rows in _rows(name, files, settings):
            grouped.setdefault(file_of(held), []).append((held, rows))
    return _Plan(settings, model_print(files.config, files.tensors), grouped)


def _rows(name: str, files: ModelFiles, settings: BuildSettings) -> list[tuple[str, Rows]]:
    """How one tensor is held: as it is, converted, or (down) turned."""
    raw = files.tensors.get(name)
    keep = len(raw.shape) < 2 or settings.format == "stored"
    kind = raw.kind if keep else settings.format.upper()
    if not name.endswith(".down"):
        return [(name, _lazy(name, files, raw, kind))]
    if not keep:
        return [(f"{name}_features", _lazy(name, files, raw, kind, True))]
    turned_kind = feature_major_kind(raw.kind, settings.down_features)
    turned = (f"{name}_features", _lazy(name, files, raw, turned_kind, True))
    return [turned] if raw.kind in FLOAT_KINDS else [(name, _lazy(name, files, raw, kind)), turned]


def _lazy(name: str, files: ModelFiles, raw: RawTensor, kind: str, transposed: bool = False) -> Rows:
    rows = Rows(lambda: files.tensors.get(name), raw.kind, raw.shape, kind, transposed)
    row_bytes(kind, rows.shape[-1])  # refuses rows that are no whole blocks before anything is written
    return rows


def _existing(directory: Path, plan: _Plan) -> Manifest:
    """The vindex that is there, if it is the one wanted. Raises StoreError otherwise."""
    if not is_vindex(directory):
        raise StoreError(f"{directory}: exists and is no vindex; choose another directory")
    manifest = read_manifest(directory)
    if manifest.model_print != plan.model_print:
        raise StoreError(
            f"{directory}: holds a vindex of another model, {manifest.model_source}; choose another directory"
        )
    if (manifest.format, manifest.down_features) != (plan.settings.format, plan.down_features):
        raise StoreError(
            f"{directory}: holds this model as {manifest.format} with down features "
            f"{manifest.down_features or 'as stored'}; choose another directory for other settings"
        )
    return manifest


def _check_room(partial: Path, plan: _Plan, done: _Done) -> None:
    wanted = plan.nbytes - sum(entry.nbytes for entry in done.files.values())
    free = shutil.disk_usage(partial).free
    if wanted > free:
        raise StoreError(f"{partial}: needs {wanted:,} bytes, the disk has {free:,} free")


def _write_files(partial: Path, plan: _Plan, done: _Done, progress: Progress) -> None:
    total, at = plan.nbytes, 0
    for file, tensors in plan.files.items():
        size = sum(rows.nbytes for _, rows in tensors)
        if file not in done.files:
            counter = _Counter(progress, file, at, total)
            written = write_tensors(partial / file, tensors, counter)
            done.files[file] = written.entry
            done.errors |= written.errors
            done.save(partial)
        at += size
        progress(file, at, total)


@dataclass
class _Counter:
    progress: Progress
    file: str
    done: int
    total: int

    def __call__(self, count: int) -> None:
        self.done += count
        self.progress(self.file, self.done, self.total)


def _manifest(files: ModelFiles, plan: _Plan, done: _Done) -> Manifest:
    tensors = {
        name: TensorEntry(rows.kind, rows.shape, file)
        for file, held in plan.files.items()
        for name, rows in held
    }
    errors: dict[str, float] = {}
    for name, error in done.errors.items():
        part = name.rsplit(".", 1)[-1]
        errors[part] = max(error, errors.get(part, 0.0))
    return Manifest(
        config=files.config,
        format=plan.settings.format,
        down_features=plan.down_features,
        print=print_as(plan.model_print, plan.settings.format),
        model_print=plan.model_print,
        model_source=files.path.name,
        tensors=tensors,
        files=done.files,
        errors=errors,
    )


def print_as(model_print: str, format: str) -> str:
    """The print of that model held in `format`: its own when nothing was converted."""
    if format == "stored":
        return model_print
    return hashlib.blake2b(f"{model_print} as {format}".encode(), digest_size=32).hexdigest()
