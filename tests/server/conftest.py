"""A service over a tiny model, an application in this process, and servers in processes of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from larql_kv.model.load import open_files
from larql_kv.server import ServerSettings, create_app
from larql_kv.server.service import FfnService
from larql_kv.server.weights import load_ffn_only
from larql_kv.vindex.index import VectorIndex
from tests import tiny_models
from tests.cli.conftest import Larql

LARQL = [sys.executable, "-m", "larql_kv.cli.main"]
PATIENCE = 120  # seconds: a fresh machine compiles its kernels first
KEY, OTHER_KEY = "first-key-0123456789", "other-key-0123456789"


def make_service(family: str = "llama", owned: range | None = None, **options) -> FfnService:
    """A service over the tiny model of that family, with caches of its own."""
    files = open_files(tiny_models.model_dir(family))
    layers = range(files.config.layer_count) if owned is None else owned
    model = load_ffn_only(files, layers, "float32")
    return FfnService(model, VectorIndex.of_model(model), layers, whole=False, **options)


def make_client(service: FfnService | None, **settings) -> TestClient:
    """The application around `service`, without a network."""
    app = create_app(ServerSettings(**settings), service)
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


@pytest.fixture
def larql() -> Larql:
    return Larql()


@pytest.fixture
def service() -> FfnService:
    return make_service()


@pytest.fixture
def client(service: FfnService) -> Iterator[TestClient]:
    with make_client(service) as client:
        yield client


class Server:
    """`larql serve` as a process."""

    def __init__(self, *words: str | Path, port: int = 0, **env: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LARQL_API_KEY": "", **env}
        self.process = subprocess.Popen(
            [*LARQL, "serve", *map(str, words), "--port", str(port), "--dtype", "float32"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += iter(self.process.stderr.readline, "")

    def said(self, text: str) -> str:
        """The line that holds `text`, once it is there."""
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            for line in list(self.lines):
                if text in line:
                    return line.strip()
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"the server never said {text!r}: {self.lines}")

    @property
    def url(self) -> str:
        """Its address, once it is ready."""
        self.said("ready")
        return self.said("listening on").split()[-1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def run(*words: str | Path, **options) -> Server:
        running.append(Server(*words, **options))
        return running[-1]

    yield run
    for server in running:
        server.kill()


class Redis:
    """A redis-server of its own, on a socket in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._folder = folder
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        words = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            self.socket,
            "--save",
            "",
            "--dir",
            self._folder,
        ]
        self.process = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL)
        ends = time.monotonic() + 10
        while not self._answers():
            assert time.monotonic() < ends, "redis-server did not start"
            time.sleep(0.01)

    def _answers(self) -> bool:
        import redis

        with contextlib.suppress(redis.RedisError):
            return bool(redis.Redis.from_url(self.url).ping())
        return False

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None:
            self.send(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Redis]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = Redis(tmp_path)
    server.start()
    yield server
    server.stop()
