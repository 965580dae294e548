"""A vindex directory's tensors by their canonical names, with the edits of its patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.safetensors_file import map_file
from larql_kv.model.shapes import check_tensors
from larql_kv.model.tensors import RawTensor, TensorSource
from larql_kv.model.vindex_edits import Overlay, read_overlay
from larql_kv.model.vindex_files import GGUF_TOKENIZER, Manifest, down_meta_file, read_manifest
from larql_kv.model.vindex_rows import FLOAT_KINDS, Rows, row_bytes

EDITED = ("gate", "up", "down")


class VindexTensors:
    """The tensors of a vindex without its patches, as views of the mapped files. A down matrix that is held
    feature-major only is turned at each `get`."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelError for a file that is missing, of another size, or at odds with index.json or the
        config. Checksums are for `larql vindex verify`: no data is read here."""
        self.directory = directory
        self.manifest = read_manifest(directory)
        self.config = self.manifest.config
        for name, entry in self.manifest.files.items():
            path = directory / name
            size = path.stat().st_size if path.is_file() else None
            if size != entry.nbytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise ModelError(f"{path}: {found}, index.json says {entry.nbytes} bytes")
        self._tensors = _map_tensors(directory, self.manifest)
        self._check()

    @property
    def print(self) -> str:
        """The print of the model that these tensors are."""
        return self.manifest.print

    def _check(self) -> None:
        config, found = self.config, {}
        for name, tensor in self._tensors.items():
            if not name.endswith(".down_features"):
                found[name] = (name, tensor.shape)
                continue
            if tensor.shape != (config.intermediate, config.hidden):
                raise ModelError(
                    f"{self.directory}: tensor {name!r} has shape {tensor.shape}, "
                    f"expected {(config.intermediate, config.hidden)}"
                )
            down = name.removesuffix("_features")
            if down not in self._tensors:
                if tensor.kind not in FLOAT_KINDS:
                    raise ModelError(f"{self.directory}: {name!r} is {tensor.kind} and cannot be turned")
                found[down] = (name, tensor.shape[::-1])
        check_tensors(config, found)
        self._names = found

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._tensors

    def get(self, name: str) -> RawTensor:
        """The tensor of canonical `name`, or `layers.N.down_features`. Raises ModelError when absent."""
        if name in self._tensors:
            return self._tensors[name]
        if name in self._names:
            features = self._tensors[f"{name}_features"]
            return Rows.of(features, features.kind, transposed=True).whole()
        raise ModelError(f"{self.directory}: no tensor {name!r} in this vindex")

    def down_meta(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(token ids int32, scores float32), each (features, k); None when not built for that layer.

        Raises ModelError for a broken file.
        """
        meta = self.manifest.down_meta
        if meta is None or layer not in meta.layers:
            return None
        path = self.directory / down_meta_file(layer)
        held = map_file(path)
        shape = (self.config.intermediate, meta.top_k)
        found = []
        for name, kind, dtype in (("ids", "I32", np.int32), ("scores", "F32", np.float32)):
            tensor = held.get(name)
            if tensor is None or tensor.kind != kind or tensor.shape != shape:
                raise ModelError(f"{path}: holds no {kind} tensor {name!r} of shape {shape}")
            found.append(np.ascontiguousarray(tensor.data).view(dtype))
        ids, scores = found
        if ids.size and (ids.min() < 0 or ids.max() >= self.config.vocab):
            raise ModelError(f"{path}: names a token outside the vocabulary of {self.config.vocab}")
        return ids, scores


class PatchedTensors:
    """`base` with edits: a matrix with edited rows is float32, every other one is the base's own."""

    def __init__(self, base: VindexTensors, overlay: Overlay) -> None:
        self.base, self.overlay = base, overlay

    @property
    def print(self) -> str:
        return self.overlay.print_with(self.base.print)

    def __contains__(self, name: object) -> bool:
        return name in self.base

    def get(self, name: str) -> RawTensor:
        """The tensor with its edits; float32 where there are any. Raises ModelError when absent."""
        parts = name.split(".")
        if len(parts) != 3 or parts[2].removesuffix("_features") not in EDITED:
            return self.base.get(name)
        part = parts[2].removesuffix("_features")
        edits = {
            feature: vector
            for feature, edit in self.overlay.at(int(parts[1])).items()
            if (vector := getattr(edit, part)) is not None
        }
        raw = self.base.get(name)
        if not edits:
            return raw
        values = np.array(raw.dequantize(), dtype=np.float32)
        rows = values.T if parts[2] == "down" else values
        for feature, vector in edits.items():
            rows[feature] = vector.numpy()
        return RawTensor(raw.name, "F32", raw.shape, values.view(np.uint8).reshape(len(values), -1))


def open_vindex(directory: Path) -> tuple[VindexTensors, Overlay]:
    """The directory's tensors and the edits of its applied patches. Raises ModelError, StoreError."""
    tensors = VindexTensors(directory)
    return tensors, read_overlay(directory, tensors.config)


def tensors_in_force(base: VindexTensors, overlay: Overlay) -> TensorSource:
    return PatchedTensors(base, overlay) if overlay.edits else base


def describe_vindex(directory: Path) -> dict[str, Any]:
    """A summary for `larql info`, with the fields of `GgufFile.describe`."""
    tensors, _ = open_vindex(directory)
    manifest = tensors.manifest
    types: dict[str, dict[str, int]] = {}
    for entry in manifest.tensors.values():
        count = types.setdefault(entry.kind, {"count": 0, "bytes": 0})
        count["count"] += 1
        count["bytes"] += _nbytes(entry.kind, entry.shape)
    config = manifest.config
    tokenizer = load_tokenizer(directory)
    return {
        "path": str(directory),
        "size": manifest.nbytes,
        "format": f"vindex ({manifest.format})",
        "architecture": config.architecture,
        "name": config.name,
        "licence": None,
        "tensor_count": len(manifest.tensors),
        "tensor_types": types,
        "parameters": sum(
            int(np.prod(entry.shape, dtype=object))
            for name, entry in manifest.tensors.items()
            if not (name.endswith(".down_features") and name.removesuffix("_features") in manifest.tensors)
        ),
        "context": config.context,
        "tokenizer": tokenizer.kind,
        "pre_tokenizer": None,
        "chat_template": tokenizer.chat_template is not None,
    }


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer that the vindex holds. Raises ModelError."""
    from larql_kv.model.gguf_file import GgufFile
    from larql_kv.model.tokenizer import Tokenizer

    if (directory / GGUF_TOKENIZER).is_file():
        return Tokenizer.from_gguf(GgufFile.open(directory / GGUF_TOKENIZER))
    return Tokenizer.from_directory(directory / "tokenizer")


def _map_tensors(directory: Path, manifest: Manifest) -> Mapping[str, RawTensor]:
    mapped: dict[str, dict[str, RawTensor]] = {}
    tensors = {}
    for name, entry in manifest.tensors.items():
        path = directory / entry.file
        if entry.file not in mapped:
            mapped[entry.file] = map_file(path)
        held = mapped[entry.file].get(name)
        if held is None or held.nbytes != _nbytes(entry.kind, entry.shape):
            found = "lacks it" if held is None else f"holds {held.nbytes} bytes of it"
            raise ModelError(
                f"{path}: index.json promises tensor {name!r} ({entry.kind}, {entry.shape}), the file {found}"
            )
        rows = entry.shape[0] if len(entry.shape) > 1 else 1
        tensors[name] = RawTensor(name, entry.kind, entry.shape, held.data.reshape(rows, -1))
    return tensors


def _nbytes(kind: str, shape: Sequence[int]) -> int:
    rows = shape[0] if len(shape) > 1 else 1
    return rows * row_bytes(kind, shape[-1])
