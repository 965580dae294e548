"""What a vindex holds, and whether all of it is still what was written."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from larql_kv.errors import LarqlError, ModelError, StoreError
from larql_kv.model.vindex_files import read_manifest
from larql_kv.model.vindex_source import VindexTensors, load_tokenizer, open_vindex
from larql_kv.vindex.build import Progress, silent
from larql_kv.vindex.patch import dequantised
from larql_kv.vindex.store import vindex_path
from larql_kv.vindex.tensor_file import file_checksum


@dataclass(frozen=True)
class Problem:
    """A file of a vindex, and what is wrong with it."""

    file: str
    what: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def verify_vindex(directory: str | os.PathLike[str], progress: Progress = silent) -> list[Problem]:
    """Read every file and check sizes, checksums, shapes, tokenizer, down-meta and patches. Raises StoreError
    for a directory that is no vindex at all."""
    where = vindex_path(directory)
    try:
        manifest = read_manifest(where)
    except ModelError as error:
        return [Problem("index.json", str(error))]
    problems, done = [], 0
    for name, entry in sorted(manifest.files.items()):
        problem = _file_problem(where / name, entry.nbytes, entry.blake2b)
        if problem is not None:
            problems.append(Problem(name, problem))
        done += entry.nbytes
        progress(name, done, manifest.nbytes)
    if not problems:  # else the reason is named already
        problems += _content_problems(where)
    return problems


def _file_problem(path: Path, nbytes: int, checksum: str) -> str | None:
    try:
        size = path.stat().st_size
        if size != nbytes:
            return f"has {size:,} bytes, index.json says {nbytes:,}"
        found = file_checksum(path)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if found == checksum else f"has checksum {found[:16]}, index.json says {checksum[:16]}"


def _content_problems(where: Path) -> list[Problem]:
    problems = []
    try:
        tensors = VindexTensors(where)
        for layer in range(tensors.config.layer_count):
            tensors.down_meta(layer)
        load_tokenizer(where)
    except LarqlError as error:
        problems.append(Problem("index.json", str(error)))
    else:
        try:
            open_vindex(where)
        except StoreError as error:
            problems.append(Problem("patches.json", str(error)))
    return problems


def vindex_facts(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What the vindex holds, for `larql vindex info`. Raises StoreError, ModelError."""
    where = vindex_path(directory)
    base, overlay = open_vindex(where)
    manifest, config = base.manifest, base.config
    parts: dict[str, int] = {}
    for name, entry in manifest.files.items():
        part = name.split("/")[0].removesuffix(".safetensors").split("-")
        label = part[-1] if part[0] == "layer" else "down-meta" if part[0] == "down" else part[0]
        parts[label] = parts.get(label, 0) + entry.nbytes
    kinds: dict[str, dict[str, int]] = {}
    for name, entry in manifest.tensors.items():
        tail = name.rsplit(".", 1)[-1]
        if len(entry.shape) == 2:
            counts = kinds.setdefault(tail, {})
            counts[entry.kind] = counts.get(entry.kind, 0) + 1
    meta = manifest.down_meta
    return {
        "path": str(where),
        "model": config.name,
        "source": manifest.model_source,
        "format": manifest.format,
        "print": overlay.print_with(base.print),
        "base_print": base.print,
        "layers": config.layer_count,
        "features_per_layer": config.intermediate,
        "features": config.layer_count * config.intermediate,
        "hidden": config.hidden,
        "bytes": manifest.nbytes,
        "bytes_by_part": parts,
        "kinds": kinds,
        "errors": dict(manifest.errors),
        "down_meta": meta and {"top_k": meta.top_k, "layers": len(meta.layers)},
        "epoch": overlay.epoch,
        "patches": [
            {
                "name": patch.name,
                "operations": len(patch.operations),
                "layers": sorted({op.layer for op in patch.operations}),
            }
            for patch in overlay.patches
        ],
        "held_as_float32": dequantised(base, overlay),
    }
