"""Every error a user of larql_kv can meet, by name.

The five `EngineError` kinds are a closed set: a sixth would silently fall through the callers that
route on them. Each message says what was wrong, with which value, and what to do about it.
"""

from __future__ import annotations


class LarqlError(Exception):
    """Root of every error raised on purpose by this package."""


class EngineError(LarqlError):
    """An engine could not do what it was asked. `is_recoverable` says whether a harness may go on."""

    is_recoverable: bool = False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.args == other.args  # type: ignore[union-attr]

    def __hash__(self) -> int:
        return hash((type(self), self.args))


class EmptyPrompt(EngineError):
    """`prefill` was called with no tokens."""

    is_recoverable = True

    def __init__(self, message: str = "prefill needs at least one token id, got none") -> None:
        super().__init__(message)


class BackendUnavailable(EngineError):
    """The backend lacks a capability that the engine asked for."""

    is_recoverable = True


class RetrievalMiss(EngineError):
    """A retrieval engine has no store, or no window of it matches the query."""

    is_recoverable = True

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class InvariantViolation(EngineError):
    """The engine was used out of order (decode before prefill, another FFN's K/V, ...)."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class BackendFailure(EngineError):
    """A forward, projection or archive call failed at run time."""

    def __init__(self, details: str) -> None:
        super().__init__(details)
        self.details = details


class ModelError(LarqlError):
    """A model file or directory is broken, unsupported, or asked for more than it can do."""


class SpecError(LarqlError, ValueError):
    """An engine (or FFN) spec names something unknown or gives a bad value."""


class StoreError(LarqlError):
    """Stored state is broken, incomplete, or belongs to another model."""


class RemoteError(LarqlError):
    """A remote service failed, was too slow, or answered nonsense."""
