"""`larql serve`: FFN layers of a model over HTTP."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from larql_kv.cli.choose import ACTIVATIONS_HELP, DEVICE_HELP
from larql_kv.cli.console import note, warn

KEY_VARIABLE = "LARQL_API_KEY"


def serve_command(
    model: Annotated[
        str, typer.Argument(help="Short name, GGUF file, model or vindex directory, or hub id.")
    ] = "smollm2-135m",
    ffn_only: Annotated[
        bool, typer.Option("--ffn-only", help="Load the FFN weights of the owned layers and nothing else.")
    ] = False,
    layers: Annotated[
        str | None,
        typer.Option(metavar="A-B", help="Layers to own, inclusive; others are refused.", show_default="all"),
    ] = None,
    vindex: Annotated[
        str | None, typer.Option(metavar="DIR", help="Vindex of the model: features, patches.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback a key is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help=f"Keys that clients must send, one tenant each; may be repeated. Or {KEY_VARIABLE}, which "
            "`ps` does not show.",
        ),
    ] = None,
    max_concurrent: Annotated[
        int, typer.Option(help="Requests at work or waiting; more are told to come back.")
    ] = 100,
    ffn: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="FFN that answers whatever top_k is asked for, as dense or walk:k=512.",
            show_default="a walk over the request's top_k",
        ),
    ] = None,
    l3: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Redis or Valkey that servers share as a cache, redis://HOST:PORT; its secret is in "
            "LARQL_L3_SECRET.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (deterministic), bfloat16, or auto.", show_default="auto")
    ] = None,
    activations: Annotated[str | None, typer.Option(help=ACTIVATIONS_HELP, show_default="mixed")] = None,
) -> None:
    """Serve FFN layers over HTTP: POST /v1/walk-ffn, and what docs/server.md lists.

    Ends on Ctrl-C or SIGTERM, after the requests at work. Exit codes: 0, 1 a failure, 2 wrong usage, spec or
    model.
    """
    from larql_kv.server.run import Source, load_service, serve
    from larql_kv.server.settings import ServerSettings, check_extra

    check_extra()
    keys = tuple(api_key or filter(None, [os.environ.get(KEY_VARIABLE)]))
    settings = ServerSettings(host, port, keys, max_concurrent)
    if not settings.is_local:
        warn(f"{host} can be reached from other machines; traffic is not encrypted: put TLS in front of it")
    source = Source(model, layers, vindex, ffn, ffn_only, l3, device, dtype, activations)
    serve(settings, lambda: load_service(source), note)
