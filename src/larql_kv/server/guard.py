"""What every request passes first: the key, the host name, the limits; and what of it is counted."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from larql_kv.server.bodies import JSON, dump
from larql_kv.server.settings import ServerSettings, is_loopback

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from larql_kv.server.metrics import Metrics

OPEN_PATHS = ("/v1/health",)  # need no key
ALWAYS_PATHS = ("/v1/health", "/metrics")  # answered however busy the server is; they do not count as work
_PIECE = 256 << 10  # bytes of an answer handed on at once


class Refused(Exception):
    """A request that is answered with an error: HTTP status, kind and message."""

    def __init__(self, status: int, kind: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        return dump({"error": {"kind": self.kind, "message": str(self)}})

    @property
    def headers(self) -> dict[str, str]:
        extra = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            extra["www-authenticate"] = "Bearer"
        return {"content-type": JSON, **extra}


class Guard:
    """ASGI middleware. Requests that pass have their tenant in `scope["state"]["tenant"]`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._at_work = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                self._metrics.bytes.labels("out").inc(len(message.get("body", b"")))
            await send(message)

        counts = scope["path"] not in ALWAYS_PATHS
        self._at_work += counts
        self._metrics.at_work.set(self._at_work)
        try:
            scope.setdefault("state", {})["tenant"] = self._check(scope)
            await self._app(scope, receive, counted)
        except Refused as refused:
            await _send(refused, counted)
        finally:
            self._at_work -= counts
            self._metrics.at_work.set(self._at_work)
            self._metrics.observe(scope, status, time.perf_counter() - began)

    def _check(self, scope: Scope) -> str:
        """The tenant of the request. Raises Refused."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        settings, path = self._settings, scope["path"]
        if not settings.api_keys and not is_loopback(_host_name(headers.get(b"host", ""))):
            # A page of another site that resolves its own name to 127.0.0.1 must not reach us.
            raise Refused(
                403, "Forbidden", "without API keys the server answers to localhost and 127.0.0.1 only"
            )
        tenant = settings.tenant(_key(headers))
        if tenant is None and path not in OPEN_PATHS:
            raise Refused(401, "Unauthorized", "give the API key: Authorization: Bearer KEY, or X-API-Key")
        if self._at_work > settings.max_concurrent and path not in ALWAYS_PATHS:
            raise Refused(
                503, "Busy", f"{settings.max_concurrent} requests are at work already (--max-concurrent)", 1
            )
        return tenant or ""


class BodyReader:
    """Reads bodies under the limits for one request, for all of them together, and for the time it takes."""

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._held = 0

    async def read(self, request: Request) -> Body:
        """The body; its bytes count as held until `release`. Raises Refused: 413, 503, 408."""
        settings = self._settings
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > settings.max_body:
            raise _too_large(settings.max_body)
        body = Body(self)
        try:
            async with asyncio.timeout(settings.body_seconds):
                async for chunk in request.stream():
                    if len(body.data) + len(chunk) > settings.max_body:
                        raise _too_large(settings.max_body)
                    self._hold(len(chunk))
                    self._metrics.bytes.labels("in").inc(len(chunk))
                    body.data += chunk
        except TimeoutError:
            body.release()
            raise Refused(
                408, "Timeout", f"the body did not arrive within {settings.body_seconds:g} s"
            ) from None
        except BaseException:
            body.release()
            raise
        return body

    def answer(self, content: bytes, media: str, headers: dict[str, str]) -> Answer:
        """A response whose bytes count as held until the client has taken them. Raises Refused: 503."""
        self._hold(len(content))
        return Answer(self, self._settings.body_seconds, content, media, headers)

    def _hold(self, count: int) -> None:
        if self._held + count > self._settings.max_bodies:
            raise Refused(503, "Busy", "too many bytes of requests and answers are held already", 1)
        self._held += count

    def let_go(self, count: int) -> None:
        self._held -= count


class Body:
    """A request's body, counted as long as it is held."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self.data = bytearray()

    def release(self) -> None:
        self._reader.let_go(len(self.data))
        self.data = bytearray()


class Answer(Response):
    """Sent piece by piece, so that it counts as held while the client is slow; one that takes longer than
    `seconds` is cut off, with its connection."""

    def __init__(
        self, reader: BodyReader, seconds: float, content: bytes, media: str, headers: dict[str, str]
    ) -> None:
        super().__init__(content, media_type=media, headers=headers)
        self._reader, self._seconds = reader, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            async with asyncio.timeout(self._seconds):
                await send(head)
                for at in range(0, len(self.body), _PIECE):
                    piece, more = bytes(self.body[at : at + _PIECE]), at + _PIECE < len(self.body)
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
        except TimeoutError:
            return  # an answer that is not whole: the server closes the connection
        finally:
            self._reader.let_go(len(self.body))


def _too_large(limit: int) -> Refused:
    return Refused(413, "TooLarge", f"the body is larger than {limit} bytes ({limit >> 20} MiB)")


def _key(headers: dict[bytes, str]) -> str | None:
    kind, _, key = headers.get(b"authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get(b"x-api-key")


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


async def _send(refused: Refused, send: Any) -> None:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in refused.headers.items()]
    body = refused.body
    headers.append((b"content-length", str(len(body)).encode()))
    # The rest of a body that nobody reads would be taken for the next request.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
