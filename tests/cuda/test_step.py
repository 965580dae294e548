"""Whole decode steps on tiny models: against transformers, against the layer-by-layer path, and again."""

from __future__ import annotations

import pytest
import torch

import larql_kv as lk
from larql_kv.model.model import Model
from tests import tiny_models
from tests.cuda.conftest import relative_error

PROMPT = [5, 17, 3, 99, 42, 7, 64, 12, 81, 33, 2, 58]
FAMILIES = ["qwen3", "gemma3"]  # the others add nothing that the kernels' own tests have not


def load(family: str) -> Model:
    return lk.load_model(tiny_models.model_dir(family), device="cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_give_the_logits_of_transformers(family: str) -> None:
    model = load(family)
    engine = lk.build_engine("standard", model)
    ids = [*PROMPT, 23, 77, 31]
    reference = torch.from_numpy(tiny_models.reference_logits(tiny_models.model_dir(family), ids))
    hidden = engine.prefill(ids[:-3])
    assert relative_error(model.logits(hidden)[0], reference[len(ids) - 4]) < 2e-2
    for index, token in enumerate(ids[-3:]):
        hidden = engine.decode_step(token)
        assert relative_error(model.logits(hidden)[0], reference[len(ids) - 3 + index]) < 2e-2
    assert model.decoder.step_executor.steps == 3
