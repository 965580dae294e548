"""The shared tier against a real redis-server: shared, proved, bounded, and never in the way."""

from __future__ import annotations

import hashlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import redis
import torch

import larql_kv as lk
from larql_kv.ffn.cache import TierCache
from larql_kv.ffn.cache import l3 as l3_module
from larql_kv.ffn.cache.l3 import RedisTier
from larql_kv.ffn.walk import WalkFfn
from tests.server.conftest import Redis, make_client, make_service
from tests.server.test_walk_ffn import close, full, reference, rows_of

SECRET = b"a secret of many bytes"
KEY = hashlib.blake2b(b"key", digest_size=32).digest()
VALUE = bytes(range(256))


@pytest.fixture
def tier_of() -> Callable[..., RedisTier]:
    made: list[RedisTier] = []

    def make(url: str, **options) -> RedisTier:
        options = {"secret": SECRET, "deadline": 2.0, "wait": 0.2, **options}
        made.append(RedisTier(url, **options))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def eventually(check: Callable[[], object], seconds: float = 5) -> object:
    ends = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.005)
    return found


def written(tier: RedisTier, count: int = 1) -> None:
    eventually(lambda: tier.stats()["writes"] >= count)


def raw_entry(server: Redis) -> tuple[redis.Redis, bytes]:
    client = redis.Redis.from_url(server.url)
    (name,) = [name for name in client.scan_iter() if not name.endswith(b":lock")]
    return client, name


# -- what it keeps ---------------------------------------------------------------------------------------


def test_two_processes_share_an_entry(redis_server: Redis, tier_of: Callable[..., RedisTier]) -> None:
    one, two = tier_of(redis_server.url), tier_of(redis_server.url, ttl=600)
    assert one.get(KEY) is None
    one.put(KEY, VALUE)
    written(one)
    assert two.get(KEY) == VALUE
    assert (one.stats()["misses"], one.stats()["writes"], two.stats()["hits"]) == (1, 1, 1)
    client, name = raw_entry(redis_server)
    assert name.startswith(l3_module.VERSION)
    assert 86000 < client.ttl(name) <= 86400
    assert client.keys(b"*:lock") == []


def test_an_empty_value_takes_the_entry_away(redis_server: Redis, tier_of: Callable[..., RedisTier]) -> None:
    tier = tier_of(redis_server.url)
    tier.put(KEY, VALUE)
    written(tier)
    tier.put(KEY, b"")
    written(tier, 2)
    assert redis.Redis.from_url(redis_server.url).keys() == []
    assert tier.get(KEY) is None


@pytest.mark.parametrize("how", ["flip", "cut", "grow", "swap", "huge", "secret"])
def test_entries_without_proof_are_misses(
    redis_server: Redis, tier_of: Callable[..., RedisTier], how: str
) -> None:
    tier = tier_of(redis_server.url)
    tier.put(KEY, VALUE)
    written(tier)
    client, name = raw_entry(redis_server)
    held: bytes = client.get(name)  # type: ignore[assignment]
    reader, key = tier, KEY
    if how == "flip":
        client.set(name, held[:-1] + bytes([held[-1] ^ 1]))
    elif how == "cut":
        client.set(name, held[:-4])
    elif how == "grow":
        client.set(name, held + b"\0")
    elif how == "huge":
        client.set(name, held + bytes(3 * l3_module.MAX_VALUE))
    elif how == "swap":  # another key's entry, whole and proved, in this one's place
        key = KEY[::-1]
        client.set(l3_module.VERSION + key.hex().encode(), held)
    else:
        reader = tier_of(redis_server.url, secret=b"another secret of many bytes")
    assert reader.get(key) is None
    assert (reader.stats()["rejected"], reader.stats()["hits"]) == (1, 0)


def test_a_value_too_large_is_not_written(redis_server: Redis, tier_of: Callable[..., RedisTier]) -> None:
    tier = tier_of(redis_server.url)
    tier.put(KEY, bytes(l3_module.MAX_VALUE))
    assert tier.stats()["dropped"] == 1


# -- one computes, the others wait -----------------------------------------------------------------------


def test_single_flight_in_a_process(redis_server: Redis, tier_of: Callable[..., RedisTier]) -> None:
    tier = tier_of(redis_server.url, wait=3.0)
    computed = []
    gate = threading.Barrier(8)

    def request() -> bytes:
        gate.wait()
        value = tier.get(KEY)
        if value is None:
            computed.append(1)
            time.sleep(0.05)
            tier.put(KEY, VALUE)
            return VALUE
        return value

    with ThreadPoolExecutor(8) as pool:
        answers = [task.result() for task in [pool.submit(request) for _ in range(8)]]
    assert answers == [VALUE] * 8
    assert len(computed) == 1
    stats = tier.stats()
    assert stats["misses"] == 1
    assert stats["joined"] + stats["hits"] == 7
    assert stats["joined"] > 0


def test_single_flight_between_processes(redis_server: Redis, tier_of: Callable[..., RedisTier]) -> None:
    one, two = tier_of(redis_server.url, wait=3.0), tier_of(redis_server.url, wait=3.0)
    assert one.get(KEY) is None  # and computes
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(two.get, KEY)
        time.sleep(0.1)
        assert not waiting.done()
        one.put(KEY, VALUE)
        assert waiting.result() == VALUE
    assert two.stats()["hits"] == 1


def test_nobody_waits_long_for_one_who_failed(redis_server: Redis, tier_of: Callable[..., RedisTier]) -> None:
    one, two = tier_of(redis_server.url, wait=0.15), tier_of(redis_server.url, wait=0.15)
    assert one.get(KEY) is None  # and dies before its put
    began = time.monotonic()
    assert two.get(KEY) is None
    assert time.monotonic() - began < 1
    began = time.monotonic()
    assert one.get(KEY) is None
    assert time.monotonic() - began < 3


def test_abandoned_flights_are_forgotten(
    redis_server: Redis, tier_of: Callable[..., RedisTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(l3_module, "_MANY_FLIGHTS", 10)
    tier = tier_of(redis_server.url, wait=0.001, deadline=0.1)
    for index in range(10):
        tier.get(index.to_bytes(32, "little"))
    assert len(tier._flights) == 10
    time.sleep(0.15)
    tier.get(KEY)
    assert len(tier._flights) == 1


# -- a Redis that is no use ------------------------------------------------------------------------------


def timed(tier: RedisTier, count: int) -> float:
    """Seconds of the slowest of `count` lookups."""
    slowest = 0.0
    for index in range(count):
        began = time.monotonic()
        assert tier.get(index.to_bytes(32, "little")) is None
        tier.put(index.to_bytes(32, "little"), VALUE)
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def test_a_dead_redis(tmp_path: Path, tier_of: Callable[..., RedisTier]) -> None:
    tier = tier_of(f"unix://{tmp_path}/nothing.sock")
    assert timed(tier, 20) < 1
    stats = tier.stats()
    assert (stats["misses"], stats["open"], stats["hits"]) == (20, True, 0)
    assert 3 <= stats["errors"] <= 8
    assert stats["skipped"] >= 12


def test_a_frozen_redis_costs_three_deadlines_then_nothing(
    redis_server: Redis, tier_of: Callable[..., RedisTier]
) -> None:
    tier = tier_of(redis_server.url, deadline=0.1)
    assert tier.get(KEY) is None
    redis_server.send(signal.SIGSTOP)
    began = time.monotonic()
    assert timed(tier, 30) < 0.4
    assert time.monotonic() - began < 2
    assert tier.stats()["timeouts"] >= 2
    assert tier.stats()["open"]


def test_one_that_drips_meets_the_deadline(tier_of: Callable[..., RedisTier], tmp_path: Path) -> None:
    path = str(tmp_path / "drip.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            for byte in b"$1000000\r\n" + bytes(100):
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return
                time.sleep(0.03)

    threading.Thread(target=drip, daemon=True).start()
    tier = tier_of(f"unix://{path}", deadline=0.1)
    assert timed(tier, 1) < 1
    assert tier.stats()["timeouts"] + tier.stats()["errors"] >= 1
    listener.close()


def test_a_redis_that_comes_back_is_used_again(
    redis_server: Redis, tier_of: Callable[..., RedisTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(l3_module, "_FIRST_BREAK", 0.05)
    tier = tier_of(redis_server.url)
    redis_server.stop()
    timed(tier, 10)
    assert tier.stats()["open"]
    redis_server.start()

    def works() -> bool:
        tier.put(KEY, VALUE)
        return tier.get(KEY) == VALUE

    eventually(works, 10)
    assert not tier.stats()["open"]


def test_the_breaks_grow_and_one_caller_tries() -> None:
    breaker = l3_module.Breaker()
    for _ in range(2):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    breaker._until = 0
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    for _ in range(20):
        breaker.failed()
    assert breaker._break == l3_module._LONGEST_BREAK
    breaker.succeeded()
    assert breaker.allows()
    assert not breaker.is_open


# -- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("http://host", {}, "'http://host' is no address"),
        ("redis://", {}, "no address"),
        ("redis://host:99999", {}, "'redis://host:99999' is no address"),
        ("redis://[::1", {}, "no address"),
        ("redis://host", {"secret": b"short"}, "has 5 bytes, at least 16"),
        ("redis://host", {"ttl": 0}, "ttl=0"),
        ("redis://host", {"deadline": 11}, "deadline=11"),
        ("redis://host", {"wait": float("nan")}, "wait=nan"),
    ],
)
def test_bad_settings(url: str, options: dict, message: str) -> None:
    with pytest.raises(lk.SpecError, match=message):
        RedisTier(url, **{"secret": SECRET, **options})


def test_the_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(l3_module.SECRET_VARIABLE, "")
    with pytest.raises(lk.SpecError, match=r"set LARQL_L3_SECRET"):
        RedisTier.from_environment("redis://localhost")
    monkeypatch.setenv(l3_module.SECRET_VARIABLE, SECRET.decode())
    tier = RedisTier.from_environment("redis://user:password@localhost:1/0")
    assert tier.secret == SECRET
    assert tier.stats()["address"] == "redis://localhost:1"
    tier.close()


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(lk.BackendUnavailable, match=r"pip install 'larql-kv\[server\]'"):
        RedisTier("redis://localhost", SECRET)


# -- behind walks and servers ----------------------------------------------------------------------------


def test_two_servers_share_and_a_dead_tier_changes_nothing(
    redis_server: Redis, tier_of: Callable[..., RedisTier]
) -> None:
    tiers = [tier_of(redis_server.url) for _ in range(3)]
    rows = rows_of()
    with make_client(make_service(l3=tiers[0])) as client:
        first = full(client, rows, 9)
        stats = client.get("/v1/cache-stats").json()
        assert (stats["l2"]["misses"], stats["l3"]["misses"]) == (1, 1)
        written(tiers[0])
    with make_client(make_service(l3=tiers[1])) as client:
        assert np.array_equal(full(client, rows, 9), first)
        stats = client.get("/v1/cache-stats").json()
        assert (stats["l2"]["misses"], stats["l3"]["hits"]) == (1, 1)
        assert np.array_equal(full(client, rows, 9), first)  # L2 has it now
        assert client.get("/v1/cache-stats").json()["l2"]["hits"] == 1
        assert close(full(client, rows, 8), reference(1, rows, 8)[0])  # another K, another key
        assert 'larql_ffn_cache{counter="hits",tier="l3"} 1.0' in client.get("/metrics").text
    redis_server.stop()
    with make_client(make_service(l3=tiers[2])) as client:
        assert np.array_equal(full(client, rows, 9), first)
        assert client.get("/v1/cache-stats").json()["l3"]["tier"]["errors"] >= 1


def test_another_models_entry_is_never_met(redis_server: Redis, tier_of: Callable[..., RedisTier]) -> None:
    tier = tier_of(redis_server.url)
    x = torch.from_numpy(rows_of())
    for family in ("llama", "gemma3"):
        service = make_service(family)
        walk = WalkFfn(service.model, service.index, 9).with_cache(TierCache(tier, SECRET, 64))
        fresh = WalkFfn(service.model, service.index, 9).forward(1, x)
        assert torch.equal(walk.forward(1, x), fresh)
    assert tier.stats()["hits"] == 0
