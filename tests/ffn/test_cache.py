"""Keys, the in-process tiers, the check of hits, and the form of entries in a tier outside the process."""

from __future__ import annotations

import gc
import hashlib
import json
import threading
import tracemalloc
from dataclasses import replace

import pytest
import torch

from larql_kv.errors import RemoteError, SpecError
from larql_kv.ffn.cache import FfnCache, FfnL1Cache, HitCheck, KeyFields, LayerKeys, TierCache
from larql_kv.ffn.cache.check import HitSampler, relative_error
from larql_kv.ffn.cache.tier import decode_entry, encode_entry
from tests.models import tiny

FIELDS = KeyFields("", "aa", 0, 3, 100, "silu", "exact", "F32")


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def row(value: float, hidden: int = 8) -> torch.Tensor:
    return torch.full((1, hidden), float(value))


# -- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant", "b"),
        ("model", "ab"),
        ("patch_epoch", 1),
        ("layer", 4),
        ("top_k", 101),
        ("activation", "gelu_tanh"),
        ("mode", "features"),
        ("down_kind", "Q8_0"),
    ],
)
def test_every_field_is_in_the_key(field, value):
    assert LayerKeys(FIELDS).key(b"x") != LayerKeys(replace(FIELDS, **{field: value})).key(b"x")
    assert LayerKeys(FIELDS).key(b"x") == LayerKeys(FIELDS).key(memoryview(b"x"))


def test_fields_do_not_run_into_each_other():
    """The same bytes cut elsewhere are another key (a shared field let one tenant hit another's entries)."""
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", "")]
    made = {LayerKeys(replace(FIELDS, tenant=t, model=m)).key(b"x") for t, m in pairs}
    assert len(made) == len(pairs)
    assert LayerKeys(replace(FIELDS, layer=1, top_k=23)).key(b"") != LayerKeys(
        replace(FIELDS, layer=12, top_k=3)
    ).key(b"")


def test_keys_need_the_secret():
    one, two = (LayerKeys(FIELDS, secret).key(b"x") for secret in (b"s" * 16, b"t" * 16))
    assert len({one, two, LayerKeys(FIELDS).key(b"x")}) == 3
    assert len(one) == 32
    assert LayerKeys(FIELDS, b"s" * 16).key(b"x") == one
    assert LayerKeys(FIELDS, b"l" * 100).key(b"x") != LayerKeys(FIELDS, b"l" * 101).key(b"x")
    with pytest.raises(SpecError, match="16 bytes"):
        LayerKeys(FIELDS, b"short")


def test_the_key_is_blake2b_under_the_secret():
    """Written out by hand: another server, or another version, must come to the same key."""
    parts = [("version", "int:1"), ("tenant", "str:t"), ("model", "str:aa"), ("patch_epoch", "int:0")]
    parts += [
        ("layer", "int:3"),
        ("top_k", "int:100"),
        ("activation", "str:silu"),
        ("mode", "str:exact"),
        ("down_kind", "str:F32"),
    ]
    text = b""
    for name, value in parts:
        for piece in (name.encode(), value.encode()):
            text += len(piece).to_bytes(4, "little") + piece
    text += b"payload" + (5).to_bytes(8, "little") + b"bytes"
    expected = hashlib.blake2b(text, digest_size=32, key=b"s" * 20, person=b"larql-ffn-cache").digest()
    assert LayerKeys(replace(FIELDS, tenant="t"), b"s" * 20).key(b"bytes") == expected


# -- in memory ---------------------------------------------------------------------------------------------


def test_counts_and_copies():
    cache = FfnCache(4)
    given = row(1.0)
    assert cache.get(2, key(1)) is None
    cache.put(2, key(1), given)
    given.fill_(9)  # the cache keeps a copy
    hit = cache.get(2, key(1))
    assert hit is not None
    assert torch.equal(hit.output, row(1.0))
    assert not hit.check
    hit.output.fill_(7)  # and hands out one
    assert torch.equal(cache.get(2, key(1)).output, row(1.0))
    assert cache.counts == (2, 1)
    stats = cache.stats()
    assert {name: stats[name] for name in ("hits", "misses", "total", "hit_rate", "layers")} == {
        "hits": 2,
        "misses": 1,
        "total": 3,
        "hit_rate": 0.667,
        "layers": 4,
    }
    assert stats["max_entries_per_layer"] == 4096
    assert FfnCache(1).stats()["hit_rate"] == 0.0
    json.dumps(stats)


def test_a_full_layer_drops_what_is_new():
    cache = FfnL1Cache.with_max_entries(3, 2)
    for number in range(5):
        cache.put(1, key(number), row(number))
    cache.put(0, key(10), row(10))
    assert [cache.entries_at(layer) for layer in range(3)] == [1, 2, 0]
    assert cache.get(1, key(0)) is not None
    assert cache.get(1, key(4)) is None
    assert cache.stats()["dropped"] == 3
    assert (cache.stats()["eviction"], cache.stats()["max_entries_per_layer"]) == ("drop", 2)
    assert isinstance(cache, FfnL1Cache)
    assert cache.mode == "features"


def test_lru_makes_room_for_what_is_used():
    probe = FfnCache(1)
    probe.put(0, key(0), row(0, 64))
    one = probe.stats()["bytes"]
    probe.put(0, key(1), row(1, 64))
    size = probe.stats()["bytes"] - one
    cache = FfnCache.lru(2, max_bytes=3 * size + size // 2)
    for number in range(3):
        cache.put(number % 2, key(number), row(number, 64))
    assert cache.get(0, key(0)) is not None  # 1 is now the one used longest ago
    cache.put(0, key(3), row(3, 64))
    assert cache.get(1, key(1)) is None
    assert all(cache.get(number % 2 if number < 3 else 0, key(number)) for number in (0, 2, 3))
    assert (len(cache), cache.stats()["evicted"]) == (3, 1)
    cache.put(0, key(9), row(9, 10_000))  # larger than all of it: dropped, nothing has to go for it
    assert (len(cache), cache.stats()["dropped"]) == (3, 1)
    assert (cache.stats()["eviction"], cache.stats()["max_entries_per_layer"]) == ("lru", None)
    cache.clear()
    assert (len(cache), cache.entries_at(0)) == (0, 0)


@pytest.mark.parametrize("features", [b"", b"\1" * 192])
def test_bytes_are_what_the_allocator_says(features):
    """Counted by tracemalloc, which sees Python's and numpy's memory."""
    cache = FfnCache(2, mode="features" if features else "exact")
    outputs = torch.randn(300, 1, 576)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    reported = cache.stats()["bytes"]
    for number in range(300):
        cache.put(0, key(number), outputs[number], bytes(bytearray(features)))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    counted = cache.stats()["bytes"] - reported
    assert counted == pytest.approx(grown, rel=0.03)
    assert counted > 300 * (576 * 4 + 32 + len(features))
    cache.clear()
    assert cache.stats()["bytes"] == pytest.approx(reported, abs=20_000)


def test_a_full_layer_makes_room_where_bytes_are_the_limit():
    cache = FfnCache(2, max_entries=3, max_bytes=1 << 20)
    cache.put(1, key(9), row(9))
    for number in range(3):
        cache.put(0, key(number), row(number))
    assert cache.get(0, key(0)) is not None
    cache.put(0, key(3), row(3))  # of its own layer, not the one of layer 1 that is older still
    assert [cache.get(0, key(number)) is not None for number in range(4)] == [True, False, True, True]
    assert cache.get(1, key(9)) is not None
    assert [cache.entries_at(layer) for layer in (0, 1)] == [3, 1]
    stats = cache.stats()
    assert (stats["eviction"], stats["evicted"], stats["dropped"]) == ("lru", 1, 0)


def test_the_set_of_features_is_compared():
    """Two sets under one key (a collision, or an attacker's) never get each other's output."""
    cache = FfnCache(2, mode="features", check=HitCheck(every=10**6))
    cache.put(0, key(1), row(1), b"\x0f")
    assert cache.get(0, key(1), b"\xf0") is None
    assert cache.get(1, key(1), b"\x0f") is None
    assert cache.get(0, key(1), b"\x0f") is not None
    assert cache.stats()["mismatched"] == 2


def test_values_that_are_not_finite_are_not_kept():
    cache = FfnCache(1)
    for value in (float("nan"), float("inf")):
        cache.put(0, key(1), row(value))
    assert len(cache) == 0


def test_a_key_keeps_its_first_output():
    cache = FfnCache(1)
    cache.put(0, key(1), row(1))
    cache.put(0, key(1), row(2))
    assert torch.equal(cache.get(0, key(1)).output, row(1))
    assert cache.entries_at(0) == 1


def test_bypasses_are_counted_by_reason():
    cache = FfnCache(1)
    for why in ("rows", "rows", "dense", "overrides"):
        cache.bypass(why)
    assert cache.stats()["bypassed"] == {"dense": 1, "rows": 2, "overrides": 1}
    assert cache.stats()["total"] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_entries": 0}, "max_entries"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"mode": "feature"}, "key mode"),
        ({"max_entries": None}, "without a limit"),
    ],
)
def test_bad_caches(options, says):
    with pytest.raises(SpecError, match=says):
        FfnCache(2, **options)
    with pytest.raises(SpecError, match="num_layers"):
        FfnCache(0)


def test_threads_share_a_cache():
    cache = FfnCache.lru(4, max_bytes=60_000)

    def use(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(400):
            number = int(torch.randint(0, 60, (1,), generator=generator))
            hit = cache.get(number % 4, key(number))
            if hit is None:
                cache.put(number % 4, key(number), row(number, 64))
            else:
                assert torch.equal(hit.output, row(number, 64))

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(cache.counts) == 1600
    assert len(cache) == sum(cache.entries_at(layer) for layer in range(4))
    assert cache._bytes <= 60_000


def test_l2_is_one_a_model():
    from dataclasses import replace as copy

    model = copy(tiny("llama"))
    assert model.ffn_l2_cache is model.ffn_l2_cache
    assert model.ffn_l2_cache.stats()["layers"] == 4
    assert model.ffn_l2_cache.mode == "exact"
    mine = FfnCache.lru(4, max_bytes=1000)
    model.ffn_l2_cache = mine
    assert model.ffn_l2_cache is mine


# -- the check of hits -------------------------------------------------------------------------------------


def test_hits_are_sampled_as_often_as_asked():
    sampler = HitSampler(HitCheck(every=8, seed=3))
    asked = [sampler.wants(is_first=False) for _ in range(8000)]
    assert sum(asked) == pytest.approx(1000, rel=0.1)
    gaps = [j - i for i, j in zip(*[[k for k, a in enumerate(asked) if a][s:] for s in (0, 1)], strict=False)]
    assert max(gaps) < 16
    assert len(set(gaps)) > 5  # not at places that can be foreseen
    again = HitSampler(HitCheck(every=8, seed=3))
    assert [again.wants(is_first=False) for _ in range(8000)] == asked
    every = HitSampler(HitCheck(every=1))
    assert all(every.wants(is_first=False) for _ in range(50))


def test_a_hit_over_the_bound_goes():
    cache = FfnCache(1, mode="features", check=HitCheck(bound=0.1, every=10**6))
    cache.put(0, key(1), row(1), b"\1")
    assert cache.get(0, key(1), b"\1").check  # the first hit of an entry is always recomputed
    assert cache.accept(key(1), 0.05)
    assert not cache.get(0, key(1), b"\1").check
    assert not cache.accept(key(1), 0.2)
    assert cache.get(0, key(1), b"\1") is None
    stats = cache.stats()
    assert (stats["checked"], stats["rejected"], stats["hits"], stats["misses"]) == (2, 1, 1, 2)
    assert (stats["mean_error"], stats["max_error"], stats["error_bound"]) == (0.05, 0.05, 0.1)
    assert not HitSampler(HitCheck()).accepts(float("nan"))
    assert cache.accept(key(5), 0.01)  # evicted meanwhile


def test_the_first_hit_stays_first_until_it_is_accepted():
    cache = FfnCache(1, mode="features", check=HitCheck(every=10**6))
    cache.put(0, key(1), row(1), b"\1")
    assert cache.get(0, key(1), b"\1").check
    assert cache.get(0, key(1), b"\1").check  # that recomputation may have failed


def test_bad_checks():
    for options in ({"bound": -1}, {"bound": float("nan")}, {"every": 0}):
        with pytest.raises(SpecError):
            HitCheck(**options)


def test_relative_error():
    assert relative_error(row(1.1), row(1.0)) == pytest.approx(0.1, rel=1e-5)
    assert relative_error(row(0), row(0)) == 0
    assert relative_error(row(1), row(0)) == float("inf")


# -- a tier outside the process ----------------------------------------------------------------------------


class Shelf:
    """A tier in a dictionary that can be told to fail."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.down = False

    def get(self, key: bytes) -> bytes | None:
        self._check()
        return self.values.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self._check()
        self.values[key] = value

    def stats(self) -> dict:
        return {"entries": len(self.values)}

    def _check(self) -> None:
        if self.down:
            raise RemoteError("the shelf is gone")


def test_entries_go_through_bytes():
    output = torch.randn(1, 8)
    value = encode_entry(output)
    assert len(value) == 8 + 32
    back = decode_entry(value, 8)
    assert back is not None
    assert torch.equal(back, output)


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: b"",
        lambda value: value[:-1],
        lambda value: value + b"\0",
        lambda value: b"XXXX" + value[4:],
        lambda value: value[:4] + (9).to_bytes(4, "little") + value[8:],
        lambda value: value[:8] + b"\xff" * 32,
    ],
)
def test_broken_values_are_misses(damage):
    shelf = Shelf()
    cache = TierCache(shelf, b"s" * 16, hidden=8)
    cache.put(0, key(1), row(2))
    assert torch.equal(cache.get(0, key(1)).output, row(2))
    shelf.values[key(1)] = damage(shelf.values[key(1)])
    assert cache.get(0, key(1)) is None
    stats = cache.stats()
    assert (stats["hits"], stats["misses"], stats["invalid"], stats["hit_rate"]) == (1, 1, 1, 0.5)


def test_a_tier_that_is_down_costs_nothing_but_hits():
    shelf = Shelf()
    cache = TierCache(shelf, b"s" * 16, hidden=8)
    cache.put(0, key(1), row(1))
    cache.put(0, key(2), row(float("nan")))
    assert len(shelf.values) == 1
    shelf.down = True
    assert cache.get(0, key(1)) is None
    cache.put(0, key(3), row(1))
    cache.bypass("rows")
    stats = cache.stats()
    assert (stats["failed"], stats["misses"], stats["bypassed"]["rows"]) == (2, 1, 1)
    assert stats["tier"] == {"entries": 1}
    assert TierCache(shelf, b"s" * 16, hidden=8).stats()["hit_rate"] == 0
    with pytest.raises(SpecError, match="16 bytes"):
        TierCache(shelf, b"short", hidden=8)
