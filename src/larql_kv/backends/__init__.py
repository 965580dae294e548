"""Execution backends. What a build lacks is a BackendUnavailable before anything is loaded, never a crash."""

from __future__ import annotations

import importlib.util
import os

from larql_kv.errors import BackendUnavailable

DEVICES = ("cpu", "cuda")


def check_device(device: str) -> None:
    """Raises BackendUnavailable for a device that no backend here serves."""
    name = str(device)
    if name.partition(":")[0] not in DEVICES:
        raise BackendUnavailable(
            f"no backend for device {name!r} in this build; available: {', '.join(DEVICES)}"
        )
    if name == "cpu":
        return
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailable("device 'cuda' needs the package triton: pip install 'larql-kv[cuda]'")
    import torch

    if not torch.cuda.is_available() and not interpreted():
        raise BackendUnavailable(
            f"device {name!r} was asked for, but torch {torch.__version__} finds no CUDA card; "
            "use device 'cpu', or a CUDA build of torch on a machine with a card"
        )


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
