"""Bodies of `POST /v1/walk-ffn`: JSON or binary in, JSON or binary out, every number bounded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from larql_kv.ffn.wire import (
    DEFAULT_TOP_K,
    MAX_BODY,
    MEDIA_TYPES,
    UNLIMITED,
    WIRES,
    FfnRequest,
    FfnResponse,
    check_finite,
    decode_request,
    encode_response,
)

MAX_VALUES = MAX_BODY // 4  # of an answer, in float32
MAX_JSON_VALUES = MAX_VALUES // 4  # written out they take several times the room
_OTHER_COMMAS = 1 << 17  # room for the layers and fields beside a residual
JSON = "application/json"
Model = TypeVar("Model", bound=BaseModel)

_Layer = Annotated[int, Field(ge=0, lt=1 << 31)]


class BadRequest(Exception):
    """The request cannot be answered as it is: `status` 400, 404 for a name not here, 413 for too much."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class WalkBody(BaseModel):
    """The JSON form."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    layer: _Layer | None = None
    layers: Annotated[list[_Layer], Field(max_length=1 << 16)] | None = None  # wins over `layer`
    residual: list[float]
    seq_len: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    top_k: Annotated[int, Field(ge=1, le=UNLIMITED)] = DEFAULT_TOP_K
    full_output: bool = False
    moe_layer: bool = False
    model_id: Annotated[str, Field(max_length=512)] | None = None


@dataclass(frozen=True)
class Served:
    """What a request must fit: the model's name and shape, and the layers that are owned here."""

    name: str
    hidden: int
    layer_count: int
    owned: range


def parse_walk(body: bytes, content_type: str, served: Served) -> FfnRequest:
    """The request in `body`. Raises BadRequest."""
    media = content_type.partition(";")[0].strip().lower()
    if media == MEDIA_TYPES["f32"]:
        try:
            request = decode_request(body, served.hidden, served.layer_count)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        if not request.full_output:
            raise BadRequest("the binary form is for full output only: set bit 0 of flags, or send JSON")
        if request.top_k < 1:
            raise BadRequest("top_k must be at least 1, got 0")
    elif media == JSON:
        request = _parse_json(body, served)
    else:
        raise BadRequest(f"content type {media[:100]!r} is unknown: send {JSON} or {MEDIA_TYPES['f32']}", 415)
    owned = served.owned
    for layer in request.layers:
        if layer >= served.layer_count:
            raise BadRequest(
                f"layer {layer} is out of range: the model has layers 0–{served.layer_count - 1}"
            )
        if layer not in owned:
            raise BadRequest(f"layer {layer} is not served here (owned: {owned[0]}–{owned[-1]})")
    return request


def _parse_json(body: bytes, served: Served) -> FfnRequest:
    # Before it is parsed: a list takes many times its bytes.
    if body.count(b",") > MAX_JSON_VALUES + _OTHER_COMMAS:
        raise BadRequest(
            f"the body lists more than {MAX_JSON_VALUES} values, the most that JSON may: send "
            f"{MEDIA_TYPES['f32']}",
            413,
        )
    walk = parse_body(WalkBody, body)
    if walk.model_id is not None and walk.model_id != served.name:
        raise BadRequest(f"unknown model {walk.model_id!r}; served: {served.name!r}", 404)
    if walk.moe_layer:
        raise BadRequest(f"moe_layer: {served.name!r} has no mixture-of-experts layers")
    several = walk.layers is not None
    layers = walk.layers if walk.layers is not None else [] if walk.layer is None else [walk.layer]
    if not layers:
        raise BadRequest("missing layer: give layer or layers")
    if len(layers) > served.layer_count:
        raise BadRequest(f"the request names {len(layers)} layers, the model has {served.layer_count}")
    want = walk.seq_len * served.hidden
    if len(walk.residual) != want:
        raise BadRequest(
            f"residual has {len(walk.residual)} values, expected {want}: seq_len {walk.seq_len} x hidden "
            f"{served.hidden}"
        )
    if walk.seq_len > 1 and not walk.full_output:
        raise BadRequest(f"seq_len {walk.seq_len}: features are given for one position; set full_output")
    with np.errstate(over="ignore"):
        rows = np.array(walk.residual, np.float64).astype(np.float32).reshape(walk.seq_len, served.hidden)
    try:
        check_finite(rows, "residual")
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return FfnRequest(tuple(layers), rows, walk.top_k, walk.full_output, several)


def parse_body(kind: type[Model], body: bytes) -> Model:
    """A JSON body as `kind`. Raises BadRequest naming the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise BadRequest(f"{where or 'body'}: {first['msg'][:300]}") from error


def answer_form(accept: str, content_type: str, request: FfnRequest) -> str:
    """`json`, or the wire form (i8, f16, f32) that the client likes best; of several the smallest.

    A binary request that accepts anything is answered in f32, a JSON one in JSON.
    """
    if not request.full_output:
        return "json"
    wanted: dict[str, float] = {}
    for part in accept.lower().split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        if media in WIRES:
            wanted[WIRES[media]] = _quality(parameters)
    offered = [wire for wire in MEDIA_TYPES if wanted.get(wire, 0) > 0]
    if offered:
        return max(offered, key=lambda wire: wanted[wire])  # the first, smallest one of equals
    return "f32" if content_type.lower().startswith(MEDIA_TYPES["f32"]) else "json"


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def check_answer_size(request: FfnRequest, form: str, hidden: int) -> None:
    """Refuse an answer that would be too large, before it is computed. Raises BadRequest."""
    values = len(request.layers) * len(request.rows) * hidden
    most = MAX_JSON_VALUES if form == "json" else MAX_VALUES
    if request.full_output and values > most:
        raise BadRequest(
            f"the answer would have {values} values, at most {most} as {form}: ask for fewer layers or "
            "positions"
        )


def binary_answer(response: FfnResponse, form: str, accept: str) -> tuple[bytes, str]:
    """Body and content type. Values beyond f16 are sent in f32 when the client takes it.

    Raises BadRequest (406) when it does not.
    """
    try:
        return encode_response(response, form), MEDIA_TYPES[form]
    except ValueError as error:
        if MEDIA_TYPES["f32"] not in [part.partition(";")[0].strip() for part in accept.lower().split(",")]:
            raise BadRequest(f"{error}; accept {MEDIA_TYPES['f32']} as well", 406) from error
        return encode_response(response, "f32"), MEDIA_TYPES["f32"]


def json_answer(response: FfnResponse) -> bytes:
    """The JSON form of full outputs."""
    milliseconds = round(response.milliseconds, 1)
    seq = len(response.outputs[0])
    results = [
        {"layer": layer, "output": output.ravel().tolist()}
        for layer, output in zip(response.layers, response.outputs, strict=True)
    ]
    if not response.several:
        return dump({**results[0], "seq_len": seq, "latency_ms": milliseconds})
    results = [{**result, "seq_len": seq} for result in results]
    return dump({"results": results, "seq_len": seq, "latency_ms": milliseconds})


def features_answer(
    found: list[tuple[int, list[int], list[float]]], milliseconds: float, several: bool
) -> bytes:
    """The JSON form of the features of one position: `found` is (layer, features, scores)."""
    results: list[dict[str, Any]] = [
        {"layer": layer, "features": features, "scores": [round(score, 2) for score in scores]}
        for layer, features, scores in found
    ]
    latency = {"latency_ms": round(milliseconds, 1)}
    return dump({"results": results, **latency} if several else {**results[0], **latency})


def dump(value: Any) -> bytes:
    """JSON text; values are finite."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
