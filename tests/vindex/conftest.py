"""Vindexes of tiny models, built once a session."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from larql_kv.model.load import open_files
from larql_kv.vindex.build import BuildSettings, build_vindex
from tests import tiny_models

Make = Callable[..., Path]


def source_of(family: str, quant: str, folder: Path) -> Path:
    """The tiny model as a directory (quant "hf"), or as a GGUF file of that quantisation."""
    if quant == "hf":
        return tiny_models.model_dir(family)
    path = folder / f"{family}-{quant}.gguf"
    return path if path.exists() else tiny_models.write_tiny_gguf(family, path, quant)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A vindex nobody changes, of (family, quant or "hf", format, down features)."""
    folder = tmp_path_factory.mktemp("vindexes")

    def make(family: str = "llama", quant: str = "Q8_0", format: str = "stored", down: str = "f32") -> Path:
        target = folder / f"{family}-{quant}-{format}-{down}"
        if not target.exists():
            files = open_files(source_of(family, quant, folder))
            build_vindex(files, target, BuildSettings(format, down))
        return target

    return make


@pytest.fixture
def own(shared: Make, tmp_path: Path) -> Make:
    """A copy of a shared vindex, for this test to change."""

    def make(*args: str, name: str = "own") -> Path:
        return Path(shutil.copytree(shared(*args), tmp_path / name))

    return make
