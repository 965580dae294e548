"""Caches of FFN outputs: L1 of one `WalkFfn`, L2 of one model in a process, and tiers outside it."""

from __future__ import annotations

from larql_kv.ffn.cache.check import HitCheck
from larql_kv.ffn.cache.keys import KeyFields, LayerKeys
from larql_kv.ffn.cache.memory import FfnCache, FfnL1Cache
from larql_kv.ffn.cache.tier import CacheTier, TierCache

__all__ = ["CacheTier", "FfnCache", "FfnL1Cache", "HitCheck", "KeyFields", "LayerKeys", "TierCache"]
