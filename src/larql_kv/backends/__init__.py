"""Execution backends. What a build lacks is a BackendUnavailable before anything is loaded, never a crash."""

from __future__ import annotations

from larql_kv.errors import BackendUnavailable

DEVICES = ("cpu",)


def check_device(device: str) -> None:
    """Raises BackendUnavailable for a device that no backend here serves."""
    if str(device) not in DEVICES:
        raise BackendUnavailable(
            f"no backend for device {str(device)!r} in this build; available: {', '.join(DEVICES)}"
        )
