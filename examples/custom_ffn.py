"""Hand an engine another FFN: it uses the one it was given, and never mixes rows of two.

This one computes the model's own FFN and counts calls; `keep` below 1 drops the weakest input features, a
crude form of sparsity whose price is then measured.
"""

from __future__ import annotations

from collections import Counter

import torch
from tiny_model import load_tiny_model

import larql_kv as lk
from larql_kv.policy import divergence


class CountingFfn(lk.FfnBackend):
    """The dense FFN on the `keep` share of input features that are largest in size."""

    def __init__(self, model: lk.Model, keep: float = 1.0) -> None:
        self.name = f"counting(keep={keep:g})"
        self._dense = lk.DenseFfn(model)
        self._keep = keep
        self.calls: Counter[int] = Counter()

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        self.calls[layer] += 1
        if self._keep < 1:
            kept = max(1, int(self._keep * x.shape[1]))
            floor = x.abs().topk(kept, dim=1).values[:, -1:]
            x = torch.where(x.abs() >= floor, x, 0.0)
        return self._dense.forward(layer, x)

    # Rows belong to the FFN they went through: two FFNs that compute the same must compare equal.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountingFfn) and (self._dense, self._keep) == (other._dense, other._keep)

    def __hash__(self) -> int:
        return hash((self._dense, self._keep))


model = load_tiny_model()
ids = model.tokenizer.encode("An engine is told how to compute, and does as it is told.")
dense = model.logits(lk.build_engine("standard", model).prefill_rows(ids))

for keep in (1.0, 0.75, 0.5):
    ffn = CountingFfn(model, keep)
    logits = model.logits(lk.build_engine("standard", model, ffn=ffn).prefill_rows(ids))
    apart = divergence(dense, logits)
    print(
        f"{ffn.name:<20} {sum(ffn.calls.values())} calls, mean KL to dense {apart.mean_kl:.2e}, "
        f"same next token {apart.top1_agreement:.0%}"
    )
    assert set(ffn.calls) == set(range(model.config.layer_count))
    assert apart.same_bits == (keep == 1.0)

engine = lk.build_engine("standard", model)
engine.prefill(ids)
try:
    with engine.using(CountingFfn(model, 0.5)):
        engine.decode_step(ids[0])
except lk.InvariantViolation as error:
    print(f"refused: {error}")
else:
    raise AssertionError("rows of two FFNs were mixed")
