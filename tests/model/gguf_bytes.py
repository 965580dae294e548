"""GGUF files written byte by byte, right ones and wrong ones; independent of the reader under test."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_CODES = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, item: Any) -> bytes:
    return string(item) if kind == STR else struct.pack("<" + _CODES[kind], item)


def scalar(key: str | bytes, kind: int, item: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, item)


def array(key: str | bytes, kind: int, items: list[Any], length: int | None = None) -> bytes:
    count = len(items) if length is None else length
    return string(key) + struct.pack("<IIQ", ARR, kind, count) + b"".join(value(kind, item) for item in items)


def tensor(
    name: str | bytes, dims: tuple[int, ...], kind: int, offset: int, rank: int | None = None
) -> bytes:
    rank = len(dims) if rank is None else rank
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


def file(
    keys: list[bytes] = [],  # noqa: B006 (never changed)
    tensors: list[bytes] = [],  # noqa: B006
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    tensor_count, key_count = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


ARCH = scalar("general.architecture", STR, "llama")
F32_TENSOR = tensor("a", (4, 2), 0, 0)


def good() -> bytes:
    """Every scalar type, arrays of numbers and strings, four tensors of three types."""
    keys = [
        ARCH,
        scalar("general.name", STR, "tiny ☃"),
        *(scalar(f"x.{kind}", kind, 1) for kind in _CODES if kind != BOOL),
        scalar("x.true", BOOL, 1),
        scalar("x.minus", I64, -(2**63)),
        scalar("x.big", U64, 2**64 - 1),
        array("a.f32", F32, [0.5, -1.5, 3.0]),
        array("a.bool", BOOL, [1, 0, 1]),
        array("a.i32", I32, [-1, 2]),
        array("a.empty", STR, []),
        array("tokenizer.ggml.tokens", STR, ["<unk>", "", "é", "▁the", "\0"]),
        scalar("tokenizer.ggml.model", STR, "llama"),
        scalar("llama.context_length", U32, 77),
    ]
    tensors = [
        tensor("f32", (4, 2), 0, 0),
        tensor("q8", (32, 3), 8, 32),
        tensor("vec", (5,), 0, 160),
        tensor("cube", (2, 3, 4), 1, 192),
    ]
    return file(keys, tensors, bytes(range(256))[:240])


# name -> (file, a word that the message must have)
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "too few"),
    "magic only": (lambda: b"GGUF", "too few"),
    "other magic": (lambda: file([ARCH], magic=b"GGML"), "not a GGUF"),
    "zip": (lambda: b"PK\x03\x04" + b"\0" * 60, "not a GGUF"),
    "version 1": (lambda: file([ARCH], version=1), "version 1"),
    "version 4": (lambda: file([ARCH], version=4), "version 4"),
    "big-endian": (lambda: file([ARCH], version=3 << 24), "big-endian"),
    # llama.cpp #27188: 43 bytes, an array of 2^63 elements; gguf 0.19.0 never returns
    "27188": (
        lambda: file()[:8] + struct.pack("<QQ", 0, 1) + string("abc") + struct.pack("<IIQ", 9, 0, 2**63)[:12],
        "truncated",
    ),
    "27188 whole": (
        lambda: file(counts=(0, 1))[:24] + string("a") + struct.pack("<IIQ", 9, 4, 2**63),
        "elements",
    ),
    "array of strings 2^63": (
        lambda: file(counts=(0, 1))[:24] + string("a") + struct.pack("<IIQ", 9, 8, 2**63),
        "elements",
    ),
    "array of bytes 2^64-1": (
        lambda: file(counts=(0, 1))[:24] + string("a") + struct.pack("<IIQ", 9, 0, 2**64 - 1),
        "elements",
    ),
    "array size wraps": (lambda: file([array("a", F64, [], 2**61 + 1)]), "elements"),
    "nested array": (
        lambda: file([array("a", ARR, [], 1), b"\0" * 64], counts=(0, 1)),
        "array of arrays",
    ),
    "array of unknown": (
        lambda: file([string("a") + struct.pack("<IIQ", 9, 77, 0)]),
        "unknown element type 77",
    ),
    "unknown value type": (lambda: file([string("a") + struct.pack("<IQ", 13, 0)]), "unknown value type 13"),
    "keys 2^63": (lambda: file([ARCH], counts=(0, 2**63)), "keys"),
    "tensors 2^63": (lambda: file([ARCH], counts=(2**63, 1)), "tensors"),
    "more keys than bytes": (lambda: file([ARCH], counts=(0, 1000)), "more than the file can hold"),
    "more tensors than bytes": (lambda: file([ARCH], counts=(1000, 1)), "more than the file can hold"),
    "key length 2^63": (lambda: file([struct.pack("<Q", 2**63) + b"\0" * 64]), "claims"),
    "key too long": (lambda: file([scalar("k" * 65536, U8, 1)]), "limit"),
    "key empty": (lambda: file([scalar("", U8, 1)]), "empty"),
    "key not UTF-8": (lambda: file([scalar(b"\xff\xfe", U8, 1)]), "UTF-8"),
    "key twice": (lambda: file([ARCH, ARCH]), "twice"),
    "string 2^64-1": (lambda: file([string("a") + struct.pack("<IQ", STR, 2**64 - 1)]), "claims"),
    "string past the end": (lambda: file([string("a") + struct.pack("<IQ", STR, 500)]), "truncated"),
    "string not UTF-8": (lambda: file([scalar("a", STR, b"\xc3\x28")]), "UTF-8"),
    "bool 2": (lambda: file([scalar("a", BOOL, 2)]), "boolean"),
    # CVE-2025-49847: a token's length
    "token length 2^63": (lambda: file([array("t", STR, ["ok"], 2)[:] + struct.pack("<Q", 2**63)]), "claims"),
    "token too long": (lambda: file([array("t", STR, ["x" * 65537])]), "limit"),
    "token past the end": (
        lambda: file([array("t", STR, ["ok"], 2) + struct.pack("<Q", 60000)]),
        "truncated",
    ),
    "tokens end early": (
        lambda: file([array("t", STR, ["okay"] * 3, 9), b"\7" * 40], counts=(0, 1)),
        "claims",
    ),
    # CVE-2025-53630, -2026-27940, -33298, -7482: dimensions and sizes that wrap
    "dimension 0": (lambda: file([ARCH], [tensor("a", (0, 2), 0, 0)]), "dimension of 0"),
    "dimension 2^63": (lambda: file([ARCH], [tensor("a", (2**63, 2), 0, 0)]), "dimension"),
    "dimension -1": (lambda: file([ARCH], [tensor("a", (2**64 - 1,), 0, 0)]), "dimension"),
    "product wraps to 0": (lambda: file([ARCH], [tensor("a", (2**32, 2**32), 0, 0)]), "truncated"),
    "product wraps to 32": (
        lambda: file([ARCH], [tensor("a", (2**33 + 8, 2**31), 0, 0)], b"\0" * 64),
        "truncated",
    ),
    "four dimensions": (lambda: file([ARCH], [tensor("a", (2**40,) * 4, 0, 0)]), "truncated"),
    "rank 0": (lambda: file([ARCH], [tensor("a", (), 0, 0)]), "0 dimensions"),
    "rank 5": (lambda: file([ARCH], [tensor("a", (1,) * 5, 0, 0)]), "5 dimensions"),
    "rank 2^32-1": (lambda: file([ARCH], [tensor("a", (1, 1), 0, 0, rank=2**32 - 1)]), "dimensions"),
    "no whole block": (lambda: file([ARCH], [tensor("a", (33, 2), 8, 0)], b"\0" * 99), "multiple of 32"),
    "unknown tensor type": (
        lambda: file([ARCH], [tensor("a", (32,), 4, 0)], b"\0" * 99),
        "unknown type 4; supported: F32",
    ),
    "offset past the end": (lambda: file([ARCH], [tensor("a", (4, 2), 0, 4096)], b"\0" * 32), "truncated"),
    "offset wraps": (lambda: file([ARCH], [tensor("a", (4, 2), 0, 2**64 - 32)], b"\0" * 32), "truncated"),
    "offset unaligned": (lambda: file([ARCH], [tensor("a", (4, 2), 0, 4)], b"\0" * 64), "alignment"),
    "one byte short": (lambda: file([ARCH], [F32_TENSOR], b"\0" * 31), "truncated"),
    "overlap": (lambda: file([ARCH], [F32_TENSOR, tensor("b", (4, 2), 0, 0)], b"\0" * 64), "overlap"),
    "overlap by part": (
        lambda: file([ARCH], [tensor("a", (9,), 0, 0), tensor("b", (4,), 0, 32)], b"\0" * 64),
        "overlap",
    ),
    "tensor twice": (lambda: file([ARCH], [F32_TENSOR, tensor("a", (4, 2), 0, 32)], b"\0" * 64), "twice"),
    "tensor name empty": (lambda: file([ARCH], [tensor("", (4, 2), 0, 0)], b"\0" * 32), "empty name"),
    "tensor name long": (lambda: file([ARCH], [tensor("n" * 257, (4, 2), 0, 0)], b"\0" * 32), "limit"),
    "tensor name not UTF-8": (lambda: file([ARCH], [tensor(b"\xff", (4, 2), 0, 0)], b"\0" * 32), "UTF-8"),
    "tensor name length 2^63": (lambda: file([ARCH], [struct.pack("<Q", 2**63) + b"\0" * 64]), "claims"),
    # llama.cpp #24997 and the like: alignments that divide by zero or wrap
    "alignment 0": (lambda: file([scalar("general.alignment", U32, 0)]), "general.alignment is 0"),
    "alignment 24": (lambda: file([scalar("general.alignment", U32, 24)]), "general.alignment is 24"),
    "alignment 1": (lambda: file([scalar("general.alignment", U32, 1)]), "general.alignment is 1"),
    "alignment 2^31": (lambda: file([scalar("general.alignment", U32, 2**31)]), "general.alignment is"),
    "alignment text": (lambda: file([scalar("general.alignment", STR, "32")]), "general.alignment is str"),
    "alignment float": (lambda: file([scalar("general.alignment", F32, 32.0)]), "general.alignment is 32.0"),
    "alignment bool": (lambda: file([scalar("general.alignment", BOOL, 1)]), "general.alignment is"),
}
