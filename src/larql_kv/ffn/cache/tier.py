"""A tier outside the process (L3): keys and values are bytes, and nothing that comes back is trusted."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from larql_kv.errors import RemoteError, SpecError
from larql_kv.ffn.cache.keys import Mode
from larql_kv.ffn.cache.memory import BYPASSES, Hit

_MAGIC = b"LFC1"
_HEADER = struct.Struct("<4sI")  # magic, values


class CacheTier(Protocol):
    """Where several servers keep entries. Neither call may stall a request: past its deadline, a `get` is
    None and a `put` is dropped."""

    def get(self, key: bytes) -> bytes | None: ...

    def put(self, key: bytes, value: bytes) -> None: ...

    def stats(self) -> dict[str, Any]: ...


class TierCache:
    """A `CacheTier` as a `WalkFfn` uses it, under `exact` keys: one server's approximation must not become
    every server's answer. All servers on a tier share its `secret`."""

    mode: Mode = "exact"

    def __init__(self, tier: CacheTier, secret: bytes, hidden: int) -> None:
        """Raises SpecError for a secret below 16 bytes."""
        if len(secret) < 16:
            raise SpecError(f"a cache secret has at least 16 bytes, got {len(secret)}")
        self.secret: bytes | None = secret
        self.tier, self.hidden = tier, hidden
        self._count: Counter[str] = Counter()
        self._lock = threading.Lock()

    def get(self, layer: int, key: bytes, features: bytes = b"") -> Hit | None:
        """What the tier has under `key`; a value that is no entry of this size counts as a miss."""
        value = self._asked(lambda: self.tier.get(key))
        output = None if value is None else decode_entry(value, self.hidden)
        self._book("hits" if output is not None else "misses")
        if output is None:
            if value is not None:
                self._book("invalid")
            return None
        return Hit(output, check=False)

    def put(self, layer: int, key: bytes, output: torch.Tensor, features: bytes = b"") -> None:
        """Offer an output (1, hidden) to the tier; one that is not finite is kept back."""
        if bool(torch.isfinite(output).all()):
            self._asked(lambda: self.tier.put(key, encode_entry(output)))

    def _asked(self, call: Callable[[], bytes | None]) -> bytes | None:
        try:
            return call()
        except RemoteError:  # a tier that is gone costs a computation, not an answer
            self._book("failed")
            return None

    def _book(self, what: str) -> None:
        with self._lock:
            self._count[what] += 1

    def bypass(self, why: str) -> None:
        """See `FfnCache.bypass`."""
        self._book(why)

    def stats(self) -> dict[str, Any]:
        """Counters since it was made; under `tier` what the tier says itself."""
        with self._lock:
            count = Counter(self._count)
        total = count["hits"] + count["misses"]
        return {
            "hits": count["hits"],
            "misses": count["misses"],
            "total": total,
            "hit_rate": round(count["hits"] / total, 3) if total else 0.0,
            "mode": self.mode,
            "invalid": count["invalid"],
            "failed": count["failed"],
            "bypassed": {why: count[why] for why in BYPASSES},
            "tier": self.tier.stats(),
        }


def encode_entry(output: torch.Tensor) -> bytes:
    """output (1, hidden) float32 as bytes."""
    values = output.numpy().astype("<f4", copy=False)
    return _HEADER.pack(_MAGIC, values.size) + values.tobytes()


def decode_entry(value: bytes, hidden: int) -> torch.Tensor | None:
    """(1, hidden) float32; None for anything that is no entry of that size, or not finite."""
    if len(value) != _HEADER.size + 4 * hidden or _HEADER.unpack_from(value) != (_MAGIC, hidden):
        return None
    values = np.frombuffer(value, "<f4", hidden, _HEADER.size).astype(np.float32)
    return torch.from_numpy(values)[None] if np.isfinite(values).all() else None
