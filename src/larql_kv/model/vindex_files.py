"""index.json of a vindex: what the directory holds, read without trusting any of it.

    index.json                   this module's `Manifest`
    embed.safetensors            embed, final_norm
    head.safetensors             head, where it is not the embedding
    layer-0003-attention.safetensors   q, k, v, o, norms and biases of layer 3
    layer-0003-ffn.safetensors   gate, up, down (own orientation, quantised models), down_features
    down-meta-0003.safetensors   token ids (features, k) int32 and scores (features, k) float32
    tokenizer/                   tokenizer.gguf (the GGUF file's metadata) or the Hugging Face files
    patches.json, patches/       applied patches (see vindex_edits)

Tensors carry the canonical names of `tensors.py`, and `layers.N.down_features`. Quantised blocks lie as U8
(rows, row_bytes); their ggml type is in index.json.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from larql_kv.errors import ModelError
from larql_kv.model.catalog import VINDEX_INDEX
from larql_kv.model.config import ModelConfig
from larql_kv.model.safetensors_file import read_json
from larql_kv.model.vindex_config import config_from_json, config_to_json
from larql_kv.model.vindex_rows import FLOAT_KINDS, block_sizes

FORMAT, VERSION = "larql-vindex", 1
FORMATS = ("stored", "f32", "bf16")
GGUF_TOKENIZER = "tokenizer/tokenizer.gguf"
_FILE = re.compile(r"[a-z0-9][a-z0-9-]{0,63}\.safetensors|tokenizer/[A-Za-z0-9_]{1,40}\.(json|jinja|gguf)")
_PRINT = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 50


@dataclass(frozen=True)
class FileEntry:
    """Size and BLAKE2b of a file of the directory."""

    nbytes: int
    blake2b: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's ggml type and shape, and the file that it lies in."""

    kind: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class DownMeta:
    """How many top tokens each feature has, and the layers done."""

    top_k: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """index.json. `print` is that of the model as it is held here: of the model itself for `stored`."""

    config: ModelConfig
    format: str  # stored, f32 or bf16
    down_features: str | None  # precision of the feature-major down of a quantised model
    print: str
    model_print: str
    model_source: str
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    files: Mapping[str, FileEntry] = field(repr=False)
    down_meta: DownMeta | None = None
    errors: Mapping[str, float] = field(default_factory=dict)  # what was rounded -> largest relative error

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files.values())

    def with_files(self, files: Mapping[str, FileEntry], down_meta: DownMeta) -> Manifest:
        """The same with these files added."""
        return replace(self, files={**self.files, **files}, down_meta=down_meta)

    def to_json(self) -> dict[str, Any]:
        """The object of index.json, with its own checksum."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "print": self.print,
            "model": {"name": self.config.name, "source": self.model_source, "print": self.model_print},
            "weights": {"format": self.format, "down_features": self.down_features},
            "config": config_to_json(self.config),
            "down_meta": self.down_meta
            and {"top_k": self.down_meta.top_k, "layers": list(self.down_meta.layers)},
            "errors": dict(self.errors),
            "files": {
                name: {"bytes": entry.nbytes, "blake2b": entry.blake2b}
                for name, entry in sorted(self.files.items())
            },
            "tensors": {
                name: {"kind": entry.kind, "shape": list(entry.shape), "file": entry.file}
                for name, entry in self.tensors.items()
            },
        }
        return value | {"blake2b": _checksum(value)}


def _checksum(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """index.json, checked. Raises ModelError naming the field that is wrong."""
    path = directory / VINDEX_INDEX
    value = read_json(path)
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        raise ModelError(
            f"{path}: format {str(value.get('format'))[:40]!r} version {str(value.get('version'))[:20]!r}, "
            f"expected {FORMAT!r} version {VERSION}; build it again with `larql vindex build`"
        )
    claimed = value.pop("blake2b", None)
    if claimed != _checksum(value):
        raise ModelError(f"{path}: its own checksum does not match: the file was changed or damaged")
    try:
        return _manifest(value, str(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: malformed: {type(error).__name__}: {str(error)[:200]}") from error


def _manifest(value: dict[str, Any], where: str) -> Manifest:
    def refuse(what: str, found: Any) -> ModelError:
        return ModelError(f"{where}: {what} is {str(found)[:100]!r}, which no vindex has")

    files = {}
    for name, entry in value["files"].items():
        if not _FILE.fullmatch(name):
            raise refuse("a file name", name)
        if type(entry["bytes"]) is not int or not 0 <= entry["bytes"] < _LARGEST:
            raise refuse(f"the size of {name}", entry["bytes"])
        files[name] = FileEntry(entry["bytes"], _print(entry["blake2b"], where))
    tensors = {}
    for name, entry in value["tensors"].items():
        kind, shape, file = entry["kind"], entry["shape"], entry["file"]
        if kind not in FLOAT_KINDS and kind not in block_sizes():
            raise refuse(f"the kind of {name}", kind)
        if (
            not isinstance(shape, list)
            or not 1 <= len(shape) <= 2
            or not all(type(size) is int and 0 < size < _LARGEST for size in shape)
        ):
            raise refuse(f"the shape of {name}", shape)
        if file not in files:
            raise refuse(f"the file of {name}", file)
        tensors[name] = TensorEntry(kind, tuple(shape), file)
    weights, meta, errors = value["weights"], value["down_meta"], value["errors"]
    if weights["format"] not in FORMATS:
        raise refuse("the format of the weights", weights["format"])
    if weights["down_features"] not in (None, "f32", "bf16", "q8_0"):
        raise refuse("down_features", weights["down_features"])
    return Manifest(
        config=config_from_json(value["config"], where),
        format=weights["format"],
        down_features=weights["down_features"],
        print=_print(value["print"], where),
        model_print=_print(value["model"]["print"], where),
        model_source=str(value["model"]["source"])[:1000],
        tensors=tensors,
        files=files,
        down_meta=None if meta is None else _down_meta(meta, files, where),
        errors={str(name)[:100]: float(error) for name, error in errors.items()},
    )


def _print(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _PRINT.fullmatch(value):
        raise ModelError(f"{where}: {str(value)[:80]!r} is no BLAKE2b checksum (64 hex digits)")
    return value


def _down_meta(value: dict[str, Any], files: Mapping[str, FileEntry], where: str) -> DownMeta:
    top_k, layers = value["top_k"], value["layers"]
    if type(top_k) is not int or not 1 <= top_k <= 1000:
        raise ModelError(f"{where}: down_meta has top_k {str(top_k)[:40]!r}, expected 1 to 1000")
    for layer in layers:
        if type(layer) is not int or down_meta_file(layer) not in files:
            raise ModelError(f"{where}: down_meta names layer {str(layer)[:40]!r}, which has no file")
    return DownMeta(top_k, tuple(layers))


def layer_file(layer: int, part: str) -> str:
    return f"layer-{layer:04d}-{part}.safetensors"


def down_meta_file(layer: int) -> str:
    return f"down-meta-{layer:04d}.safetensors"


def file_of(name: str) -> str:
    """The file that the tensor `name` belongs in."""
    if name in ("embed", "final_norm"):
        return "embed.safetensors"
    if name == "head":
        return "head.safetensors"
    _, layer, suffix = name.split(".")
    ffn = suffix in ("gate", "up", "down", "down_features")
    return layer_file(int(layer), "ffn" if ffn else "attention")
