"""Stats, models, metrics, warm-up, patches; and errors that leave as JSON."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import larql_kv as lk
from larql_kv.ffn.remote import PRINT_HEADER
from larql_kv.server import service as service_module
from larql_kv.server.service import FfnService
from tests.models import tiny
from tests.server.conftest import make_client, make_service
from tests.server.test_walk_ffn import HIDDEN, close, full, reference, rows_of


def test_stats(client: TestClient, service: FfnService) -> None:
    stats = client.get("/v1/stats").json()
    config = tiny("llama").config
    assert stats["model"] == service.served.name
    assert stats["family"] == "llama"
    assert (stats["layers"], stats["hidden_size"]) == (config.layer_count, config.hidden)
    assert (stats["features"], stats["intermediate_size"]) == (4 * 96, 96)
    assert stats["owned"] == [0, 3]
    assert stats["loaded"] == {"browse": True, "inference": False}
    assert stats["print"] == stats["base_print"] == service.index.print
    assert stats["patches"] == []


@pytest.mark.parametrize(
    ("layers", "bands"),
    [
        (34, {"syntax": [0, 13], "knowledge": [14, 27], "output": [28, 33]}),
        (4, {"syntax": [0, 1], "knowledge": [2, 2], "output": [3, 3]}),
        (1, {"knowledge": [0, 0]}),
    ],
)
def test_layer_bands(layers: int, bands: dict) -> None:
    found = service_module._layer_bands(layers)
    assert found == bands
    assert sorted(layer for first, last in found.values() for layer in range(first, last + 1)) == [
        *range(layers)
    ]


def test_models(client: TestClient, service: FfnService) -> None:
    value = client.get("/v1/models").json()
    assert value == {
        "object": "list",
        "data": [{"id": service.served.name, "object": "model", "owned_by": "larql"}],
    }


def test_metrics(client: TestClient) -> None:
    full(client, rows_of(), 9)
    full(client, rows_of(), 9)
    client.get("/made/up/1")
    client.get("/made/up/2")
    text = client.get("/metrics").text
    assert 'larql_requests_total{endpoint="/v1/walk-ffn",status="200"} 2.0' in text
    assert 'larql_requests_total{endpoint="none",status="404"} 2.0' in text
    assert "made" not in text  # a client cannot make series
    assert 'larql_ffn_cache{counter="hits",tier="l2"} 1.0' in text
    assert 'larql_ffn_rows_total{layer="1"} 2.0' in text
    assert 'larql_request_seconds_count{endpoint="/v1/walk-ffn"} 2.0' in text
    assert 'larql_body_bytes_total{direction="in"}' in text
    with make_client(make_service()) as other:  # a registry of its own
        assert 'endpoint="/v1/walk-ffn"' not in other.get("/metrics").text


def test_warmup(client: TestClient) -> None:
    value = client.post("/v1/warmup", json={}).json()
    assert (value["weights_loaded"], value["layers_prefetched"], value["hnsw_built"]) == (True, 4, False)
    assert value["total_ms"] >= value["prefetch_ms"] >= 0
    fields = {"model", "weights_loaded", "weights_load_ms", "layers_prefetched", "prefetch_ms", "hnsw_built"}
    assert set(value) == fields | {"hnsw_warmup_ms", "total_ms"}
    assert client.post("/v1/warmup", json={"layers": [2, 1]}).json()["layers_prefetched"] == 2
    assert client.post("/v1/warmup", json={"skip_weights": True}).json()["layers_prefetched"] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"layers": [4]}, "layer 4 is not served here (owned: 0–3)"),
        ({"layers": ["1"]}, "layers.0: Input should be a valid integer"),
        ({"warmup_hnsw": True}, "no approximate index"),
        ({"what": 1}, "what: Extra inputs"),
    ],
)
def test_bad_warmups(client: TestClient, body: dict, message: str) -> None:
    answer = client.post("/v1/warmup", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_unknown_paths_and_methods(client: TestClient) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/walk-ffn", 405), ("GET", "/docs", 404)):
        answer = client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"kind", "message"}


class _Broken(lk.DenseFfn):
    def __init__(self, model: lk.Model, error: Exception) -> None:
        super().__init__(model)
        self.error = error

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (lk.RemoteError("http://far: gone"), 502, "RemoteError"),
        (lk.ModelError("layer missing"), 400, "ModelError"),
        (lk.BackendUnavailable("no"), 500, "BackendUnavailable"),
        (RuntimeError("boom"), 500, "InternalError"),
    ],
)
def test_failures_have_names(error: Exception, status: int, kind: str) -> None:
    service = make_service()
    service.ffn = _Broken(service.model, error)
    with make_client(service) as client:
        body = {"layer": 1, "residual": [0.0] * HIDDEN, "full_output": True}
        answer = client.post("/v1/walk-ffn", json=body)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (status, kind)
        assert "Traceback" not in answer.text
        assert client.get("/v1/health").status_code == 200


# -- patches ---------------------------------------------------------------------------------------------


def vector(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def patch_of(layer: int = 1, **notes: str) -> dict:
    """Adds a feature that answers to rows_of()[0] by writing ones."""
    row = rows_of()[0]
    operation = {"op": "insert", "layer": layer, "feature": 5, "gate_vector_b64": vector(row)}
    operation |= {"up_vector_b64": vector(row), "down_vector_b64": vector(np.ones(HIDDEN))}
    return {"version": 1, "operations": [operation], **notes}


def apply(client: TestClient, patch: dict, name: str = "fact"):
    return client.post("/v1/patches/apply", json={"patch": patch, "name": name})


def test_a_patch_changes_its_layer_until_it_is_removed(client: TestClient) -> None:
    rows = rows_of()
    before = {top_k: full(client, rows, top_k) for top_k in (9, 8092)}
    told = apply(client, patch_of()).json()
    assert told["operations"] == [{"op": "insert", "layer": 1, "feature": 5, "parts": ["down", "gate", "up"]}]
    assert told["name"] == "fact"
    score = float(rows[0] @ rows[0])
    for top_k, output in before.items():
        patched = full(client, rows, top_k)
        # silu(score) * score, on every output; feature 5's own part is small beside it
        assert np.allclose(patched.mean(), output.mean() + score * score, rtol=0.05)
        assert not close(patched, output, 0.1)
    assert [patch["name"] for patch in client.get("/v1/patches").json()["patches"]] == ["fact"]
    assert client.get("/v1/patches/fact").json()["digest"] == told["digest"]
    assert (
        client.get("/v1/stats").json()["print"]
        == told["print"]
        != client.get("/v1/stats").json()["base_print"]
    )
    removed = client.delete("/v1/patches/fact")
    assert removed.json()["removed"] == "fact"
    for top_k, output in before.items():
        assert np.array_equal(full(client, rows, top_k), output)


def test_a_patched_layer_bypasses_the_cache_and_others_do_not(client: TestClient) -> None:
    apply(client, patch_of(layer=2))
    rows = rows_of()
    for _ in range(2):
        body = {"layers": [1, 2], "residual": rows[0].tolist(), "top_k": 9, "full_output": True}
        client.post("/v1/walk-ffn", json=body)
    l2 = client.get("/v1/cache-stats").json()["l2"]
    assert (l2["hits"], l2["misses"], l2["bypassed"]["overrides"]) == (1, 1, 2)


def test_the_print_of_answers_follows_patches(client: TestClient) -> None:
    body = {"layer": 1, "residual": [0.0] * HIDDEN, "full_output": True}
    prints = [client.post("/v1/walk-ffn", json=body).headers[PRINT_HEADER]]
    apply(client, patch_of())
    prints.append(client.post("/v1/walk-ffn", json=body).headers[PRINT_HEADER])
    client.delete("/v1/patches/fact")
    prints.append(client.post("/v1/walk-ffn", json=body).headers[PRINT_HEADER])
    assert prints[0] == prints[2] != prints[1]


def test_bad_patches(client: TestClient, service: FfnService) -> None:
    def refused(body: dict) -> str:
        answer = client.post("/v1/patches/apply", json=body)
        assert answer.status_code == 400
        return answer.json()["error"]["message"]

    assert "patch: Field required" in refused({})
    assert "version" in refused({"patch": {}})
    assert "layer '9' is not one of 0 to 3" in refused({"patch": patch_of(9)})
    assert "no patch name" in refused({"patch": patch_of(), "name": "../x"})
    assert "was made for print abc, this is " in refused({"patch": patch_of(base_checksum="abc")})
    own = patch_of(base_checksum=service.index.base_print)
    assert apply(client, own).status_code == 200
    assert "applied already" in refused({"patch": own, "name": "fact"})
    assert client.get("/v1/patches/other").status_code == 404
    assert "no patch named 'other' is applied; applied: fact" in client.delete("/v1/patches/other").text
    simple = {"content-type": "text/plain"}  # what a page of another site may send unasked
    assert client.post("/v1/patches/apply", content=b"{}", headers=simple).status_code == 415


def test_patches_are_limited(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_PATCHES", 1)
    assert apply(client, patch_of(), "one").status_code == 200
    answer = apply(client, patch_of(), "two")
    assert answer.status_code == 400
    assert "1 patches are applied already" in answer.text


def test_unnamed_patches_get_a_name(client: TestClient) -> None:
    assert client.post("/v1/patches/apply", json={"patch": patch_of()}).json()["name"] == "patch-1"
    assert client.post("/v1/patches/apply", json={"patch": patch_of()}).json()["name"] == "patch-2"


# -- weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama-bias", "llama-odd", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ffn_alone_computes_the_same_bits(family: str, dtype: str) -> None:
    from larql_kv.model.load import open_files
    from larql_kv.server.weights import load_ffn_only
    from tests import tiny_models

    whole = tiny(family, dtype)
    part = load_ffn_only(open_files(tiny_models.model_dir(family)), range(1, 3), dtype)
    for count in (1, 7, 70):
        x = torch.randn(count, whole.config.hidden)
        for layer in (1, 2):
            assert torch.equal(part.decoder.dense_ffn(layer, x), whole.decoder.dense_ffn(layer, x))
    for layer in (0, 3):
        with pytest.raises(lk.ModelError, match=f"layer {layer} is not loaded, only 1–2"):
            part.decoder.dense_ffn(layer, x)
    share = part.decoder.facts()["resident_bytes"] / whole.decoder.facts()["resident_bytes"]
    assert share < 0.6


def test_answers_of_gemma_are_geglu() -> None:
    with make_client(make_service("gemma3")) as client:
        rows = rows_of()
        got = full(client, rows, 8092)
    from tests import tiny_models

    mlp = tiny_models.build("gemma3").model.layers[1].mlp.double()
    x = torch.from_numpy(rows).double()
    with torch.no_grad():
        gate = torch.nn.functional.gelu(mlp.gate_proj(x), approximate="tanh")
        want = mlp.down_proj(gate * mlp.up_proj(x)).numpy()
    assert close(got, want[0])
    assert not close(got, reference(1, rows)[0], 0.1)
