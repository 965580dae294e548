"""Execution backends. `capabilities` answers before anything is loaded; what is missing is a
BackendUnavailable, never a crash."""

from __future__ import annotations

from larql_kv.errors import BackendUnavailable

DEVICES = ("cpu",)


def check_device(device: str) -> None:
    """Raises BackendUnavailable for a device that no backend here serves."""
    if device not in DEVICES:
        raise BackendUnavailable(
            f"no backend for device {device!r} in this build; available: {', '.join(DEVICES)}"
        )
