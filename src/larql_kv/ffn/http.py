"""One server's HTTP, for FFN clients: pooled connections, a deadline a call, bounded answers, few retries."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from larql_kv.errors import RemoteError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from urllib3 import BaseHTTPResponse

_BUSY = (502, 503, 504)  # the server's way of saying: try again
_FIRST_PAUSE = 0.05  # seconds before the first retry; doubles
_MESSAGE_BYTES = 64 << 10  # of a refusal's body that are read
MOST_CONNECTIONS = 16


def check_url(url: str) -> str:
    """`url` without a trailing slash. Raises SpecError unless it is http(s)://HOST[:PORT][/PATH]."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        known = False
        parts = urlsplit("")
    extra = parts.query or parts.fragment or "@" in parts.netloc
    if not known or extra or not url.isascii() or any(c.isspace() or not c.isprintable() for c in url):
        hint = "; give the key as api_key or LARQL_API_KEY" if "@" in parts.netloc else ""
        shown = url.rpartition("@")[2] if "@" in url else url
        raise SpecError(
            f"endpoint {shown[:200]!r} is no address: expected http(s)://HOST[:PORT][/PATH]{hint}"
        )
    return url.rstrip("/")


@dataclass
class RetryBudget:
    """How many retries may be had: `most` at once, and one more for every ten calls that went well, so that
    a failing server does not get a multiple of the load that it already fails under."""

    most: float = 10.0
    tokens: float = 10.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def spend(self) -> bool:
        """Take one retry; False when none is left."""
        with self._lock:
            if self.tokens < 1:
                return False
            self.tokens -= 1
            return True

    def earn(self) -> None:
        with self._lock:
            self.tokens = min(self.most, self.tokens + 0.1)


@dataclass(frozen=True)
class Answer:
    """A response of status 200, read whole."""

    headers: Mapping[str, str]
    body: bytes


@dataclass
class Traffic:
    """Bodies of requests sent and answers read, and what it took."""

    calls: int = 0
    round_trips: int = 0  # every request that went out, retries too
    retries: int = 0
    failures: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


class Endpoint:
    """The server at `url`. Safe to use from several threads. Every failure is a RemoteError with the address.

    Requests must be repeatable: a call is sent again, at most `retries` times within `timeout` seconds and
    within the budget, when the connection failed or the server said that it is busy.
    """

    def __init__(self, url: str, timeout: float = 60.0, api_key: str | None = None, retries: int = 2) -> None:
        if not 0 < timeout <= 86400:
            raise SpecError(f"timeout={timeout} is not in (0, 86400] seconds")
        if retries < 0:
            raise SpecError(f"retries={retries} is negative")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise SpecError(
                f"the api_key for {url[:200]} has characters that no HTTP header holds: ASCII only"
            )
        self.url = check_url(url)
        self.timeout = timeout
        self.retries = retries
        self.budget = RetryBudget()
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._prefix = urlsplit(self.url).path
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._pool = _pool(self.url)

    def get(self, path: str, limit: int) -> Answer:
        """GET `path`; at most `limit` bytes are read. Raises RemoteError."""
        return self._call("GET", path, b"", {}, limit)

    def post(self, path: str, body: bytes, headers: Mapping[str, str], limit: int) -> Answer:
        """POST `body`; at most `limit` bytes are read. Raises RemoteError."""
        return self._call("POST", path, body, headers, limit)

    def close(self) -> None:
        """Close the pooled connections; the next call opens new ones."""
        self._pool.close()
        self._pool = _pool(self.url)

    def _call(self, method: str, path: str, body: bytes, headers: Mapping[str, str], limit: int) -> Answer:
        began = time.monotonic()
        deadline = began + self.timeout
        pause = _FIRST_PAUSE
        attempt = 0
        try:
            while True:
                attempt += 1
                try:
                    answer = self._once(method, path, body, headers, limit, deadline)
                except _Failed as failed:
                    left = deadline - time.monotonic()
                    again = failed.again and attempt <= self.retries and left > pause
                    if not (again and self.budget.spend()):
                        tries = "" if attempt == 1 else f" (tried {attempt} times)"
                        self._count(failures=1)
                        raise RemoteError(f"{self.url}: {failed.reason}{tries}") from failed.__cause__
                    self._count(retries=1)
                    time.sleep(pause)
                    pause *= 2
                else:
                    self.budget.earn()
                    return answer
        finally:
            self._count(calls=1, seconds=time.monotonic() - began)

    def _once(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        limit: int,
        deadline: float,
    ) -> Answer:
        import urllib3
        from urllib3 import exceptions

        left = max(0.001, deadline - time.monotonic())
        self._count(round_trips=1, bytes_sent=len(body))
        response = None
        whole = False
        try:
            response = self._pool.urlopen(
                method,
                self._prefix + path,
                body=body or None,
                headers={**self._headers, **headers},
                timeout=urllib3.Timeout(connect=left, read=left),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            status, heads = response.status, response.headers
            received = _read(response, limit if status == 200 else _MESSAGE_BYTES, deadline)
            whole = True
        except exceptions.NewConnectionError as error:  # before the timeouts, of which urllib3 makes it one
            raise _Failed(_connection_reason(error), True) from error
        except (exceptions.TimeoutError, TimeoutError) as error:
            raise _Failed(f"no answer within {self.timeout:g} s", False) from error
        except (exceptions.HTTPError, OSError) as error:
            raise _Failed(_connection_reason(error), True) from error
        finally:
            if response is not None:
                response.release_conn() if whole else response.close()
        self._count(bytes_received=len(received))
        if status != 200:
            raise _Failed(f"status {status}: {_message(received)}", status in _BUSY)
        return Answer({key.lower(): value for key, value in heads.items()}, received)

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.traffic, name, getattr(self.traffic, name) + amount)


class _Failed(Exception):
    """One attempt failed; `again` says whether another may do better."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.reason, self.again = reason, again


def _pool(url: str) -> Any:
    try:
        import urllib3
    except ImportError as error:
        raise RemoteError(f"{url}: a remote FFN needs urllib3: pip install 'larql-kv[server]'") from error
    parts = urlsplit(url)
    kind = urllib3.HTTPSConnectionPool if parts.scheme == "https" else urllib3.HTTPConnectionPool
    return kind(parts.hostname or "", parts.port, maxsize=MOST_CONNECTIONS)


def _read(response: BaseHTTPResponse, limit: int, deadline: float) -> bytes:
    """The whole body. A server that sends a byte now and then still meets the deadline."""
    length = response.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _Failed(
            f"status {response.status}: the answer has {length} bytes, at most {limit} are read", False
        )
    parts, size = [], 0
    while part := response.read1(1 << 18):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _Failed(f"status {response.status}: the answer goes on after {limit} bytes", False)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _connection_reason(error: Exception) -> str:
    """What went wrong, without the library's object names."""
    text = str(error.__cause__ or error)
    return f"connection failed: {text.rpartition(': ')[2] if '0x' in text else text}"


def _message(body: bytes) -> str:
    """A refusal's own words, on one line."""
    import json

    text = body.decode("utf-8", "replace")
    try:
        text = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = text[:300]
    return " ".join(text.split())[:500] or "(no message)"
