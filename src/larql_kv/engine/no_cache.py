"""no-cache: the token ids are the state; every step runs them all."""

from __future__ import annotations

from dataclasses import dataclass

from larql_kv.model.model import Model
from larql_kv.policy import Exact, StateKind, StatePolicy
from larql_kv.spec import EngineSpec, engine
from larql_kv.state.kv import RecomputeState


@engine("no-cache", aliases=("no_cache", "none", "off"))
@dataclass(frozen=True)
class NoCache(EngineSpec):
    """Token ids only; each step runs the whole text again (O(n²): a correctness oracle, not for use)."""

    @property
    def policy(self) -> StatePolicy:
        return StatePolicy(StateKind.TOKEN_IDS, StateKind.NOTHING, Exact())

    def build_state(self, model: Model) -> RecomputeState:
        return RecomputeState(model)
