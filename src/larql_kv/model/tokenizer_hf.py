"""A Hugging Face directory's tokenizer: `tokenizer.json` and the small files beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from larql_kv.errors import ModelError
from larql_kv.model.tokenizer import STOP_IF_CONTROL, STOP_STRINGS, Tokenizer
from larql_kv.model.tokenizer_bpe import TokenizersEncoder

MAX_TOKENIZER_BYTES = 512 << 20
MAX_CONFIG_BYTES = 64 << 20


def load_directory(path: Path) -> Tokenizer:
    """See `Tokenizer.from_directory`, which is the public name."""
    raw = _read(path / "tokenizer.json", MAX_TOKENIZER_BYTES)
    if raw is None:
        raise ModelError(f"{path}: no tokenizer.json; save the model with its fast tokenizer")
    backend = _backend(path, raw)
    files = _Files.read(path)
    byte_level, strip = _decoder_style(path, backend)
    config = files.config
    bos, eos = (_named(backend, files, name) for name in ("bos", "eos"))
    added = backend.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    special |= {
        index for name in ("bos", "eos", "unk", "pad") if (index := _named(backend, files, name)) is not None
    }
    if "add_bos_token" in config or "add_eos_token" in config or backend.post_processor is None:
        # transformers replaces the post-processor as soon as one of the two flags is there.
        prefix = (bos,) if config.get("add_bos_token") and bos is not None else ()
        suffix = (eos,) if config.get("add_eos_token") and eos is not None else ()
    else:
        prefix, suffix = _around(path, backend)
    size = backend.get_vocab_size(with_added_tokens=True)

    def piece_of(index: int) -> bytes | None:
        token = backend.id_to_token(index) if index < 1 << 32 else None
        return None if token is None else token.encode()

    return Tokenizer(
        kind="tokenizer.json",
        encoder=TokenizersEncoder(backend),
        piece_of=piece_of,
        vocab_size=size,
        byte_level=byte_level,
        strip_first_space=strip,
        bos_id=bos,
        eos_id=eos,
        stop_ids=_stop_ids(backend, files, eos, special),
        special_ids=frozenset(special),
        fingerprint=hashlib.sha256(b"tokenizer.json\0" + raw).hexdigest(),
        chat_template=files.chat_template,
        prefix_ids=prefix,
        suffix_ids=suffix,
    )


@dataclass(frozen=True)
class _Files:
    """The small files; one that is absent is empty."""

    config: dict[str, Any]  # tokenizer_config.json
    special: dict[str, Any]  # special_tokens_map.json
    generation: dict[str, Any]  # generation_config.json
    model: dict[str, Any]  # config.json
    chat_template: str | None

    @classmethod
    def read(cls, path: Path) -> _Files:
        config = _json(path / "tokenizer_config.json")
        raw = _read(path / "chat_template.jinja", MAX_CONFIG_BYTES)
        template: Any = config.get("chat_template")
        if isinstance(template, list):  # several by name
            by_name = {
                str(item.get("name")): item.get("template") for item in template if isinstance(item, dict)
            }
            template = by_name.get("default")
        if raw is not None:
            template = _text(path / "chat_template.jinja", raw)
        return cls(
            config,
            _json(path / "special_tokens_map.json"),
            _json(path / "generation_config.json"),
            _json(path / "config.json"),
            template if isinstance(template, str) else None,
        )


def _read(path: Path, limit: int) -> bytes | None:
    try:
        if not path.is_file():
            return None
        size = path.stat().st_size
        if size > limit:
            raise ModelError(f"{path}: {size} bytes, the limit is {limit}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _text(path: Path, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    raw = _read(path, MAX_CONFIG_BYTES)
    if raw is None:
        return {}
    try:
        value = json.loads(_text(path, raw))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _backend(path: Path, raw: bytes) -> Any:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(_text(path / "tokenizer.json", raw))
    except ModelError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(f"{path / 'tokenizer.json'}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _decoder_style(path: Path, backend: Any) -> tuple[bool, bool]:
    """(byte level?, strip the first space?) of the file's decoder, for decoders that can be streamed."""
    if backend.decoder is None:
        raise ModelError(f"{path / 'tokenizer.json'}: no decoder, so its ids have no text")
    spec = json.loads(backend.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return True, False
    if types == ["Metaspace"] and steps[0].get("replacement") == "\u2581":
        return False, steps[0].get("prepend_scheme", "always") != "never"
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    known = types[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == replace
    if known and steps[3:] in ([], [strip]):
        return False, steps[3:] == [strip]
    raise ModelError(
        f"{path / 'tokenizer.json'}: its decoder ({', '.join(types)}) is not supported; supported: "
        "ByteLevel, Metaspace, and Replace + ByteFallback + Fuse (+ Strip)"
    )


def _named(backend: Any, files: _Files, name: str) -> int | None:
    """The id of the bos, eos, unk or pad token, by its text in the config files, then by its id there."""
    for source in (files.config, files.special):
        token = source.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            try:
                return backend.token_to_id(text)
            except UnicodeEncodeError as error:
                raise ModelError(f"the {name}_token {text!r} is no valid text: {error}") from error
    for source in (files.generation, files.model):
        value = source.get(f"{name}_token_id")
        if isinstance(value, list) and value:
            value = value[0]
        if type(value) is int and 0 <= value < backend.get_vocab_size(with_added_tokens=True):
            return value
    return None


def _around(path: Path, backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text, found by encoding one."""
    probe = "a"
    plain = backend.encode(probe, add_special_tokens=False).ids
    full = backend.encode(probe, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    raise ModelError(f"{path / 'tokenizer.json'}: its post-processor changes the text's own ids")


def _stop_ids(backend: Any, files: _Files, eos: int | None, special: set[int]) -> frozenset[int]:
    size = backend.get_vocab_size(with_added_tokens=True)
    found = set() if eos is None else {eos}
    for source in (files.generation, files.model):
        value = source.get("eos_token_id")
        for index in value if isinstance(value, list) else [value]:
            if type(index) is int and 0 <= index < size:
                found.add(index)
    added = backend.get_added_tokens_decoder()
    for index, token in added.items():
        text = token.content
        if text in STOP_STRINGS and (text not in STOP_IF_CONTROL or index in special):
            found.add(index)
    return frozenset(found)
