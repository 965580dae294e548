"""K/V rows of a window: read from blocks, put into blocks, and caught on their way into attention."""

from __future__ import annotations

import torch

from larql_kv.model.model import Model
from larql_kv.state.pages import PagedRows


def rows_of(pages: PagedRows, first: int, stop: int) -> torch.Tensor:
    """(2, n, kv_heads, head_dim) of full-precision blocks (2, kv_heads, rows, head_dim), a copy."""
    runs = pages.runs(first, stop)
    parts = [pages.block(index)[:, :, slot : slot + count] for _, index, slot, count in runs]
    return torch.cat(parts, 2).transpose(1, 2)


def put_rows(pages: PagedRows, rows: torch.Tensor) -> None:
    """Fill empty pages with rows (2, n, kv_heads, head_dim)."""
    rows = rows.transpose(1, 2)
    pages.reserve(0, rows.shape[2])
    for offset, index, slot, count in pages.runs(0, rows.shape[2]):
        pages.block(index)[:, :, slot : slot + count] = rows[:, :, offset : offset + count]


class Capture:
    """K/V rows as they enter attention, (layers, 2, n, kv_heads, head_dim) in the K/V dtype."""

    def __init__(self, model: Model, first: int, count: int) -> None:
        config = model.config
        shape = (config.layer_count, 2, count, config.kv_heads, config.head_dim)
        self.first, self.rows = first, torch.empty(shape, dtype=model.kv_dtype)

    def take(self, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        at = slice(first - self.first, first - self.first + len(k))
        self.rows[layer, 0, at], self.rows[layer, 1, at] = k, v
