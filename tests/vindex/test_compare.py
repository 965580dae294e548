"""The comparison's metrics against plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv.cli.vindex_measure import last_logits
from larql_kv.vindex.compare import aggregate, compare, difference
from tests import tiny_models


def test_metrics_are_those_of_the_formulas():
    a = np.array([2.0, 1.0, 0.0, -1.0, -50.0])
    b = np.array([1.0, 2.0, -2.0, 0.0, -60.0])
    p, q = np.exp(a) / np.exp(a).sum(), np.exp(b) / np.exp(b).sum()
    pf, qf = np.maximum(p, 1e-12), np.maximum(q, 1e-12)
    forward = sum(p[i] * (math.log(pf[i]) - math.log(qf[i])) for i in range(5))
    reverse = sum(q[i] * (math.log(qf[i]) - math.log(pf[i])) for i in range(5))
    found = difference("x", 3, torch.tensor(a), torch.tensor(b), 3, lambda token: f"t{token}")
    assert found.kl_forward == pytest.approx(forward, rel=1e-12)
    assert found.kl_reverse == pytest.approx(reverse, rel=1e-12)
    assert found.kl_symmetric == pytest.approx((forward + reverse) / 2, rel=1e-12)
    assert found.cosine == pytest.approx(a @ b / math.sqrt((a @ a) * (b @ b)))
    assert not found.argmax_match
    assert found.overlap == 2 / 4  # {0, 1, 2} and {1, 0, 3}
    assert [token for token, _, _ in found.top_a] == [0, 1, 2]
    assert found.top_b[0] == (1, "t1", pytest.approx(q[1]))


def test_the_floor_keeps_infinities_out():
    a, b = torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0])
    found = difference("x", 1, a, b, 1, str)
    assert found.kl_forward == pytest.approx(-math.log(1e-12))
    assert found.overlap == 0
    same = difference("x", 1, a, a, 1, str)
    assert (same.kl_forward, same.kl_symmetric, same.cosine) == (0, 0, pytest.approx(1))
    assert math.copysign(1, same.kl_reverse) == 1


def test_prompts_and_totals(shared):
    a = lk.load_model(tiny_models.model_dir("llama"), dtype="float32")
    stored = lk.load_model(shared("llama", "hf"), dtype="float32")
    rounded = lk.load_model(shared("llama", "hf", "bf16"), dtype="float32")
    prompts = ["the tea is on", "a", "to be or not to be"]
    same = compare(a, stored, prompts, last_logits)
    assert all(item.kl_symmetric == 0 and item.overlap == 1 for item in same)
    found = compare(a, rounded, prompts, last_logits, top_k=5, max_seq_len=4)
    assert [item.tokens for item in found] == [4, 1, 4]
    ids = a.tokenizer.encode(prompts[2])[:4]  # cut at the end
    wanted = tiny_models.reference_logits(tiny_models.model_dir("llama"), ids)[-1]
    top = np.argsort(-wanted)[:5]
    assert [token for token, _, _ in found[2].top_a] == top.tolist()
    total = aggregate(found)
    kls = [item.kl_symmetric for item in found]
    assert 0 < total["kl_mean"] == pytest.approx(sum(kls) / 3)
    assert total["kl_max"] == max(kls)
    assert total["kl_p95"] == pytest.approx(np.quantile(kls, 0.95))
    assert total["prompts"] == 3
    with pytest.raises(lk.StoreError, match="one vocabulary"):
        compare(a, lk.load_model(tiny_models.model_dir("llama-odd")), prompts, last_logits)
    with pytest.raises(lk.StoreError, match="no prompt"):
        compare(a, stored, [], last_logits)
