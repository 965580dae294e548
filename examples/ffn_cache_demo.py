"""A walked FFN with its activation cache: what hits, and what a patch on layer 10 does to it.

Scenario 1: the same row again is a hit. Scenario 2: the caches are left aside where they must be. Scenario 3:
a patch lies over layer 10: that layer is computed with the patch, all the others go on hitting.
"""

from __future__ import annotations

import numpy as np
import tiny_model
import torch

import larql_kv as lk
from larql_kv.ffn.cache import FfnL1Cache
from larql_kv.ffn.walk import WalkFfn
from larql_kv.model.vindex_edits import Patch, PatchOp
from larql_kv.vindex.index import VectorIndex

LAYERS, PATCHED = 12, 10
tiny_model.LAYERS = LAYERS
model = tiny_model.load_tiny_model()
index = VectorIndex.of_model(model)
hidden, top_k = model.config.hidden, model.config.intermediate // 10
walk = WalkFfn(model, index, top_k).with_l1_cache(LAYERS, mode="exact")
row = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0))


def all_layers() -> list[torch.Tensor]:
    return [walk.forward(layer, row) for layer in range(LAYERS)]


first, again = all_layers(), all_layers()
print(f"1. the same row again: {walk.l1_cache_stats()} (hits, misses)")
assert walk.l1_cache_stats() == (LAYERS, LAYERS)
assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

walk.forward(0, torch.cat([row, row]))
dense = WalkFfn(model, index, model.config.intermediate).with_cache(FfnL1Cache(LAYERS))
dense.forward(0, row)
print(f"2. two positions, or K from 4/5 on: {walk.l1_cache_stats()}, {dense.l1_cache_stats()}: nobody asks")
assert walk.l1_cache_stats() == (LAYERS, LAYERS)
assert dense.l1_cache_stats() == (0, 0)

# The patch changes a down vector only: gate scores, and so the set of features, are what they were.
strongest = walk.trace(PATCHED, row[0], 1)[0].feature
change = PatchOp("update", PATCHED, strongest, {"down": np.ones(hidden, np.float32)})
index.apply(Patch("demo", (change,)))
patched = all_layers()
hits, misses = walk.l1_cache_stats() or (0, 0)
print(
    f"3. a patch on layer {PATCHED}: {hits - LAYERS} of {LAYERS} layers hit, layer {PATCHED} is computed anew"
)
assert (hits, misses) == (2 * LAYERS - 1, LAYERS)
for layer in range(LAYERS):
    assert torch.equal(patched[layer], first[layer]) == (layer != PATCHED)
assert torch.equal(patched[PATCHED], WalkFfn(model, index, top_k).forward(PATCHED, row))

engine = lk.build_engine("standard", model, ffn=walk)
ids = model.tokenizer.encode("An engine uses the FFN it is handed.")
print(f"   an engine on it says {[token.id for token in engine.generate(ids, 5)]}")
print(f"   looked up: {walk.l1_cache_stats()}, left aside: {walk.cache_stats()[0]['bypassed']}")
