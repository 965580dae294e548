"""Models of a well-known shape with random weights: speed without a download.

A shape's GGUF header is made in memory, so that its configuration, tokenizer and tensor names come from the
code that reads real files; the tensors' blocks are made when they are asked for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import numpy as np

from larql_kv.backends import check_device
from larql_kv.errors import ModelError
from larql_kv.model import tokenizer_spm as spm
from larql_kv.model.config_gguf import config_from_gguf
from larql_kv.model.gguf_file import DEFAULT_ALIGNMENT, GgufArray, GgufFile
from larql_kv.model.gguf_source import GgufSource, half_split_order
from larql_kv.model.rope import RopeScaling, resolve_rope
from larql_kv.model.shape_blocks import random_blocks, row_bytes
from larql_kv.model.shape_recipes import MIXES, Shape, parse_shape, tensor_table
from larql_kv.model.tensors import RawTensor
from larql_kv.model.tokenizer_stream import byte_alphabet

if TYPE_CHECKING:
    import torch

    from larql_kv.model.model import Model

ROPE_FACTORS = "rope_freqs.weight"
_PRE_TOKENIZER = {"qwen3": "qwen2", "llama": "llama-bpe"}
_LLAMA3_CONTEXT = 8192
# Norm weights; a sandwich's second norm is small, so that the residual stream grows slowly, as a real one's.
_NORM, _POST_NORM = (0.75, 1.25), (0.225, 0.375)


def random_model(
    shape: str | Shape,
    device: str = "cpu",
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    activations: str | None = None,
) -> Model:
    """A model of that shape (`gemma3-4b`, `qwen3-4b:q8_0`, ...) whose weights depend on `seed` alone.

    `dtype` and `activations` as in `load_model`. Its tokenizer knows single bytes, and it has no stop ids.
    Raises ModelError for an unknown shape or mix, BackendUnavailable for a device without a backend.
    """
    from larql_kv.model.load import Form, assemble
    from larql_kv.model.tokenizer import Tokenizer

    check_device(device)
    form = Form(str(device), dtype, activations)
    shape = parse_shape(shape) if isinstance(shape, str) else shape
    source = RandomSource(shape, seed)
    tokenizer = replace(Tokenizer.from_gguf(source.file), stop_ids=frozenset())
    return assemble(source.config, source, tokenizer, form, source_label(shape))


def source_label(shape: Shape) -> str:
    """What messages and reports call such a model."""
    return f"{shape.label} (random weights)"


class RandomSource(GgufSource):
    """A `TensorSource` of random weights. The same (seed, tensor name, format, shape) gives the same bytes.

    A tensor that somebody still holds is handed out again, not made again.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        """Raises ModelError for sizes that no decoder can have."""
        file = shape_header(shape)
        super().__init__(file, config_from_gguf(file))
        self.seed = seed
        self._alive: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    def get(self, name: str) -> RawTensor:
        """The tensor of canonical `name`. Raises ModelError when the model has none."""
        if name not in self:
            raise ModelError(f"{self.file.path}: no tensor {name!r} in this model")
        data = self._alive.get(name)
        tensor = self.file.tensors[self._names[name]]
        if data is None:
            data = self.stored(tensor.name)
            order = self.stored_order(tensor.name)
            data = data if order is None else data[order]
            self._alive[name] = data
        return RawTensor(tensor.name, tensor.kind, tensor.shape, data)

    def stored(self, name: str) -> np.ndarray:
        """The bytes of the GGUF tensor `name`, rows in the order of the file: (rows, row_bytes) uint8."""
        tensor = self.file.tensors[name]
        if name == ROPE_FACTORS:
            return tensor.data
        random = np.random.Generator(np.random.SFC64([self.seed, *name.encode()]))
        *rows, columns = tensor.shape
        if rows:  # std: a row's product with a normed input is about 1
            return random_blocks(tensor.kind, rows[0], columns, columns**-0.5, random)
        low, high = _POST_NORM if ".post_" in name else _NORM
        values = random.uniform(low, high, (1, columns))
        if name == "output_norm.weight":  # with one sign a tied head would always answer the last token
            values *= random.choice([-1, 1], columns)
        return values.astype(np.float32).view(np.uint8)

    def stored_order(self, name: str) -> np.ndarray | None:
        """Which stored row each canonical row is; None where they are the same."""
        tail = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if self.config.architecture != "llama" or tail not in ("attn_q", "attn_k"):
            return None
        heads = self.config.heads if tail == "attn_q" else self.config.kv_heads
        return half_split_order(heads, self.config.head_dim)


def shape_header(shape: Shape) -> GgufFile:
    """The GGUF header of that shape, in memory: metadata, and tensors whose data are all zeros of no memory
    (only the RoPE factors are real)."""
    metadata = _metadata(shape) | _vocabulary(shape)
    tensors = {}
    for name, (kind, size) in tensor_table(shape).items():
        rows = size[0] if len(size) == 2 else 1
        nothing = np.broadcast_to(np.zeros(1, np.uint8), (rows, row_bytes(kind, size[-1])))
        tensors[name] = RawTensor(name, kind, size, nothing)
    if shape.llama3_factor != 1.0:
        factors = _llama3_factors(shape)
        tensors[ROPE_FACTORS] = RawTensor(ROPE_FACTORS, "F32", factors.shape, factors.view(np.uint8)[None])
    size = sum(tensor.nbytes for tensor in tensors.values())
    return GgufFile(Path(source_label(shape)), 3, DEFAULT_ALIGNMENT, metadata, tensors, 0, size)


def _metadata(shape: Shape) -> dict[str, Any]:
    values: dict[str, Any] = {
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": float(np.float32(shape.norm_eps)),  # as a file holds it
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.freq_base": shape.rope_base,
        "vocab_size": shape.vocab,
    }
    if shape.architecture == "llama":
        values["rope.dimension_count"] = shape.head_dim
    if shape.window is not None:
        values["attention.sliding_window"] = shape.window
    if shape.linear_factor != 1.0:
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": shape.linear_factor}
    return {
        "general.architecture": shape.architecture,
        "general.name": source_label(shape),
        "general.file_type": MIXES[shape.mix].file_type,
        "general.quantization_version": 2,
    } | {f"{shape.architecture}.{key}": value for key, value in values.items()}


def _llama3_factors(shape: Shape) -> np.ndarray:
    """What divides each inverse frequency, (head_dim/2,) float32."""
    scaling = RopeScaling("llama3", shape.llama3_factor, _LLAMA3_CONTEXT)
    plain, scaled = (
        np.array(resolve_rope(shape.rope_base, shape.head_dim, rule).inv_freq) for rule in (None, scaling)
    )
    return (plain / scaled).astype(np.float32)


def _vocabulary(shape: Shape) -> dict[str, Any]:
    """A tokenizer of single bytes; the rest of the vocabulary are words that no text is cut into."""
    sentencepiece = shape.architecture == "gemma3"
    space = "\u2581" if sentencepiece else "\u0120"
    special = [b"<pad>", b"<eos>", b"<bos>", b"<unk>"]
    types = [spm.CONTROL, spm.CONTROL, spm.CONTROL, spm.UNKNOWN]
    if sentencepiece:
        letters = [*(b"<0x%02X>" % byte for byte in range(256)), space.encode()]
        types += [*[spm.BYTE] * 256, spm.NORMAL]
    else:
        types[3] = spm.CONTROL
        # llama.cpp wants at least one merge: of a space and a t.
        letters = [*(char.encode() for char in byte_alphabet()), f"{space}t".encode()]
        types += [spm.NORMAL] * 257
    known = len(special) + len(letters)
    if shape.vocab < known:
        raise ModelError(f"{shape.label}: a vocabulary of {shape.vocab}, expected at least {known}")
    words = [f"{space}w{index}".encode() for index in range(known, shape.vocab)]
    types += [spm.NORMAL] * len(words)
    prefix = "tokenizer.ggml."
    values: dict[str, Any] = {
        "model": "llama" if sentencepiece else "gpt2",
        "pre": _PRE_TOKENIZER.get(shape.architecture, "default"),
        "tokens": _strings(f"{prefix}tokens", [*special, *letters, *words]),
        "token_type": _numbers(f"{prefix}token_type", "INT32", np.array(types, "<i4")),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "padding_token_id": 0,
        "add_bos_token": shape.architecture != "qwen3",
        "add_eos_token": False,
    }
    if sentencepiece:
        scores = -np.arange(shape.vocab, dtype="<f4")
        values |= {
            "scores": _numbers(f"{prefix}scores", "FLOAT32", scores),
            "unknown_token_id": 3,
            "add_space_prefix": False,
        }
    else:
        values["merges"] = _strings(f"{prefix}merges", [f"{space} t".encode()])
    return {f"{prefix}{key}": value for key, value in values.items()}


def _strings(key: str, items: list[bytes]) -> GgufArray:
    data = b"".join(len(item).to_bytes(8, "little") + item for item in items)
    return GgufArray(key, "STRING", len(items), 0, len(data), cast(Any, data))


def _numbers(key: str, type_name: str, values: np.ndarray) -> GgufArray:
    data = values.tobytes()
    return GgufArray(key, type_name, len(values), 0, len(data), cast(Any, data))
