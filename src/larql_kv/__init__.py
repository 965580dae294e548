"""larql_kv: LLM continuation state. Pick a state engine, run a real model, check the promise."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# torch and numba each bring an OpenMP pool. By default a pool's idle threads spin for milliseconds, so after
# every torch operation one pool would hold the cores that the other needs (a third of the decode speed).
# 20,000 turns outlast the gaps between kernels and little more. Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"

_POLICY = ("Exact", "ExactWithinWindow", "BoundedKL", "BoundedKLPerLayer", "TaskLevel", "StatePolicy")
_ERRORS = (
    *(
        "LarqlError",
        "EngineError",
        "EmptyPrompt",
        "BackendUnavailable",
        "RetrievalMiss",
        "InvariantViolation",
    ),
    *("BackendFailure", "ModelError", "SpecError", "StoreError", "RemoteError"),
)
# Name -> module: torch and the kernels are imported only when something is used.
_EXPORTS = {
    "load_model": "larql_kv.model.load",
    "describe": "larql_kv.model.load",
    "Model": "larql_kv.model.model",
    "build_engine": "larql_kv.engine",
    "engines": "larql_kv.engine",
    "generate_with_engine": "larql_kv.engine",
    "KvEngine": "larql_kv.engine",
    "Token": "larql_kv.engine",
    "parse_spec": "larql_kv.engine",
    "DenseFfn": "larql_kv.ffn.base",
    "FfnBackend": "larql_kv.ffn.base",
    "Ledger": "larql_kv.state.ledger",
    **dict.fromkeys(_POLICY, "larql_kv.policy"),
    **dict.fromkeys(_ERRORS, "larql_kv.errors"),
}


__all__ = [
    "BackendFailure",
    "BackendUnavailable",
    "BoundedKL",
    "BoundedKLPerLayer",
    "DenseFfn",
    "EmptyPrompt",
    "EngineError",
    "Exact",
    "ExactWithinWindow",
    "FfnBackend",
    "InvariantViolation",
    "KvEngine",
    "LarqlError",
    "Ledger",
    "Model",
    "ModelError",
    "RemoteError",
    "RetrievalMiss",
    "SpecError",
    "StatePolicy",
    "StoreError",
    "TaskLevel",
    "Token",
    "__version__",
    "build_engine",
    "describe",
    "engines",
    "generate_with_engine",
    "load_model",
    "parse_spec",
]

if TYPE_CHECKING:
    from larql_kv.engine import KvEngine, Token, build_engine, engines, generate_with_engine
    from larql_kv.errors import (
        BackendFailure,
        BackendUnavailable,
        EmptyPrompt,
        EngineError,
        InvariantViolation,
        LarqlError,
        ModelError,
        RemoteError,
        RetrievalMiss,
        SpecError,
        StoreError,
    )
    from larql_kv.ffn.base import DenseFfn, FfnBackend
    from larql_kv.model.load import describe, load_model
    from larql_kv.model.model import Model
    from larql_kv.policy import BoundedKL, BoundedKLPerLayer, Exact, ExactWithinWindow, StatePolicy, TaskLevel
    from larql_kv.spec import parse_spec
    from larql_kv.state.ledger import Ledger


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
