"""`RemoteWalkBackend`: an FFN that runs in another process, one round trip a layer."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from larql_kv.errors import RemoteError, SpecError
from larql_kv.ffn.base import FfnBackend, LayerPath
from larql_kv.ffn.http import Endpoint
from larql_kv.ffn.wire import (
    DEFAULT_TOP_K,
    MAX_BODY,
    MEDIA_TYPES,
    UNLIMITED,
    WIRES,
    FfnRequest,
    FfnResponse,
    WireCost,
    decode_response,
    encode_request,
)

if TYPE_CHECKING:
    from larql_kv.model.model import Model

WIRE_CHOICES = ("f32", "f16", "i8", "best")
PRINT_HEADER = "x-larql-print"
KEY_VARIABLE = "LARQL_API_KEY"
_STATS_BYTES = 1 << 20
_HEAD_BYTES = 4096  # room for the heads of a request or an answer, beside its rows


@dataclass(frozen=True)
class Served:
    """What a server says it serves."""

    model: str
    layers: int
    first: int  # of the layers it owns
    last: int
    hidden: int
    base_print: str  # of the model, without patches
    print: str  # of what answers now

    @classmethod
    def parse(cls, url: str, body: bytes) -> Served:
        """Raises RemoteError for anything but a larql server's stats."""
        try:
            stats = json.loads(body)
            first, last = stats["owned"]
            served = cls(
                str(stats["model"]),
                int(stats["layers"]),
                int(first),
                int(last),
                int(stats["hidden_size"]),
                str(stats["base_print"]),
                str(stats["print"]),
            )
            if not (0 <= served.first <= served.last < served.layers and served.hidden > 0):
                raise ValueError(f"layers {first} to {last} of {served.layers}, hidden size {served.hidden}")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise RemoteError(f"{url}: /v1/stats is not a larql server's: {error!r}"[:500]) from error
        return served

    def owns(self, layer: int) -> bool:
        return self.first <= layer <= self.last


class RemoteWalkBackend(FfnBackend):
    """The FFN of the server at `base_url`.

    `wire` is how outputs come back: f32 (exact), f16, i8, or best: whatever the server prefers, the smallest
    it has. Inputs always travel as float32. `top_k` features are walked, all of them for None.

    Every failure is a RemoteError with the address, and costs at most `timeout` seconds; nothing is kept from
    a failed call, so it can be made again.
    """

    def __init__(
        self,
        base_url: str,
        timeout: float = 60.0,
        wire: str = "f32",
        api_key: str | None = None,
        top_k: int | None = DEFAULT_TOP_K,
        retries: int = 2,
    ) -> None:
        if wire not in WIRE_CHOICES:
            raise SpecError(f"wire={wire!r} is unknown; known: {', '.join(WIRE_CHOICES)}")
        if top_k is not None and not 1 <= top_k < UNLIMITED:
            raise SpecError(f"top_k={top_k} is not in 1 to {UNLIMITED - 1}; None walks all features")
        self.endpoint = Endpoint(base_url, timeout, api_key, retries)
        self.wire = wire
        self.top_k = top_k
        self.name = f"remote-walk({self.endpoint.url}, {wire})"
        self.served: Served | None = None
        self.answers: dict[str, int] = dict.fromkeys(MEDIA_TYPES, 0)  # by the form they came in
        self._server_ms = 0.0
        self._rows: Counter[int] = Counter()  # answered, by layer
        self._bytes = 0  # of the bodies of those requests and answers
        # f16 cannot hold every output: f32 may then come instead, and `answers` shows it.
        self._accepted = {"best": ("i8", "f16", "f32"), "f16": ("f16", "f32")}.get(wire, (wire,))
        accept = ", ".join(f"{MEDIA_TYPES[form]};q={1 - at / 10}" for at, form in enumerate(self._accepted))
        self._headers = {"content-type": MEDIA_TYPES["f32"], "accept": accept}

    def connect(self, model: Model | None = None, layers: Iterable[int] | None = None) -> RemoteWalkBackend:
        """Ask the server what it serves; returns self.

        Raises RemoteError when it cannot be asked, serves another model than `model` (by print, hidden size
        and layers), or does not own all of `layers` (default: every layer).
        """
        url = self.endpoint.url
        served = Served.parse(url, self.endpoint.get("/v1/stats", _STATS_BYTES).body)
        if model is not None:
            theirs, ours = (served.hidden, served.layers), (model.config.hidden, model.config.layer_count)
            if theirs != ours:
                raise RemoteError(
                    f"{url}: serves {served.model!r} with hidden size {theirs[0]} and {theirs[1]} layers; "
                    f"this model has {ours[0]} and {ours[1]}"
                )
            if (own := model_print(model)) != served.base_print:
                raise RemoteError(
                    f"{url}: serves another model: print {served.base_print[:16]}, this model's is {own[:16]}"
                )
        for layer in range(served.layers) if layers is None else layers:
            if not served.owns(layer):
                raise RemoteError(
                    f"{url}: does not serve layer {layer} (owned: {served.first}–{served.last})"
                )
        self.served = served
        return self

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._ask([layer], x, several=False)[0]

    def forward_layers(self, layers: Sequence[int], x: torch.Tensor) -> list[torch.Tensor]:
        """The FFN of each of `layers` on the same `x`, in one round trip: exact for rows that are the input
        of every one of them (probes, traces). A forward pass is not: a layer's input needs the one before."""
        if not layers:
            raise ValueError("forward_layers needs at least one layer")
        return self._ask(list(layers), x, several=True)

    def path(self, layer: int) -> LayerPath:
        return LayerPath("remote", self.top_k, why=self.endpoint.url)

    def cost(self, layers: int | None = None) -> WireCost:
        """Bytes a token for `layers` layers (default: those the server owns); of `best`, what came last."""
        served = self._known()
        wire = self.wire if self.wire != "best" else max(self.answers, key=lambda wire: self.answers[wire])
        return WireCost(served.last - served.first + 1 if layers is None else layers, served.hidden, wire)

    def probe_latency(self, count: int = 5) -> float:
        """Seconds of a round trip with one row, the median of `count` after one to warm up."""
        served = self._known()
        row = torch.zeros(1, served.hidden)
        times = []
        for _ in range(count + 1):
            began = time.perf_counter()
            self.forward(served.first, row)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def wire_facts(self) -> list[dict[str, Any]]:
        if not self._rows:
            return []
        cost = self.cost(len(self._rows))
        tokens = self._rows.total() / len(self._rows)
        return [
            {
                "endpoint": self.endpoint.url,
                "wire": cost.wire,
                "layers": cost.layers,
                "formula": str(cost),
                "bytes_per_token": cost.total,
                "measured_bytes_per_token": round(self._bytes / tokens, 1),
                "tokens": round(tokens, 1),
            }
        ]

    def stats(self) -> dict[str, Any]:
        """Calls, round trips, retries, bytes of bodies both ways, seconds waited and computed so far."""
        return {
            "endpoint": self.endpoint.url,
            "wire": self.wire,
            **asdict(self.endpoint.traffic),
            "server_ms": round(self._server_ms, 3),
            "answers": dict(self.answers),
        }

    def close(self) -> None:
        self.endpoint.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteWalkBackend) and other._identity == self._identity

    def __hash__(self) -> int:
        return hash((self.endpoint.url, self.wire, self.top_k))

    @property
    def mark(self) -> Hashable:
        """The print that the server was last known to serve."""
        return None if self.served is None else self.served.print

    @property
    def _identity(self) -> tuple[Any, ...]:
        return (self.endpoint.url, self.wire, self.top_k, self.mark)

    def _known(self) -> Served:
        if self.served is None:
            self.connect(layers=())
        assert self.served is not None
        return self.served

    def _ask(self, layers: list[int], x: torch.Tensor, several: bool) -> list[torch.Tensor]:
        served = self._known()
        if x.dim() != 2 or x.shape[1] != served.hidden:
            raise ValueError(f"expected rows (n, {served.hidden}), got {tuple(x.shape)}")
        rows = x.detach().to("cpu", torch.float32).numpy()
        step = max(1, (MAX_BODY - _HEAD_BYTES - 4 * len(layers)) // (4 * served.hidden))
        top_k = UNLIMITED if self.top_k is None else self.top_k
        parts = []
        for start in range(0, len(rows), step):
            asked = FfnRequest(tuple(layers), rows[start : start + step], top_k, several=several)
            parts.append(self._exchange(asked, served).outputs)
        if not parts:
            return [torch.empty_like(x) for _ in layers]
        whole = [
            torch.cat([torch.from_numpy(rows) for rows in outputs]) for outputs in zip(*parts, strict=True)
        ]
        return [output.to(x.device) for output in whole]

    def _exchange(self, asked: FfnRequest, served: Served) -> FfnResponse:
        url = self.endpoint.url
        limit = _HEAD_BYTES + len(asked.layers) * (16 + asked.rows.nbytes + 8 * len(asked.rows))
        body = encode_request(asked)
        answer = self.endpoint.post("/v1/walk-ffn", body, self._headers, limit)
        media = answer.headers.get("content-type", "")
        wire = WIRES.get(media.partition(";")[0].strip().lower(), "")
        if wire not in self._accepted:
            raise RemoteError(f"{url}: answered as {media[:100]!r}, asked for {self._headers['accept']}")
        print_now = answer.headers.get(PRINT_HEADER, "")
        if print_now != served.print:
            raise RemoteError(
                f"{url}: serves print {print_now[:16]!r} now, {served.print[:16]!r} when connected: its "
                "model or its patches changed; connect() again and reset the engine"
            )
        try:
            response = decode_response(answer.body, wire, asked)
        except ValueError as error:
            raise RemoteError(f"{url}: layer {', '.join(map(str, asked.layers))}: {error}") from error
        self.answers[wire] += 1
        self._server_ms += response.milliseconds
        self._bytes += len(body) + len(answer.body)
        for layer in asked.layers:
            self._rows[layer] += len(asked.rows)
        return response


def model_print(model: Model) -> str:
    """The print of a loaded model, without patches."""
    from larql_kv.vindex.index import VectorIndex

    return VectorIndex.of_model(model).base_print


def remote_backend(
    model: Model,
    endpoint: str,
    wire: str = "f32",
    timeout: float = 60.0,
    api_key: str | None = None,
    top_k: int | None = DEFAULT_TOP_K,
    layers: Iterable[int] | None = None,
) -> FfnBackend:
    """A connected remote FFN for `layers` (default: all) of `model`.

    `endpoint` is one URL, or layer ranges and theirs: `0-14=URL,15-29=URL`. `api_key` defaults to
    LARQL_API_KEY. Raises SpecError for a bad endpoint, RemoteError when a server cannot serve it.
    """
    from larql_kv.ffn.sharded import LayerShardedBackend, names_shards

    key = os.environ.get(KEY_VARIABLE) or None if api_key is None else api_key
    if names_shards(endpoint):
        sharded = LayerShardedBackend.parse(endpoint, model.config.layer_count, timeout, wire, key, top_k)
        return sharded.connect(model)
    return RemoteWalkBackend(endpoint, timeout, wire, key, top_k).connect(model, layers)
