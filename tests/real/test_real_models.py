"""Both real models against transformers' float32 run of the same GGUF file, past Gemma's window of 512."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import larql_kv as lk
from larql_kv.bench.text import TEXT
from larql_kv.model.catalog import resolve
from larql_kv.policy import Verdict, divergence
from tests.models import needs_gemma, needs_smollm2, real

pytestmark = [pytest.mark.real, pytest.mark.slow]
MODELS = [
    pytest.param("smollm2-135m", marks=[needs_smollm2, pytest.mark.xdist_group("smollm2")]),
    pytest.param("gemma3-270m", marks=[needs_gemma, pytest.mark.xdist_group("gemma")]),
]
TOKENS = 1000


@functools.lru_cache(maxsize=1)
def reference(name: str) -> Any:
    """transformers' model, dequantised to float32 from the GGUF; saved once, since that takes 12-25 s."""
    import transformers

    file = resolve(name)
    assert isinstance(file, Path)
    saved = Path(os.environ.get("LARQL_TEST_CACHE", ".cache/tests")) / f"{file.stem}-f32"
    if not (saved / "config.json").exists():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        model.hf_quantizer = None  # the weights are plain float32 now; it would refuse to save them
        del model.config.quantization_config
        model.save_pretrained(saved)
    return transformers.AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@functools.lru_cache(maxsize=1)
def text_ids(name: str) -> list[int]:
    ids = real(name).tokenizer.encode(TEXT + TEXT[::2])  # real sentences, then a hard, unlikely tail
    assert len(ids) >= TOKENS
    return ids[:TOKENS]


@functools.lru_cache(maxsize=1)
def reference_logits(name: str) -> torch.Tensor:
    with torch.inference_mode():
        return reference(name)(torch.tensor([text_ids(name)]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_1000_tokens(name: str) -> None:
    model = real(name)
    got = model.logits(lk.build_engine("standard", model).prefill_rows(text_ids(name)))
    apart = divergence(reference_logits(name), got)
    assert apart.max_kl <= 1e-6, apart
    assert apart.top1_agreement == 1.0, apart


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", ["standard", "markov-rs:window=256"])
def test_decode_has_the_bits_of_prefill(name: str, spec: str) -> None:
    """Steps 505..520 cross Gemma's window: each has the bits of the one-pass run, after dropping too."""
    model = real(name)
    ids = text_ids(name)
    at_once = lk.build_engine("standard", model).prefill_rows(ids[:520])
    engine = lk.build_engine(spec, model)
    engine.prefill(ids[:505])
    for position in range(505, 520):
        if position == 514:
            engine.drop_derivative()
        assert torch.equal(engine.decode_step(ids[position]), at_once[position : position + 1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", None])
def test_first_16_greedy_ids_equal_transformers(name: str, dtype: str | None) -> None:
    model = real(name, dtype)
    ids = model.tokenizer.encode("The capital of France is")
    tokens = [
        token.id for token in lk.build_engine("standard", model).generate(ids, 16, ignore_stop_tokens=True)
    ]
    generated = reference(name).generate(
        torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert tokens == generated[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_the_default_form_keeps_its_kl_bound(name: str) -> None:
    """dtype=None may be fast, not wrong: mean KL against float32 under 1.5e-3, in prefill and decode."""
    model = real(name, None)
    ids = text_ids(name)
    engine = lk.build_engine("standard", model)
    rows = [engine.prefill_rows(ids[:600])]
    rows += [engine.decode_step(token) for token in ids[600:640]]
    apart = divergence(reference_logits(name)[:640], model.logits(torch.cat(rows)))
    assert apart.mean_kl < 1.5e-3, apart
    assert apart.top1_agreement > 0.95, apart


@pytest.mark.parametrize("name", MODELS)
def test_contracts_on_the_real_model(name: str) -> None:
    model = real(name)
    for spec in ("standard", "markov-rs", "markov-rs:window=13", "no-cache", "standard:window=13,sinks=3"):
        engine = lk.build_engine(spec, model)
        count = max(60, engine.widest_window + 20)
        report = engine.policy.contract.check(engine, text_ids(name)[:count], count - 15, free_tokens=8)
        assert report.verdict == Verdict.BITS, (spec, report)


@pytest.mark.parametrize("name", MODELS)
def test_sliding_layers_cost_their_window_and_no_more(name: str) -> None:
    model = real(name)
    engine = lk.build_engine("standard", model)
    engine.prefill(text_ids(name))
    row = 2 * model.config.kv_dim * 4
    expected = sum(min(TOKENS, layer.window or TOKENS) * row for layer in model.config.layers)
    kv = next(item for item in engine.ledger().rows() if item["name"] == "K/V rows")
    assert kv["live"] == expected
    assert kv["capacity"] <= expected + model.config.layer_count * 64 * row
