"""Edits of features: `.vlp` patch files, and the overlay that applied patches make; a later patch wins.

A `.vlp` file is JSON: {"version": 1, "base_model", "base_checksum", "created_at", "description", "author",
"tags", "operations": [...]}, an operation {"op": "insert" | "update" | "delete", "layer", "feature",
"gate_vector_b64", "up_vector_b64", "down_vector_b64", "down_meta": {"t", "i", "c"}} with vectors as base64 of
little-endian float32. An insert without a feature takes the weakest unused one when it is applied.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from larql_kv.errors import ModelError, StoreError
from larql_kv.model.config import ModelConfig
from larql_kv.model.safetensors_file import read_json

PATCHES, PATCH_FOLDER = "patches.json", "patches"
STATE_FORMAT, STATE_VERSION, VLP_VERSION = "larql-vindex-patches", 1, 1
PARTS = ("gate", "up", "down")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_OPERATIONS = 100_000
_NOTES = ("base_model", "base_checksum", "created_at", "description", "author", "tags")
_OP_NOTES = ("relation", "entity", "target", "confidence", "reason")


@dataclass(frozen=True)
class FeatureEdit:
    """What patches made of one feature; a vector that is None is the base's own. A deleted feature has gate
    and down vectors of zeros: it is never chosen and adds nothing."""

    gate: torch.Tensor | None = None  # float32 (hidden,)
    up: torch.Tensor | None = None
    down: torch.Tensor | None = None
    deleted: bool = False
    tokens: tuple[tuple[int, float], ...] | None = None  # what its down vector writes, where a patch says so


@dataclass(frozen=True)
class PatchOp:
    """One operation. `feature` None: an insert that still has to be given one."""

    op: str  # insert, update, delete
    layer: int
    feature: int | None
    vectors: Mapping[str, np.ndarray] = field(default_factory=dict)  # of PARTS -> float32 (hidden,)
    down_meta: tuple[str, int, float] | None = None  # text, token id, score of the token it writes
    notes: Mapping[str, Any] = field(default_factory=dict)

    def edit(self, before: FeatureEdit | None, hidden: int) -> FeatureEdit:
        """The feature after this operation; `before` is what earlier patches made of it."""
        if self.op == "delete":
            return FeatureEdit(gate=torch.zeros(hidden), down=torch.zeros(hidden), deleted=True)
        start = before if self.op == "update" and before is not None else FeatureEdit()
        parts = {name: torch.from_numpy(vector.copy()) for name, vector in self.vectors.items()}
        tokens = None if "down" in parts else start.tokens
        if self.down_meta is not None:
            tokens = (self.down_meta[1:],)
        return replace(start, **parts, tokens=tokens, deleted=start.deleted and "gate" not in parts)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"op": self.op, "layer": self.layer, "feature": self.feature, **self.notes}
        for name, vector in self.vectors.items():
            value[f"{name}_vector_b64"] = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        if self.down_meta is not None:
            value["down_meta"] = dict(zip("tic", self.down_meta, strict=True))
        return value


@dataclass(frozen=True)
class Patch:
    """A named list of operations."""

    name: str
    operations: tuple[PatchOp, ...]
    notes: Mapping[str, Any] = field(default_factory=dict)  # the file's other fields

    @property
    def base_checksum(self) -> str | None:
        """The print of the base that the patch was made for, where it says so."""
        return self.notes.get("base_checksum") or None

    @property
    def digest(self) -> str:
        """BLAKE2b of what the operations do (hex): notes do not count."""
        hashed = hashlib.blake2b(digest_size=32)
        for op in self.operations:
            hashed.update(f"{op.op} {op.layer} {op.feature} {op.down_meta}\n".encode())
            for name, vector in sorted(op.vectors.items()):
                hashed.update(name.encode() + vector.astype("<f4").tobytes())
        return hashed.hexdigest()

    def to_bytes(self) -> bytes:
        """The `.vlp` file."""
        value = {"version": VLP_VERSION, **self.notes, "operations": [op.to_json() for op in self.operations]}
        return (json.dumps(value, indent=1) + "\n").encode()


@dataclass(frozen=True)
class Overlay:
    """The edits in force, by layer and feature. `epoch` goes up with every change."""

    hidden: int
    epoch: int = 0
    patches: tuple[Patch, ...] = ()
    edits: Mapping[int, Mapping[int, FeatureEdit]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, hidden: int, patches: Sequence[Patch], epoch: int) -> Overlay:
        """These patches in order; every operation must have its feature."""
        edits: dict[int, dict[int, FeatureEdit]] = {}
        for patch in patches:
            for op in patch.operations:
                assert op.feature is not None
                layer = edits.setdefault(op.layer, {})
                layer[op.feature] = op.edit(layer.get(op.feature), hidden)
        return cls(hidden, epoch, tuple(patches), edits)

    def at(self, layer: int) -> Mapping[int, FeatureEdit]:
        return self.edits.get(layer, {})

    def applied(self, patch: Patch) -> Overlay:
        """With one more patch. Raises StoreError when one of that name is in force."""
        if any(known.name == patch.name for known in self.patches):
            raise StoreError(f"a patch named {patch.name!r} is applied already; remove it first")
        return Overlay.of(self.hidden, [*self.patches, patch], self.epoch + 1)

    def removed(self, name: str) -> Overlay:
        """Without the patch of that name. Raises StoreError when there is none."""
        left = [patch for patch in self.patches if patch.name != name]
        if len(left) == len(self.patches):
            known = ", ".join(patch.name for patch in self.patches) or "none"
            raise StoreError(f"no patch named {name[:80]!r} is applied; applied: {known}")
        return Overlay.of(self.hidden, left, self.epoch + 1)

    def print_with(self, base: str) -> str:
        """The base's print, with the patches' digests hashed in where there are any."""
        if not self.patches:
            return base
        text = "\n".join((base, *(patch.digest for patch in self.patches)))
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def read_patch(path: Path, config: ModelConfig, name: str | None = None) -> Patch:
    """The patch in a `.vlp` file, named after it. Raises StoreError for what is broken or does not fit."""
    try:
        value = read_json(path)
    except ModelError as error:
        raise StoreError(str(error)) from error
    return patch_from_json(value, config, name or path.stem, str(path))


def patch_from_json(value: Any, config: ModelConfig, name: str, where: str) -> Patch:
    """A patch for a model of that config. Raises StoreError naming the operation that is wrong."""
    if not NAME.fullmatch(name):
        raise StoreError(
            f"{name[:80]!r} is no patch name: up to 64 letters, digits, dots, dashes, underscores"
        )
    version = value.get("version") if isinstance(value, dict) else None
    if type(version) is not int or version != VLP_VERSION:
        raise StoreError(
            f"{where}: patch version {str(version)[:40]!r} is not supported; supported: {VLP_VERSION}"
        )
    operations = value.get("operations")
    if not isinstance(operations, list) or not 0 < len(operations) <= MAX_OPERATIONS:
        raise StoreError(f"{where}: operations must be a list of 1 to {MAX_OPERATIONS}")
    ops = tuple(_op(item, config, f"{where}: operation {index}") for index, item in enumerate(operations))
    return Patch(name, ops, {key: value[key] for key in _NOTES if key in value})


def read_overlay(directory: Path, config: ModelConfig) -> Overlay:
    """The applied patches of a vindex directory. Raises StoreError for broken or changed files."""
    path = directory / PATCHES
    if not path.exists():
        return Overlay(config.hidden)
    try:
        state = read_json(path)
    except ModelError as error:
        raise StoreError(str(error)) from error
    epoch, entries = state.get("epoch"), state.get("patches")
    if state.get("format") != STATE_FORMAT or state.get("version") != STATE_VERSION:
        raise StoreError(f"{path}: is not a list of applied patches, version {STATE_VERSION}")
    if type(epoch) is not int or not 0 <= epoch < 1 << 62 or not isinstance(entries, list):
        raise StoreError(f"{path}: epoch {str(epoch)[:40]!r} or the list of patches is malformed")
    patches = []
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise StoreError(f"{path}: {str(name)[:80]!r} is no patch name")
        patch = read_patch(directory / PATCH_FOLDER / f"{name}.vlp", config, name)
        if patch.digest != entry.get("digest"):
            raise StoreError(
                f"{path}: patch {name!r} was changed after it was applied: digest {patch.digest}"
            )
        if any(op.feature is None for op in patch.operations):
            raise StoreError(f"{path}: patch {name!r} has an insert without a feature")
        patches.append(patch)
    return Overlay.of(config.hidden, patches, epoch)


def _op(value: Any, config: ModelConfig, where: str) -> PatchOp:
    kind = value.get("op") if isinstance(value, dict) else None
    kind = kind.lower() if isinstance(kind, str) else kind
    if kind in ("insert_knn", "insertknn", "delete_knn", "deleteknn"):
        raise StoreError(
            f"{where}: {kind!r} edits a store of keys beside the model, which has no place in an FFN; "
            "use insert, update or delete"
        )
    if kind not in ("insert", "update", "delete"):
        raise StoreError(f"{where}: unknown op {str(kind)[:40]!r}; known: insert, update, delete")
    layer, feature = value.get("layer"), value.get("feature")
    if type(layer) is not int or not 0 <= layer < config.layer_count:
        raise StoreError(f"{where}: layer {str(layer)[:40]!r} is not one of 0 to {config.layer_count - 1}")
    if not (feature is None and kind == "insert") and (
        type(feature) is not int or not 0 <= feature < config.intermediate
    ):
        raise StoreError(
            f"{where}: feature {str(feature)[:40]!r} is not one of 0 to {config.intermediate - 1}"
        )
    vectors = {}
    for part in PARTS:
        text = value.get(f"{part}_vector_b64")
        if text is not None:
            vectors[part] = _vector(text, config.hidden, f"{where}: {part}_vector_b64")
    meta = value.get("down_meta")
    if kind == "insert" and "gate" not in vectors:
        raise StoreError(f"{where}: an insert needs a gate_vector_b64")
    if kind == "update" and not vectors and meta is None:
        raise StoreError(f"{where}: an update needs a vector or a down_meta")
    if kind == "delete" and vectors:
        raise StoreError(f"{where}: a delete takes no vectors")
    notes = {key: value[key] for key in _OP_NOTES if key in value}
    return PatchOp(kind, layer, feature, vectors, None if meta is None else _meta(meta, config, where), notes)


def _vector(text: Any, hidden: int, where: str) -> np.ndarray:
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"{where}: is no base64: {error}") from error
    if len(raw) != 4 * hidden:
        raise StoreError(
            f"{where}: holds {len(raw)} bytes, expected {hidden} float32 values ({4 * hidden} bytes)"
        )
    vector = np.frombuffer(raw, "<f4").astype(np.float32)
    if not np.isfinite(vector).all():
        raise StoreError(f"{where}: holds a value that is not finite")
    return vector


def _meta(value: Any, config: ModelConfig, where: str) -> tuple[str, int, float]:
    text, token, score = (value.get(key) for key in "tic") if isinstance(value, dict) else (None,) * 3
    if (
        not isinstance(text, str)
        or len(text) > 1000
        or type(token) is not int
        or not 0 <= token < config.vocab
    ):
        raise StoreError(
            f"{where}: down_meta must hold t (text), i (a token id below {config.vocab}), c (score)"
        )
    if not isinstance(score, int | float) or not abs(score) < 1e30:
        raise StoreError(f"{where}: down_meta has c {str(score)[:40]!r}, expected a finite number")
    return text, token, float(score)
