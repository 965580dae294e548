"""An FFN server of the tests' own, which can be told to misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from larql_kv.ffn import wire
from larql_kv.ffn.remote import PRINT_HEADER, RemoteWalkBackend, model_print
from larql_kv.ffn.wire import MEDIA_TYPES, FfnResponse
from tests.models import tiny

HIDDEN, LAYERS = 64, 4


class FakeServer:
    """Serves the FFN of the tiny llama; `misbehave(handler, body)` may answer instead, once it is set.

    Returns True when it has answered. `requests` counts what came in on /v1/walk-ffn."""

    def __init__(self) -> None:
        self.model = tiny("llama")
        self.print = self.now = model_print(self.model)
        self.stats: dict = {
            "model": "tiny",
            "layers": LAYERS,
            "owned": [0, LAYERS - 1],
            "hidden_size": HIDDEN,
            "base_print": self.print,
            "print": self.print,
        }
        self.misbehave: Callable[[BaseHTTPRequestHandler, bytes], bool] | None = None
        self.requests = 0
        self.connections = 0
        self.top_ks: list[int] = []
        self.keys: list[str | None] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                fake.connections += 1
                super().setup()

            def log_message(self, *_: object) -> None:
                return

            def reply(self, status: int, body: bytes, media: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("content-type", media)
                self.send_header("content-length", str(len(body)))
                self.send_header(PRINT_HEADER, fake.now)
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                fake.keys.append(self.headers.get("authorization"))
                self.reply(200, json.dumps(fake.stats).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fake.requests += 1
                if fake.misbehave is not None and fake.misbehave(self, body):
                    return
                self.reply(*fake.answer(body, self.headers["accept"]))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients that hang up, on purpose
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, body: bytes, accept: str) -> tuple[int, bytes, str]:
        asked = wire.decode_request(body, HIDDEN, LAYERS)
        self.top_ks.append(asked.top_k)
        form = next(form for form, media in MEDIA_TYPES.items() if accept.startswith(f"{media};"))
        x = torch.from_numpy(asked.rows.copy())
        outputs = tuple(self.model.decoder.dense_ffn(layer, x).numpy() for layer in asked.layers)
        response = FfnResponse(asked.layers, outputs, 0.5, asked.several)
        return 200, wire.encode_response(response, form), MEDIA_TYPES[form]

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def rows(count: int = 1) -> torch.Tensor:
    return torch.randn(count, HIDDEN)


def connected(fake: FakeServer, **options) -> RemoteWalkBackend:
    return RemoteWalkBackend(fake.url, **options).connect(fake.model)


def replies(status: int, body: bytes, media: str = MEDIA_TYPES["f32"]):
    def misbehave(handler, _body: bytes) -> bool:
        handler.reply(status, body, media)
        return True

    return misbehave
