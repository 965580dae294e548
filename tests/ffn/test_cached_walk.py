"""When the caches of a walk fire, when they are left aside, and what they must never answer."""

from __future__ import annotations

import pytest
import torch

import larql_kv as lk
from larql_kv.errors import SpecError
from larql_kv.ffn import cached_rows
from larql_kv.ffn.cache import FfnCache, FfnL1Cache, HitCheck, LayerKeys, TierCache
from larql_kv.ffn.walk import WalkFfn
from larql_kv.vindex.index import VectorIndex
from tests import tiny_models
from tests.ffn.patched import edit, index_of, patch, vector
from tests.ffn.test_cache import Shelf
from tests.models import tiny

MODES = ("features", "exact")
NEVER = HitCheck(every=10**6)


@pytest.fixture
def walk():
    model = tiny("llama")
    return WalkFfn(model, index_of(model), 20)


def fresh(walk: WalkFfn, top_k: int | None = 20) -> WalkFfn:
    """The same walk without a cache."""
    return WalkFfn(walk.model, walk.index, top_k)


def cache_of(mode: str, **options) -> FfnCache:
    return FfnCache(4, mode=mode, **options)


# -- when it fires -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tier", ["l1", "l2"])
def test_one_row_on_the_sparse_path_is_looked_up(walk, mode, tier):
    cache = FfnL1Cache(4, mode=mode) if tier == "l1" else cache_of(mode)
    walk.with_cache(cache)
    x = torch.randn(1, 64)
    first = walk.forward(1, x)
    assert cache.counts == (0, 1)
    for _ in range(3):
        assert torch.equal(walk.forward(1, x), first)
    assert cache.counts == (3, 1)
    assert torch.equal(first, fresh(walk).forward(1, x))
    assert cache.entries_at(1) == 1
    assert walk.l1_cache_stats() == ((3, 1) if tier == "l1" else None)
    (stats,) = walk.cache_stats()
    assert stats["hit_rate"] == 0.75


@pytest.mark.parametrize("mode", MODES)
def test_what_is_never_looked_up(walk, mode):
    """top_k from 4/5 on, several positions, overrides at that layer: per layer, in every tier."""
    model, index = walk.model, walk.index
    caches = FfnL1Cache(4, mode=mode), cache_of(mode)
    x = torch.randn(1, 64)
    for top_k, fires in ((76, True), (77, False), (None, False), ([20, 77, None, 20], True)):
        walk = WalkFfn(model, index, top_k).with_cache(caches[0]).with_cache(caches[1])
        before = [cache.counts for cache in caches]
        walk.forward(0, x)
        assert [cache.counts != counts for cache, counts in zip(caches, before, strict=True)] == [fires] * 2
    held, before = [len(cache) for cache in caches], [cache.counts for cache in caches]
    for layer in (1, 2):
        walk.forward(layer, x)  # dense ones among sparse ones
    walk.forward(0, torch.cat([x, x]))
    walk.forward(0, torch.empty(0, 64))
    patch(index, edit("update", 3, 5, up=vector(64, 1)))
    walk.forward(3, x)
    assert [len(cache) for cache in caches] == held
    assert [cache.counts for cache in caches] == before
    for cache in caches:
        assert cache.stats()["bypassed"] == {"dense": 4, "rows": 2, "overrides": 1}


def test_a_generation_uses_its_l1():
    """The cache is used: the second of two equal generations computes no sparse row again."""
    model = tiny("llama")
    walk = WalkFfn(model, index_of(model), 20).with_l1_cache(4, mode="exact")
    ids = tiny_models.sample_ids(8)
    engine = lk.build_engine("standard", model, ffn=walk)
    first = [token.id for token in engine.generate(ids, 10)]
    hits, misses = walk.l1_cache_stats()
    assert (hits, misses) == (0, 9 * 4)
    second = [token.id for token in engine.fresh().generate(ids, 10)]
    assert first == second
    assert walk.l1_cache_stats() == (9 * 4, 9 * 4)
    plain = lk.build_engine("standard", model, ffn=WalkFfn(model, walk.index, 20))
    assert first == [token.id for token in plain.generate(ids, 10)]


def test_walks_on_rounded_down_rows_share_nothing_with_exact_ones(tmp_path):
    """Both indexes have the model's print, and other down vectors."""
    tiny_models.write_tiny_gguf("llama", tmp_path / "m.gguf", "Q8_0")
    model = lk.load_model(tmp_path / "m.gguf", dtype="float32")
    walks = [WalkFfn(model, VectorIndex.of_model(model, down_form=form), 20) for form in ("f32", "q8_0")]
    assert walks[0].index.print == walks[1].index.print
    assert walks[0] != walks[1]
    assert walks[1] == WalkFfn(model, VectorIndex.of_model(model, down_form="q8_0"), 20)
    x = torch.randn(1, 64)
    plain = [walk.forward(1, x) for walk in walks]
    assert not torch.equal(*plain)
    for walk in walks:
        walk.with_cache(model.ffn_l2_cache)
    for _ in range(2):
        assert all(torch.equal(walk.forward(1, x), want) for walk, want in zip(walks, plain, strict=True))
    assert model.ffn_l2_cache.counts == (2, 2)


# -- faults of the original --------------------------------------------------------------------------------


def test_rows_that_differ_in_the_last_bit_are_other_rows(walk):
    """The original rounded the row to 1/256 and clamped it, so near and large rows shared an output."""
    walk.with_cache(cache := cache_of("exact"))
    x = torch.randn(1, 64)
    near, large = x.clone(), 1000 * x
    near[0, 5] = torch.nextafter(x[0, 5], torch.tensor(9.0))
    for rows in (x, near, large, 2 * large):
        assert torch.equal(walk.forward(0, rows), fresh(walk).forward(0, rows))
    assert cache.counts == (0, 4)


@pytest.mark.parametrize("mode", MODES)
def test_activations_are_never_those_of_a_hit(walk, mode):
    """The original gave zeros as the activations of a hit."""
    walk.with_l1_cache(mode=mode)
    x = torch.randn(1, 64)
    before = walk.trace(0, x[0], 20)
    walk.forward(0, x)
    walk.forward(0, x)
    assert walk.l1_cache_stats() == (1, 1)
    assert walk.trace(0, x[0], 20) == before
    assert all(item.activation for item in before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top_k", [20, 90])
@pytest.mark.parametrize("parts", [("up",), ("down",), ("gate", "up", "down")])
def test_patches_never_meet_the_cache(mode, top_k, parts):
    """A patch that leaves the gate alone keeps the set of features; the output is another. No path of an
    overridden layer falls through to a cache, before, during or after; the other layers go on hitting."""
    model = tiny("llama")
    index = index_of(model)
    walk = (
        WalkFfn(model, index, top_k)
        .with_l1_cache(mode=mode, check=NEVER)
        .with_cache(cache_of(mode, check=NEVER))
    )
    x = torch.randn(1, 64)
    base = [walk.forward(layer, x) for layer in range(4)]
    feature = walk.trace(2, x[0], 1)[0].feature
    patch(index, edit("update", 2, feature, **{part: vector(64, 7, 3.0) for part in parts}))
    for _ in range(2):
        changed = walk.forward(2, x)
        assert torch.equal(changed, fresh(walk, top_k).forward(2, x))
        assert not torch.allclose(changed, base[2], atol=1e-3)
    before = [cache["hits"] for cache in walk.cache_stats()]
    others = [walk.forward(layer, x) for layer in (0, 1, 3)]
    assert all(torch.equal(a, base[layer]) for a, layer in zip(others, (0, 1, 3), strict=True))
    after = [cache["hits"] for cache in walk.cache_stats()]
    if top_k == 20:  # the nearest tier answers
        assert max(b - a for a, b in zip(before, after, strict=True)) == 3
    index.remove("p")
    assert torch.equal(walk.forward(2, x), base[2])


@pytest.mark.parametrize("mode", MODES)
def test_a_small_top_k_poisons_nobody(mode):
    """The original stored a dense output under the coarse key of a request's own top_k, for everyone."""
    model = tiny("llama")
    index, shared = index_of(model), cache_of(mode, check=NEVER)
    x = torch.randn(1, 64)
    attacker, victim = (WalkFfn(model, index, k).with_cache(shared) for k in (1, 20))
    for _ in range(3):
        small = attacker.forward(0, x)
        assert torch.equal(small, WalkFfn(model, index, 1).forward(0, x))
        assert torch.equal(victim.forward(0, x), WalkFfn(model, index, 20).forward(0, x))
    assert len(shared) == 2


def test_one_feature_is_a_coarse_key_and_the_check_says_so():
    """Rows that share a set have other outputs. A hit is believed only within the bound."""
    model = tiny("llama")
    index = index_of(model)
    cache = cache_of("features", check=HitCheck(bound=0.01))
    walk = WalkFfn(model, index, 1).with_cache(cache)
    x = torch.randn(1, 64)
    walk.forward(0, x)
    given = walk.forward(0, 2 * x)  # the same strongest feature, another output
    assert torch.equal(given, WalkFfn(model, index, 1).forward(0, 2 * x))
    stats = cache.stats()
    assert (stats["rejected"], stats["hits"], stats["misses"], stats["entries"]) == (1, 0, 2, 0)
    # Within the bound it is an approximation, and counted as one.
    cache = cache_of("features", check=HitCheck(bound=0.1, every=10**6))
    walk = WalkFfn(model, index, 1).with_cache(cache)
    first = walk.forward(0, x)
    walk.forward(0, 1.01 * x)
    assert torch.equal(walk.forward(0, 1.02 * x), first)
    stats = cache.stats()
    assert (stats["hits"], stats["checked"], stats["rejected"]) == (2, 1, 0)
    assert 0 < stats["max_error"] < 0.1


def test_an_approximation_never_reaches_an_exact_tier():
    model = tiny("llama")
    index = index_of(model)
    exact, near = cache_of("exact"), cache_of("features", check=HitCheck(bound=0.5, every=10**6))
    walk = WalkFfn(model, index, 1).with_cache(exact).with_cache(near)
    x = torch.randn(1, 64)
    for scale in (1, 1.01, 1.02, 1.03):
        walk.forward(0, scale * x)
    assert near.counts[0] == 3
    for scale in (1, 1.01):  # computed: the first, and the recomputed first hit
        assert torch.equal(walk.forward(0, scale * x), WalkFfn(model, index, 1).forward(0, scale * x))
    assert exact.counts == (2, 4)
    assert len(exact) == 2


def test_colliding_keys_do_not_mix_sets(monkeypatch):
    """64 bits were never compared. With every key the same, sets are still told apart."""
    monkeypatch.setattr(LayerKeys, "key", lambda self, payload: b"k" * 32)
    model = tiny("llama")
    index = index_of(model)
    cache = cache_of("features", check=NEVER)
    walk = WalkFfn(model, index, 20).with_cache(cache)
    for x in torch.randn(6, 1, 64):
        assert torch.equal(walk.forward(0, x), WalkFfn(model, index, 20).forward(0, x))
    assert cache.stats()["mismatched"] == 5


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1"])
def test_quantised_models_hit_and_take_patches(tmp_path, quant):
    """The original's quantised server path walked the base and ignored patches."""
    model = lk.load_model(tiny_models.write_tiny_gguf("llama", tmp_path / "m.gguf", quant), dtype="float32")
    index = index_of(model)
    walk = WalkFfn(model, index, 20).with_cache(model.ffn_l2_cache)
    x = torch.randn(1, 64)
    base = walk.forward(1, x)
    assert torch.equal(walk.forward(1, x), base)
    assert model.ffn_l2_cache.counts == (1, 1)
    feature = walk.trace(1, x[0], 1)[0].feature
    patch(index, edit("update", 1, feature, down=vector(64, 3, 5.0)))
    assert not torch.allclose(walk.forward(1, x), base, atol=1e-3)


# -- tenants, tiers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_tenants_share_nothing(walk, mode):
    shared = cache_of(mode)
    one, two = (fresh(walk).with_cache(shared, tenant=name) for name in ("one", "two"))
    x = torch.randn(1, 64)
    one.forward(0, x)
    two.forward(0, x)
    assert shared.counts == (0, 2)
    one.forward(0, x)
    assert shared.counts == (1, 2)


def test_models_share_nothing():
    shared = cache_of("exact")
    x = torch.randn(1, 64)
    for family in ("llama", "llama-llama3", "llama-bias"):
        model = tiny(family)
        WalkFfn(model, index_of(model), 20).with_cache(shared).forward(0, x)
    assert shared.counts == (0, 3)


def test_l2_is_shared_by_walks_of_other_requests(walk):
    x = torch.randn(1, 64)
    l2 = cache_of("exact")
    first = fresh(walk).with_l1_cache().with_cache(l2)
    out = first.forward(0, x)
    second = fresh(walk).with_l1_cache().with_cache(l2)
    assert torch.equal(second.forward(0, x), out)
    assert l2.counts == (1, 1)
    assert second.l1_cache_stats() == (0, 0)  # exact tiers are asked first: they need no gate scores


def test_a_nearer_exact_tier_is_filled_from_a_farther_one(walk):
    l2, shelf = cache_of("exact"), Shelf()
    x = torch.randn(1, 64)
    secret = b"shared by the servers"
    one = fresh(walk).with_cache(TierCache(shelf, secret, 64))
    out = one.forward(0, x)
    tier = TierCache(shelf, secret, 64)
    two = fresh(walk).with_cache(l2).with_cache(tier)
    for _ in range(2):
        assert torch.equal(two.forward(0, x), out)
    assert (l2.counts, tier.stats()["hits"]) == ((1, 1), 1)
    shelf.down = True
    other = torch.randn(1, 64)
    assert torch.equal(two.forward(0, other), fresh(walk).forward(0, other))
    assert tier.stats()["failed"] == 2
    elsewhere = fresh(walk).with_cache(TierCache(shelf, b"another secret of it", 64))
    shelf.down = False
    elsewhere.forward(0, x)
    assert elsewhere.cache_stats()[0]["hits"] == 0


def test_builders_refuse(walk):
    with pytest.raises(SpecError, match="3 layers"):
        walk.with_l1_cache(3)
    walk.with_l1_cache()
    with pytest.raises(SpecError, match="already"):
        walk.with_cache(FfnL1Cache(4))
    assert walk.l1_cache_stats() == (0, 0)


def test_custom_capacity(walk):
    walk.with_cache(FfnL1Cache.with_max_entries(4, 2, mode="exact"))
    rows = torch.randn(5, 1, 64)
    for x in (*rows, *rows):
        walk.forward(0, x)
    assert walk.l1_cache_stats() == (2, 8)
    assert walk.cache_stats()[0]["dropped"] == 6


def test_a_checked_hit_gives_what_was_computed(walk, monkeypatch):
    cache = cache_of("features", check=HitCheck(every=1))
    walk.with_cache(cache)
    x = torch.randn(1, 64)
    out = walk.forward(0, x)
    seen = []
    monkeypatch.setattr(cached_rows, "relative_error", lambda a, b: seen.append((a, b)) or 0.0)
    assert torch.equal(walk.forward(0, x), out)
    assert len(seen) == 1
