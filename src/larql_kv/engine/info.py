"""What an engine says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is, for people and for `--json`."""

    name: str
    description: str
    backend: str
    config: str
    capture: str  # the mask in force: what is staged to the host each step

    @property
    def summary(self) -> str:
        return f"{self.name} [{self.backend}]" + (f" ({self.config})" if self.config else "")
