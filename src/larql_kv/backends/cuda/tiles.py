"""Which tile a matrix is cut into, by its role in the step. Figures behind the table: docs/cuda.md."""

from __future__ import annotations

from larql_kv.backends.cuda.packed import FloatTile, Tile

# Tuned on an H200 (benchmarks/micro/cuda_tune.py): role, or role and ggml type -> tile.
_TUNED = {
    ("qkv", ""): Tile(32, 16, 4, 5),
    ("o", ""): Tile(8, 64, 4, 1),
    ("gate_up", ""): Tile(64, 16, 4, 2, 168),
    ("down", ""): Tile(8, 64, 4, 3),
    ("head", ""): Tile(64, 16, 4, 0),
}

_FLOATS = {
    "qkv": FloatTile(8, 512, 4, 4),
    "o": FloatTile(8, 1024, 8, 2),
    "gate_up": FloatTile(16, 512, 8, 4),
    "down": FloatTile(4, 2048, 8, 3),
    "head": FloatTile(16, 512, 4, 5),
}


def choose_float_tile(role: str) -> FloatTile:
    """The tuned tile of a matrix that is stored as floats."""
    return _FLOATS[role]


def choose_tile(role: str, groups: int, kind: str) -> Tile:
    """The tuned tile where the groups of a row fit it; else one that pads the row by at most an eighth."""
    tuned = _TUNED.get((role, kind)) or _TUNED[role, ""]
    if groups % tuned.groups == 0:
        return tuned
    return Tile.default(groups, 64 if role == "gate_up" else min(tuned.rows, 32))
