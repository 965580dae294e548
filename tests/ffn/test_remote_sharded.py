"""Layer ranges and their servers: gaps and overlaps by name, and the same bits as one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import larql_kv as lk
from larql_kv.ffn.remote import RemoteWalkBackend, remote_backend
from larql_kv.ffn.sharded import LayerShardedBackend, names_shards, parse_shards
from tests import tiny_models
from tests.ffn.fake_server import FakeServer, replies, rows


@pytest.fixture
def pair() -> Iterator[list[FakeServer]]:
    servers = [FakeServer(), FakeServer()]
    servers[0].stats["owned"], servers[1].stats["owned"] = [0, 1], [2, 3]
    yield servers
    for server in servers:
        server.stop()


def spec_of(pair: list[FakeServer]) -> str:
    return f"0-1={pair[0].url}, 2-3={pair[1].url}"


def test_ranges_are_inclusive_and_in_any_order() -> None:
    assert parse_shards("15-29=http://b,0-14=http://a", 30) == [
        (range(15), "http://a"),
        (range(15, 30), "http://b"),
    ]
    assert parse_shards("0=http://a,1-2=http://b", 3) == [(range(1), "http://a"), (range(1, 3), "http://b")]
    assert names_shards(" 0-1=http://a")
    assert not names_shards("http://a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-13=http://a,15-29=http://b", "no shard has layers 14 of 0-29"),
        ("1-29=http://a", "no shard has layers 0 of 0-29"),
        ("0-27=http://a", "no shard has layers 28-29 of 0-29"),
        ("0-14=http://a,14-29=http://b", "two shards have layers 14: the second is http://b"),
        ("0-29=http://a,3-9=http://b", "two shards have layers 3-9"),
        ("0-30=http://a", r"the model has no layer 30 \(0-29\)"),
        ("14-0=http://a", "0 comes before 14"),
        ("", "shard '' is not FIRST-LAST=URL"),
        ("0-29", "is not FIRST-LAST=URL"),
        ("0-14=http://a,,15-29=http://b", "shard '' is not"),
        ("0-29=host", "'host' is no address"),
        ("-1-29=http://a", "is not FIRST-LAST=URL"),
    ],
)
def test_gaps_overlaps_and_nonsense_are_named(text: str, message: str) -> None:
    with pytest.raises(lk.SpecError, match=message):
        LayerShardedBackend.parse(text, 30)


def test_the_same_bits_as_one_process_and_each_layer_at_its_owner(pair: list[FakeServer]) -> None:
    model = pair[0].model
    ffn = remote_backend(model, spec_of(pair))
    assert isinstance(ffn, LayerShardedBackend)
    ids = tiny_models.sample_ids(12)
    got = [token.id for token in lk.build_engine("standard", model, ffn=ffn).generate(ids, 12)]
    assert got == [token.id for token in lk.build_engine("standard", model).generate(ids, 12)]
    assert pair[0].requests == pair[1].requests > 0
    stats = ffn.stats()
    assert stats["round_trips"] == pair[0].requests + pair[1].requests + 2
    assert set(stats["shards"]) == {"0-1", "2-3"}
    assert stats["bytes_sent"] == sum(one["bytes_sent"] for one in stats["shards"].values())
    assert ffn.path(0).why == pair[0].url
    assert ffn.path(3).why == pair[1].url
    ffn.close()


def test_several_layers_go_to_their_owners_at_once(pair: list[FakeServer]) -> None:
    ffn = LayerShardedBackend.parse(spec_of(pair), 4).connect(pair[0].model)
    x = rows(2)
    for layer, output in zip([3, 0, 1], ffn.forward_layers([3, 0, 1], x), strict=True):
        assert torch.equal(output, pair[0].model.decoder.dense_ffn(layer, x))
    assert [server.requests for server in pair] == [1, 1]


def test_a_failing_shard_is_named(pair: list[FakeServer]) -> None:
    engine = lk.build_engine("standard", pair[0].model, ffn=remote_backend(pair[0].model, spec_of(pair)))
    engine.prefill([5, 6, 7])
    pair[1].misbehave = replies(500, b"{}")
    with pytest.raises(lk.BackendFailure, match=pair[1].url):
        engine.decode_step(9)
    assert engine.tokens == [5, 6, 7]


def test_a_shard_that_does_not_own_its_range(pair: list[FakeServer]) -> None:
    pair[1].stats["owned"] = [0, 2]
    with pytest.raises(lk.RemoteError, match=rf"{pair[1].url}: does not serve layer 3 \(owned: 0–2\)"):
        remote_backend(pair[0].model, spec_of(pair))


def test_shards_of_different_models(pair: list[FakeServer]) -> None:
    pair[1].stats["base_print"] = "ab" * 32
    with pytest.raises(lk.RemoteError, match=f"different models: .*{pair[1].url}"):
        LayerShardedBackend.parse(spec_of(pair), 4).connect()


def test_a_layer_nobody_owns_is_an_error_not_zeros(pair: list[FakeServer]) -> None:
    ffn = LayerShardedBackend([(range(2), RemoteWalkBackend(pair[0].url).connect(layers=range(2)))])
    for call in (lambda: ffn.forward(2, rows()), lambda: ffn.forward_layers([0, 2], rows())):
        with pytest.raises(lk.RemoteError, match=f"no shard owns layer 2; owned: 0-1 at {pair[0].url}"):
            call()


def test_equality(pair: list[FakeServer]) -> None:
    one, two = (LayerShardedBackend.parse(spec_of(pair), 4) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != LayerShardedBackend.parse(spec_of(pair), 4, wire="i8")
    assert one != lk.DenseFfn(pair[0].model)
