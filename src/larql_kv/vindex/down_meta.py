"""Down-meta: the tokens that each feature writes, its down vector sent through the head."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from larql_kv.errors import StoreError
from larql_kv.model.catalog import VINDEX_INDEX
from larql_kv.model.config import ModelConfig
from larql_kv.model.tensors import RawTensor, TensorSource
from larql_kv.model.vindex_edits import Overlay
from larql_kv.model.vindex_files import DownMeta, down_meta_file, read_manifest
from larql_kv.model.vindex_rows import Rows
from larql_kv.model.vindex_source import VindexTensors
from larql_kv.vindex.build import Progress, silent
from larql_kv.vindex.store import locked, named_errors, open_index, vindex_path, write_whole
from larql_kv.vindex.tensor_file import write_tensors

_VOCABULARY_CHUNK, _FEATURE_CHUNK = 8192, 1024
MAX_TOP_K = 1000


class TopTokens(NamedTuple):
    """The strongest tokens of each feature, the strongest first."""

    ids: torch.Tensor  # int32 (features, k)
    scores: torch.Tensor  # float32 (features, k)


def written_tokens(
    config: ModelConfig, tensors: TensorSource, layer: int, down: torch.Tensor, top_k: int
) -> TopTokens:
    """What the down vectors (n, hidden) float32 of a layer write: down x (norm weights) x head.

    Scores are logits up to one positive factor per row, that of the final norm; the weights of the final
    norm (and of Gemma's norm after the FFN) count. Memory: a chunk of the head, and of the product.
    """
    weight = _vector(tensors, "final_norm")
    if config.post_norms:
        weight = weight * _vector(tensors, f"layers.{layer}.post_ffn_norm")
    rows = down * weight
    head = tensors.get("embed" if config.tied else "head")
    k = min(top_k, config.vocab)
    ids = torch.zeros(len(rows), 0, dtype=torch.int64)
    scores = torch.zeros(len(rows), 0)
    for first in range(0, config.vocab, _VOCABULARY_CHUNK):
        part = torch.from_numpy(np.array(head.dequantize(slice(first, first + _VOCABULARY_CHUNK))))
        found = [
            torch.topk(rows[at : at + _FEATURE_CHUNK] @ part.T, min(k, len(part)))
            for at in range(0, len(rows), _FEATURE_CHUNK)
        ]
        scores = torch.cat([scores, torch.cat([item.values for item in found])], dim=1)
        ids = torch.cat([ids, torch.cat([item.indices for item in found]) + first], dim=1)
        scores, order = torch.topk(scores, min(k, scores.shape[1]))
        ids = ids.gather(1, order)
    return TopTokens(ids.int(), scores)


def _vector(tensors: TensorSource, name: str) -> torch.Tensor:
    return torch.from_numpy(np.array(tensors.get(name).dequantize()))


def add_down_meta(
    directory: str | os.PathLike[str], top_k: int = 10, progress: Progress = silent
) -> DownMeta:
    """Compute and store the down-meta of every layer that lacks it; one that was stopped goes on.

    Raises StoreError when the vindex has down-meta with another `top_k`.
    """
    if not 1 <= top_k <= MAX_TOP_K:
        raise StoreError(f"down-meta keeps 1 to {MAX_TOP_K} tokens of a feature, got {top_k}")
    where = vindex_path(directory)
    with locked(where):
        index = open_index(where)
        base = VindexTensors(where)
        k = min(top_k, base.config.vocab)
        meta = base.manifest.down_meta or DownMeta(k, ())
        if meta.top_k != k:
            raise StoreError(f"{where}: has down-meta with {meta.top_k} tokens a feature, {k} were asked for")
        count = base.config.layer_count
        for layer in range(count):
            if layer not in meta.layers:
                down = torch.from_numpy(np.array(index.down(layer).dequantize()))
                meta = _store(where, layer, written_tokens(base.config, base, layer, down, k), meta)
            progress("down-meta", layer + 1, count)
    return meta


def bake_down_meta(base: VindexTensors, overlay: Overlay, out: Path) -> None:
    """The base's down-meta for the vindex in `out`, which has `overlay`'s edits baked in: rows of features
    whose down vector was edited are made anew."""
    top_k = base.manifest.down_meta.top_k if base.manifest.down_meta else None
    baked = VindexTensors(out.expanduser())
    if top_k is None:
        return
    meta = baked.manifest.down_meta or DownMeta(top_k, ())  # of a bake that was stopped: what it had done
    if meta.top_k != top_k:
        return
    with locked(baked.directory):
        for layer in range(base.config.layer_count):
            held = base.down_meta(layer)
            if held is None or layer in meta.layers:
                continue
            ids, scores = (torch.from_numpy(array.copy()) for array in held)
            edited = {f: e.down for f, e in overlay.at(layer).items() if e.down is not None}
            if edited:
                rows = torch.stack(list(edited.values()))
                fresh = written_tokens(base.config, base, layer, rows, meta.top_k)
                ids[list(edited)], scores[list(edited)] = fresh.ids, fresh.scores
            meta = _store(baked.directory, layer, TopTokens(ids, scores), meta)


def _store(directory: Path, layer: int, tokens: TopTokens, meta: DownMeta) -> DownMeta:
    """Write one layer's file, then index.json with it."""
    name = down_meta_file(layer)
    tensors = []
    for field, kind, values in (("ids", "I32", tokens.ids), ("scores", "F32", tokens.scores)):
        array = values.contiguous().numpy()
        raw = RawTensor(field, kind, array.shape, array.view(np.uint8).reshape(len(array), -1))
        tensors.append((field, Rows.of(raw, kind)))
    temporary = directory / f".{name}.tmp"
    written = write_tensors(temporary, tensors)
    with named_errors(directory):
        os.replace(temporary, directory / name)
    meta = DownMeta(meta.top_k, (*meta.layers, layer))
    manifest = read_manifest(directory).with_files({name: written.entry}, meta)
    write_whole(directory / VINDEX_INDEX, json.dumps(manifest.to_json()).encode())
    return meta
