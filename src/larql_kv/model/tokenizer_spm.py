"""The GGUF tokenizer kind `llama`: SentencePiece BPE with scores and byte fallback.

The vocabulary is written out as a sentencepiece model, which loads 262,144 pieces in 50 ms; deriving
merges from it, as transformers does, takes ten seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.tokenizer_stream import SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PREFIX_FIRST, PREFIX_NONE, PREFIX_EVERY = "first", "none", "every"


def prefix_mode(architecture: str, add_space_prefix: bool | None) -> str:
    """Where a space is put before the text: `none`, `first` (the text's start) or `every` segment.

    The file's word counts; without one Gemma has no prefix and the others have it at the start. Phi-3
    puts it after each special token as well.
    """
    if add_space_prefix is None:
        add_space_prefix = not architecture.startswith("gemma")
    if not add_space_prefix:
        return PREFIX_NONE
    return PREFIX_EVERY if architecture == "phi3" else PREFIX_FIRST


class SpecialSplitter:
    """Cuts a text at the tokens that are matched whole: leftmost first, then the longest."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        groups: dict[str, dict[str, int]] = {}
        for text, token_id in tokens.items():
            if text:
                groups.setdefault(text[:2], {})[text] = token_id
        self._groups = {
            start: (sorted({len(text) for text in group}, reverse=True), group)
            for start, group in groups.items()
        }
        starts = sorted(groups, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, starts))) if starts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Alternate text and token ids, in order; no text is empty."""
        begin = position = 0
        while self._find and (found := self._find.search(text, position)):
            position = found.start()
            token = self._longest(text, position)
            if token is None:
                position += 1
                continue
            if begin < position:
                yield text[begin:position]
            yield token[1]
            begin = position = position + len(token[0])
        if begin < len(text):
            yield text[begin:]

    def _longest(self, text: str, at: int) -> tuple[str, int] | None:
        # A one-character token shares its first character with longer ones: look at both groups.
        for start in (text[at : at + 2], text[at]):
            lengths, group = self._groups.get(start, ((), {}))
            for length in lengths:
                candidate = text[at : at + length]
                if candidate in group:
                    return candidate, group[candidate]
        return None


@dataclass
class SentencePieceEncoder:
    """Text -> ids by sentencepiece, cut at special tokens first."""

    processor: object  # sentencepiece.SentencePieceProcessor
    splitter: SpecialSplitter
    prefix: str

    def encode(self, text: str) -> list[int]:
        parts = list(self.splitter.split(text))
        texts: list[str] = []
        for index, part in enumerate(parts):
            if isinstance(part, str):
                wanted = self.prefix == PREFIX_EVERY or (self.prefix == PREFIX_FIRST and index == 0)
                # Phi-3 prefixes even where a space is; the others do not.
                if wanted and (self.prefix == PREFIX_EVERY or part[0] not in " \u2581"):
                    part = " " + part
                texts.append(part)
        encoded = iter(self.processor.encode(texts, num_threads=1))  # type: ignore[attr-defined]
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids.extend(next(encoded))
            else:
                ids.append(part)
        return ids


def load_processor(pieces: list[bytes], scores: np.ndarray, types: np.ndarray, unknown: int | None) -> object:
    """A sentencepiece processor of that vocabulary.

    Raises ModelError when sentencepiece refuses it (no unknown token, for one).
    """
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model_proto(pieces, scores, types, unknown))
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"sentencepiece refuses the file's vocabulary: {error}") from error


def model_proto(pieces: list[bytes], scores: np.ndarray, types: np.ndarray, unknown: int | None) -> bytes:
    """sentencepiece's ModelProto in protobuf wire format."""
    pieces = _unique(pieces)
    packed = scores.astype("<f4").tobytes()
    # A piece's record: its tag and length, then piece (field 1), score (2) and, unless normal, type (3).
    heads = [_record(length, 5) for length in range(max(map(len, pieces), default=0) + 1)]
    records = [
        b"%b%b\x15%b" % (heads[len(piece)], piece, packed[at : at + 4])
        for piece, at in zip(pieces, range(0, len(packed), 4), strict=True)
    ]
    types = types.copy()
    types[types == UNKNOWN] = CONTROL  # sentencepiece wants exactly one
    if unknown is not None:
        types[unknown] = UNKNOWN
    # Matched before sentencepiece sees the text. UNUSED pieces take part, as transformers has it.
    types[types == USER_DEFINED] = CONTROL
    for index in np.nonzero((types != NORMAL) & (types != UNUSED))[0].tolist():
        piece = pieces[index]
        score = packed[4 * index : 4 * index + 4]
        records[index] = _record(len(piece), 7) + piece + b"\x15" + score + b"\x18" + bytes([types[index]])
    fallback = int((types == BYTE).sum() == 256)
    # model_type = BPE, byte_fallback, unk_id, and none of bos, eos, pad: those are ours.
    trainer = b"\x18\x02\x98\x02" + bytes([fallback]) + b"\xc0\x02" + _varint(unknown or 0)
    for tag in (b"\xc8\x02", b"\xd0\x02", b"\xd8\x02"):
        trainer += tag + b"\xff" * 9 + b"\x01"  # -1
    # No dummy prefix, whitespace kept, spaces escaped; no character map.
    normalizer = b"\x18\x00\x20\x00\x28\x01"
    records.append(
        b"\x12" + _varint(len(trainer)) + trainer + b"\x1a" + _varint(len(normalizer)) + normalizer
    )
    return b"".join(records)


def _record(length: int, tail: int) -> bytes:
    size = _varint(length)
    return b"\x0a" + _varint(1 + len(size) + length + tail) + b"\x0a" + size


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _unique(pieces: list[bytes]) -> list[bytes]:
    """sentencepiece wants no piece twice and none empty: all but the last become unreachable."""
    last = {piece: index for index, piece in enumerate(pieces)}
    if len(last) == len(pieces) and b"" not in last:
        return pieces
    # U+FDD0 is a noncharacter: no text that a model was trained on has it.
    return [
        piece if piece and last[piece] == index else f"\ufdd0{index}\ufdd0".encode()
        for index, piece in enumerate(pieces)
    ]


def respell_spaces(pieces: list[bytes], indices: list[int]) -> None:
    """Gemma's files hold runs of spaces as spaces; sentencepiece knows them as visible spaces. In place."""
    for index in indices:
        if pieces[index] and not pieces[index].strip(b" "):
            pieces[index] = SPACE * len(pieces[index])
