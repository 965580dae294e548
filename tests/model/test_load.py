"""From a name to a model: hub ids, refused devices and dtypes, vocabulary checks, every stored type."""

from __future__ import annotations

from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv.model.dequant import dequantize
from larql_kv.model.load import describe
from tests import tiny_models
from tests.models import tiny


def test_a_hub_id_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tiny_models.model_dir("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = lk.load_model("someone/tiny-llama", dtype="float32")
    ids = [5, 6, 7]
    expected = lk.build_engine("standard", tiny("llama")).prefill(ids)
    assert torch.equal(lk.build_engine("standard", model).prefill(ids), expected)
    assert describe("someone/tiny-llama")["architecture"] == "llama"
    assert asked[0][0] == "someone/tiny-llama"
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in asked[0][1])


def test_a_hub_that_cannot_be_reached_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, allow_patterns: list[str]) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(lk.ModelError, match="could not provide it: no network"):
        lk.load_model("someone/tiny-llama")


def test_describe_says_what_a_gguf_holds(tmp_path: Path) -> None:
    path = tiny_models.write_tiny_gguf("gemma3", tmp_path / "m.gguf")
    assert describe(path)["architecture"] == "gemma3"


@pytest.mark.parametrize("dtype", [torch.float32, "float32", "f32", torch.bfloat16, "bf16", None, "auto"])
def test_dtypes(dtype: torch.dtype | str | None) -> None:
    model = lk.load_model(tiny_models.model_dir("llama"), dtype=dtype)
    assert model.kv_dtype in (torch.float32, torch.bfloat16)
    if dtype not in (None, "auto"):
        assert model.kv_dtype == (torch.float32 if "32" in str(dtype) else torch.bfloat16)


def test_embedding_an_id_outside_the_vocabulary() -> None:
    model = tiny("llama")
    with pytest.raises(lk.ModelError, match="token id 128 is outside the vocabulary of 128"):
        model.embed([5, 128])
    assert model.embed([]).shape == (0, model.config.hidden)


def test_every_type_that_the_gguf_package_writes_is_read() -> None:
    values = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    read = 0
    for kind in gguf.GGMLQuantizationType:
        try:
            stored = gguf.quantize(values, kind)
        except (NotImplementedError, KeyError):
            continue
        data = np.ascontiguousarray(stored).view(np.uint8).reshape(4, -1)
        np.testing.assert_array_equal(dequantize(kind.name, data), gguf.dequantize(stored, kind))
        read += 1
    assert read >= 8


@pytest.mark.parametrize("kind", ["I32", "Q8_K", "NONSENSE"])
def test_a_type_that_cannot_be_read_is_refused_with_the_list(kind: str) -> None:
    with pytest.raises(lk.ModelError, match=rf"{kind}.*supported: F32, F16, BF16, .*Q6_K"):
        dequantize(kind, np.zeros((1, 292), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "qwen2", "qwen3"])
def test_a_gguf_runs_as_its_directory_does(family: str, kind: str, tmp_path: Path) -> None:
    """The same weights through both readers: logits equal for F32, near for the others."""
    path = tiny_models.write_tiny_gguf(family, tmp_path / "m.gguf", kind)
    model, ids = lk.load_model(path, dtype="float32"), tiny_models.sample_ids(27)
    expected = tiny_models.reference_logits(tiny_models.model_dir(family), ids)
    got = model.logits(lk.build_engine("markov-rs", model).prefill_rows(ids)).numpy()
    if kind == "F32":
        np.testing.assert_allclose(got, expected, atol=2e-4)
    else:
        assert np.abs(got - expected).mean() < 0.1 * expected.std()


def test_the_reference_engine_is_described() -> None:
    from larql_kv.engine.reference import Reference

    assert Reference(window=5).is_reference
    assert Reference().policy.canonical == "K/V rows"
