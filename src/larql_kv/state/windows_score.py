"""Which archived windows a query is about: token overlap, and summaries of their keys."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from larql_kv.model.config import RopeSpec
from larql_kv.model.model import Model
from larql_kv.state.ledger import LedgerEntry
from larql_kv.state.pages import BLOCK, PagedRows, allocate_block

_SATURATION, _LENGTH_SHARE = 1.2, 0.75  # k1 and b of BM25
_EMPHASIS = 8  # so high that what counts is how far a window stands out once, not how often a little


@dataclass(frozen=True)
class WindowScores:
    """How archived windows were ranked at one query, best first; `tokens` and `keys` by window id, None where
    that score was not asked for."""

    tokens: list[float] | None
    keys: list[float] | None
    order: list[int]

    @classmethod
    def of(cls, tokens: torch.Tensor | None, keys: torch.Tensor | None) -> WindowScores:
        order = fused([ranked(scores) for scores in (tokens, keys) if scores is not None])
        given = [None if scores is None else scores.tolist() for scores in (tokens, keys)]
        return cls(given[0], given[1], order)


def token_scores(ids: torch.Tensor, starts: Sequence[int], query: torch.Tensor) -> torch.Tensor:
    """BM25 of windows as documents, (windows,) float64.

    ids: int64 (n,) of all archived positions; starts: the first position of each window; query: int64 ids,
    of which each counts once.
    """
    edges = torch.tensor([*starts, len(ids)])
    sizes = edges.diff().double()
    windows = torch.repeat_interleave(torch.arange(len(starts)), edges.diff())
    terms = query.unique()
    at = torch.searchsorted(terms, ids).clamp_max(len(terms) - 1)
    hit = terms[at] == ids
    counts = torch.zeros(len(starts), len(terms), dtype=torch.float64)
    counts.index_put_((windows[hit], at[hit]), torch.ones((), dtype=torch.float64), accumulate=True)
    having = (counts > 0).sum(0).double()
    rarity = torch.log1p((len(starts) - having + 0.5) / (having + 0.5))
    norm = _SATURATION * (1 - _LENGTH_SHARE + _LENGTH_SHARE * sizes / sizes.mean())
    return (rarity * counts * (_SATURATION + 1) / (counts + norm.unsqueeze(1))).sum(1)


def ranked(scores: torch.Tensor) -> list[int]:
    """Window ids by falling score; of equal ones the later first."""
    values = scores.tolist()
    return sorted(range(len(values)), key=lambda index: (-values[index], -index))


def fused(orders: Sequence[Sequence[int]]) -> list[int]:
    """Several rankings as one, by the sum of reciprocal ranks; of equal ones the later window first."""
    worth = torch.zeros(len(orders[0]), dtype=torch.float64)
    for order in orders:
        worth[list(order)] += 1 / torch.arange(1, len(order) + 1, dtype=torch.float64)
    return ranked(worth)


def unrotated(x: torch.Tensor, first: int, rope: RopeSpec) -> torch.Tensor:
    """Rotated head vectors x (n, heads, head_dim) float32 of positions first.. as they were before, but for
    the rule's attention factor."""
    angles = torch.outer(torch.arange(first, first + len(x)).float(), torch.tensor(rope.inv_freq))
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos + high * sin, high * cos - low * sin), -1)


class KeySummaries:
    """Per archived window and layer, the least and the largest value of each channel of its K rows, before
    rotation, bfloat16: they bound what any query can score against any row of the window, were it near.

    `layers` are those that see the whole text. Windows below `missing` have none.
    """

    def __init__(self, model: Model, layers: Sequence[int]) -> None:
        config = model.config
        self.layers = list(layers)
        self.missing = 0
        self._config = config
        shape = (len(self.layers), 2, config.kv_heads, config.head_dim)
        self.pages = PagedRows(
            lambda rows: allocate_block((rows, *shape), torch.bfloat16, model.device), None
        )
        self.row_bytes = 2 * shape[0] * 2 * config.kv_dim

    def close(self, layer: int, window_id: int, first: int, k: torch.Tensor) -> None:
        """Summarise K rows (n, kv_heads, head_dim) of a window that begins at `first`."""
        plain = unrotated(k.float(), first, self._config.layers[layer].rope)
        self.pages.reserve(window_id, window_id + 1)
        block, slot = divmod(window_id, BLOCK)
        row = self.pages.block(block)[slot, self.layers.index(layer)]
        row[0], row[1] = plain.amin(0), plain.amax(0)

    def score(self, layer: int, windows: int, q: torch.Tensor, first: int) -> torch.Tensor:
        """How far each of the first `windows` windows stands out for rotated queries q (n, heads, head_dim)
        of positions first.., (windows,) float32."""
        config = self._config
        at, runs = self.layers.index(layer), self.pages.runs(0, windows)
        bounds = torch.cat(
            [self.pages.block(block)[: slot + count, at] for _, block, slot, count in runs]
        ).float()
        q = unrotated(q, first, config.layers[layer].rope)
        q = q.view(len(q), config.kv_heads, -1, config.head_dim)
        low, high = bounds.unbind(1)
        best = torch.einsum("nkgd,wkd->wnkg", q.clamp_min(0), high)
        best += torch.einsum("nkgd,wkd->wnkg", q.clamp_max(0), low)
        best -= best.mean(0)
        best /= best.square().mean(0).sqrt() + 1e-6
        return best.clamp_min(0).pow(_EMPHASIS).sum((1, 2, 3))

    def trim(self, windows: int) -> None:
        self.pages.truncate(windows)
        self.missing = min(self.missing, windows)

    def drop(self, windows: int) -> None:
        """Let all go, of `windows` archived windows."""
        self.pages.clear()
        self.missing = windows

    def fork(self) -> KeySummaries:
        twin = copy.copy(self)
        twin.pages = self.pages.fork()
        return twin

    def entries(self, windows: int) -> list[LedgerEntry]:
        return self.pages.entries("key summaries", "derivative", windows)
