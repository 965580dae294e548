"""Text <-> token ids, as the model's files ask for it; equal to transformers' tokenizers of those files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model import tokenizer_bpe, tokenizer_spm
from larql_kv.model.gguf_file import GgufArray, GgufFile
from larql_kv.model.tokenizer_stream import (
    ByteLevelStream,
    PieceOf,
    SentencePieceStream,
    StreamDecoder,
    decode_all,
)

__all__ = ["StreamDecoder", "Tokenizer"]

STOP_STRINGS = (
    "<eos>",
    "</s>",
    "<|endoftext|>",
    "<|im_end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
# Also plain words of some vocabularies (Gemma has the HTML tag </s>): they stop only as control tokens.
STOP_IF_CONTROL = ("<eos>", "</s>")
SUPPORTED_KINDS = ("gpt2", "llama")


class Encoder(Protocol):
    """Text -> ids, special tokens in the text recognised, none added."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer. Build one with `from_gguf` or `from_directory`."""

    kind: str  # "gpt2/smollm", "llama", "tokenizer.json": for `larql info`
    encoder: Encoder = field(repr=False)
    piece_of: PieceOf = field(repr=False)
    vocab_size: int
    byte_level: bool
    strip_first_space: bool
    bos_id: int | None
    eos_id: int | None
    stop_ids: frozenset[int]
    special_ids: frozenset[int] = field(repr=False)
    fingerprint: str  # sha256 over kind, vocabulary and merges
    chat_template: str | None = field(repr=False)
    prefix_ids: tuple[int, ...] = ()  # what `encode` puts before and after the text
    suffix_ids: tuple[int, ...] = ()

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """The tokenizer that a GGUF file holds.

        Raises ModelError for a kind that is not supported and for a broken vocabulary.
        """
        return _from_gguf(file)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a Hugging Face directory (`tokenizer.json` and the config files beside it).

        Raises ModelError when `tokenizer.json` is missing, broken, or of a kind that cannot be streamed.
        """
        from larql_kv.model.tokenizer_hf import load_directory

        return load_directory(Path(path))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of `text`, with the special tokens that the model's files ask for around them.

        Special tokens spelled in the text are recognised, so text of strangers must be checked before.
        Lone surrogates, which have no UTF-8, are read as U+FFFD; surrogate pairs as their character.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids = self.encoder.encode(text) if text else []
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special else ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`. An id that the vocabulary lacks (padded embeddings) has no text.

        Bytes that are no UTF-8 become U+FFFD. Raises ModelError for a negative id.
        """
        return decode_all(self.stream(skip_special), ids)

    def stream(self, skip_special: bool = False) -> StreamDecoder:
        """A decoder to push ids into; it never splits a character, and its parts join to `decode`'s text."""
        piece_of = self._without_special if skip_special else self._piece
        if self.byte_level:
            return ByteLevelStream(piece_of)
        return SentencePieceStream(piece_of, self.strip_first_space)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, its leading space kept; U+FFFD for a part of a character.

        Raises ModelError for an id outside the vocabulary.
        """
        if self._piece(token_id) is None:
            raise ModelError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        if self.byte_level:
            return decode_all(ByteLevelStream(self._piece), [token_id])
        return decode_all(SentencePieceStream(self._piece, strip_first_space=False), [token_id])

    def _piece(self, token_id: int) -> bytes | None:
        if token_id < 0:
            raise ModelError(f"token id {token_id} is negative")
        return self.piece_of(token_id)

    def _without_special(self, token_id: int) -> bytes | None:
        return None if token_id in self.special_ids else self._piece(token_id)


@dataclass(frozen=True)
class _Vocabulary:
    """What both kinds read from the file, checked."""

    kind: str
    pre: str
    tokens: list[bytes]
    types: np.ndarray  # int32, one per token
    bos: int | None
    eos: int | None
    unknown: int | None
    special: frozenset[int]  # control tokens and the named ones

    def text(self, index: int) -> str:
        return self.tokens[index].decode()

    def whole(self) -> dict[str, int]:
        """The tokens matched whole in a text: special and user-defined ones."""
        user = np.nonzero(self.types == tokenizer_spm.USER_DEFINED)[0].tolist()
        return {self.text(index): index for index in sorted({*user, *self.special})}


def _from_gguf(file: GgufFile) -> Tokenizer:
    kind = file.get("tokenizer.ggml.model", str)
    if kind not in SUPPORTED_KINDS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model is {kind[:100]!r}, which is not supported; "
            f"supported: {', '.join(SUPPORTED_KINDS)}"
        )
    vocabulary = _vocabulary(file, kind)
    default_bos = True
    prefix = tokenizer_spm.PREFIX_NONE
    if kind == "gpt2":
        rules = tokenizer_bpe.pre_tokenizer(vocabulary.pre)
        default_bos = rules.bos
        built = tokenizer_bpe.build(
            [token.decode() for token in vocabulary.tokens],
            _array(file, "merges").strings(),
            vocabulary.types,
            rules,
            set(vocabulary.special),
        )
        encoder: Encoder = tokenizer_bpe.TokenizersEncoder(built)
    else:
        architecture = file.get("general.architecture", str, "")
        space = file.get("tokenizer.ggml.add_space_prefix", bool, None)
        prefix = tokenizer_spm.prefix_mode(architecture, space)
        encoder = _sentencepiece(file, vocabulary, architecture, prefix)
    tokens, count = vocabulary.tokens, len(vocabulary.tokens)
    return Tokenizer(
        kind=f"{kind}/{vocabulary.pre}" if kind == "gpt2" else kind,
        encoder=encoder,
        piece_of=lambda index: tokens[index] if index < count else None,
        vocab_size=count,
        byte_level=kind == "gpt2",
        strip_first_space=prefix != tokenizer_spm.PREFIX_NONE,
        bos_id=vocabulary.bos,
        eos_id=vocabulary.eos,
        stop_ids=_stop_ids(file, vocabulary),
        special_ids=vocabulary.special,
        fingerprint=_fingerprint(file, vocabulary),
        chat_template=file.get("tokenizer.chat_template", str, None),
        prefix_ids=_added(file, "bos", vocabulary.bos, default_bos),
        suffix_ids=_added(file, "eos", vocabulary.eos, False),
    )


def _sentencepiece(
    file: GgufFile, vocabulary: _Vocabulary, architecture: str, prefix: str
) -> tokenizer_spm.SentencePieceEncoder:
    scores = _numbers(file, "scores", len(vocabulary.tokens), np.floating)
    if not np.isfinite(scores).all():
        raise ModelError(f"{file.path}: tokenizer.ggml.scores holds a value that is not finite")
    pieces, types, whole = vocabulary.tokens, vocabulary.types, vocabulary.whole()
    if architecture.startswith("gemma"):
        # Gemma merges in the order of its vocabulary: the scores in the files do not follow it.
        scores = -np.arange(len(pieces), dtype=np.float32)
        pieces, types = list(pieces), types.copy()
        spaces = [index for text, index in whole.items() if not text.strip(" ")]
        tokenizer_spm.respell_spaces(pieces, spaces)
        types[spaces] = tokenizer_spm.NORMAL
        whole = {text: index for text, index in whole.items() if text.strip(" ")}
    processor = tokenizer_spm.load_processor(pieces, scores, types, vocabulary.unknown)
    return tokenizer_spm.SentencePieceEncoder(processor, tokenizer_spm.SpecialSplitter(whole), prefix)


def _vocabulary(file: GgufFile, kind: str) -> _Vocabulary:
    array = _array(file, "tokens")
    tokens = array.bytes_list()
    if not tokens:
        raise ModelError(f"{file.path}: the vocabulary is empty")
    try:
        b"\0".join(tokens).decode()  # one pass; the NULs keep a character from spanning tokens
    except UnicodeDecodeError:
        array.strings()  # raises, and names the token
    if "tokenizer.ggml.token_type" in file.metadata:
        types = _numbers(file, "token_type", len(tokens), np.integer).astype(np.int32)
    else:
        types = np.ones(len(tokens), np.int32)
    if types.min() < 0 or types.max() > tokenizer_spm.BYTE:
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type holds a value outside 0 to 6")
    types[types == 0] = tokenizer_spm.NORMAL
    named = {name: _token_id(file, name, len(tokens)) for name in ("bos", "eos", "unknown", "padding")}
    special = {*np.nonzero(types == tokenizer_spm.CONTROL)[0].tolist(), *named.values()} - {None}
    unknown = named["unknown"]
    if unknown is None:
        marked = np.nonzero(types == tokenizer_spm.UNKNOWN)[0]
        unknown = int(marked[0]) if len(marked) else None
    pre = file.get("tokenizer.ggml.pre", str, "default")
    return _Vocabulary(kind, pre, tokens, types, named["bos"], named["eos"], unknown, frozenset(special))


def _array(file: GgufFile, name: str) -> GgufArray:
    return file.get(f"tokenizer.ggml.{name}", GgufArray)


def _numbers(file: GgufFile, name: str, count: int, kind: type) -> np.ndarray:
    values = _array(file, name).numpy()
    if len(values) != count:
        raise ModelError(f"{file.path}: tokenizer.ggml.{name} has {len(values)} entries for {count} tokens")
    if not np.issubdtype(values.dtype, kind):
        raise ModelError(f"{file.path}: tokenizer.ggml.{name} is of type {values.dtype}")
    return values


def _token_id(file: GgufFile, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.get(key, int, None)
    if value is not None and not 0 <= value < count:
        raise ModelError(f"{file.path}: {key} is {value}, the vocabulary has {count} tokens")
    return value


def _added(file: GgufFile, name: str, token_id: int | None, default: bool) -> tuple[int, ...]:
    key = f"tokenizer.ggml.add_{name}_token"
    wanted = file.get(key, bool, None)
    if token_id is not None:
        return (token_id,) if (default if wanted is None else wanted) else ()
    if wanted:
        raise ModelError(f"{file.path}: {key} is set, but the file names no {name} token")
    return ()


def _stop_ids(file: GgufFile, vocabulary: _Vocabulary) -> frozenset[int]:
    count = len(vocabulary.tokens)
    found = {vocabulary.eos, *(_token_id(file, name, count) for name in ("eot", "eom"))} - {None}
    several = file.metadata.get("tokenizer.ggml.eos_token_ids")
    if isinstance(several, GgufArray) and not several.is_text:
        found |= {int(value) for value in several.numpy() if 0 <= value < count}
    for text, index in vocabulary.whole().items():
        if text in STOP_STRINGS and (text not in STOP_IF_CONTROL or index in vocabulary.special):
            found.add(index)
    return frozenset(found)  # type: ignore[arg-type]


def _fingerprint(file: GgufFile, vocabulary: _Vocabulary) -> str:
    digest = hashlib.sha256(f"{vocabulary.kind}\0{vocabulary.pre}\0{len(vocabulary.tokens)}".encode())
    digest.update(vocabulary.types.tobytes())
    for token in (b"\0".join(vocabulary.tokens),):
        digest.update(len(token).to_bytes(8, "little") + token)
    for name in ("scores", "merges"):
        values = file.metadata.get(f"tokenizer.ggml.{name}")
        if isinstance(values, GgufArray):
            raw = b"\0".join(values.bytes_list()) if values.is_text else values.numpy().tobytes()
            digest.update(name.encode() + len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
