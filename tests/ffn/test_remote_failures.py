"""`RemoteWalkBackend` against servers that misbehave: every failure is a RemoteError with the address, in
time, and the engine goes on as if nothing had happened."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv.ffn import http as http_module
from larql_kv.ffn.http import Endpoint, RetryBudget
from larql_kv.ffn.remote import RemoteWalkBackend
from larql_kv.ffn.sharded import LayerShardedBackend
from larql_kv.ffn.wire import MEDIA_TYPES
from tests import tiny_models
from tests.ffn.fake_server import HIDDEN, LAYERS, FakeServer, connected, replies, rows


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


def short_body(handler, body: bytes) -> bool:
    """A whole HTTP answer with too few values."""
    handler.reply(200, struct.pack("<IIf", 1, 1, 0) + bytes(4 * HIDDEN - 4), MEDIA_TYPES["f32"])
    return True


def truncated(handler, body: bytes) -> bool:
    """The connection ends within the body that was announced."""
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(bytes(10))
    handler.close_connection = True
    return True


def hang_up(handler, body: bytes) -> bool:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
    return True


def never(handler, body: bytes) -> bool:
    time.sleep(1.5)
    return True


def dripping(handler, body: bytes) -> bool:
    """A byte now and then, each in time, the whole never."""
    handler.send_response(200)
    handler.send_header("content-length", str(12 + 4 * HIDDEN))
    handler.end_headers()
    for _ in range(30):
        handler.wfile.write(b"\0")
        time.sleep(0.05)
    return True


def endless(handler, body: bytes) -> bool:
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    try:
        while True:
            handler.wfile.write(bytes(1 << 16))
    except OSError:
        return True


def announced_huge(handler, body: bytes) -> bool:
    handler.send_response(200)
    handler.send_header("content-length", str(1 << 40))
    handler.end_headers()
    handler.close_connection = True
    return True


def not_http(handler, body: bytes) -> bool:
    handler.wfile.write(b"220 smtp ready\r\n")
    handler.close_connection = True
    return True


def floats(first: float, layer: int = 1, seq: int = 1) -> bytes:
    return struct.pack("<IIff", layer, seq, 0, first) + bytes(4 * HIDDEN - 4)


@pytest.mark.parametrize(
    ("misbehave", "message"),
    [
        (short_body, "layer 1: the answer has 264 bytes, expected 268"),
        (truncated, "connection failed"),
        (hang_up, "connection failed"),
        (never, r"no answer within 0.4 s"),
        (dripping, r"no answer within 0.4 s"),
        (endless, "goes on after"),
        (announced_huge, "has 1099511627776 bytes, at most"),
        (not_http, "connection failed"),
        (replies(200, floats(0, layer=2)), "begins with 2, 1, expected 1, 1"),
        (replies(200, floats(0, seq=2)), "begins with 1, 2, expected 1, 1"),
        (replies(200, floats(float("nan"))), r"output\[0\] is nan"),
        (replies(200, floats(float("inf"))), r"output\[0\] is inf"),
        (replies(200, b"{}", "application/json"), "answered as 'application/json', asked for"),
        (replies(200, floats(0), MEDIA_TYPES["i8"]), "answered as 'application/x-larql-ffn-i8'"),
        (
            replies(500, b'{"error": {"kind": "X", "message": "out of\\nmemory"}}'),
            "status 500: out of memory",
        ),
        (
            replies(401, b'{"error": {"kind": "X", "message": "give the API key"}}'),
            "status 401: give the API",
        ),
        (replies(404, b"<html>"), "status 404: <html>"),
        (replies(400, b""), r"status 400: \(no message\)"),
        (replies(204, b""), "status 204"),
        (replies(302, b""), "status 302"),
        (replies(503, b"{}"), r"status 503.*\(tried 3 times\)"),
    ],
)
def test_every_failure_is_a_remote_error_and_the_engine_goes_on(
    fake: FakeServer, misbehave: Callable, message: str
) -> None:
    ids = tiny_models.sample_ids(9)
    witness = lk.build_engine("standard", fake.model)
    want = [witness.prefill(ids), witness.decode_step(7), witness.decode_step(8)]

    ffn = connected(fake, timeout=0.4 if misbehave in (never, dripping) else 20)
    engine = lk.build_engine("standard", fake.model, ffn=ffn)
    assert torch.equal(engine.prefill(ids), want[0])

    def only_layer_one(handler, body: bytes) -> bool:
        return struct.unpack_from("<I", body)[0] == 1 and misbehave(handler, body)

    fake.misbehave = only_layer_one
    began = time.monotonic()
    with pytest.raises(lk.BackendFailure, match=message) as caught:
        engine.decode_step(7)
    assert time.monotonic() - began < 5
    cause = caught.value.__cause__
    assert isinstance(cause, lk.RemoteError)
    assert fake.url in str(cause)
    assert engine.tokens == ids

    fake.misbehave = None
    assert torch.equal(engine.decode_step(7), want[1])
    assert torch.equal(engine.decode_step(8), want[2])


def test_a_dead_server(fake: FakeServer) -> None:
    ffn = connected(fake)
    fake.stop()
    ffn.close()
    with pytest.raises(lk.RemoteError, match=rf"{fake.url}: connection failed: .*refused.*\(tried 3 times\)"):
        ffn.forward(0, rows())
    with pytest.raises(lk.RemoteError, match="connection failed"):
        RemoteWalkBackend(fake.url).connect()


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(lk.RemoteError, match=r"http://nowhere.invalid: connection failed"):
        RemoteWalkBackend("http://nowhere.invalid", retries=0).connect()


@pytest.mark.parametrize("passing", [replies(503, b"{}"), replies(502, b""), hang_up, truncated])
def test_what_passes_is_tried_again(fake: FakeServer, passing: Callable) -> None:
    ffn, x = connected(fake), rows()
    fake.misbehave = lambda handler, body: fake.requests == 1 and passing(handler, body)
    assert torch.equal(ffn.forward(0, x), fake.model.decoder.dense_ffn(0, x))
    stats = ffn.stats()
    assert (stats["retries"], stats["failures"], fake.requests) == (1, 0, 2)


@pytest.mark.parametrize("lasting", [replies(500, b"{}"), replies(400, b"{}"), short_body, endless])
def test_what_does_not_pass_is_not(fake: FakeServer, lasting: Callable) -> None:
    ffn = connected(fake)
    fake.misbehave = lasting
    with pytest.raises(lk.RemoteError):
        ffn.forward(1, rows())
    assert fake.requests == 1


def test_retries_have_a_budget(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "_FIRST_PAUSE", 0.001)
    ffn = connected(fake)
    ffn.endpoint.budget.tokens = 3
    fake.misbehave = replies(503, b"{}")
    for _ in range(5):
        with pytest.raises(lk.RemoteError):
            ffn.forward(0, rows())
    assert fake.requests == 5 + 3  # and not 5 x 3
    assert ffn.stats()["retries"] == 3
    assert ffn.stats()["failures"] == 5
    budget = RetryBudget(most=1.0, tokens=0.0)
    for _ in range(9):
        budget.earn()
    assert not budget.spend()
    for _ in range(20):
        budget.earn()
    assert budget.spend()
    assert not budget.spend()


def test_a_model_that_changed_behind_the_address(fake: FakeServer) -> None:
    ffn, x = connected(fake), rows()
    ffn.forward(0, x)
    fake.now = "cd" * 32
    with pytest.raises(lk.RemoteError, match=r"serves print 'cdcdcdcdcdcdcdcd' now.*connect\(\) again"):
        ffn.forward(0, x)
    fake.stats["print"] = fake.now
    ffn.connect(fake.model)  # patched, on the same base
    ffn.forward(0, x)


def test_rows_of_another_size(fake: FakeServer) -> None:
    with pytest.raises(ValueError, match=r"expected rows \(n, 64\), got \(1, 65\)"):
        RemoteWalkBackend(fake.url).forward(0, torch.zeros(1, 65))


def test_f16_falls_back_to_f32_and_says_so(fake: FakeServer) -> None:
    ffn = connected(fake, wire="f16")

    def as_f32(handler, body: bytes) -> bool:
        handler.reply(*fake.answer(body, MEDIA_TYPES["f32"] + ";"))
        return True

    fake.misbehave = as_f32
    x = rows()
    assert torch.equal(ffn.forward(0, x), fake.model.decoder.dense_ffn(0, x))
    assert ffn.stats()["answers"] == {"i8": 0, "f16": 0, "f32": 1}


def test_several_threads_share_a_backend(fake: FakeServer) -> None:
    ffn, x = connected(fake), rows()
    want = [fake.model.decoder.dense_ffn(layer, x) for layer in range(LAYERS)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda index: ffn.forward(index % LAYERS, x), range(40)))
    assert all(torch.equal(output, want[index % LAYERS]) for index, output in enumerate(outputs))
    assert ffn.stats()["calls"] == 41


def test_endpoints_refuse_a_number_that_is_none() -> None:
    assert Endpoint("http://127.0.0.1:1", 1.5).timeout == 1.5
    assert np.isfinite(Endpoint("http://127.0.0.1:1").timeout)


@pytest.mark.parametrize("sharded", [False, True])
def test_rows_of_two_prints_are_not_mixed(fake: FakeServer, sharded: bool) -> None:
    ffn = RemoteWalkBackend(fake.url)
    whole = LayerShardedBackend([(range(4), ffn)]) if sharded else ffn
    engine = lk.build_engine("standard", fake.model, ffn=whole)
    engine.prefill([5, 6])  # connects on the way
    engine.decode_step(7)
    before = connected(fake)
    fake.stats["print"] = fake.now = "cd" * 32
    ffn.connect(fake.model)
    assert ffn != before
    assert hash(ffn) == hash(before)
    with pytest.raises(lk.InvariantViolation, match=r"what its server serves.*reset\(\) first"):
        engine.decode_step(8)
    engine.reset()
    engine.prefill([5, 6])
    engine.decode_step(7)
