"""How far two models of one vocabulary are apart: the metrics of vindex_compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from larql_kv.errors import StoreError

if TYPE_CHECKING:
    from larql_kv.model.model import Model

FLOOR = 1e-12  # of a probability inside a logarithm
LastLogits = Callable[["Model", list[int]], torch.Tensor]  # ids -> logits of the last position (vocab,)


@dataclass(frozen=True)
class Difference:
    """Two distributions after the same prompt. KL in nats: forward is KL(A || B), symmetric the mean of both
    directions; overlap is the Jaccard index of the top-k sets."""

    prompt: str
    tokens: int
    cosine: float
    argmax_match: bool
    overlap: float
    kl_forward: float
    kl_reverse: float
    kl_symmetric: float
    top_a: list[tuple[int, str, float]]  # token id, text, probability
    top_b: list[tuple[int, str, float]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def difference(
    prompt: str, tokens: int, a: torch.Tensor, b: torch.Tensor, top_k: int, text_of: Callable[[int], str]
) -> Difference:
    """The metrics of two logit vectors (vocab,), in float64."""
    a, b = a.double(), b.double()
    p, q = torch.softmax(a, 0), torch.softmax(b, 0)
    logs = torch.log(p.clamp(min=FLOOR)) - torch.log(q.clamp(min=FLOOR))
    forward, reverse = float((p * logs).sum()), float((q * -logs).sum()) + 0.0  # no -0.0
    tops = []
    for values in (p, q):
        top = torch.topk(values, top_k)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        tops.append([(token, text_of(token), probability) for token, probability in pairs])
    sets = [{token for token, _, _ in top} for top in tops]
    return Difference(
        prompt=prompt,
        tokens=tokens,
        cosine=float(torch.nn.functional.cosine_similarity(a, b, dim=0)),
        argmax_match=bool(a.argmax() == b.argmax()),
        overlap=len(sets[0] & sets[1]) / len(sets[0] | sets[1]),
        kl_forward=forward,
        kl_reverse=reverse,
        kl_symmetric=(forward + reverse) / 2,
        top_a=tops[0],
        top_b=tops[1],
    )


def compare(
    a: Model,
    b: Model,
    prompts: Sequence[str],
    last_logits: LastLogits,
    top_k: int = 5,
    max_seq_len: int | None = None,
) -> list[Difference]:
    """Both models after each prompt (ids of A's tokenizer; a longer prompt keeps its first `max_seq_len`).

    Raises StoreError for models of different vocabularies, and for no prompt.
    """
    if a.config.vocab != b.config.vocab:
        raise StoreError(
            f"{a.source} has {a.config.vocab} token ids and {b.source} has {b.config.vocab}: "
            "only models of one vocabulary can be compared"
        )
    if not prompts:
        raise StoreError("no prompt to compare on")
    found = []
    for prompt in prompts:
        ids = a.tokenizer.encode(prompt)[:max_seq_len]
        first, second = last_logits(a, ids), last_logits(b, ids)
        found.append(difference(prompt, len(ids), first, second, min(top_k, a.config.vocab), _text_of(a)))
    return found


def _text_of(model: Model) -> Callable[[int], str]:
    size = model.tokenizer.vocab_size
    return lambda token: model.tokenizer.token_text(token) if token < size else ""


def aggregate(found: Sequence[Difference]) -> dict[str, float]:
    """Over all prompts; the KL figures are of the symmetric one."""
    kl = np.array([item.kl_symmetric for item in found])
    return {
        "prompts": len(found),
        "argmax_agreement": fmean(item.argmax_match for item in found),
        "mean_overlap": fmean(item.overlap for item in found),
        "mean_cosine": fmean(item.cosine for item in found),
        "kl_mean": float(kl.mean()),
        "kl_p95": float(np.percentile(kl, 95)),
        "kl_max": float(kl.max()),
    }
