"""`larql serve`: two processes that own half the layers each, one that is killed, how it ends, its words."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import urllib3

import larql_kv as lk
from larql_kv.ffn.remote import remote_backend
from larql_kv.ffn.wire import FfnRequest, WireCost, encode_request
from larql_kv.model.load import open_files
from larql_kv.model.model import Model
from larql_kv.server import ServerSettings, run
from larql_kv.vindex.build import build_vindex
from larql_kv.vindex.patch import apply_patch
from tests import tiny_models
from tests.cli.conftest import Larql
from tests.models import tiny
from tests.server.conftest import KEY, PATIENCE, Redis, Server, make_service
from tests.server.test_facts import patch_of
from tests.server.test_walk_ffn import rows_of

Start = Callable[..., Server]


def greedy(engine: lk.KvEngine, ids: list[int], count: int) -> list[int]:
    """`count` tokens, past any end of text."""
    got = [engine.logits(engine.prefill(ids)).argmax().item()]
    while len(got) < count:
        got.append(engine.logits(engine.decode_step(got[-1])).argmax().item())
    return got


def test_two_halves_give_the_same_tokens_and_one_may_die_in_between(start: Start) -> None:
    directory, model = tiny_models.model_dir("llama"), tiny("llama")
    servers = [start(directory, "--ffn-only", "--layers", span) for span in ("0-1", "2-3")]
    first, second = (server.url for server in servers)
    ffn = remote_backend(model, f"0-1={first},2-3={second}")
    engine = lk.build_engine("standard", model, ffn=ffn)
    ids = tiny_models.sample_ids(20)
    want = greedy(lk.build_engine("standard", model), ids, 24)

    before = ffn.stats()
    got = [engine.logits(engine.prefill(ids)).argmax().item()]
    cost = WireCost(4, 64, "f32")
    after = ffn.stats()
    assert after["bytes_sent"] - before["bytes_sent"] == cost.sent + 4 * 19 * 4 * 64
    for _ in range(11):
        got.append(engine.logits(engine.decode_step(got[-1])).argmax().item())
    decoded = ffn.stats()
    moved = sum(decoded[name] - after[name] for name in ("bytes_sent", "bytes_received"))
    assert moved == 11 * cost.total  # 1.0 x of the formula
    assert decoded["round_trips"] - after["round_trips"] == 11 * 4

    port = servers[1].port
    servers[1].kill()
    held = engine.tokens
    for _ in range(2):
        with pytest.raises(lk.BackendFailure) as caught:
            engine.decode_step(got[-1])
        assert isinstance(caught.value.__cause__, lk.RemoteError)
        assert second in str(caught.value.__cause__)
        assert engine.tokens == held

    revived = start(directory, "--ffn-only", "--layers", "2-3", port=port)
    assert revived.url == second
    for _ in range(12):
        got.append(engine.logits(engine.decode_step(got[-1])).argmax().item())
    assert got == want
    assert [servers[0].end(), revived.end()] == [0, 0]


def test_it_answers_before_the_weights_are_there_and_sigterm_finishes_what_is_at_work(start: Start) -> None:
    server = start(tiny_models.model_dir("llama"))
    address = server.said("listening on").split()[-1]
    assert urllib3.request("GET", f"{address}/v1/health").json()["status"] in ("loading", "ok")
    x = torch.randn(60_000, 64)
    body = encode_request(FfnRequest((0, 1, 2, 3), x.numpy(), several=True))
    answers = []

    def ask() -> None:
        headers = {"content-type": "application/x-larql-ffn"}
        answers.append(urllib3.request("POST", f"{server.url}/v1/walk-ffn", body=body, headers=headers))

    warm = remote_backend(tiny("llama"), server.url)
    warm.forward(0, x[:100])
    asking = threading.Thread(target=ask)
    asking.start()
    while "larql_requests_at_work 1.0" not in urllib3.request("GET", f"{server.url}/metrics").data.decode():
        assert asking.is_alive()
    assert server.end() == 0
    asking.join(PATIENCE)
    assert answers[0].status == 200
    assert len(answers[0].data) == 12 + 4 * (12 + 60_000 * 64 * 4)
    with pytest.raises(urllib3.exceptions.HTTPError):
        urllib3.request("GET", f"{server.url}/v1/health", retries=False)


def test_keys_the_shared_tier_and_ctrl_c_by_command(start: Start, redis_server: Redis) -> None:
    words = (tiny_models.model_dir("llama"), "--host", "0.0.0.0", "--l3", redis_server.url)
    server = start(*words, LARQL_API_KEY=KEY, LARQL_L3_SECRET="a secret of many bytes")
    assert "not encrypted" in server.said("warning:")
    address = server.url.replace("0.0.0.0", "127.0.0.1")
    with pytest.raises(lk.RemoteError, match=r"status 401: give the API key"):
        remote_backend(tiny("llama"), address)
    ffn = remote_backend(tiny("llama"), address, api_key=KEY, top_k=9)
    ffn.forward(1, torch.ones(1, 64))
    stats = urllib3.request("GET", f"{address}/v1/cache-stats", headers={"x-api-key": KEY}).json()
    assert stats["l3"]["misses"] == 1
    assert stats["l3"]["tier"]["errors"] == 0
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE) == 0
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--host", "0.0.0.0"), 2, "can be reached from other machines"),
        (("--layers", "2-9"), 2, "layers 2-9: not a range within the model's layers 0-3"),
        (("--api-key", "short"), 2, "an API key has 5 characters"),
        (("--ffn", "walks"), 2, "unknown FFN 'walks'"),
        (("--ffn", "walk:k=9,l1=features"), 2, "an L1 cache lives one request"),
        (("--vindex", "/nowhere"), 1, "/nowhere"),
        (("--l3", "http://x"), 2, "the L3 secret has 0 bytes"),
        (("--ffn-only", "--device", "cuda"), None, ""),
        (("--device", "cuda"), None, "without --ffn every request is walked, on device 'cpu' only"),
    ],
)
def test_what_cannot_be_served_ends_with_its_name(
    larql: Larql, words: tuple[str, ...], code: int | None, message: str
) -> None:
    result = larql("serve", tiny_models.model_dir("llama"), "--port", "0", *words, LARQL_API_KEY="")
    assert result.exit_code == code if code is not None else result.exit_code in (1, 2)
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_port_that_is_taken(larql: Larql) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = larql("serve", tiny_models.model_dir("llama"), "--port", str(port), LARQL_API_KEY="")
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


def test_serving_in_this_process(redis_server: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LARQL_L3_SECRET", "a secret of many bytes")
    said: list[str] = []
    health = []

    def announce(text: str) -> None:
        said.append(text)
        if text == "ready":
            health.append(urllib3.request("GET", f"{said[0].split()[-1]}/v1/health").json()["status"])
            os.kill(os.getpid(), signal.SIGTERM)

    source = run.Source(
        str(tiny_models.model_dir("llama")), ffn="walk:k=9", l3=redis_server.url, dtype="float32"
    )
    before = signal.getsignal(signal.SIGTERM)
    run.serve(ServerSettings(port=0), lambda: run.load_service(source), announce)
    assert said[1] == "ready"
    assert health == ["ok"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_patched_vindex_is_served_with_its_patches_over_its_own_weights(tmp_path: Path) -> None:
    directory = tmp_path / "vindex"
    build_vindex(open_files(tiny_models.model_dir("llama")), directory)
    x = torch.from_numpy(rows_of())
    base = tiny("llama").decoder.dense_ffn(1, x)
    patch_file = tmp_path / "fact.vlp"
    patch_file.write_text(json.dumps(patch_of()))
    apply_patch(directory, patch_file)
    service = run.load_service(run.Source(str(directory), ffn_only=True, dtype="float32"))
    asked = FfnRequest((1,), x.numpy())
    assert not torch.equal(torch.from_numpy(service.walk(asked, "").outputs[0]), base)
    assert service.patch_names() == ["fact"]
    service.remove_patch("fact")
    assert torch.equal(torch.from_numpy(service.walk(asked, "").outputs[0]), base)
    service.close()


@pytest.mark.parametrize("spec", ["dense", "{dense}@layers=0-1;{null}@otherwise"])
def test_dense_layers_of_a_server_have_its_patches(spec: str) -> None:
    """`--ffn dense` once answered with the base weights whatever was applied."""
    source = run.Source(str(tiny_models.model_dir("llama")), ffn=spec, dtype="float32")
    service = run.load_service(source)
    asked = FfnRequest((1,), rows_of())
    base = tiny("llama").decoder.dense_ffn(1, torch.from_numpy(rows_of()))
    assert torch.equal(torch.from_numpy(service.walk(asked, "").outputs[0]), base)
    service.apply_patch(patch_of(), "fact")
    assert not torch.equal(torch.from_numpy(service.walk(asked, "").outputs[0]), base)


def test_the_print_of_a_server_is_of_its_ffn_too() -> None:
    """A server that comes back with another --ffn must not be taken for the one before."""
    prints = [
        run.load_service(run.Source(str(tiny_models.model_dir("llama")), ffn=ffn, dtype="float32")).print
        for ffn in (None, "dense", "walk:k=9", "null")
    ]
    assert len(set(prints)) == 4


def test_patches_are_refused_where_nothing_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service()
    monkeypatch.setattr(Model, "device", torch.device("cuda"))
    with pytest.raises(lk.StoreError, match="the model is on 'cuda'"):
        service.apply_patch(patch_of(), "fact")
    assert service.patch_names() == []


def test_a_load_that_breaks_ends_the_server() -> None:
    def load():
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match=r"loading failed: RuntimeError\('boom'\)"):
        run.serve(ServerSettings(port=0), load, lambda _: None)


def test_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def load():
        raise lk.ModelError("enough")

    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    with pytest.raises((lk.ModelError, lk.RemoteError)):
        run.serve(ServerSettings(host="::1", port=0), load, said.append)
    assert not said or said[0].startswith("listening on http://[::1]:")
