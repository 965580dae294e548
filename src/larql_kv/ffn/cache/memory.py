"""The in-process tiers: L1 of one `WalkFfn`, L2 of all of a model's."""

from __future__ import annotations

import sys
import threading
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

from larql_kv.errors import SpecError
from larql_kv.ffn.cache.check import HitCheck, HitSampler
from larql_kv.ffn.cache.keys import MODES, Mode

MAX_ENTRIES = 4096  # a layer
BYPASSES = ("dense", "rows", "overrides")  # why the cache was not asked


class Hit(NamedTuple):
    """A cached output, and whether it has to be recomputed before it is believed."""

    output: torch.Tensor  # (1, hidden) float32, the caller's own
    check: bool


class _Entry:
    __slots__ = ("features", "output", "proved")

    def __init__(self, output: np.ndarray, features: bytes) -> None:
        self.output, self.features = output, features
        self.proved = False  # a hit was recomputed and found within the bound


class FfnCache:
    """Outputs of single rows, by layer and key. Safe to share among threads.

    With `max_bytes` the entries used longest ago make room: over all layers for bytes, within a layer that
    has `max_entries`. Without, a full layer drops what is new, as the original does. `mode` says what its
    keys are of: `exact` of the input's bytes, whose hits are what would be computed, or `features` of the
    set of selected features, whose hits are approximations under `check`.
    """

    def __init__(
        self,
        num_layers: int,
        max_entries: int | None = MAX_ENTRIES,
        max_bytes: int | None = None,
        mode: Mode = "exact",
        check: HitCheck | None = None,
    ) -> None:
        """Raises SpecError for sizes below 1, an unknown mode, or no limit at all."""
        if mode not in MODES:
            raise SpecError(f"unknown key mode {mode!r} of a cache (one of: {', '.join(MODES)})")
        sizes = {"num_layers": num_layers, "max_entries": max_entries, "max_bytes": max_bytes}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise SpecError(f"{name} of a cache must be at least 1, got {size}")
        if max_entries is None and max_bytes is None:
            raise SpecError(
                "a cache needs max_entries or max_bytes: without a limit it would take all memory"
            )
        self.mode: Mode = mode
        self.num_layers = num_layers
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.secret: bytes | None = None  # the process's own
        self._sampler = HitSampler(check or HitCheck())
        self._entries: OrderedDict[bytes, tuple[int, _Entry]] = OrderedDict()
        self._per_layer = [0] * num_layers
        self._bytes = 0
        self._count: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def with_max_entries(cls, num_layers: int, max_entries: int, **options: Any) -> FfnCache:
        """Another capacity a layer; new entries are dropped when it is reached."""
        return cls(num_layers, max_entries=max_entries, **options)

    @classmethod
    def lru(cls, num_layers: int, max_bytes: int, **options: Any) -> FfnCache:
        """The recommended form: `max_bytes` over all layers, the entries used longest ago make room."""
        return cls(num_layers, max_entries=None, max_bytes=max_bytes, **options)

    def get(self, layer: int, key: bytes, features: bytes = b"") -> Hit | None:
        """The output under `key`, if it was stored for the same set of features."""
        with self._lock:
            held = self._entries.get(key)
            if held is not None and (held[0] != layer or held[1].features != features):
                self._count["mismatched"] += 1  # two inputs under one key: never served
                held = None
            if held is None:
                self._count["misses"] += 1
                return None
            self._count["hits"] += 1
            if self.max_bytes is not None:
                self._entries.move_to_end(key)
            check = self.mode == "features" and self._sampler.wants(not held[1].proved)
            output = held[1].output
        return Hit(torch.from_numpy(output.copy()), check)

    def accept(self, key: bytes, error: float) -> bool:
        """Book the relative error of a hit that was recomputed. False: it was too large, the entry is gone
        and the hit counts as a miss."""
        with self._lock:
            if self._sampler.accepts(error):
                if key in self._entries:
                    self._entries[key][1].proved = True
                return True
            self._remove(key)
            self._count["hits"] -= 1
            self._count["misses"] += 1
            return False

    def put(self, layer: int, key: bytes, output: torch.Tensor, features: bytes = b"") -> None:
        """Keep a copy of output (1, hidden). One with values that are not finite is not kept."""
        copy = output.numpy().copy()
        if not np.isfinite(copy).all():
            return
        entry = _Entry(copy, features)
        size = entry_bytes(key, entry)
        with self._lock:
            if key in self._entries:
                return
            full = self.max_entries is not None and self._per_layer[layer] >= self.max_entries
            if full if self.max_bytes is None else size > self.max_bytes:
                self._count["dropped"] += 1
                return
            if self.max_bytes is not None:
                if full:
                    self._remove(next(key for key, (at, _) in self._entries.items() if at == layer))
                    self._count["evicted"] += 1
                while self._bytes + size > self.max_bytes:
                    self._remove(next(iter(self._entries)))
                    self._count["evicted"] += 1
            self._entries[key] = (layer, entry)
            self._per_layer[layer] += 1
            self._bytes += size

    def _remove(self, key: bytes) -> None:
        held = self._entries.pop(key, None)
        if held is not None:
            self._per_layer[held[0]] -= 1
            self._bytes -= entry_bytes(key, held[1])

    def bypass(self, why: str) -> None:
        """A row that was not looked up: its layer is `dense`, there are several `rows`, or `overrides`."""
        with self._lock:
            self._count[why] += 1

    def clear(self) -> None:
        """Let every entry go; the counters stay."""
        with self._lock:
            self._entries.clear()
            self._per_layer = [0] * self.num_layers
            self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def entries_at(self, layer: int) -> int:
        return self._per_layer[layer]

    @property
    def counts(self) -> tuple[int, int]:
        """(hits, misses)"""
        with self._lock:
            return self._count["hits"], self._count["misses"]

    def stats(self) -> dict[str, Any]:
        """Counters since it was made, and what it holds. `bytes` counts keys, outputs, sets and the Python
        objects around them, and the table."""
        with self._lock:
            hits, misses = self._count["hits"], self._count["misses"]
            total = hits + misses
            return {
                "hits": hits,
                "misses": misses,
                "total": total,
                "hit_rate": round(hits / total, 3) if total else 0.0,
                "layers": self.num_layers,
                "max_entries_per_layer": self.max_entries,
                "max_bytes": self.max_bytes,
                "eviction": "drop" if self.max_bytes is None else "lru",
                "mode": self.mode,
                "entries": len(self._entries),
                "bytes": self._bytes + sys.getsizeof(self._entries),
                "dropped": self._count["dropped"],
                "evicted": self._count["evicted"],
                "mismatched": self._count["mismatched"],
                "bypassed": {why: self._count[why] for why in BYPASSES},
                **self._sampler.stats(),
            }


class FfnL1Cache(FfnCache):
    """The tier of one `WalkFfn`: it lives one command-line run, or one request. Keys are of features unless
    told otherwise."""

    def __init__(
        self,
        num_layers: int,
        max_entries: int | None = MAX_ENTRIES,
        max_bytes: int | None = None,
        mode: Mode = "features",
        check: HitCheck | None = None,
    ) -> None:
        super().__init__(num_layers, max_entries, max_bytes, mode, check)


def entry_bytes(key: bytes, entry: _Entry) -> int:
    """Bytes of one entry: key, output, set of features, and the objects that hold them."""
    parts = (key, entry.output, entry.features) if entry.features else (key, entry.output)
    return sum(map(sys.getsizeof, parts)) + sys.getsizeof(entry) + _PAIR


_PAIR = sys.getsizeof((0, None))
