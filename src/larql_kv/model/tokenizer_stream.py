"""Token ids -> text, whole or piece by piece; both give the same characters."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Protocol

SPACE = "\u2581".encode()  # sentencepiece's visible space
_BYTE_PIECE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
# id -> the token as its vocabulary spells it (UTF-8), or None for an id to leave out
PieceOf = Callable[[int], bytes | None]


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of every byte -> the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class StreamDecoder(Protocol):
    """Decodes ids as they come. All pushed texts and the flush, joined, equal `Tokenizer.decode`."""

    def push(self, token_id: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end of the stream; the decoder can be used afresh afterwards."""
        ...


class ByteLevelStream:
    """GPT-2 style vocabularies: each token is a string of bytes, a character may span tokens."""

    def __init__(self, piece_of: PieceOf) -> None:
        self._piece_of = piece_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        return self._utf8.decode(piece_bytes(piece)) if piece else ""

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def piece_bytes(piece: bytes) -> bytes:
    """A byte-level token's bytes; one with any character outside the alphabet stands for itself."""
    table = byte_alphabet()
    try:
        return bytes([table[char] for char in piece.decode()])
    except KeyError:
        return piece


class SentencePieceStream:
    """SentencePiece vocabularies: visible spaces, and runs of byte tokens for what the vocabulary lacks.

    A run of byte tokens is one character sequence or, if it is no UTF-8, one U+FFFD per byte (as
    `tokenizers` decodes it), so it is held back until a token of another kind ends it.
    """

    def __init__(self, piece_of: PieceOf, strip_first_space: bool) -> None:
        self._piece_of = piece_of
        self._strip = strip_first_space
        self._run = bytearray()
        self._at_start = True

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if not piece:
            return ""
        byte = _BYTE_PIECE.fullmatch(piece)
        if byte:
            self._run.append(int(byte[1], 16))
            return ""
        return self._begin(self._end_run() + piece.replace(SPACE, b" ").decode("utf-8", "replace"))

    def flush(self) -> str:
        rest = self._begin(self._end_run())
        self._at_start = True
        return rest

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(self._run)
        finally:
            self._run = bytearray()

    def _begin(self, text: str) -> str:
        if not (text and self._at_start):
            return text
        self._at_start = False
        return text[1:] if self._strip and text[0] == " " else text


def decode_all(stream: StreamDecoder, ids: Iterable[int]) -> str:
    """The text of `ids` by a fresh stream."""
    parts = [stream.push(token_id) for token_id in ids]
    parts.append(stream.flush())
    return "".join(parts)
