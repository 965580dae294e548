"""What a vindex keeps of a model's tokenizer, so that the directory alone loads."""

from __future__ import annotations

import struct
from pathlib import Path

from larql_kv.errors import ModelError
from larql_kv.model.catalog import is_vindex
from larql_kv.model.gguf_file import metadata_bytes
from larql_kv.model.vindex_files import GGUF_TOKENIZER

# Those that `tokenizer_hf` reads; config.json and generation_config.json name the special tokens.
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Name in the vindex -> bytes, of a GGUF file, Hugging Face directory or vindex. Raises ModelError."""
    if path.is_file():
        version, keys, data = metadata_bytes(path)
        return {GGUF_TOKENIZER: b"GGUF" + struct.pack("<IQQ", version, 0, keys) + data}
    folder = path / "tokenizer" if is_vindex(path) else path
    gguf = folder / "tokenizer.gguf"
    names = ("tokenizer.gguf",) if is_vindex(path) and gguf.is_file() else _NAMES
    try:
        found = {
            f"tokenizer/{name}": (folder / name).read_bytes() for name in names if (folder / name).is_file()
        }
    except OSError as error:
        raise ModelError(f"{folder}: the tokenizer's files cannot be read: {error}") from error
    return found
