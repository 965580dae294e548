"""Running the server: the socket, loading behind it, signals, and an end that finishes what was begun."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from larql_kv.errors import BackendUnavailable, LarqlError, RemoteError, SpecError
from larql_kv.model.catalog import is_vindex
from larql_kv.model.load import Form, ModelFiles, assemble, open_files
from larql_kv.model.vindex_source import PatchedTensors
from larql_kv.server.settings import ServerSettings, check_extra, parse_layers

if TYPE_CHECKING:
    from larql_kv.ffn.policy import FfnPolicy
    from larql_kv.server.service import FfnService

DRAIN_SECONDS = 30  # for requests at work when the server is told to end
_KEEP_ALIVE = 75  # seconds that an idle connection is kept


@dataclass(frozen=True)
class Source:
    """Which weights to serve, and how."""

    model: str
    layers: str | None = None  # FIRST-LAST; all for None
    vindex: str | None = None
    ffn: str | None = None  # spec; None: the walk that a request's top_k asks for
    ffn_only: bool = False
    l3: str | None = None  # redis://...
    device: str = "cpu"
    dtype: str | None = None
    activations: str | None = None


def load_service(source: Source) -> FfnService:
    """Load what `source` names. Raises SpecError, ModelError, StoreError, BackendUnavailable."""
    from larql_kv.ffn.base import FfnBackend
    from larql_kv.server.service import FfnService
    from larql_kv.server.weights import load_ffn_only
    from larql_kv.vindex.index import VectorIndex

    began = time.perf_counter()
    form = Form(source.device, source.dtype, source.activations)
    if source.ffn_only and source.device != "cpu":
        raise SpecError(f"--ffn-only loads on the CPU only, device is {source.device!r}: leave it out")
    if source.ffn is None and source.device != "cpu":
        raise BackendUnavailable(
            f"without --ffn every request is walked, on device 'cpu' only, and device is {source.device!r}: "
            "give --ffn dense, or leave --device out"
        )
    files = _unpatched(open_files(source.model))
    owned = parse_layers(source.layers, files.config.layer_count)
    if source.ffn_only:
        model = load_ffn_only(files, owned, source.dtype)
    else:
        model = assemble(files.config, files.tensors, files.tokenizer(), form, str(files.path))
    # Patches lie over the index alone, so that taking one away leaves nothing of it in the weights.
    vindex = source.vindex or (str(files.path) if is_vindex(files.path) else None)
    index = VectorIndex.of_model(model, vindex)
    ffn: FfnBackend | None = None
    if source.ffn is not None:
        from larql_kv.ffn.policy import build_ffn, parse_ffn

        policy = parse_ffn(source.ffn)
        if any(rule.ffn.get("l1", "off") != "off" for rule in policy.rules):
            raise SpecError(f"--ffn {source.ffn}: an L1 cache lives one request; on a server leave l1 out")
        if model.device.type == "cpu":
            policy = _over_index(policy)
        ffn = build_ffn(policy, model, index)
    l3 = None
    if source.l3 is not None:
        from larql_kv.ffn.cache.l3 import RedisTier

        l3 = RedisTier.from_environment(source.l3)
    milliseconds = 1000 * (time.perf_counter() - began)
    name = PurePath(source.model).name
    return FfnService(model, index, owned, ffn, l3, milliseconds, not source.ffn_only, name)


def _over_index(policy: FfnPolicy) -> FfnPolicy:
    """Dense layers as walks over all features: the same bits, but patches of the index count."""
    from larql_kv.ffn.policy import FfnKind, FfnPolicy

    rules = [
        replace(rule, ffn=FfnKind("walk")) if rule.ffn.kind == "dense" else rule for rule in policy.rules
    ]
    return FfnPolicy(tuple(rules))


def _unpatched(files: ModelFiles) -> ModelFiles:
    tensors = files.tensors
    if not isinstance(tensors, PatchedTensors):
        return files
    return ModelFiles(files.path, files.config, tensors.base, files.tokenizer)


def serve(settings: ServerSettings, load: Callable[[], FfnService], announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; then finish the requests at work (at most 30 s) and return.

    The address answers at once, with 503 until `load` is done. `announce` gets the URL, and "ready". Raises
    what `load` raises, and RemoteError when the address cannot be had.
    """
    check_extra()
    import uvicorn

    from larql_kv.server.app import create_app

    listener = _listen(settings.host, settings.port)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = uvicorn.Server(config)
    failures: list[BaseException] = []

    def fill() -> None:
        try:
            app.state.holder.service = load()
            announce("ready")
        except BaseException as error:
            failures.append(error)
            server.should_exit = True

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    announce(f"listening on http://{host}:{listener.getsockname()[1]}")
    loader = threading.Thread(target=fill, name="larql-load", daemon=True)
    # uvicorn hands a signal on once it has ended by it: an asked-for end is no failure.
    before: Any = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        loader.start()
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listener.close()
    if failures:
        error = failures[0]
        raise (
            error if isinstance(error, LarqlError) else RuntimeError(f"loading failed: {error!r}")
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    listener = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio answers without Nagle's delay (40 ms) only where the protocol is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise RemoteError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
