"""`load_model`: a short name, a GGUF file, a Hugging Face directory or a hub id -> a Model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from larql_kv.backends import check_device
from larql_kv.errors import ModelError
from larql_kv.model.catalog import HubId, resolve

if TYPE_CHECKING:
    import torch

    from larql_kv.model.model import Model

DEFAULT_MODEL = "smollm2-135m"
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def load_model(
    name: str | os.PathLike[str] = DEFAULT_MODEL,
    device: str = "cpu",
    dtype: torch.dtype | str | None = None,
) -> Model:
    """Load a model by short name, path of a .gguf file, Hugging Face directory, or hub id.

    `dtype` float32: every linear is row-invariant float32 arithmetic, and K/V are float32 (the
    deterministic mode). bfloat16: prefill multiplies in bfloat16, K/V are bfloat16. None: the fastest
    form that keeps the mean KL against float32 under 1.5e-3 nats on this CPU (docs/forms.md).

    Raises ModelError for what is broken or unsupported, BackendUnavailable for a device without a backend.
    """
    check_device(device)
    exact = _is_exact(dtype)
    path = resolve(name)
    if isinstance(path, HubId):
        path = download(path)
    if path.is_dir():
        return _load_directory(path, exact)
    return _load_gguf(path, exact)


def download(hub_id: HubId) -> Path:
    """Fetch a hub repository's config, tokenizer and safetensors. Raises ModelError when it cannot be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(hub_id), allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"{str(hub_id)!r} is no local path, and the hub could not provide it: {error}"
        ) from error


def describe(name: str | os.PathLike[str]) -> dict[str, Any]:
    """What the model's files hold, without loading weights. Raises ModelError."""
    path = resolve(name)
    if isinstance(path, HubId):
        path = download(path)
    if path.is_dir():
        from larql_kv.model.config_hf import config_from_directory
        from larql_kv.model.hf_source import HfSource

        return HfSource(path, config_from_directory(path)).describe()
    from larql_kv.model.gguf_file import GgufFile

    return GgufFile.open(path).describe()


def _load_gguf(path: Path, exact: bool) -> Model:
    from larql_kv.model.config_gguf import config_from_gguf
    from larql_kv.model.gguf_file import GgufFile
    from larql_kv.model.gguf_source import GgufSource
    from larql_kv.model.tokenizer import Tokenizer

    file = GgufFile.open(path)
    config = config_from_gguf(file)
    return _assemble(config, GgufSource(file, config), Tokenizer.from_gguf(file), exact, str(path))


def _load_directory(path: Path, exact: bool) -> Model:
    from larql_kv.model.config_hf import config_from_directory
    from larql_kv.model.hf_source import HfSource
    from larql_kv.model.tokenizer import Tokenizer

    config = config_from_directory(path)
    return _assemble(config, HfSource(path, config), Tokenizer.from_directory(path), exact, str(path))


def _assemble(config: Any, source: Any, tokenizer: Any, exact: bool, where: str) -> Model:
    from larql_kv.backends.cpu.decoder import CpuDecoder
    from larql_kv.model.model import Model
    from larql_kv.model.rope import RopeTable

    tables = {layer.rope: RopeTable(layer.rope) for layer in config.layers}
    decoder = CpuDecoder(config, source, [tables[layer.rope] for layer in config.layers], exact)
    return Model(config, tokenizer, decoder, where)


def _is_exact(dtype: Any) -> bool:
    import torch

    names = {"float32": True, "f32": True, "fp32": True, "bfloat16": False, "bf16": False}
    text = str(dtype).removeprefix("torch.")
    if dtype is None or text in ("auto", "None"):
        # Without bfloat16 instructions a bfloat16 product is emulated and slower than float32.
        return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    if text not in names:
        raise ModelError(f"dtype {dtype!r} is not supported; supported: auto, float32, bfloat16")
    return names[text]
