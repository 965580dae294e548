"""Building: the same logits from the directory alone, streaming, going on after a kill, refusing well."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv.model.load import open_files
from larql_kv.model.vindex_files import read_manifest
from larql_kv.model.vindex_rows import Rows, encode_rows
from larql_kv.vindex import build as build_module
from larql_kv.vindex.build import BuildSettings, build_vindex
from larql_kv.vindex.store import locked
from tests import tiny_models
from tests.models import needs_smollm2
from tests.vindex.conftest import source_of

IDS = tiny_models.sample_ids(24)


def logits(model: lk.Model, engine: str = "standard") -> torch.Tensor:
    """Of the prompt's last position, and of one step after it."""
    built = lk.build_engine(engine, model)
    first = built.logits(built.prefill(IDS))
    return torch.cat([first, built.logits(built.decode_step(7))])


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        *(("llama", quant) for quant in ("hf", "Q4_0", "Q8_0", "F32")),
        *((family, "hf") for family in ("llama-bias", "llama-odd", "qwen2", "qwen3", "mistral")),
        *((family, "hf") for family in ("llama-llama3", "llama-yarn", "gemma2", "gemma3")),
        *((family, "Q8_0") for family in ("gemma3", "qwen3", "llama-llama3")),
    ],
)
@pytest.mark.parametrize("format", ["stored", "f32"])
def test_same_bits_from_the_directory_alone(shared, tmp_path, family, quant, format):
    source = source_of(family, quant, tmp_path)
    vindex = shared(family, quant, format)
    model = lk.load_model(source, dtype="float32")
    loaded = lk.load_model(vindex, dtype="float32")
    assert torch.equal(logits(model), logits(loaded))
    assert loaded.config == model.config
    text = "the tea is on"
    assert loaded.tokenizer.encode(text) == model.tokenizer.encode(text)
    assert loaded.tokenizer.fingerprint == model.tokenizer.fingerprint
    assert loaded.tokenizer.stop_ids == model.tokenizer.stop_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_gives_the_same_bits_in_every_engine_and_form(shared, tmp_path, dtype):
    model = lk.load_model(source_of("llama", "Q8_0", tmp_path), dtype=dtype)
    loaded = lk.load_model(shared("llama", "Q8_0"), dtype=dtype)
    for engine in ("standard", "no-cache", "markov-rs"):
        assert torch.equal(logits(model, engine), logits(loaded, engine)), engine


def test_a_bfloat16_model_stays_itself_and_its_down_is_held_once(tmp_path):
    source = tiny_models.model_dir("llama", "bfloat16")
    manifest = build_vindex(open_files(source), tmp_path / "v")
    assert {entry.kind for entry in manifest.tensors.values() if len(entry.shape) == 2} == {"BF16"}
    assert "layers.0.down" not in manifest.tensors
    assert manifest.tensors["layers.0.down_features"].shape == (96, 64)
    assert not manifest.errors
    assert manifest.down_features is None
    assert torch.equal(logits(lk.load_model(source)), logits(lk.load_model(tmp_path / "v")))


def test_bf16_rounds_to_nearest_and_says_by_how_much(shared):
    vindex = shared("llama", "hf", "bf16")
    manifest = read_manifest(vindex)
    model = lk.load_model(tiny_models.model_dir("llama"), dtype="float32")
    gate = model.tensors.get("layers.1.gate").dequantize()
    held = lk.load_model(vindex, dtype="float32").tensors.get("layers.1.gate").dequantize()
    rounded = torch.tensor(gate).bfloat16().float().numpy()
    np.testing.assert_array_equal(held, rounded)
    worst = max(
        np.linalg.norm(held.astype(float) - gate) / np.linalg.norm(gate.astype(float))
        for layer in range(4)
        for gate in [model.tensors.get(f"layers.{layer}.gate").dequantize()]
        for held in [torch.tensor(gate).bfloat16().float().numpy()]
    )
    assert manifest.errors["gate"] == pytest.approx(worst, rel=1e-6)
    assert manifest.print != manifest.model_print


@pytest.mark.parametrize(("down", "bound"), [("f32", 0.0), ("bf16", 0.002), ("q8_0", 0.01)])
def test_down_features_are_the_down_matrix_turned(shared, tmp_path, down, bound):
    vindex = shared("llama", "Q8_0", "stored", down)
    model = lk.load_model(source_of("llama", "Q8_0", tmp_path), dtype="float32")
    from larql_kv.vindex.index import VectorIndex

    wanted = model.tensors.get("layers.2.down").dequantize().T
    for index in (VectorIndex.open(vindex), VectorIndex.of_model(model, down_form=down)):
        held = index.down(2)
        assert held.kind == down.upper()
        error = np.linalg.norm(held.dequantize() - wanted) / np.linalg.norm(wanted)
        assert error <= bound
    recorded = read_manifest(vindex).errors.get("down_features", 0.0)
    assert (0 < recorded <= bound) if bound else recorded == 0


def test_rows_come_in_chunks_of_any_size(monkeypatch):
    """Odd sizes, both orientations, chunk borders everywhere."""
    from larql_kv.model import vindex_rows
    from larql_kv.model.tensors import RawTensor

    values = np.random.default_rng(0).normal(size=(33, 96)).astype(np.float32)
    quantised = RawTensor("w", "Q8_0", (33, 96), encode_rows(values, "Q8_0"))
    plain = RawTensor("w", "BF16", (33, 96), encode_rows(values, "BF16"))
    for chunk in (1, 4 * 96 * 5, 4 * 33 * 32 * 2, 1 << 20):
        monkeypatch.setattr(vindex_rows, "CHUNK_BYTES", chunk)
        for raw in (quantised, plain):
            turned = Rows.of(raw, "F32", transposed=True).whole()
            assert turned.shape == (96, 33)
            np.testing.assert_array_equal(turned.dequantize(), raw.dequantize().T)
            np.testing.assert_array_equal(Rows.of(raw, raw.kind).whole().data, raw.data)
        same = Rows.of(plain, "BF16", transposed=True).whole()
        np.testing.assert_array_equal(same.dequantize(), plain.dequantize().T)
    with pytest.raises(ValueError, match="not encoded as Q4_0"):
        encode_rows(values, "Q4_0")


def test_odd_rows_cannot_be_q8_0(tmp_path):
    """hidden 72 is no whole number of blocks: said before anything is written."""
    model = lk.load_model(tiny_models.model_dir("llama-odd"), dtype="float32")
    raw = model.tensors.get("layers.0.down")
    with pytest.raises(lk.ModelError, match="its blocks hold 32"):
        _ = Rows.of(raw, "Q8_0", transposed=True).row_bytes


WORKER = """
import sys
from pathlib import Path
from larql_kv.model import vindex_rows
from larql_kv.model.load import open_files
from larql_kv.vindex.build import BuildSettings, build_vindex
import larql_kv.backends.cpu.ops, gguf, tokenizers  # imported before the base line is taken
def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10
vindex_rows.CHUNK_BYTES = 2 << 20
files = open_files(sys.argv[1])
files.tokenizer()
base, peak = anonymous(), 0
def progress(what, done, total):
    global peak
    peak = max(peak, anonymous())
build_vindex(files, Path(sys.argv[2]), BuildSettings("f32"), progress)
print(peak - base)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_is_a_chunk_not_the_model(tmp_path):
    """109 MB of weights (the embedding: 67 MB) in under 40 MB of memory, chunks of 2 MB."""
    import gguf

    path = tmp_path / "big.gguf"
    hidden, inner, vocab, layers = 512, 4096, 32768, 1
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": layers, "context_length": 256, "embedding_length": hidden,
        "feed_forward_length": inner, "attention.head_count": 8, "attention.head_count_kv": 8,
        "vocab_size": vocab, "rope.dimension_count": 64,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["t", "1", *(f"t{index}" for index in range(vocab - 2))])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)
    writer.add_token_merges(["t 1"])
    half, norm = np.float16, np.ones(hidden, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((vocab, hidden), half))
    writer.add_tensor("output_norm.weight", norm)
    for layer in range(layers):
        for name, shape in {
            "attn_q": (hidden, hidden), "attn_k": (hidden, hidden), "attn_v": (hidden, hidden),
            "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():  # fmt: skip
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.zeros(shape, half))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(path), str(tmp_path / "v")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "v").nbytes > 95e6
    assert int(done.stdout) < 40e6


def test_a_killed_build_goes_on_with_what_it_had(tmp_path):
    """Killed by SIGKILL in the middle; finished files are not written again, a damaged one is."""
    source = source_of("gemma3", "Q8_0", tmp_path)
    target = tmp_path / "v"
    script = (
        "import os, sys, signal\nfrom pathlib import Path\nfrom larql_kv.model.load import open_files\n"
        "from larql_kv.vindex.build import build_vindex\n"
        "def progress(what, done, total):\n"
        "    if what.startswith('layer-0003-ffn'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_vindex(open_files(sys.argv[1]), Path(sys.argv[2]), progress=progress)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, source, target], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    partial = tmp_path / "v.partial"
    assert partial.is_dir()
    assert not target.exists()
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("layer-000[012]-*")}
    assert len(finished) == 6
    damaged = partial / "layer-0001-ffn.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)

    with pytest.raises(lk.StoreError, match="other settings"):
        build_vindex(open_files(source), target, BuildSettings("f32"))
    time.sleep(0.01)
    seen: list[str] = []
    build_vindex(open_files(source), target, progress=lambda what, done, total: seen.append(what))
    after = {path.name: path.stat().st_mtime_ns for path in target.glob("layer-000[012]-*")}
    assert {name for name in finished if after[name] != finished[name]} == {"layer-0001-ffn.safetensors"}
    assert not partial.exists()
    assert not (target / "progress.json").exists()
    fresh = lk.load_model(source, dtype="float32")
    assert torch.equal(logits(fresh), logits(lk.load_model(target, dtype="float32")))


def test_built_again_it_is_left_alone(own):
    vindex = own("llama", "hf")
    before = {path.name: path.stat().st_mtime_ns for path in vindex.iterdir()}
    build_vindex(open_files(tiny_models.model_dir("llama")), vindex)
    assert before == {path.name: path.stat().st_mtime_ns for path in vindex.iterdir()}


def test_what_is_there_is_never_overwritten(own, tmp_path):
    vindex = own("llama", "hf")
    with pytest.raises(lk.StoreError, match="another model"):
        build_vindex(open_files(tiny_models.model_dir("qwen2")), vindex)
    with pytest.raises(lk.StoreError, match="choose another directory for other settings"):
        build_vindex(open_files(tiny_models.model_dir("llama")), vindex, BuildSettings("bf16"))
    other = tmp_path / "notes"
    other.mkdir()
    with pytest.raises(lk.StoreError, match="is no vindex"):
        build_vindex(open_files(tiny_models.model_dir("llama")), other)


def test_bad_settings_and_places(tmp_path, monkeypatch):
    with pytest.raises(lk.SpecError, match="unknown format 'int3'"):
        BuildSettings("int3")
    with pytest.raises(lk.SpecError, match="down features"):
        BuildSettings("stored", "q2_k")
    (tmp_path / "file").write_text("")
    files = open_files(tiny_models.model_dir("llama"))
    with pytest.raises(lk.StoreError, match="cannot be written"):
        build_vindex(files, tmp_path / "file" / "v")
    partial = tmp_path / "v.partial"
    partial.mkdir()
    with locked(partial), pytest.raises(lk.StoreError, match="another process"):
        build_vindex(files, tmp_path / "v")
    (partial / "progress.json").write_text('{"identity": 3}')
    with pytest.raises(lk.StoreError, match="is damaged"):
        build_vindex(files, tmp_path / "v")

    class Usage:
        free = 1000

    monkeypatch.setattr(build_module.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(lk.StoreError, match="the disk has 1,000 free"):
        build_vindex(files, tmp_path / "w")


def test_a_full_disk_is_a_named_error(tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    files = open_files(tiny_models.model_dir("llama"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(lk.StoreError, match="No space left"):
            build_vindex(files, tmp_path / "v")
    assert not (tmp_path / "v").exists()
    build_vindex(files, tmp_path / "v")  # and the next attempt finishes


def test_without_a_tokenizer_nothing_is_built(tmp_path):
    bare = Path(shutil.copytree(tiny_models.model_dir("llama"), tmp_path / "bare"))
    for path in bare.glob("*token*"):
        path.unlink()
    with pytest.raises(lk.ModelError, match=r"no tokenizer\.json"):
        build_vindex(open_files(bare), tmp_path / "v")
    assert not (tmp_path / "v").exists()
    assert not (tmp_path / "v.partial").exists()


def test_a_vindex_is_built_from_a_vindex(shared, tmp_path):
    first = shared("llama", "hf")
    manifest = build_vindex(open_files(first), tmp_path / "second")
    assert manifest.print == read_manifest(first).print
    assert json.loads((tmp_path / "second" / "index.json").read_text())["model"]["print"] == manifest.print
    gguf = shared("llama", "Q8_0")
    build_vindex(open_files(gguf), tmp_path / "third")
    assert torch.equal(logits(lk.load_model(gguf)), logits(lk.load_model(tmp_path / "third")))


@needs_smollm2
@pytest.mark.real
def test_smollm2_stored(tmp_path):
    target = tmp_path / "v"
    build_vindex(open_files("smollm2-135m"), target, BuildSettings(down_features="bf16"))
    model = lk.load_model("smollm2-135m", dtype="float32")
    loaded = lk.load_model(target, dtype="float32")
    ids = model.tokenizer.encode("The capital of France is")
    assert loaded.tokenizer.encode("The capital of France is") == ids
    results = []
    for each in (model, loaded):
        engine = lk.build_engine("standard", each)
        results.append(engine.logits(engine.prefill(ids)))
    assert torch.equal(*results)
    assert loaded.tokenizer.chat_template == model.tokenizer.chat_template
