"""Patches of a vindex on disk: applied, removed, baked into a new base. The base's own files never change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from larql_kv.errors import StoreError
from larql_kv.model.load import ModelFiles
from larql_kv.model.safetensors_file import MAX_JSON_BYTES
from larql_kv.model.tensors import TensorSource
from larql_kv.model.vindex_edits import (
    PATCH_FOLDER,
    PATCHES,
    STATE_FORMAT,
    STATE_VERSION,
    Overlay,
    Patch,
    PatchOp,
    read_patch,
)
from larql_kv.model.vindex_files import Manifest
from larql_kv.model.vindex_source import (
    EDITED,
    PatchedTensors,
    VindexTensors,
    load_tokenizer,
    open_vindex,
)
from larql_kv.vindex.build import BuildSettings, Progress, build_vindex, silent
from larql_kv.vindex.down_meta import bake_down_meta
from larql_kv.vindex.store import locked, open_index, tensor_names, vindex_path, write_whole


def insert(
    layer: int,
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    down: torch.Tensor | None = None,
    feature: int | None = None,
    writes: tuple[str, int, float] | None = None,
    **notes: Any,
) -> PatchOp:
    """An INSERT of a feature (vectors float32 (hidden,)); without `feature` it takes the weakest unused one.
    `writes`: text, id and score of the token it writes; `notes`: entity, relation, target, confidence."""
    given = {"gate": gate, "up": up, "down": down}
    vectors = {name: _vector(vector) for name, vector in given.items() if vector is not None}
    return PatchOp("insert", layer, feature, vectors, writes, notes)


def update(
    layer: int,
    feature: int,
    gate: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    down: torch.Tensor | None = None,
    writes: tuple[str, int, float] | None = None,
) -> PatchOp:
    """An UPDATE: the vectors that are given replace those of the feature."""
    given = {"gate": gate, "up": up, "down": down}
    vectors = {name: _vector(vector) for name, vector in given.items() if vector is not None}
    return PatchOp("update", layer, feature, vectors, writes)


def delete(layer: int, feature: int, reason: str = "") -> PatchOp:
    """A DELETE: the feature is never chosen and adds nothing."""
    return PatchOp("delete", layer, feature, notes={"reason": reason} if reason else {})


def _vector(values: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.detach().to("cpu", torch.float32).reshape(-1).numpy())


def apply_patch(
    directory: str | os.PathLike[str], path: Path, name: str | None = None, any_base: bool = False
) -> Patch:
    """Apply the `.vlp` file to the vindex, under its file name unless another is given.

    Returns the patch as applied, with a feature for every insert. Raises StoreError for a broken patch, one
    made for another base (unless `any_base`), a name that is in use.
    """
    where = vindex_path(directory)
    with locked(where):
        index = open_index(where)
        patch = read_patch(path, index.config, name)
        if patch.base_checksum not in (None, index.base_print) and not any_base:
            raise StoreError(
                f"{path}: was made for the base {str(patch.base_checksum)[:16]!r}, {where} is "
                f"{index.base_print[:16]!r}; apply it with --any-base if the features mean the same there"
            )
        placed = index.apply(patch)
        data = placed.to_bytes()
        if len(data) > MAX_JSON_BYTES:  # it could not be read again
            raise StoreError(
                f"{path}: takes {len(data):,} bytes as applied, at most {MAX_JSON_BYTES:,} are read: split it"
            )
        write_whole(where / PATCH_FOLDER / f"{placed.name}.vlp", data)
        _save(where, index.overlay)
    return placed


def remove_patch(directory: str | os.PathLike[str], name: str) -> None:
    """Take an applied patch out of force and delete its file. Raises StoreError when there is none."""
    where = vindex_path(directory)
    with locked(where):
        index = open_index(where)
        index.remove(name)
        _save(where, index.overlay)
        (where / PATCH_FOLDER / f"{name}.vlp").unlink(missing_ok=True)


def _save(directory: Path, overlay: Overlay) -> None:
    entries = [{"name": patch.name, "digest": patch.digest} for patch in overlay.patches]
    state = {"format": STATE_FORMAT, "version": STATE_VERSION, "epoch": overlay.epoch, "patches": entries}
    write_whole(directory / PATCHES, json.dumps(state).encode())


def bake(directory: str | os.PathLike[str], out: Path, progress: Progress = silent) -> Manifest:
    """A new vindex in `out` whose base has the gate, up and down edits of all applied patches.

    Edited matrices are held as float32, every other one as it was. What was written is compared with the
    patched tensors bit by bit. Raises StoreError when nothing is applied, or `out` holds something else.
    """
    where = vindex_path(directory)
    base, overlay = open_vindex(where)
    if not overlay.patches:
        raise StoreError(f"{where}: no patch is applied, so there is nothing to bake")
    patched = PatchedTensors(base, overlay)
    files = ModelFiles(where, base.config, patched, lambda: load_tokenizer(where))
    settings = BuildSettings("stored", base.manifest.down_features or "f32")
    build_vindex(files, out, settings, progress)
    if base.manifest.down_meta is not None:
        bake_down_meta(base, overlay, out)
    baked, applied = open_vindex(out.expanduser())
    if applied.patches:
        raise StoreError(f"{out}: has patches of its own; bake into a new directory")
    _check_equal(patched, baked, out)
    return baked.manifest


def _check_equal(wanted: PatchedTensors, baked: VindexTensors, out: Path) -> None:
    for name in tensor_names(baked.config, baked):
        ours, theirs = wanted.get(name), baked.get(name)
        if ours.kind != theirs.kind or not np.array_equal(ours.data, theirs.data):
            raise StoreError(f"{out}: tensor {name!r} differs from the patched one; remove it and bake again")


def dequantised(tensors: TensorSource, overlay: Overlay) -> list[str]:
    """Names of the quantised matrices that patches make float32."""
    names = []
    for layer, edits in sorted(overlay.edits.items()):
        for part in EDITED:
            name = f"layers.{layer}.{part}"
            edited = any(getattr(edit, part) is not None for edit in edits.values())
            if edited and tensors.get(name).kind != "F32":
                names.append(name)
    return names


__all__ = ["Patch", "apply_patch", "bake", "delete", "dequantised", "insert", "remove_patch", "update"]
