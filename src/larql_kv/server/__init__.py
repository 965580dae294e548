"""FFN layers over HTTP: `create_app` makes the application, `larql serve` runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from larql_kv.server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from larql_kv.server.service import FfnService

__all__ = ["ServerSettings", "create_app"]


def create_app(settings: ServerSettings, service: FfnService | None = None) -> FastAPI:
    """The application; until `app.state.holder.service` is set, it answers 503 (see `app.create_app`).

    Raises BackendUnavailable when the `server` extra is not installed.
    """
    from larql_kv.server.settings import check_extra

    check_extra()
    from larql_kv.server.app import create_app

    return create_app(settings, service)
