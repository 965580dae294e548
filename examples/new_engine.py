"""A new engine in one file: it registers itself, runs, and its promise is checked like everyone else's.

token-park: the token ids are what it cannot lose. K/V rows are kept while they are in use and may be dropped
at any moment (between the turns of an idle chat, say): the next step runs the ids again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiny_model import load_tiny_model

import larql_kv as lk
from larql_kv.policy import StateKind
from larql_kv.spec import EngineSpec, engine
from larql_kv.state.kv import KVState


class ParkedState(KVState):
    """K/V rows as derivative state of the token ids."""

    def __init__(self, model: lk.Model) -> None:
        super().__init__(model, role="derivative")

    def drop_derivative(self) -> int:
        freed = sum(item.capacity for item in self.entries() if item.role == "derivative")
        self.clear()  # length 0: the engine runs again whatever the state does not hold
        return freed


@engine("token-park", aliases=("token_park",))
@dataclass(frozen=True)
class TokenPark(EngineSpec):
    """Token ids only while idle; K/V of all of them while in use."""

    @property
    def policy(self) -> lk.StatePolicy:
        return lk.StatePolicy(StateKind.TOKEN_IDS, StateKind.KV, lk.Exact())

    def build_state(self, model: lk.Model) -> ParkedState:
        return ParkedState(model)


model = load_tiny_model()
print("registered:", ", ".join(entry.name for entry in lk.engines()))

prompt = model.tokenizer.encode("Good night, and see you tomorrow. " * 3)
parked, standard = lk.build_engine("token-park", model), lk.build_engine("standard", model)
tokens = [int(model.logits(side.prefill(prompt)).argmax()) for side in (parked, standard)]
print(f"in use: {parked.ledger().live:,} bytes; ", end="")
print(f"parked: {parked.drop_derivative():,} bytes freed, {parked.ledger().live:,} left")

for step in range(8):
    tokens = [int(model.logits(side.decode_step(tokens[0])).argmax()) for side in (parked, standard)]
    assert tokens[0] == tokens[1]
    if step == 0:
        print(f"woke up: {parked.recomputed_tokens} tokens were run again, the same next token")

report = parked.policy.contract.check(parked, prompt, free_tokens=16)
print(f"contract {report.contract}: {report.verdict} ({report.reason})")
assert report.ok
