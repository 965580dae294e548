"""Carry the real models to a machine without a network, in pieces that fit its limit for one transfer.

    python benchmarks/carry_models.py split smollm2-135m gemma3-270m     # here: .carry/models.1, .2, ...
    python benchmarks/carry_models.py join                               # there, whenever a piece arrived

`join` puts the pieces that it finds into /tmp/models (outside of the tree that every transfer replaces), in
any order, each once; a model appears there as NAME.gguf when all of it has come and its sha256 is right. A
piece carries its own description: a line of JSON, then compressed bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CARRY = ROOT / ".carry"
ARRIVED = Path("/tmp/models")
_BLOCK = 1 << 20
_HELD = 1 << 17  # bytes that a packer may still hold, and the description
_LEVEL = 1  # quantised weights hardly compress (6 %), at any level


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    split_verb = verbs.add_parser("split", help="cut models into pieces")
    split_verb.add_argument("models", nargs="+", help="short names, or paths of .gguf files")
    split_verb.add_argument("--piece-mib", type=float, default=60.0, help="largest piece, MiB")
    split_verb.add_argument("--folder", type=Path, default=CARRY)
    join_verb = verbs.add_parser("join", help="put the pieces that arrived together")
    join_verb.add_argument("--folder", type=Path, default=CARRY)
    join_verb.add_argument("--to", type=Path, default=ARRIVED)
    arguments = parser.parse_args()
    if arguments.verb == "split":
        models = {_file_name(name): _path(name) for name in arguments.models}
        for piece in split(models, arguments.folder, int(arguments.piece_mib * 2**20)):
            print(f"{piece}  {piece.stat().st_size / 2**20:.1f} MiB")
    else:
        for line in join(arguments.folder, arguments.to):
            print(line)


def _path(name: str) -> Path:
    from larql_kv.model.catalog import HubId, resolve  # not there to be had, nor needed, where pieces arrive

    found = resolve(name)
    if isinstance(found, HubId) or not found.is_file():
        sys.exit(f"{name}: expected a short name or a .gguf file")
    return found


def _file_name(name: str) -> str:
    """What the model is called over there: NAME.gguf."""
    return name if "/" not in name and not name.endswith(".gguf") else Path(name).stem


def split(models: dict[str, Path], folder: Path, piece_bytes: int) -> list[Path]:
    """Cut `models` (name -> file) into pieces of at most `piece_bytes`; earlier pieces in `folder` go."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("models.*"):
        old.unlink()
    files = {
        f"{name}.gguf": {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for name, path in models.items()
    }
    blocks = _blocks(models)
    block = next(blocks, None)
    pieces: list[Path] = []
    while block is not None:
        packer, body, size = zlib.compressobj(_LEVEL), [], 0
        segments: list[dict[str, Any]] = []
        while block is not None and (not body or size + 2 * _BLOCK + _HELD <= piece_bytes):
            name, at, data = block
            if not segments or segments[-1]["file"] != name:
                segments.append({"file": name, "at": at, "bytes": 0})
            segments[-1]["bytes"] += len(data)
            body.append(packer.compress(data))
            size += len(body[-1])
            block = next(blocks, None)
        body.append(packer.flush())
        header = {"piece": len(pieces) + 1, "segments": segments, "files": files}
        pieces.append(folder / f"models.{len(pieces) + 1}")
        pieces[-1].write_bytes(json.dumps(header).encode() + b"\n" + b"".join(body))
    return pieces


def _blocks(models: dict[str, Path]):
    """(file name, offset, bytes) of every block of every file."""
    for name, path in models.items():
        with path.open("rb") as source:
            at = 0
            while data := source.read(_BLOCK):
                yield f"{name}.gguf", at, data
                at += len(data)


def join(folder: Path, target: Path) -> list[str]:
    """Put every piece in `folder` that was not there yet into `target`; what each file has, as lines.

    Raises ValueError for a file that is all there under another checksum; every piece is then wanted again.
    """
    target.mkdir(parents=True, exist_ok=True)
    record = target / "arrived.json"
    arrived: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    for piece in sorted(folder.glob("models.*")):
        with piece.open("rb") as source:
            header = json.loads(source.readline())
            body = source.read()
        if arrived.get("files") != header["files"]:  # the first piece, or pieces of another split
            arrived = {"files": header["files"], "segments": []}
        if header["segments"][0] in arrived["segments"]:
            continue
        data = memoryview(zlib.decompress(body))
        for segment in header["segments"]:
            partial = target / f"{segment['file']}.partial"
            partial.touch()
            with partial.open("r+b") as out:
                out.seek(segment["at"])
                out.write(data[: segment["bytes"]])
            data = data[segment["bytes"] :]
            arrived["segments"].append(segment)
        record.write_text(json.dumps(arrived))
    return [_finish(name, facts, arrived, record) for name, facts in arrived.get("files", {}).items()]


def _finish(name: str, facts: dict[str, Any], arrived: dict[str, Any], record: Path) -> str:
    """Check and rename a file that is all there; a line about it."""
    whole, partial = record.parent / name, record.parent / f"{name}.partial"
    if whole.exists() and whole.stat().st_size == facts["bytes"]:
        return f"{whole}: complete"
    here = sum(part["bytes"] for part in arrived["segments"] if part["file"] == name)
    if here < facts["bytes"]:
        return f"{whole}: {here / 2**20:.0f} of {facts['bytes'] / 2**20:.0f} MiB"
    if (found := _sha256(partial)) != facts["sha256"]:
        record.unlink()
        raise ValueError(f"{name}: sha256 {found}, expected {facts['sha256']}: carry every piece again")
    partial.replace(whole)
    return f"{whole}: complete"


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


if __name__ == "__main__":
    main()
