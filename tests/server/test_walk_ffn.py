"""POST /v1/walk-ffn: its forms, fields, defaults and refusals, against the model computed with PyTorch."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from larql_kv.ffn import wire
from larql_kv.ffn.remote import PRINT_HEADER
from larql_kv.ffn.wire import MEDIA_TYPES, FfnRequest
from larql_kv.server import bodies
from larql_kv.server.service import FfnService
from tests import tiny_models
from tests.server.conftest import KEY, make_client, make_service

HIDDEN, FEATURES, LAYERS = 64, 96, 4
WALK = "/v1/walk-ffn"


def rows_of(count: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def reference(layer: int, rows: np.ndarray, top_k: int | None = None) -> np.ndarray:
    """The FFN in float64, from transformers' own weights: the formula of facts.md 9.2."""
    mlp = tiny_models.build("llama").model.layers[layer].mlp.double()
    x = torch.from_numpy(rows).double()
    with torch.no_grad():
        gate = mlp.gate_proj(x)
        if top_k is not None:
            kept = gate.abs().topk(top_k, dim=1).indices
            mask = torch.zeros_like(gate).scatter(1, kept, 1.0)
        else:
            mask = torch.ones_like(gate)
        return mlp.down_proj(torch.nn.functional.silu(gate) * mlp.up_proj(x) * mask).numpy()


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 2e-6) -> bool:
    return bool(np.abs(got - want).max() <= tolerance * np.abs(want).max())


def ask(client: TestClient, body: dict, **headers: str):
    return client.post(WALK, json=body, headers=headers)


# -- answers ---------------------------------------------------------------------------------------------


def test_full_output_of_one_layer(client: TestClient) -> None:
    rows = rows_of(3)
    answer = ask(client, {"layer": 2, "residual": rows.ravel().tolist(), "seq_len": 3, "full_output": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    value = answer.json()
    assert set(value) == {"layer", "output", "seq_len", "latency_ms"}
    assert (value["layer"], value["seq_len"]) == (2, 3)
    assert round(value["latency_ms"], 1) == value["latency_ms"] >= 0
    assert close(np.reshape(value["output"], (3, HIDDEN)), reference(2, rows))


def test_layers_win_over_layer_and_get_the_same_rows(client: TestClient) -> None:
    rows = rows_of(2)
    body = {
        "layer": 0,
        "layers": [3, 1],
        "residual": rows.ravel().tolist(),
        "seq_len": 2,
        "full_output": True,
    }
    value = ask(client, body).json()
    assert set(value) == {"results", "seq_len", "latency_ms"}
    assert [(result["layer"], result["seq_len"]) for result in value["results"]] == [(3, 2), (1, 2)]
    for result in value["results"]:
        assert close(np.reshape(result["output"], (2, HIDDEN)), reference(result["layer"], rows))


def test_features_are_the_default(client: TestClient) -> None:
    rows = rows_of()
    value = ask(client, {"layer": 1, "residual": rows[0].tolist(), "top_k": 5}).json()
    assert set(value) == {"layer", "features", "scores", "latency_ms"}
    gate = tiny_models.build("llama").model.layers[1].mlp.gate_proj
    scores = gate(torch.from_numpy(rows))[0]
    best = scores.abs().argsort(descending=True)[:5]
    assert value["features"] == best.tolist()
    assert value["scores"] == [round(score, 2) for score in scores[best].tolist()]


def test_features_of_several_layers_and_the_default_k(client: TestClient) -> None:
    value = ask(client, {"layers": [0, 2], "residual": rows_of()[0].tolist()}).json()
    assert set(value) == {"results", "latency_ms"}
    assert [result["layer"] for result in value["results"]] == [0, 2]
    assert all(sorted(result["features"]) == list(range(FEATURES)) for result in value["results"])


@pytest.mark.parametrize("top_k", [1, 7, 76])  # 77 of 96 are 4/5
def test_top_k_walks_that_many_features(client: TestClient, top_k: int) -> None:
    rows = rows_of()
    body = {"layer": 1, "residual": rows[0].tolist(), "top_k": top_k, "full_output": True}
    output = np.array(ask(client, body).json()["output"])
    assert close(output, reference(1, rows, top_k)[0])
    assert not close(output, reference(1, rows)[0], 1e-3)


@pytest.mark.parametrize("form", ["f32", "f16", "i8"])
@pytest.mark.parametrize("several", [False, True])
def test_binary_forms(client: TestClient, form: str, several: bool) -> None:
    asked = FfnRequest((3, 0) if several else (3,), rows_of(2), several=several)
    headers = {"content-type": MEDIA_TYPES["f32"], "accept": MEDIA_TYPES[form]}
    answer = client.post(WALK, content=wire.encode_request(asked), headers=headers)
    assert answer.headers["content-type"] == MEDIA_TYPES[form]
    assert len(answer.headers[PRINT_HEADER]) == 64
    response = wire.decode_response(answer.content, form, asked)
    tolerance = {"f32": 2e-6, "f16": 1e-3, "i8": 1e-2}[form]
    for layer, output in zip(asked.layers, response.outputs, strict=True):
        assert close(output, reference(layer, asked.rows), tolerance)


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, "f32"),
        ("*/*", "f32"),
        ("text/html, " + MEDIA_TYPES["f32"], "f32"),
        (", ".join(MEDIA_TYPES[form] for form in ("f32", "f16", "i8")), "i8"),
        (", ".join(MEDIA_TYPES[form] for form in ("f32", "f16")), "f16"),
        (f"{MEDIA_TYPES['i8']};q=0.1, {MEDIA_TYPES['f32']};q=0.9", "f32"),
        (f"{MEDIA_TYPES['i8']};q=0, {MEDIA_TYPES['f16']}", "f16"),
        (f"{MEDIA_TYPES['i8']};q=x, {MEDIA_TYPES['f16']}", "f16"),
        ("Application/X-Larql-FFN-f16", "f16"),
    ],
)
def test_negotiation(client: TestClient, accept: str | None, form: str) -> None:
    body = wire.encode_request(FfnRequest((0,), rows_of()))
    headers = {"content-type": MEDIA_TYPES["f32"]} | ({} if accept is None else {"accept": accept})
    assert client.post(WALK, content=body, headers=headers).headers["content-type"] == MEDIA_TYPES[form]


def test_json_in_binary_out(client: TestClient) -> None:
    rows = rows_of()
    body = {"layer": 1, "residual": rows[0].tolist(), "full_output": True}
    answer = ask(client, body, accept=MEDIA_TYPES["i8"])
    asked = FfnRequest((1,), rows)
    (output,) = wire.decode_response(answer.content, "i8", asked).outputs
    assert close(output, reference(1, rows), 1e-2)


def test_what_f16_cannot_hold_comes_as_f32_where_that_is_accepted(client: TestClient) -> None:
    rows = 3e4 * rows_of()
    body = wire.encode_request(FfnRequest((0,), rows))
    headers = {"content-type": MEDIA_TYPES["f32"], "accept": MEDIA_TYPES["f16"]}
    answer = client.post(WALK, content=body, headers=headers)
    assert answer.status_code == 406
    assert "f16 cannot hold" in answer.json()["error"]["message"]
    headers["accept"] += f", {MEDIA_TYPES['f32']};q=0.1"
    answer = client.post(WALK, content=body, headers=headers)
    assert answer.headers["content-type"] == MEDIA_TYPES["f32"]
    (output,) = wire.decode_response(answer.content, "f32", FfnRequest((0,), rows)).outputs
    assert close(output, reference(0, rows))


# -- refusals --------------------------------------------------------------------------------------------

ROW = [0.5] * HIDDEN


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"residual": ROW}, 400, "missing layer"),
        ({"layers": [], "residual": ROW}, 400, "missing layer"),
        ({"layer": 1}, 400, "residual: Field required"),
        ({"layer": 1, "residual": ROW[1:]}, 400, "has 63 values, expected 64: seq_len 1 x hidden 64"),
        ({"layer": 1, "residual": ROW, "seq_len": 2, "full_output": True}, 400, "expected 128"),
        ({"layer": 1, "residual": ROW * 2, "seq_len": 2}, 400, "seq_len 2: features are given for one"),
        ({"layer": 1, "residual": ROW, "seq_len": 0}, 400, "seq_len"),
        ({"layer": 4, "residual": ROW}, 400, "layer 4 is out of range: the model has layers 0–3"),
        ({"layer": -1, "residual": ROW}, 400, "layer: Input should be greater than or equal to 0"),
        ({"layers": [0] * 5, "residual": ROW}, 400, "names 5 layers, the model has 4"),
        ({"layer": "1", "residual": ROW}, 400, "layer: Input should be a valid integer"),
        ({"layer": 1, "residual": [*ROW[1:], "x"]}, 400, "residual.63"),
        ({"layer": 1, "residual": [*ROW[1:], 1e39]}, 400, r"residual[63] is inf"),
        ({"layer": 1, "residual": ROW, "top_k": 0}, 400, "top_k"),
        ({"layer": 1, "residual": ROW, "top_k": 1 << 32}, 400, "top_k"),
        ({"layer": 1, "residual": ROW, "moe_layer": True}, 400, "no mixture-of-experts"),
        ({"layer": 1, "residual": ROW, "topk": 3}, 400, "topk: Extra inputs"),
        ({"layer": 1, "residual": ROW, "model_id": "other"}, 404, "unknown model 'other'; served: 'llama"),
    ],
)
def test_bad_json(client: TestClient, body: dict, status: int, message: str) -> None:
    answer = client.post(WALK, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"kind", "message"}
    assert message in error["message"]


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "[" * 100_000, '{"layer": NaN}', "\x00", '{"layer": 1' + "0" * 9999]
)
def test_what_is_no_json_object(client: TestClient, body: str) -> None:
    answer = client.post(WALK, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_the_models_own_name_is_known(client: TestClient, service: FfnService) -> None:
    body = {"layer": 1, "residual": ROW, "model_id": service.served.name}
    assert ask(client, body).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x01", "ends within its head"),
        (struct.pack("<IIII", 0, 1, 1, 9) + bytes(8), "has 8 bytes, expected 256"),
        (struct.pack("<IIII", 0, 1, 0, 9) + bytes(256), "for full output only"),
        (struct.pack("<IIII", 0, 1, 1, 0) + bytes(256), "top_k must be at least 1"),
        (struct.pack("<IIII", 9, 1, 1, 9) + bytes(256), "layer 9 is out of range"),
        (struct.pack("<II", wire.MARKER, 5) + bytes(400), "names 5 layers, expected 1 to 4"),
    ],
)
def test_bad_binary(client: TestClient, body: bytes, message: str) -> None:
    answer = client.post(WALK, content=body, headers={"content-type": MEDIA_TYPES["f32"]})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("media", ["", "text/plain", "application/octet-stream", MEDIA_TYPES["i8"]])
def test_other_content_types(client: TestClient, media: str) -> None:
    answer = client.post(WALK, content=b"{}", headers={"content-type": media})
    assert answer.status_code == 415


def test_a_layer_of_another_shard_is_refused_by_name() -> None:
    with make_client(make_service(owned=range(1, 3))) as client:
        for layer in (0, 3):
            for body in ({"layer": layer}, {"layers": [1, layer]}, {"layer": layer, "full_output": True}):
                answer = ask(client, {**body, "residual": ROW})
                assert answer.status_code == 400
                assert f"layer {layer} is not served here (owned: 1–2)" in answer.json()["error"]["message"]
        assert ask(client, {"layer": 2, "residual": ROW}).status_code == 200


def test_an_answer_too_large_is_refused_before_it_is_computed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_JSON_VALUES", 4 * HIDDEN)
    body = {"layers": [0, 1], "residual": ROW * 3, "seq_len": 3, "full_output": True}
    answer = ask(client, body)
    assert answer.status_code == 400
    assert "would have 384 values, at most 256 as json" in answer.json()["error"]["message"]


def test_weights_that_are_not_there_yet() -> None:
    with make_client(None) as client:
        answer = ask(client, {"layer": 1, "residual": ROW})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert client.get("/v1/stats").status_code == 503
        assert client.get("/v1/health").json() == {"status": "loading"}
        assert client.get("/v1/models").json()["data"] == []
        client.app.state.holder.service = make_service()
        assert ask(client, {"layer": 1, "residual": ROW}).status_code == 200
        assert client.get("/v1/health").json() == {"status": "ok"}


# -- the shared cache ------------------------------------------------------------------------------------


def full(client: TestClient, rows: np.ndarray, top_k: int, **headers: str) -> np.ndarray:
    body = {"layer": 1, "residual": rows[0].tolist(), "top_k": top_k, "full_output": True}
    return np.array(ask(client, body, **headers).json()["output"])


def test_a_repeated_row_is_a_hit_and_the_same(client: TestClient) -> None:
    rows = rows_of()
    first, second = full(client, rows, 9), full(client, rows, 9)
    l2 = client.get("/v1/cache-stats").json()["l2"]
    assert (l2["hits"], l2["misses"], l2["total"], l2["hit_rate"]) == (1, 1, 2, 0.5)
    assert np.array_equal(first, second)
    assert close(second, reference(1, rows, 9)[0])


def test_a_small_k_does_not_poison_a_large_one(client: TestClient) -> None:
    rows = rows_of()
    full(client, rows, 1)  # the original stored a dense output under this request's coarse key
    for top_k in (1, 2, 9, 76, 8092):
        want = reference(1, rows, top_k if top_k < 77 else None)[0]
        assert close(full(client, rows, top_k), want)
        assert close(full(client, rows, top_k), want)


def test_dense_and_several_positions_bypass(client: TestClient) -> None:
    full(client, rows_of(), 77)
    body = {
        "layer": 1,
        "residual": rows_of(2).ravel().tolist(),
        "seq_len": 2,
        "top_k": 5,
        "full_output": True,
    }
    ask(client, body)
    l2 = client.get("/v1/cache-stats").json()["l2"]
    assert l2["total"] == 0
    assert l2["bypassed"] == {"dense": 1, "rows": 1, "overrides": 0}


def test_tenants_do_not_see_each_others_entries() -> None:
    other = "other-key-0123456789"
    with make_client(make_service(), api_keys=(KEY, other)) as client:
        rows = rows_of()
        for key in (KEY, other, KEY):
            full(client, rows, 9, authorization=f"Bearer {key}")
        l2 = client.get("/v1/cache-stats", headers={"x-api-key": KEY}).json()["l2"]
        assert (l2["hits"], l2["misses"]) == (1, 2)


def test_a_long_list_is_refused_before_it_is_parsed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_JSON_VALUES", 128)
    monkeypatch.setattr(bodies, "_OTHER_COMMAS", 8)
    headers = {"content-type": "application/json"}

    def post(count: int):
        body = {"layer": 0, "residual": [0.5] * count, "seq_len": count // 64, "full_output": True}
        return client.post("/v1/walk-ffn", content=json.dumps(body), headers=headers)

    assert post(128).status_code == 200
    monkeypatch.setattr(bodies, "parse_body", None)
    answer = post(192)
    assert answer.status_code == 413
    assert "lists more than 128 values" in answer.json()["error"]["message"]
