"""Execution backends. What a build lacks is a BackendUnavailable before anything is loaded, never a crash."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from larql_kv.errors import BackendUnavailable

if TYPE_CHECKING:
    import torch

DEVICES = ("cpu", "cuda")
_cards: set[int] = set()  # that models of this process are on: one at most


def check_device(device: str) -> None:
    """Raises BackendUnavailable for a device that no backend here serves."""
    name = str(device)
    if name == "cpu":
        return
    kind, colon, index = name.partition(":")
    if kind != "cuda" or (colon and not (index.isascii() and index.isdigit())):
        raise BackendUnavailable(
            f"no backend for device {name!r} in this build; available: {', '.join(DEVICES)}, cuda:N"
        )
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailable(f"device {name!r} needs the package triton: pip install 'larql-kv[cuda]'")
    import torch

    if not interpreted() and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"device {name!r} was asked for, but torch {torch.__version__} finds no CUDA card; "
            "use device 'cpu', or a CUDA build of torch on a machine with a card"
        )
    cards = 1 if interpreted() else torch.cuda.device_count()
    if int(index or 0) >= cards:
        raise BackendUnavailable(f"device {name!r} was asked for, but only {cards} can be had")
    if not interpreted() and (major := torch.cuda.get_device_capability(name)[0]) < 9:
        raise BackendUnavailable(
            f"device {name!r} is of compute capability {major}.x; the kernels need 9.0 (Hopper) or later"
        )


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_card(device: str) -> torch.device:
    """The torch device of a `device` that passed `check_device`; the CPU for the interpreter.

    Kernels are launched on the process's current card: the first model that loads decides which that is
    (`settle_card`). Raises BackendUnavailable for a model on a second one.
    """
    import torch

    if interpreted():
        return torch.device("cpu")
    index = torch.device(device).index  # pragma: cuda only
    index = torch.cuda.current_device() if index is None else index  # pragma: cuda only
    if _cards - {index}:  # pragma: cuda only
        raise BackendUnavailable(
            f"device {device!r}: models of this process run on cuda:{min(_cards)} already, and one process "
            "drives one card"
        )
    torch.cuda.set_device(index)  # pragma: cuda only
    return torch.device("cuda", index)  # pragma: cuda only


def settle_card(device: torch.device) -> None:
    """A model runs on `device`: so will every other of this process."""
    if device.index is not None:  # pragma: cuda only
        _cards.add(device.index)
