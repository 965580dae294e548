"""The FastAPI application. Handlers read and check; computing happens on one thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from larql_kv import __version__
from larql_kv.errors import LarqlError, ModelError, RemoteError, StoreError
from larql_kv.ffn.remote import PRINT_HEADER
from larql_kv.server.bodies import (
    JSON,
    BadRequest,
    answer_form,
    binary_answer,
    check_answer_size,
    dump,
    features_answer,
    json_answer,
    parse_body,
    parse_walk,
)
from larql_kv.server.guard import BodyReader, Guard, Refused
from larql_kv.server.metrics import Metrics
from larql_kv.server.settings import ServerSettings

if TYPE_CHECKING:
    from larql_kv.server.service import FfnService

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class WarmupBody(BaseModel):
    """`POST /v1/warmup`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    layers: Annotated[list[int], Field(max_length=1 << 16)] | None = None
    skip_weights: bool = False
    warmup_hnsw: bool = False


class PatchBody(BaseModel):
    """`POST /v1/patches/apply`: the contents of a .vlp file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    patch: dict[str, Any]
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class Holder:
    """The service, once its weights are there, and the thread that computes."""

    def __init__(self, service: FfnService | None) -> None:
        self.service = service
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="larql-ffn")

    def ready(self) -> FfnService:
        """Raises Refused (503) while the weights are being loaded."""
        if self.service is None:
            raise Refused(503, "WeightsUnavailable", "the weights are not loaded yet", 1)
        return self.service

    async def run(self, work: Callable[[FfnService], T]) -> T:
        """`work(service)` on the computing thread, after what was asked for before."""
        service = self.ready()
        return await asyncio.get_running_loop().run_in_executor(self._compute, work, service)

    def close(self) -> None:
        self._compute.shutdown(wait=True)
        if self.service is not None:
            self.service.close()


def create_app(settings: ServerSettings, service: FfnService | None = None) -> FastAPI:
    """The application. With no `service` yet, set `app.state.holder.service` when the weights are there;
    until then everything but /v1/health, /v1/models and /metrics is answered with 503."""
    holder = Holder(service)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        holder.close()

    app = FastAPI(
        title="larql", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    metrics = Metrics(lambda: {} if holder.service is None else holder.service.cache_stats())
    app.state.holder = holder
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    _add_error_handlers(app)
    reader = BodyReader(settings, metrics)
    _add_walk(app, holder, reader, metrics)
    _add_facts(app, holder, metrics)
    _add_changes(app, holder, reader)
    return app


def _add_walk(app: FastAPI, holder: Holder, reader: BodyReader, metrics: Metrics) -> None:
    @app.post("/v1/walk-ffn")
    async def walk_ffn(request: Request) -> Response:
        holder.ready()
        body = await reader.read(request)
        content_type = request.headers.get("content-type", "")
        accept = request.headers.get("accept", "")
        tenant = request.state.tenant

        def answer(service: FfnService) -> tuple[bytes, str, str]:
            asked = parse_walk(bytes(body.data), content_type, service.served)
            form = answer_form(accept, content_type, asked)
            check_answer_size(asked, form, service.served.hidden)
            if asked.full_output:
                response = service.walk(asked, tenant)
                for layer in asked.layers:
                    metrics.rows.labels(str(layer)).inc(len(asked.rows))
                if form != "json":
                    return *binary_answer(response, form, accept), service.print
                return json_answer(response), JSON, service.print
            found, milliseconds = service.features(asked)
            return features_answer(found, milliseconds, asked.several), JSON, service.print

        try:
            content, media, mark = await holder.run(answer)
        finally:
            body.release()
        return reader.answer(content, media, {PRINT_HEADER: mark})


def _add_facts(app: FastAPI, holder: Holder, metrics: Metrics) -> None:
    @app.get("/v1/health")
    async def health() -> Response:
        return _json({"status": "loading" if holder.service is None else "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        service = holder.service
        known = [] if service is None else [service.served.name]
        return _json(
            {
                "object": "list",
                "data": [{"id": name, "object": "model", "owned_by": "larql"} for name in known],
            }
        )

    @app.get("/v1/stats")
    async def stats() -> Response:
        return _json(await holder.run(lambda service: service.stats()))

    @app.get("/v1/cache-stats")
    async def cache_stats() -> Response:
        return _json(holder.ready().cache_stats())

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=_METRICS_TYPE)


def _add_changes(app: FastAPI, holder: Holder, reader: BodyReader) -> None:
    async def read_json(request: Request, kind: type[Body]) -> Body:
        holder.ready()
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != JSON:
            raise BadRequest(f"content type {media[:100]!r} is unknown: send {JSON}", 415)
        body = await reader.read(request)
        try:
            return await asyncio.to_thread(parse_body, kind, bytes(body.data))
        finally:
            body.release()

    @app.post("/v1/warmup")
    async def warmup(request: Request) -> Response:
        asked = await read_json(request, WarmupBody)
        if asked.warmup_hnsw:
            raise BadRequest("warmup_hnsw: this server has no approximate index, its scores are exact")
        return _json(await holder.run(lambda service: service.warmup(asked.layers, asked.skip_weights)))

    @app.get("/v1/patches")
    async def patches() -> Response:
        return _json({"patches": await holder.run(lambda service: service.patches())})

    @app.post("/v1/patches/apply")
    async def apply(request: Request) -> Response:
        asked = await read_json(request, PatchBody)
        return _json(await holder.run(lambda service: service.apply_patch(asked.patch, asked.name)))

    @app.get("/v1/patches/{name}")
    async def patch(name: str) -> Response:
        return _json(await holder.run(lambda service: service.patch(name)))

    @app.delete("/v1/patches/{name}")
    async def remove(name: str) -> Response:
        return _json(await holder.run(lambda service: service.remove_patch(name)))


def _json(value: Any) -> Response:
    return Response(dump(value), media_type=JSON)


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves as {"error": {"kind", "message"}}, and none with a traceback."""

    def refused(_request: Request, error: Any) -> Response:
        return Response(error.body, error.status, error.headers)

    def bad_request(request: Request, error: Any) -> Response:
        return refused(request, Refused(error.status, "BadRequest", str(error)))

    def http_error(request: Request, error: Any) -> Response:
        return refused(request, Refused(error.status_code, "NotFound", f"{request.url.path}: {error.detail}"))

    def named(request: Request, error: Any) -> Response:
        status = (
            502
            if isinstance(error, RemoteError)
            else 400
            if isinstance(error, ModelError | StoreError)
            else 500
        )
        return refused(request, Refused(status, type(error).__name__, str(error)))

    def unknown(request: Request, error: Any) -> Response:
        return refused(request, Refused(500, "InternalError", f"{type(error).__name__}: {error}"[:300]))

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(BadRequest, bad_request)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(LarqlError, named)
    app.add_exception_handler(Exception, unknown)
