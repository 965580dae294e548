"""The tensors of a Hugging Face directory by their canonical names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.config import ModelConfig
from larql_kv.model.safetensors_file import open_tensors, read_json
from larql_kv.model.shapes import check_tensors, refuse_unknown
from larql_kv.model.tensors import RawTensor

_KINDS = {"F32": 4, "F16": 2, "BF16": 2}
# Text model inside the file: a causal LM; the multimodal wrapper as the Hub has it, as transformers 5
# renames it in memory; a bare base model.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_IGNORED_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # a buffer of old transformers; the configuration decides
_TOP = {"embed_tokens.weight": "embed", "norm.weight": "final_norm"}
_LAYER = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.bias": "o_bias",
    "mlp.gate_proj.bias": "gate_bias",
    "mlp.up_proj.bias": "up_bias",
    "mlp.down_proj.bias": "down_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
_NORMS = {"post_attention_layernorm.weight": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm.weight": "post_attn_norm",
    "pre_feedforward_layernorm.weight": "ffn_norm",
    "post_feedforward_layernorm.weight": "post_ffn_norm",
}


class HfSource:
    """The tensors of `directory` under the names of `tensors.py`, as views of the mapped files.

    Only Gemma's norms are new arrays: the file holds w, the forward pass multiplies by 1 + w (float32).
    Nothing in the directory is executed.
    """

    def __init__(self, directory: str | os.PathLike[str], config: ModelConfig) -> None:
        """Raises ModelError for a missing, misshapen or unknown tensor; no data is read."""
        self.directory = Path(directory)
        self.config = config
        tensors = open_tensors(self.directory)
        self._names, unknown = canonical_names(tensors, config.post_norms)
        refuse_unknown(unknown)
        if config.tied:
            self._names.pop("head", None)  # a copy of the embedding, as config_from_directory has seen
        for name in self._names.values():
            if tensors[name].kind not in _KINDS:
                raise ModelError(
                    f"{self.directory}: tensor {name!r} is of dtype {tensors[name].kind}, which is not "
                    f"supported; supported: {', '.join(_KINDS)}"
                )
        self._tensors = tensors
        check_tensors(config, {canon: (name, tensors[name].shape) for canon, name in self._names.items()})

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def get(self, name: str) -> RawTensor:
        """The tensor of canonical `name`, its own name that of the file. Raises ModelError when absent."""
        if name not in self._names:
            raise ModelError(f"{self.directory}: no tensor {name!r} in this model")
        tensor = self._tensors[self._names[name]]
        if self.config.post_norms and name.endswith("_norm"):
            factor = np.float32(1) + tensor.dequantize()
            return RawTensor(tensor.name, "F32", tensor.shape, factor.view(np.uint8).reshape(1, -1))
        if tensor.data.ctypes.data % _KINDS[tensor.kind]:
            # A misaligned view cannot become a torch tensor of its dtype.
            return replace(tensor, data=tensor.data.copy())
        return tensor

    def describe(self) -> dict[str, Any]:
        """A summary for `larql info`, with the fields of `GgufFile.describe`."""
        types: dict[str, dict[str, int]] = {}
        for tensor in self._tensors.values():
            entry = types.setdefault(tensor.kind, {"count": 0, "bytes": 0})
            entry["count"] += 1
            entry["bytes"] += tensor.nbytes
        settings = self.directory / "tokenizer_config.json"
        template = (self.directory / "chat_template.jinja").exists()
        if not template and settings.exists():
            template = read_json(settings).get("chat_template") is not None
        return {
            "path": str(self.directory),
            "size": sum(file.stat().st_size for file in self.directory.glob("*.safetensors")),
            "format": "safetensors",
            "architecture": self.config.architecture,
            "name": self.config.name,
            "licence": None,
            "tensor_count": len(self._tensors),
            "tensor_types": types,
            "parameters": sum(prod(tensor.shape) for tensor in self._tensors.values()),
            "context": self.config.context,
            "tokenizer": "tokenizer.json" if (self.directory / "tokenizer.json").exists() else None,
            "pre_tokenizer": None,
            "chat_template": template,
        }


def canonical_names(names: Iterable[str], four_norms: bool) -> tuple[dict[str, str], list[str]]:
    """Canonical name -> file's name, and the names that no canonical one stands for.

    Raises ModelError when the text model's place in the file is not clear, or a tensor occurs twice.
    """
    names = list(names)
    prefixes = [prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in names]
    if len(prefixes) != 1:
        found = "no token embedding" if not prefixes else f"{len(prefixes)} token embeddings"
        raise ModelError(
            f"the model has {found}; expected exactly one of "
            + ", ".join(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)
        )
    layer = _LAYER | (_GEMMA_NORMS if four_norms else _NORMS)
    known: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        if name.startswith(_IGNORED_PREFIXES) or name.endswith(_IGNORED_SUFFIXES):
            continue
        canonical = _canonical(name, prefixes[0], layer)
        if canonical is None:
            unknown.append(name)
        elif canonical in known:
            raise ModelError(f"tensors {known[canonical]!r} and {name!r} both are {canonical!r}")
        else:
            known[canonical] = name
    return known, unknown


def head_equals_embedding(tensors: Mapping[str, RawTensor], names: Mapping[str, str]) -> bool:
    """Whether the file's head is, bit for bit, its embedding (both must be there)."""
    head, embed = tensors[names["head"]], tensors[names["embed"]]
    same = head.kind == embed.kind and head.shape == embed.shape
    return same and bool(np.array_equal(head.data, embed.data))


def _canonical(name: str, prefix: str, layer: Mapping[str, str]) -> str | None:
    if name in _HEADS:
        return "head"
    if not name.startswith(prefix):
        return None
    tail = name[len(prefix) :]
    if tail in _TOP:
        return _TOP[tail]
    parts = tail.split(".", 2)
    if len(parts) != 3 or parts[0] != "layers" or not (parts[1].isascii() and parts[1].isdigit()):
        return None
    if len(parts[1]) > 4 or str(int(parts[1])) != parts[1] or parts[2] not in layer:
        return None
    return f"layers.{parts[1]}.{layer[parts[2]]}"
