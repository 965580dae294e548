"""markov-rs: the residual rows are the state, K/V are derived from them; or from bare token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from larql_kv.engine.kv_forms import coding_of, nats_of
from larql_kv.engine.preconditions import require_residual_sufficiency
from larql_kv.errors import SpecError
from larql_kv.model.model import Model
from larql_kv.policy import BoundedKL, Exact, StateKind, StatePolicy
from larql_kv.spec import EngineSpec, engine, key
from larql_kv.state.residual import ResidualState
from larql_kv.state.token_state import TokenState


@engine("markov-rs", aliases=("markov_rs", "markov-residual", "markov_residual"))
@dataclass(frozen=True)
class MarkovResidual(EngineSpec):
    """Residual rows of every layer (or bare token ids); K/V come from them and may be dropped at any time."""

    window: int | None = key(
        None, "rows kept hot; older blocks go to the cold tier (none or 0: all hot)", minimum=0
    )

    rows: Literal["device", "host", "none"] = key(
        "device", "where residual rows live: device, host, or none kept (the token ids are canonical then)"
    )
    kv: Literal["full", "turbo4", "turbo3", "turbo2"] = key(
        "full", "the K/V derived: full precision, or codes as turbo-quant has them"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows == "none" and self.window is not None:
            raise SpecError(
                f"window={self.window} places the hot and the cold tier of residual rows, and rows=none "
                f"keeps none: give one of the two"
            )

    @property
    def policy(self) -> StatePolicy:
        canonical = StateKind.TOKEN_IDS if self.rows == "none" else StateKind.RESIDUAL_ROWS
        coding = coding_of(self.kv)
        if coding is not None:
            return StatePolicy(canonical, StateKind.KV_CODES, BoundedKL(nats_of(coding)))
        return StatePolicy(canonical, StateKind.KV, Exact())

    def build_state(self, model: Model) -> ResidualState | TokenState:
        if self.rows == "none":
            return TokenState(model, coding_of(self.kv))
        require_residual_sufficiency(model.config, self.engine_name)
        return ResidualState(model, self.window, self.rows, coding=coding_of(self.kv))
