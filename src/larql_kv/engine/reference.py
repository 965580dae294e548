"""The runs that contracts name as their reference."""

from __future__ import annotations

from dataclasses import dataclass

from larql_kv.model.model import Model
from larql_kv.policy import Exact, StateKind, StatePolicy
from larql_kv.spec import EngineSpec
from larql_kv.state.kv import KvLayout, KVState


@dataclass(frozen=True)
class Reference(EngineSpec):
    """Every K/V row is kept, and masked as a contract says (`Contract.mask`). Not registered: nobody serves
    it."""

    engine_name = "reference"
    window: int | None = None
    sinks: int = 0
    tumbling: int | None = None

    @property
    def policy(self) -> StatePolicy:
        return StatePolicy(StateKind.KV, StateKind.NOTHING, Exact())

    @property
    def is_reference(self) -> bool:
        return True

    def build_state(self, model: Model) -> KVState:
        return KVState(model, KvLayout(self.window, self.sinks, self.tumbling, retire=False))
