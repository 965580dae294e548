"""Fork a conversation, take one branch back, and see what it costs: shared bytes count once."""

from __future__ import annotations

from tiny_model import load_tiny_model

import larql_kv as lk

model = load_tiny_model()
text = "The same beginning, told twice. " * 8
prompt = model.tokenizer.encode(text)

trunk = lk.build_engine("standard", model)
trunk.prefill(prompt)
print(f"trunk holds {len(trunk.tokens)} tokens in {trunk.ledger().live:,} bytes")

left, right = trunk.fork(), trunk.fork()
left.prefill(model.tokenizer.encode("It ends well."))
right.prefill(model.tokenizer.encode("It does not end."))
apart = sum(side.ledger().capacity for side in (trunk, left, right))
together = lk.Ledger.combined(side.ledger() for side in (trunk, left, right))
print(f"three branches: {apart:,} bytes if counted apart, {together.capacity:,} with shared blocks once")
assert together.capacity < 0.6 * apart

recomputed = left.trim(len(prompt))
print(f"left went back to {len(left.tokens)} tokens; {recomputed} had to be run again")
assert left.tokens == trunk.tokens

ids = [
    [token.id for token in side.generate(prompt, max_tokens=12, ignore_stop_tokens=True)]
    for side in (trunk, left, right)
]
assert ids[0] == ids[1] == ids[2]
print(f"asked again, all three say the same: {ids[0]}")
print(f"reused instead of run again: {[side.reused_tokens for side in (trunk, left, right)]} tokens")
