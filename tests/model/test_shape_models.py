"""Random models of well-known shapes: sizes, formats, values, and the same weights as a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv.errors import ModelError
from larql_kv.model.catalog import resolve
from larql_kv.model.config import ModelConfig
from larql_kv.model.config_gguf import config_from_gguf
from larql_kv.model.gguf_file import GgufFile
from larql_kv.model.shape_blocks import block_kinds, random_blocks, row_bytes
from larql_kv.model.shape_gguf import write_random_gguf
from larql_kv.model.shape_models import RandomSource, random_model, shape_header
from larql_kv.model.shape_recipes import MIXES, SHAPES, Shape, parse_shape, tensor_table
from tests.models import needs_gemma

SMALL: dict[str, dict[str, Any]] = {  # odd sizes; rows of 256 and of no multiple of it
    "gemma3-4b": {"hidden": 256, "intermediate": 544, "heads": 4, "kv_heads": 2, "head_dim": 64, "window": 9},
    "qwen3-4b": {"hidden": 160, "intermediate": 288, "heads": 4, "kv_heads": 2, "head_dim": 32},
    "llama3.1-8b": {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64},
}


def small(label: str) -> Shape:
    shape = parse_shape(label)
    return replace(shape, layers=7, vocab=300, context=512, **SMALL[shape.name])


def traits(config: ModelConfig) -> dict[str, Any]:
    """Everything but the name."""
    return {key: value for key, value in vars(config).items() if key != "name"}


def total_bytes(shape: Shape) -> int:
    sizes = (
        (kind, int(np.prod(size[:-1], initial=1)), size[-1]) for kind, size in tensor_table(shape).values()
    )
    return sum(rows * row_bytes(kind, columns) for kind, rows, columns in sizes)


@pytest.mark.parametrize(
    ("label", "billions"),
    [
        ("gemma3-4b", 2.483),  # as llama-bench counted, 2026-11-30
        ("llama3.1-8b", 4.913),  # published files of these mixes
        ("qwen3-4b", 2.491),
        ("gemma3-4b:bf16", 7.761),
    ],
)
def test_bytes_of_the_published_mixes(label: str, billions: float) -> None:
    assert round(total_bytes(parse_shape(label)) / 1e9, 3) == billions


@needs_gemma
@pytest.mark.real
def test_the_270m_shape_is_that_of_the_installed_file() -> None:
    path = resolve("gemma3-270m")
    assert isinstance(path, Path)
    file, header = GgufFile.open(path), shape_header(parse_shape("gemma3-270m:q4_k_m"))
    assert {name: (tensor.kind, tensor.shape) for name, tensor in file.tensors.items()} == {
        name: (tensor.kind, tensor.shape) for name, tensor in header.tensors.items()
    }
    assert traits(config_from_gguf(file)) == traits(config_from_gguf(header))


def test_gemma3_4b_is_configured_as_published() -> None:
    config = RandomSource(parse_shape("gemma3-4b")).config
    assert (config.layer_count, config.hidden, config.q_dim, config.kv_dim) == (34, 2560, 2048, 1024)
    assert [index for index, layer in enumerate(config.layers) if layer.window is None] == [5, 11, 17, 23, 29]
    assert config.layers[0].window == 1024
    assert (config.layers[0].rope.base, config.layers[0].rope.scaling) == (1e4, "none")
    full = config.layers[5].rope
    assert (full.base, full.scaling, full.inv_freq[0]) == (1e6, "linear", 1 / 8)
    assert config.qk_norm
    assert config.post_norms
    assert config.tied
    assert config.context == 131072


def test_llama3_frequencies_are_those_of_its_scaling_rule() -> None:
    from larql_kv.model.rope import RopeScaling, resolve_rope

    config = RandomSource(parse_shape("llama3.1-8b")).config
    expected = resolve_rope(5e5, 128, RopeScaling("llama3", 8.0, 8192))
    np.testing.assert_allclose(config.layers[0].rope.inv_freq, expected.inv_freq, rtol=3e-7)
    assert config.layers[0].rope.scaling == "llama3"
    assert not config.tied
    assert {layer.window for layer in config.layers} == {None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gemma3-5b", "did you mean 'gemma3-4b'? known: gemma3-4b, gemma3-270m, qwen3-4b, llama3.1-8b"),
        ("", "unknown shape ''; known: gemma3-4b"),
        ("gemma3-4b:q4_k", "did you mean 'q4_k_m'? known: q4_k_m, q5_k_m, q8_0"),
        ("gemma3-4b:", "unknown quantisation mix ''"),
    ],
)
def test_an_unknown_shape_or_mix_names_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_shape(text)
    assert message in str(caught.value)


def test_labels_are_read_back() -> None:
    for name in SHAPES:
        for mix in MIXES:
            shape = parse_shape(f" {name}:{mix}".upper())
            assert parse_shape(shape.label) == shape


@pytest.mark.parametrize("kind", block_kinds())
def test_random_blocks_have_the_deviation_asked_for_and_no_mean(kind: str) -> None:
    def make(seed: int) -> np.ndarray:
        return random_blocks(kind, 301, 768, 0.02, np.random.Generator(np.random.SFC64(seed)))

    data = make(3)
    assert data.shape == (301, row_bytes(kind, 768))
    values = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(0.02, rel=0.03)
    assert abs(values.mean()) < 0.01 * 0.02
    # No common direction either: the sum of the rows is as long as that of independent ones.
    assert np.linalg.norm(values.mean(0)) == pytest.approx(0.02 * np.sqrt(768 / 301), rel=0.15)
    assert (np.abs(values).reshape(301, -1, 32).max(-1) > 0).all()
    assert len(np.unique(data, axis=0)) == 301
    assert np.array_equal(data, make(3))
    assert not np.array_equal(data, make(4))
    if kind == "Q8_0":
        assert data.reshape(-1, 34)[:, 2:].view(np.int8).min() == -127


def test_blocks_that_do_not_exist_are_refused() -> None:
    random = np.random.Generator(np.random.SFC64(0))
    for kind, columns in (("IQ4_XS", 256), ("Q4_K", 640)):
        with pytest.raises(ModelError, match=f"no random rows of {columns} elements in {kind}"):
            random_blocks(kind, 2, columns, 1.0, random)


def test_a_source_depends_on_its_seed_and_on_the_tensor() -> None:
    first, second, other = (RandomSource(small("llama3.1-8b"), seed) for seed in (0, 0, 1))
    for name in ("embed", "head", "layers.3.q", "layers.3.ffn_norm"):
        tensor = first.get(name)
        assert np.array_equal(tensor.data, second.get(name).data)
        assert not np.array_equal(tensor.data, other.get(name).data)
        assert tensor.nbytes == first.file.tensors[tensor.name].nbytes
    assert not np.array_equal(first.get("layers.3.k").data, first.get("layers.4.k").data)
    held = first.get("layers.0.gate")
    assert first.get("layers.0.gate").data is held.data  # not made again while it is held
    with pytest.raises(ModelError, match=r"no tensor 'layers\.7\.q'"):
        first.get("layers.7.q")


def test_norms_are_near_one_and_those_behind_a_block_small() -> None:
    source = RandomSource(small("gemma3-4b"))
    for name, low, high in (("attn_norm", 0.75, 1.25), ("q_norm", 0.75, 1.25), ("post_ffn_norm", 0.22, 0.38)):
        values = source.get(f"layers.2.{name}").dequantize()
        assert ((values >= low) & (values <= high)).all()
    final = source.get("final_norm").dequantize()
    assert ((np.abs(final) >= 0.75) & (np.abs(final) <= 1.25)).all()
    assert (final < 0).any()


@pytest.mark.parametrize("label", ["gemma3-4b", "qwen3-4b:q5_k_m", "llama3.1-8b", "llama3.1-8b:bf16"])
def test_the_file_written_is_the_model(label: str, tmp_path: Path) -> None:
    shape = small(label)
    path = write_random_gguf(tmp_path / "random.gguf", shape, seed=5)
    written = lk.load_model(path, dtype="float32")
    made = random_model(shape, seed=5, dtype="float32")
    assert made.source == f"{shape.label} (random weights)"
    assert written.config == made.config
    ids = made.tokenizer.encode("Hello, Elmsea!")
    assert ids == written.tokenizer.encode("Hello, Elmsea!")
    assert len(ids) == len("Hello, Elmsea!") + made.config.architecture.startswith(("gemma", "llama"))
    answers = []
    for model in (written, made):
        engine = lk.build_engine("standard", model)
        hidden = engine.prefill(ids)
        for _ in range(12):
            hidden = engine.decode_step(int(model.logits(hidden).argmax()))
        answers.append(hidden)
        assert 0.8 < float(model.logits(hidden).std()) < 1.3
        assert 0.5 < float(hidden.std()) < 8
    assert torch.equal(*answers)


def test_answers_vary_and_never_stop() -> None:
    model = random_model(small("gemma3-4b"), dtype="float32")
    assert model.tokenizer.stop_ids == frozenset()
    engine = lk.build_engine("standard", model)
    hidden, ids = engine.prefill(model.tokenizer.encode("a")), []
    for _ in range(16):
        ids.append(int(model.logits(hidden).argmax()))
        hidden = engine.decode_step(ids[-1])
    assert len(set(ids)) > 4


@pytest.mark.parametrize("label", sorted(SMALL))
def test_the_tokenizer_knows_bytes(label: str) -> None:
    tokenizer = random_model(small(label), dtype="float32").tokenizer
    text = "One  word, über 漢字\n"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text
    stream = tokenizer.stream()
    assert "".join([stream.push(299), stream.flush()]).strip() == "w299"


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(ModelError, match="vocabulary of 200, expected at least 261"):
        random_model(replace(small("qwen3-4b"), vocab=200))


def test_a_device_without_backend_is_named() -> None:
    with pytest.raises(lk.BackendUnavailable, match="tpu"):
        random_model(small("qwen3-4b"), device="tpu")


@pytest.mark.parametrize("label", sorted(SMALL))
def test_llama_cpp_reads_the_file(label: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    shape = small(label)
    path = write_random_gguf(tmp_path / "random.gguf", shape)
    model = random_model(shape, dtype="float32")
    peer = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    ids = model.tokenizer.encode("Hello the world")
    assert peer.tokenize(b"Hello the world") == ids
    peer.eval(ids)
    ours = model.logits(lk.build_engine("standard", model).prefill(ids))[0].numpy()
    theirs = peer.scores[len(ids) - 1]
    assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(ours)
