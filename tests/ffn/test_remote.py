"""`RemoteWalkBackend` against a server that behaves: what it gives, sends and counts; whom it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import larql_kv as lk
from larql_kv.ffn import remote as remote_module
from larql_kv.ffn import wire
from larql_kv.ffn.http import check_url
from larql_kv.ffn.remote import RemoteWalkBackend, remote_backend
from larql_kv.ffn.wire import MEDIA_TYPES
from tests import tiny_models
from tests.cli.conftest import Larql
from tests.ffn.fake_server import HIDDEN, LAYERS, FakeServer, connected, rows


@pytest.fixture
def larql() -> Larql:
    return Larql()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


# -- working ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "tolerance"), [("f32", 0), ("f16", 1e-3), ("i8", 1e-2), ("best", 1e-2)])
@pytest.mark.parametrize("count", [1, 7])
def test_outputs_are_the_models(fake: FakeServer, form: str, tolerance: float, count: int) -> None:
    ffn, x = connected(fake, wire=form), rows(count)
    for layer in range(LAYERS):
        want = fake.model.decoder.dense_ffn(layer, x)
        got = ffn.forward(layer, x)
        assert got.dtype == torch.float32
        assert got.shape == x.shape
        assert (got - want).abs().max() <= tolerance * want.abs().max()
    assert ffn.answers == {**dict.fromkeys(MEDIA_TYPES, 0), ("i8" if form == "best" else form): LAYERS}


def test_several_layers_in_one_round_trip(fake: FakeServer) -> None:
    ffn, x = connected(fake), rows(3)
    before = ffn.stats()["round_trips"]
    outputs = ffn.forward_layers([2, 0], x)
    assert ffn.stats()["round_trips"] == before + 1
    for layer, output in zip([2, 0], outputs, strict=True):
        assert torch.equal(output, fake.model.decoder.dense_ffn(layer, x))
    with pytest.raises(ValueError, match="at least one layer"):
        ffn.forward_layers([], x)


def test_bytes_are_the_formulas(fake: FakeServer) -> None:
    for form in ("f32", "f16", "i8"):
        ffn = connected(fake, wire=form)
        cost = ffn.cost()
        before = ffn.stats()
        engine = lk.build_engine("standard", fake.model, ffn=ffn)
        engine.prefill([5])
        for _ in range(4):
            engine.decode_step(7)
        after = ffn.stats()
        assert after["bytes_sent"] - before["bytes_sent"] == 5 * cost.sent
        assert after["bytes_received"] - before["bytes_received"] == 5 * cost.received
        assert after["round_trips"] - before["round_trips"] == 5 * LAYERS
        assert cost.total == cost.sent + cost.received
        (facts,) = ffn.wire_facts()
        assert (facts["formula"], facts["layers"], facts["tokens"]) == (str(cost), LAYERS, 5)
        assert facts["bytes_per_token"] == facts["measured_bytes_per_token"] == cost.total
        assert after["server_ms"] == pytest.approx(0.5 * 5 * LAYERS)
        assert after["seconds"] > 0
    assert connected(fake).cost(30).layers == 30
    assert connected(fake).wire_facts() == []  # nothing was asked


def test_a_run_tells_the_wire_cost(fake: FakeServer, larql: Larql) -> None:
    words = ("--raw", "-n", "3", "--dtype", "float32", "--engine", "standard", "--ffn", fake.url)
    model = tiny_models.model_dir("llama")
    (facts,) = larql.json("run", model, "tell me", *words)["ffn_wire"]
    assert facts["endpoint"] == fake.url
    assert facts["measured_bytes_per_token"] == pytest.approx(facts["bytes_per_token"], rel=0.05)
    assert f"wire f32 to {fake.url}: {facts['formula']}; measured" in larql(
        "run", model, "tell me", "-v", *words
    ).stderr.replace("\n", " ")
    walked = larql("walk", model, "-p", "tell me", "-l", "0", *words[3:5], "--ffn", fake.url)
    assert f"wire f32 to {fake.url}" in walked.stderr.replace("\n", " ")


def test_connections_are_pooled(fake: FakeServer) -> None:
    ffn = connected(fake)
    for _ in range(20):
        ffn.forward(0, rows())
    assert fake.connections == 1
    ffn.close()
    ffn.forward(0, rows())
    assert fake.connections == 2


def test_a_long_prompt_goes_in_parts(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "MAX_BODY", remote_module._HEAD_BYTES + 10 * 4 * HIDDEN + 4)
    ffn, x = connected(fake), rows(25)
    assert torch.equal(ffn.forward(1, x), fake.model.decoder.dense_ffn(1, x))
    assert fake.requests == 3
    assert ffn.forward(1, rows(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize(("given", "sent"), [(8092, 8092), (5, 5), (None, wire.UNLIMITED)])
def test_top_k_is_sent(fake: FakeServer, given: int | None, sent: int) -> None:
    connected(fake, top_k=given).forward(0, rows())
    assert fake.top_ks == [sent]


def test_the_seeds_defaults(fake: FakeServer) -> None:
    ffn = connected(fake)
    assert (ffn.endpoint.timeout, ffn.top_k, ffn.wire) == (60.0, 8092, "f32")
    assert ffn.probe_latency(3) > 0
    assert ffn.path(0).path == "remote"
    assert ffn.path(0).why == fake.url


def test_backends_that_compute_the_same_are_equal(fake: FakeServer) -> None:
    ffn = connected(fake)
    assert ffn == connected(fake) != RemoteWalkBackend(fake.url)  # which may be served anything
    assert RemoteWalkBackend(fake.url) == RemoteWalkBackend(fake.url + "/")
    assert hash(ffn) == hash(RemoteWalkBackend(fake.url))
    for other in ({"wire": "i8"}, {"top_k": 5}):
        assert ffn != RemoteWalkBackend(fake.url, **other)
    assert ffn != lk.DenseFfn(fake.model)


def test_the_factory_takes_the_key_from_the_environment(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARQL_API_KEY", "a-key")
    ffn = remote_backend(fake.model, fake.url, wire="f16", timeout=3, top_k=7)
    assert isinstance(ffn, RemoteWalkBackend)
    assert (ffn.wire, ffn.endpoint.timeout, ffn.top_k) == ("f16", 3, 7)
    remote_backend(fake.model, fake.url, api_key="other")
    monkeypatch.delenv("LARQL_API_KEY")
    remote_backend(fake.model, fake.url)
    assert fake.keys == ["Bearer a-key", "Bearer other", None]
    assert "a-key" not in repr(ffn.stats()) + ffn.name


# -- refusing to connect ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 65}, "hidden size 65 and 4 layers; this model has 64 and 4"),
        ({"layers": 5}, "64 and 5 layers"),
        ({"base_print": "ab" * 32}, "serves another model: print abababababababab"),
        ({"owned": [0, 2]}, r"does not serve layer 3 \(owned: 0–2\)"),
        ({"owned": 3}, "is not a larql server's"),
        ({"owned": [0, "x"]}, "is not a larql server's"),
        ({"layers": None}, "is not a larql server's"),
        ({"layers": float("inf")}, "is not a larql server's"),
        ({"owned": [0, 1 << 40]}, "layers 0 to 1099511627776 of 4"),
        ({"hidden_size": 0}, "hidden size 0"),
    ],
)
def test_another_model_is_refused(fake: FakeServer, change: dict, message: str) -> None:
    fake.stats |= change
    with pytest.raises(lk.RemoteError, match=message) as caught:
        connected(fake)
    assert fake.url in str(caught.value)


def test_only_the_layers_asked_for_must_be_owned(fake: FakeServer) -> None:
    fake.stats["owned"] = [1, 2]
    ffn = RemoteWalkBackend(fake.url).connect(fake.model, layers=[1, 2])
    assert ffn.cost().layers == 2
    with pytest.raises(lk.RemoteError, match="does not serve layer 0"):
        remote_backend(fake.model, fake.url)


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 100_000, b'{"model": 1}', b"\xff"])
def test_stats_that_are_none(fake: FakeServer, body: bytes) -> None:
    with pytest.raises(lk.RemoteError, match="is not a larql server's"):
        remote_module.Served.parse(fake.url, body)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8080",
        "ftp://host",
        "http://",
        "http://h:x",
        "http://h/?a=1",
        "http://h h",
        "http://h\n",
        "http://[::1",
    ],
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(lk.SpecError, match="is no address"):
        check_url(url)


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(lk.SpecError, match="LARQL_API_KEY") as caught:
        check_url("http://user:secret@host")
    assert "secret" not in str(caught.value)
    assert check_url("https://host:1/ffn/") == "https://host:1/ffn"


@pytest.mark.parametrize(
    "options",
    [
        {"wire": "f64"},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"retries": -1},
        {"top_k": 0},
        {"top_k": 1 << 32},
        {"api_key": "key\n"},
        {"api_key": "k\u20acy"},
    ],
)
def test_bad_options(options: dict) -> None:
    with pytest.raises(lk.SpecError, match=next(iter(options))):
        RemoteWalkBackend("http://127.0.0.1:1", **options)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "urllib3", None)
    with pytest.raises(lk.RemoteError, match=r"pip install 'larql-kv\[server\]'"):
        RemoteWalkBackend("http://127.0.0.1:1")
