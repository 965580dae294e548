"""Engines by name: importing this package registers them all."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points

from larql_kv.engine.base import KvEngine
from larql_kv.engine.generate import Token, generate_with_engine
from larql_kv.engine.info import EngineInfo
from larql_kv.ffn.base import FfnBackend
from larql_kv.model.model import Model
from larql_kv.spec import EngineEntry, EngineSpec, parse_spec, registered

__all__ = [
    "EngineInfo",
    "KvEngine",
    "Token",
    "build_engine",
    "engines",
    "generate_with_engine",
    "parse_spec",
]


def _register_all() -> None:
    """Every module of this folder, then plug-ins (entry point group `larql_kv.engines`)."""
    for module in sorted(item.name for item in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{module}")
    for plugin in entry_points(group="larql_kv.engines"):
        plugin.load()


_register_all()


def engines() -> list[EngineEntry]:
    """Every registered engine: name, aliases, keys with their defaults, policy."""
    return registered()


def build_engine(
    spec: str | EngineSpec, model: Model, ffn: FfnBackend | None = None, context_window: int | None = None
) -> KvEngine:
    """An empty engine on `model`. `ffn` defaults to the model's own dense FFN.

    Raises SpecError naming the bad part of a spec, ModelError when the model breaks the engine's
    preconditions.
    """
    parsed = spec if isinstance(spec, EngineSpec) else parse_spec(spec, context_window)
    return KvEngine(parsed, model, ffn)
