"""The hash that ties a check on the chip to the source it checked."""

from __future__ import annotations

from pathlib import Path

from larql_kv.backends.cuda import source_hash
from larql_kv.backends.cuda.source_hash import backends_cuda_hash


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_every_byte_and_every_name_counts(tmp_path: Path) -> None:
    files = {"a.py": "x = 1\n", "kernels/b.py": "# why\n", "kernels/__init__.py": ""}
    first = backends_cuda_hash(write(tmp_path / "first", files))
    assert first == backends_cuda_hash(write(tmp_path / "same", files))
    changed = [
        files | {"a.py": "x = 2\n"},
        files | {"kernels/b.py": "# Why\n"},
        files | {"kernels/c.py": ""},
        {"a.py": "x = 1\n", "kernels/c.py": "# why\n", "kernels/__init__.py": ""},
        {"a.py": "x = 1\nkernels", "kernels/b.py": "# why\n", "kernels/__init__.py": ""},
    ]
    hashes = {backends_cuda_hash(write(tmp_path / str(index), item)) for index, item in enumerate(changed)}
    assert len(hashes | {first}) == len(changed) + 1


def test_other_files_do_not_count(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.py": "x = 1\n"})
    before = backends_cuda_hash(folder)
    write(folder, {"notes.txt": "", "__pycache__/a.cpython-311.pyc": ""})
    assert backends_cuda_hash(folder) == before


def test_the_default_is_this_backend() -> None:
    assert source_hash.__file__ is not None
    folder = Path(source_hash.__file__).parent
    assert (folder / "kernels" / "linear.py").is_file()
    assert backends_cuda_hash() == backends_cuda_hash(folder)
