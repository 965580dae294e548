"""The forward pass against transformers in float32, on a tiny random model of every family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import larql_kv as lk
from tests import tiny_models
from tests.models import FAMILIES, tiny

LENGTH = 27  # over three of the tiny models' windows of 8
TOLERANCE = 2e-4  # absolute, on logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["standard", "markov-rs", "no-cache"])
def test_logits_equal_transformers_at_once_and_step_by_step(family: str, spec: str) -> None:
    model = tiny(family)
    ids = tiny_models.sample_ids(LENGTH, model.config.vocab)
    expected = tiny_models.reference_logits(tiny_models.model_dir(family), ids)
    at_once = model.logits(lk.build_engine(spec, model).prefill_rows(ids)).numpy()
    np.testing.assert_allclose(at_once, expected, atol=TOLERANCE, rtol=0)
    engine = lk.build_engine(spec, model)
    steps = [model.logits(engine.prefill(ids[:1]))]
    steps += [model.logits(engine.decode_step(token)) for token in ids[1:]]
    np.testing.assert_allclose(torch.cat(steps).numpy(), expected, atol=TOLERANCE, rtol=0)
    assert np.ptp(expected) > 1, "the reference's logits are flat: equality would prove nothing"


@pytest.mark.parametrize("length", [7, 8, 9, 19])  # W-1, W, W+1, 2W+3
@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith(("gemma", "mistral"))])
def test_logits_at_the_edges_of_the_models_window(family: str, length: int) -> None:
    model = tiny(family)
    ids = tiny_models.sample_ids(length + 1, model.config.vocab)
    expected = tiny_models.reference_logits(tiny_models.model_dir(family), ids)
    for spec in ("standard", "markov-rs"):
        engine = lk.build_engine(spec, model)
        got = [model.logits(engine.prefill(ids[:length])), model.logits(engine.decode_step(ids[length]))]
        np.testing.assert_allclose(torch.cat(got).numpy(), expected[length - 1 :], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_form_stays_close_to_float32(family: str) -> None:
    """The fast form is an approximation of a known kind: its logits are near, and its K/V are bfloat16."""
    exact, fast = tiny(family), tiny(family, "bfloat16")
    ids = tiny_models.sample_ids(LENGTH, exact.config.vocab)
    expected = exact.logits(lk.build_engine("standard", exact).prefill_rows(ids))
    engine = lk.build_engine("standard", fast)
    got = fast.logits(engine.prefill_rows(ids))
    scale = expected.std()
    assert (got - expected).abs().mean() < 0.05 * scale
    assert engine.read_forms() == {"bfloat16": 1.0}


def test_engine_window_equals_a_masked_transformers_run(tmp_path: Path) -> None:
    """`standard:window=N` on a model without windows is what transformers computes with sliding_window=N."""
    model = tiny("mistral")
    window = model.config.layers[0].window
    assert window is not None
    ids = tiny_models.sample_ids(LENGTH, model.config.vocab)
    expected = tiny_models.reference_logits(tiny_models.model_dir("mistral"), ids)
    unbounded = tmp_path / "unbounded"
    shutil.copytree(tiny_models.model_dir("mistral"), unbounded)
    config = json.loads((unbounded / "config.json").read_text())
    (unbounded / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    plain = lk.load_model(unbounded, dtype="float32")
    assert all(layer.window is None for layer in plain.config.layers)
    engine = lk.build_engine(f"standard:window={window}", plain)
    steps = [plain.logits(engine.prefill(ids[:5]))] + [plain.logits(engine.decode_step(t)) for t in ids[5:]]
    np.testing.assert_allclose(torch.cat(steps).numpy(), expected[4:], atol=TOLERANCE, rtol=0)
