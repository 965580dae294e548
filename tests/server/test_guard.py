"""Keys, host names, limits: what is refused, and that nothing else is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import larql_kv as lk
from larql_kv.errors import BackendUnavailable, SpecError
from larql_kv.ffn.wire import FfnRequest, encode_request
from larql_kv.server import ServerSettings, create_app, guard, settings
from tests.server.conftest import KEY, OTHER_KEY, make_client, make_service

ROW = [0.5] * 64
PATHS = ["/v1/stats", "/v1/cache-stats", "/v1/models", "/v1/patches", "/metrics", "/v1/walk-ffn", "/nothing"]


@pytest.fixture(scope="module")
def locked() -> Iterator[TestClient]:
    with make_client(make_service(), api_keys=(KEY, OTHER_KEY)) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"x-api-key": ""},
        {"x-api-key": "\xff"},
    ],
)
def test_without_the_key_nothing_but_health(locked: TestClient, path: str, headers: dict) -> None:
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = locked.get(path, headers=sent)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert KEY not in answer.text
    assert locked.get("/v1/health", headers=sent).status_code == 200


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_with_a_key(locked: TestClient, key: str) -> None:
    assert locked.get("/v1/stats", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert locked.get("/v1/stats", headers={"authorization": f"bearer  {key} "}).status_code == 200
    assert locked.get("/v1/stats", headers={"x-api-key": key}).status_code == 200


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(settings.hmac, "compare_digest", compare)
    made = ServerSettings(api_keys=(KEY, OTHER_KEY))
    tenants = [made.tenant(key) for key in (KEY, OTHER_KEY)]
    assert made.tenant("short") is None
    assert made.tenant(None) is None
    assert len(set(tenants)) == 2
    assert compared == [(16, 16)] * 8  # digests, and no early exit at the first key
    assert ServerSettings().tenant(None) == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "10.0.0.1"]
)
def test_without_keys_only_loopback_names_are_answered(host: str) -> None:
    with make_client(make_service()) as client:
        assert client.get("/v1/stats", headers={"host": host}).status_code == 403
        for ours in ("localhost", "localhost:8080", "127.0.0.1:9", "[::1]:8080"):
            assert client.get("/v1/stats", headers={"host": ours}).status_code == 200


def test_with_keys_any_host_name_is_answered(locked: TestClient) -> None:
    assert locked.get("/v1/stats", headers={"host": "ffn.example", "x-api-key": KEY}).status_code == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host": "0.0.0.0"}, "can be reached from other machines: give --api-key"),
        ({"host": "::"}, "can be reached"),
        ({"host": "ffn.example"}, "can be reached"),
        ({"api_keys": ("short",)}, "has 5 characters: at least 16"),
        ({"api_keys": ("with spaces in the middle",)}, "no spaces"),
        ({"api_keys": ("ключ-ключ-ключ-ключ",)}, "ASCII"),
        ({"port": 65536}, "port 65536"),
        ({"port": -1}, "port -1"),
        ({"max_concurrent": 0}, "max-concurrent 0"),
    ],
)
def test_unsafe_settings_are_refused(given: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        ServerSettings(**given)
    assert not any(key in str(caught.value) for key in given.get("api_keys", ()))


def test_settings_that_are_safe() -> None:
    assert not ServerSettings(host="0.0.0.0", api_keys=(KEY,)).is_local
    assert all(ServerSettings(host=host).is_local for host in ("localhost", "127.0.0.9", "::1"))
    assert KEY not in repr(ServerSettings(api_keys=(KEY,)))


def test_layers_are_parsed_strictly() -> None:
    assert settings.parse_layers(None, 30) == range(30)
    assert settings.parse_layers("0-14", 30) == range(15)
    assert settings.parse_layers(" 15 - 29 ", 30) == range(15, 30)
    assert settings.parse_layers("7", 30) == range(7, 8)
    for text in ("", "a", "1-", "-1", "3-2", "0-30", "30", "0-14,15-29", "0x1-2"):
        with pytest.raises(SpecError, match="layers"):
            settings.parse_layers(text, 30)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "EXTRA", ("fastapi", "no_such_package"))
    with pytest.raises(BackendUnavailable, match=r"no_such_package.*pip install 'larql-kv\[server\]'"):
        create_app(ServerSettings())


# -- sizes -----------------------------------------------------------------------------------------------

BINARY = {"content-type": "application/x-larql-ffn"}


def chunks(count: int, taken: list[int]) -> Iterator[bytes]:
    for index in range(count):
        taken.append(index)
        yield bytes(1024)


def test_bodies_are_limited() -> None:
    with make_client(make_service(), max_body=4096) as client:
        answer = client.post("/v1/walk-ffn", content=bytes(4097), headers=BINARY)
        assert answer.status_code == 413
        assert "larger than 4096 bytes" in answer.json()["error"]["message"]
        assert client.post("/v1/walk-ffn", content=bytes(4096), headers=BINARY).status_code == 400
        assert client.post("/v1/walk-ffn", content=chunks(5, []), headers=BINARY).status_code == 413
        assert client.post("/v1/walk-ffn", content=chunks(4, []), headers=BINARY).status_code == 400
        json = {"content-type": "application/json"}
        assert client.post("/v1/patches/apply", content=bytes(4097), headers=json).status_code == 413


def in_app(app, work):
    """Run the coroutine `work(client)` against the application, in one event loop."""

    async def run():
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await work(client)

    return asyncio.run(run())


def test_a_body_without_a_length_is_not_read_past_the_limit() -> None:
    app = create_app(ServerSettings(max_body=4096), make_service())
    taken: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        while len(taken) < 1000:
            taken.append(1)
            yield bytes(1024)

    async def work(client: httpx2.AsyncClient):
        return await client.post("/v1/walk-ffn", content=endless(), headers=BINARY)

    assert in_app(app, work).status_code == 413
    assert len(taken) < 20


def test_bodies_are_limited_all_together_and_given_back() -> None:
    app = create_app(ServerSettings(max_body=4096, max_bodies=6000), make_service())

    async def work(client: httpx2.AsyncClient) -> list[int]:
        held = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield bytes(4000)
            await held.wait()

        first = asyncio.create_task(client.post("/v1/walk-ffn", content=slow(), headers=BINARY))
        await asyncio.sleep(0.05)
        second = await client.post("/v1/walk-ffn", content=bytes(4000), headers=BINARY)
        held.set()
        status = (await first).status_code
        third = await client.post("/v1/walk-ffn", content=bytes(4000), headers=BINARY)
        fourth = await client.post("/v1/walk-ffn", content=bytes(4000), headers=BINARY)
        return [status, second.status_code, third.status_code, fourth.status_code]

    assert in_app(app, work) == [400, 503, 400, 400]


def walk_body(rows: int = 1) -> bytes:
    return encode_request(FfnRequest((0,), np.ones((rows, 64), np.float32), 8, several=False))


def send_slowly(app, body: bytes, seconds: float = 20.0):
    """The application called with that walk by a client that takes a piece of the answer and then waits:
    (task, messages taken, event that lets it go on)."""
    taken: list[dict] = []
    go = asyncio.Event()
    headers = [(b"host", b"127.0.0.1"), *((k.encode(), v.encode()) for k, v in BINARY.items())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/walk-ffn",
        "raw_path": b"/v1/walk-ffn",
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 80),
    }
    told = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return told.pop() if told else await asyncio.sleep(seconds, {"type": "http.disconnect"})

    async def send(message):
        taken.append(message)
        if message["type"] == "http.response.body":
            await go.wait()

    return asyncio.create_task(app(scope, receive, send)), taken, go


def test_answers_count_as_held_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_PIECE", 1000)
    app = create_app(ServerSettings(max_bodies=6000), make_service())

    async def work(client: httpx2.AsyncClient) -> tuple[list[dict], list[int]]:
        task, taken, go = send_slowly(app, walk_body(16))  # 4 KiB back
        while len(taken) < 2:
            await asyncio.sleep(0.01)
        codes = [(await client.post("/v1/walk-ffn", content=walk_body(8), headers=BINARY)).status_code]
        go.set()
        await task
        codes.append((await client.post("/v1/walk-ffn", content=walk_body(8), headers=BINARY)).status_code)
        return taken, codes

    taken, codes = in_app(app, work)
    assert codes == [503, 200]
    assert [len(message["body"]) <= 1000 for message in taken[1:]] == [True] * 5
    assert [message["more_body"] for message in taken[1:]] == [True] * 4 + [False]
    length = dict(taken[0]["headers"])[b"content-length"]
    assert sum(len(message["body"]) for message in taken[1:]) == int(length) > 4096


def test_an_answer_that_is_not_taken_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_PIECE", 1000)
    app = create_app(ServerSettings(max_bodies=6000, body_seconds=0.3), make_service())

    async def work(client: httpx2.AsyncClient) -> tuple[list[dict], int]:
        task, taken, _ = send_slowly(app, walk_body(16))
        await task
        return taken, (await client.post("/v1/walk-ffn", content=walk_body(8), headers=BINARY)).status_code

    taken, code = in_app(app, work)
    assert taken[-1]["more_body"]
    assert code == 200


def test_a_body_that_does_not_arrive() -> None:
    app = create_app(ServerSettings(body_seconds=0.1), make_service())

    async def work(client: httpx2.AsyncClient):
        async def never() -> AsyncIterator[bytes]:
            yield b"x"
            await asyncio.sleep(5)

        return await client.post("/v1/walk-ffn", content=never(), headers=BINARY)

    answer = in_app(app, work)
    assert answer.status_code == 408
    assert "within 0.1 s" in answer.json()["error"]["message"]


class _Slow(lk.DenseFfn):
    """Computes when it is told to; counts how many do so at once."""

    def __init__(self, model: lk.Model) -> None:
        super().__init__(model)
        self.go = threading.Event()
        self.inside = self.most = 0

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.go.wait(20)
        self.inside -= 1
        return super().forward(layer, x)


def test_more_requests_than_allowed_are_told_to_come_back() -> None:
    service = make_service()
    slow = service.ffn = _Slow(service.model)
    body = {"layer": 1, "residual": ROW, "full_output": True}
    with make_client(service, max_concurrent=3) as client, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(client.post, "/v1/walk-ffn", json=body) for _ in range(3)]
        ends = time.monotonic() + 10
        while "larql_requests_at_work 3.0" not in client.get("/metrics").text:
            assert time.monotonic() < ends
        refused = client.post("/v1/walk-ffn", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/v1/health").status_code == 200  # off the event loop: it still answers
        slow.go.set()
        assert [task.result().status_code for task in waiting] == [200, 200, 200]
        assert slow.most == 1  # one computation at a time
        assert client.post("/v1/walk-ffn", json=body).status_code == 200
