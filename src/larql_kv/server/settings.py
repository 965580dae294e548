"""What `larql serve` was asked for, checked before anything is loaded."""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import ipaddress
import re
from dataclasses import dataclass, field

from larql_kv.errors import BackendUnavailable, SpecError
from larql_kv.ffn.wire import MAX_BODY

EXTRA = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
LEAST_KEY = 16  # characters of an API key


@dataclass(frozen=True)
class ServerSettings:
    """Addresses, keys and limits of one server. Raises SpecError for what would be unsafe or cannot be."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_concurrent: int = 100  # requests at work or waiting; more are told to come back
    max_body: int = MAX_BODY  # bytes of one request
    max_bodies: int = 4 * MAX_BODY  # bytes of all requests being read or computed, and of answers being sent
    body_seconds: float = 60.0  # for a request's body to arrive, or for its answer to be taken

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SpecError(f"port {self.port} is not in 0 to 65535")
        if self.max_concurrent < 1:
            raise SpecError(f"max-concurrent {self.max_concurrent} must be at least 1")
        for key in self.api_keys:
            if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise SpecError(
                    f"an API key has {len(key)} characters: at least {LEAST_KEY} are needed, ASCII, no spaces"
                )
        if not self.api_keys and not self.is_local:
            raise SpecError(
                f"host {self.host!r} can be reached from other machines: give --api-key (or LARQL_API_KEY), "
                "or stay on 127.0.0.1"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def tenant(self, key: str | None) -> str | None:
        """The tenant of a request with that key, None for a key that is not ours. Takes the same time for
        every wrong key: digests are compared, with all keys, to the end."""
        if not self.api_keys:
            return ""
        given = _digest(key or "")
        found = None
        for known in self.api_keys:
            if hmac.compare_digest(given, _digest(known)):
                found = _digest(known).hex()
        return found


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16, person=b"larql-tenant").digest()


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine's loopback: localhost, 127.0.0.0/8, ::1."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_layers(text: str | None, layer_count: int) -> range:
    """`a-b` (inclusive) or `a` -> the layers that a server owns; all for None. Raises SpecError."""
    if text is None:
        return range(layer_count)
    match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", text)
    if match is None:
        raise SpecError(f"layers {text[:100]!r} is not FIRST-LAST, as in 0-14")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first or last >= layer_count:
        raise SpecError(f"layers {text.strip()}: not a range within the model's layers 0-{layer_count - 1}")
    return range(first, last + 1)


def check_extra() -> None:
    """Raises BackendUnavailable when a package of the `server` extra is missing."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            f"the server needs {', '.join(missing)}, which is not installed: pip install 'larql-kv[server]'"
        )
