"""markov-rs: the residual rows are the state, K/V are derived from them."""

from __future__ import annotations

from dataclasses import dataclass

from larql_kv.engine.preconditions import require_residual_sufficiency
from larql_kv.model.model import Model
from larql_kv.policy import Exact, StateKind, StatePolicy
from larql_kv.spec import EngineSpec, engine, key
from larql_kv.state.residual import ResidualState


@engine("markov-rs", aliases=("markov_rs", "markov-residual", "markov_residual"))
@dataclass(frozen=True)
class MarkovResidual(EngineSpec):
    """Residual rows of every layer; K/V are derived from them and may be dropped at any time."""

    window: int | None = key(
        None, "rows kept hot; older blocks go to the cold tier (none or 0: all hot)", minimum=0
    )

    @property
    def policy(self) -> StatePolicy:
        return StatePolicy(StateKind.RESIDUAL_ROWS, StateKind.KV, Exact())

    def build_state(self, model: Model) -> ResidualState:
        require_residual_sufficiency(model.config, self.engine_name)
        return ResidualState(model, self.window)
