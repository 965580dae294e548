"""Run an engine, read its ledger, drop what it may drop, and see that nothing changed.

markov-rs keeps the residual rows; its K/V are derived from them. Dropping the K/V frees memory, the next
step derives them again, and the logits have the same bits.
"""

from __future__ import annotations

import torch
from tiny_model import load_tiny_model

import larql_kv as lk

model = load_tiny_model()
engine = lk.build_engine("markov-rs", model)
print(f"{engine.info.summary}: canonical {engine.policy.canonical}, derivative {engine.policy.derivative}")

prompt = model.tokenizer.encode("Once upon a time there was a cache that could be forgotten.")
tokens = [token.id for token in engine.generate(prompt, max_tokens=16, ignore_stop_tokens=True)]
print(f"{len(prompt)} prompt tokens, then {tokens}")
print(engine.ledger())

twin = engine.fork()  # the same state: one side forgets, the other does not
freed = twin.drop_derivative()
print(f"\ndropped the derivative state: {freed:,} bytes freed")
print(twin.ledger())

kept, rebuilt = (model.logits(side.decode_step(tokens[-1])) for side in (engine, twin))
assert torch.equal(kept, rebuilt)
print("\nthe next step derived the K/V again: same bits in every logit")
