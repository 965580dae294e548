"""Keys of cached FFN outputs: a keyed BLAKE2b over fields that each carry their name and length.

Without the secret nobody can make two inputs collide, nor tell which inputs are cached; L1 and L2 draw theirs
at random once a process, a tier that several servers share is given one.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, fields
from typing import Literal

from larql_kv.errors import SpecError

KEY_VERSION = 1
KEY_BYTES = 32
Mode = Literal["features", "exact"]
MODES: tuple[Mode, ...] = ("features", "exact")
_PERSON = b"larql-ffn-cache"
_PROCESS_SECRET = secrets.token_bytes(32)


@dataclass(frozen=True)
class KeyFields:
    """What a cached output depends on beside its input."""

    tenant: str  # entries of one are never another's
    model: str  # the base print of the index
    patch_epoch: int  # of the layer: 0, its base weights. A layer with overrides is not cached
    layer: int
    top_k: int
    activation: str
    mode: Mode
    down_kind: str  # of the index's down rows, which quantised models may hold rounded


class LayerKeys:
    """Makes the keys of one layer. The payload is the input row as computed with (`exact`), or the set of
    features as a bitmap (`features`); both have one length a layer."""

    def __init__(self, known: KeyFields, secret: bytes | None = None) -> None:
        """`secret`: 16 bytes or more, None for this process's own. Raises SpecError for a shorter one."""
        secret = _PROCESS_SECRET if secret is None else secret
        if len(secret) < 16:
            raise SpecError(f"a cache secret has at least 16 bytes, got {len(secret)}")
        if len(secret) > hashlib.blake2b.MAX_KEY_SIZE:
            secret = hashlib.blake2b(secret).digest()
        self._start = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=_PERSON)
        self._start.update(_tagged("version", KEY_VERSION))
        for field in fields(known):
            self._start.update(_tagged(field.name, getattr(known, field.name)))

    def key(self, payload: bytes | memoryview) -> bytes:
        """The key of one input, 32 bytes."""
        made = self._start.copy()
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        made.update(b"payload" + size.to_bytes(8, "little"))
        made.update(payload)
        return made.digest()


def _tagged(name: str, value: str | int) -> bytes:
    data = f"{type(value).__name__}:{value}".encode()
    return b"".join(len(part).to_bytes(4, "little") + part for part in (name.encode(), data))
