"""`RedisTier`: an activation cache that several servers share, in Redis or Valkey.

It may make a request faster and nothing else: whatever happens to Redis, a lookup ends within its deadline
and the caller computes. Entries are authenticated, so that whoever writes to the database without the secret
gets no vector into an answer.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from larql_kv.errors import BackendUnavailable, SpecError

VERSION = b"larql:ffn:1:"  # of keys and values; entries of another version are never met
SECRET_VARIABLE = "LARQL_L3_SECRET"
MAX_VALUE = 1 << 20  # bytes of an entry
LEAST_SECRET = 16  # bytes
_MAC = 16
_QUEUE = 256  # entries waiting to be written; more are dropped
_MANY_FLIGHTS = 1024  # from here on, those that nobody landed are looked for
_POLL = 0.002  # seconds between looks at an entry that another process computes
_OPEN_AFTER = 3  # failures in a row
_FIRST_BREAK, _LONGEST_BREAK = 0.5, 30.0  # seconds without asking Redis after that, doubling
# Value, or 1 for a miss whose lock is now ours, or 0 for a miss that another process is working on.
_LOOK = """
local value = redis.call('GETRANGE', KEYS[1], 0, ARGV[1])
if #value > 0 then return value end
if redis.call('SET', KEYS[2], '1', 'NX', 'PX', ARGV[2]) then return 1 end
return 0
"""


class Breaker:
    """Stops asking a service that fails: after three failures in a row, for a time that doubles; then one
    caller tries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._break = _FIRST_BREAK

    @property
    def is_open(self) -> bool:
        return self._failures >= _OPEN_AFTER

    def allows(self) -> bool:
        """Whether to ask now; while open, one caller at a time may, when the break is over."""
        with self._lock:
            if self._failures < _OPEN_AFTER:
                return True
            if time.monotonic() < self._until:
                return False
            self._until = time.monotonic() + self._break  # the others wait for how this one fares
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._break = 0, _FIRST_BREAK

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= _OPEN_AFTER:
                self._until = time.monotonic() + self._break
                self._break = min(_LONGEST_BREAK, 2 * self._break)


@dataclass
class _Flight:
    """A key that somebody in this process looks up or computes."""

    ends: float
    done: threading.Event = field(default_factory=threading.Event)
    value: bytes | None = None


class RedisTier:
    """A `CacheTier` over the Redis or Valkey at `url` (redis://, rediss:// or unix://).

    Keys must be the same in every process that shares the tier, and tell nothing about what they are of:
    `TierCache` makes such ones under the same `secret` (16 bytes or more). A lookup waits `deadline` seconds
    for Redis, and up to `wait` more for another request, or another server, that computes the same entry;
    `put` never waits. Entries live `ttl` seconds.
    """

    def __init__(
        self, url: str, secret: bytes, ttl: int = 86400, deadline: float = 0.01, wait: float = 0.05
    ) -> None:
        if len(secret) < LEAST_SECRET:
            raise SpecError(
                f"the L3 secret has {len(secret)} bytes, at least {LEAST_SECRET} are needed: set "
                f"{SECRET_VARIABLE}, the same on every server"
            )
        for name, value, most in (("ttl", ttl, 1 << 31), ("deadline", deadline, 10), ("wait", wait, 10)):
            if not 0 < value <= most:
                raise SpecError(f"l3 {name}={value} is not in (0, {most}] seconds")
        self.address = _address(url)
        self.secret = secret
        self._ttl, self._deadline, self._wait = ttl, deadline, wait
        root = hashlib.blake2b(secret).digest()
        self._mac_secret = hashlib.blake2b(key=root, person=b"larql-l3-mac").digest()
        self._client = _client(url, deadline)
        self._look: Any = self._client.register_script(_LOOK)
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._flights: dict[bytes, _Flight] = {}
        names = ("hits", "misses", "joined", "rejected", "timeouts", "errors", "skipped", "writes", "dropped")
        self._counts: dict[str, int] = dict.fromkeys(names, 0)
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="larql-l3")
        self._writes: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue(_QUEUE)
        self._writer = threading.Thread(target=self._write_all, name="larql-l3-writer", daemon=True)
        self._writer.start()

    @classmethod
    def from_environment(cls, url: str, **options: Any) -> RedisTier:
        """The tier whose secret is in LARQL_L3_SECRET. Raises SpecError when it is not set."""
        return cls(url, os.environ.get(SECRET_VARIABLE, "").encode(), **options)

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`, or None: then the caller computes it, and others with that key wait for its
        `put` for a moment."""
        name = self._name(key)
        with self._lock:
            flight = self._flights.get(name)
            leads = flight is None or time.monotonic() > flight.ends
            if leads:
                flight = self._flights[name] = _Flight(time.monotonic() + self._deadline + self._wait)
                self._forget_stale()
        assert flight is not None
        if not leads:
            return self._join(flight)
        value = self._find(name)
        if value is not None:
            self._land(name, value)
        self._count("misses" if value is None else "hits")
        return value

    def put(self, key: bytes, value: bytes) -> None:
        """Hand out `value` to whoever waits for it, and write it to Redis in the background; an empty value
        takes the entry away."""
        name = self._name(key)
        self._land(name, value)
        if len(value) > MAX_VALUE - _MAC or self._breaker.is_open:
            self._count("dropped")
            return
        try:
            self._writes.put_nowait((name, self._mac(name, value) + value if value else b""))
        except queue.Full:
            self._count("dropped")

    def stats(self) -> dict[str, Any]:
        """Lookups by outcome (`joined`: served by another request of this process), entries written, entries
        dropped, and whether Redis is being left alone at the moment."""
        with self._lock:
            return {**self._counts, "open": self._breaker.is_open, "address": self.address}

    def close(self) -> None:
        """Write what waits, at most for a second, and end the threads."""
        self._writes.put(None)
        self._writer.join(1.0)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _join(self, flight: _Flight) -> bytes | None:
        flight.done.wait(max(0.0, flight.ends - time.monotonic()))
        self._count("misses" if flight.value is None else "joined")
        return flight.value

    def _find(self, name: bytes) -> bytes | None:
        """What Redis has, within the deadline; a little later, when another process is computing it."""
        found = self._ask(name)
        ends = time.monotonic() + self._wait
        while found == 0 and time.monotonic() < ends:
            time.sleep(_POLL)
            found = self._ask(name)
        if not isinstance(found, bytes):
            return None
        proof, value = found[:_MAC], found[_MAC:]
        if hmac.compare_digest(proof, self._mac(name, value)):
            return value
        self._count("rejected")
        return None

    def _ask(self, name: bytes) -> bytes | int | None:
        if not self._breaker.allows():
            self._count("skipped")
            return None
        call = self._readers.submit(self._look, [name, name + b":lock"], [MAX_VALUE, int(1000 * self._wait)])
        try:
            found = call.result(self._deadline)
        except FutureTimeout:
            call.cancel()
            self._failed("timeouts")
        except Exception as error:  # whatever the client raises, a cache miss is what it means here
            self._failed("timeouts" if "Timeout" in type(error).__name__ else "errors")
        else:
            self._breaker.succeeded()
            return found
        return None

    def _failed(self, kind: str) -> None:
        self._breaker.failed()
        self._count(kind)

    def _write_all(self) -> None:
        while (entry := self._writes.get()) is not None:
            name, value = entry
            try:
                with self._client.pipeline(transaction=False) as pipe:
                    if value:
                        pipe.set(name, value, ex=self._ttl)
                    pipe.delete(name + b":lock", *(() if value else (name,))).execute()
            except Exception:  # as for lookups: nobody waits for this
                self._failed("errors")
                self._count("dropped")
            else:
                self._breaker.succeeded()
                self._count("writes")

    def _land(self, name: bytes, value: bytes) -> None:
        with self._lock:
            flight = self._flights.pop(name, None)
        if flight is not None:
            flight.value = value
            flight.done.set()

    def _forget_stale(self) -> None:
        if len(self._flights) > _MANY_FLIGHTS:
            now = time.monotonic()
            self._flights = {name: flight for name, flight in self._flights.items() if flight.ends > now}

    @staticmethod
    def _name(key: bytes) -> bytes:
        return VERSION + key.hex().encode()

    def _mac(self, name: bytes, value: bytes) -> bytes:
        return hashlib.blake2b(name + value, key=self._mac_secret, digest_size=_MAC).digest()

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _address(url: str) -> str:
    """`url` without user and password, for messages. Raises SpecError for another kind of URL."""
    try:
        parts = urlsplit(url)
        place = parts.path if parts.scheme == "unix" else parts.hostname
        port = f":{parts.port}" if parts.port else ""
    except ValueError:  # a port that is none, brackets that do not match
        parts, place, port = urlsplit(""), None, ""
    if parts.scheme not in ("redis", "rediss", "unix") or not place:
        raise SpecError(
            f"l3 {url.rpartition('@')[2][:200]!r} is no address: expected redis://HOST[:PORT][/DB], "
            "rediss://... or unix:///PATH"
        )
    return f"{parts.scheme}://{place}{port}"


def _client(url: str, deadline: float) -> Any:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise BackendUnavailable("an L3 cache needs redis: pip install 'larql-kv[server]'") from error
    patience = 2 * deadline  # of a thread that nobody waits for any more
    return redis.Redis.from_url(
        url,
        socket_timeout=patience,
        socket_connect_timeout=patience,
        retry=Retry(NoBackoff(), 0),
        max_connections=16,
    )
