"""`load_model`: a short name, a GGUF file, a Hugging Face directory, a vindex or a hub id -> a Model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from larql_kv.backends import check_device, settle_card, use_card
from larql_kv.errors import BackendUnavailable, ModelError
from larql_kv.model.catalog import HubId, is_vindex, resolve

if TYPE_CHECKING:
    import torch

    from larql_kv.backends.base import Decoder
    from larql_kv.model.config import ModelConfig
    from larql_kv.model.model import Model
    from larql_kv.model.tensors import TensorSource
    from larql_kv.model.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2-135m"
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def load_model(
    name: str | os.PathLike[str] = DEFAULT_MODEL,
    device: str = "cpu",
    dtype: torch.dtype | str | None = None,
    activations: str | None = None,
) -> Model:
    """Load a model by short name, path of a .gguf file, Hugging Face or vindex directory, or hub id.

    `dtype` float32: every linear is row-invariant float32 arithmetic, and K/V are float32 (the
    deterministic mode). bfloat16: prefill multiplies in bfloat16, K/V are bfloat16. None: the fastest
    form that keeps the mean KL against float32 under 1.5e-3 nats on this CPU (docs/forms.md).

    On "cuda" weights keep their stored precision and K/V are bfloat16 (dtype None or bfloat16). `activations`
    (cuda only) is the precision that meets quantised weights in a decode step: int8, mixed (None) or int16;
    docs/cuda.md has the speed and the KL of each.

    Raises ModelError for what is broken or unsupported, BackendUnavailable for a device without a backend.
    """
    check_device(device)
    form = Form(str(device), dtype, activations)
    files = open_files(name)
    return assemble(files.config, files.tensors, files.tokenizer(), form, str(files.path))


@dataclass(frozen=True)
class ModelFiles:
    """A model's files, opened: nothing but headers was read yet."""

    path: Path
    config: ModelConfig
    tensors: TensorSource
    tokenizer: Callable[[], Tokenizer]


def open_files(name: str | os.PathLike[str]) -> ModelFiles:
    """The files of a model, found as `load_model` finds them (a hub id is downloaded). Raises ModelError."""
    path = resolve(name)
    if isinstance(path, HubId):
        path = download(path)
    if not path.is_dir():
        return _open_gguf(path)
    return _open_vindex(path) if is_vindex(path) else _open_directory(path)


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
    if path.is_dir() and is_vindex(path):
        from larql_kv.model.vindex_source import describe_vindex

        return describe_vindex(path)
    if path.is_dir():
        from larql_kv.model.config_hf import config_from_directory
        from larql_kv.model.hf_source import HfSource

        return HfSource(path, config_from_directory(path)).describe()
    from larql_kv.model.gguf_file import GgufFile

    return GgufFile.open(path).describe()


def _open_gguf(path: Path) -> ModelFiles:
    from larql_kv.model.config_gguf import config_from_gguf
    from larql_kv.model.gguf_file import GgufFile
    from larql_kv.model.gguf_source import GgufSource
    from larql_kv.model.tokenizer import Tokenizer

    file = GgufFile.open(path)
    config = config_from_gguf(file)
    return ModelFiles(path, config, GgufSource(file, config), lambda: Tokenizer.from_gguf(file))


def _open_directory(path: Path) -> ModelFiles:
    from larql_kv.model.config_hf import config_from_directory
    from larql_kv.model.hf_source import HfSource
    from larql_kv.model.tokenizer import Tokenizer

    config = config_from_directory(path)
    return ModelFiles(path, config, HfSource(path, config), lambda: Tokenizer.from_directory(path))


def _open_vindex(path: Path) -> ModelFiles:
    from larql_kv.model.vindex_source import load_tokenizer, open_vindex, tensors_in_force

    tensors, overlay = open_vindex(path)
    return ModelFiles(path, tensors.config, tensors_in_force(tensors, overlay), lambda: load_tokenizer(path))


def assemble(config: Any, source: Any, tokenizer: Any, form: Form, where: str) -> Model:
    """The model of these parts, in the execution form that `form` asks for."""
    from larql_kv.model.model import Model
    from larql_kv.model.rope import RopeTable

    tables = {layer.rope: RopeTable(layer.rope) for layer in config.layers}
    ropes = [tables[layer.rope] for layer in config.layers]
    return Model(config, tokenizer, form.decoder(config, source, ropes), where, source)


@dataclass(frozen=True)
class Form:
    """Where a model runs and in which precision: the arguments of `load_model`, checked."""

    device: str = "cpu"
    dtype: Any = None
    activations: str | None = None

    def __post_init__(self) -> None:
        exact = is_exact(self.dtype)  # refuses an unknown dtype on every device
        asked = str(self.dtype).removeprefix("torch.") not in ("None", "auto")
        if self.device != "cpu" and exact and asked:
            raise BackendUnavailable(
                f"device {self.device!r} has no float32 form: K/V are bfloat16 there; leave dtype out, or "
                "use device 'cpu'"
            )
        if self.activations is not None:
            self._check_activations()

    def _check_activations(self) -> None:
        if self.device == "cpu":
            raise BackendUnavailable(
                f"activations {self.activations!r} is a setting of device 'cuda'; on 'cpu' leave it out"
            )
        from larql_kv.backends.cuda.weights import ACTIVATIONS

        if self.activations not in ACTIVATIONS:
            raise BackendUnavailable(
                f"activations {self.activations!r} are not offered on cuda; offered: {', '.join(ACTIVATIONS)}"
            )

    def decoder(self, config: Any, source: Any, ropes: list[Any]) -> Decoder:
        """The backend's decoder over the tensors of `source`."""
        if self.device == "cpu":
            from larql_kv.backends.cpu.decoder import CpuDecoder

            return CpuDecoder(config, source, ropes, is_exact(self.dtype))
        import torch

        from larql_kv.backends.cuda.decoder import CudaDecoder

        device = use_card(self.device)
        try:
            decoder = CudaDecoder(config, source, ropes, device, self.activations)
        except torch.OutOfMemoryError as error:
            raise BackendUnavailable(
                f"the model does not fit the memory of {self.device!r}: {error}"
            ) from error
        settle_card(device)
        return decoder


def is_exact(dtype: Any) -> bool:
    """Whether that `dtype` of `load_model` means float32 arithmetic. Raises ModelError for an unknown one."""
    import torch

    names = {"float32": True, "f32": True, "fp32": True, "bfloat16": False, "bf16": False}
    text = str(dtype).removeprefix("torch.")
    if dtype is None or text in ("auto", "None"):
        # Without bfloat16 instructions a bfloat16 product is emulated and slower than float32.
        return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    if text not in names:
        raise ModelError(f"dtype {dtype!r} is not supported; supported: auto, float32, bfloat16")
    return names[text]
