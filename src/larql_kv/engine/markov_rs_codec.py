"""markov-rs-codec: residual rows are the state, and those that left the window are held by a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from larql_kv.codec.rows import RowCodec, row_codec
from larql_kv.engine.preconditions import require_residual_sufficiency
from larql_kv.engine.residual_cost import residual_cost
from larql_kv.engine.row_codecs import nats_of
from larql_kv.model.model import Model
from larql_kv.policy import BoundedKL, StateKind, StatePolicy
from larql_kv.spec import EngineSpec, engine, key
from larql_kv.state.residual import ResidualState


@engine(
    "markov-rs-codec",
    aliases=("markov_rs_codec", "markov-residual-codec", "markov_residual_codec"),
)
@dataclass(frozen=True)
class MarkovResidualCodec(EngineSpec):
    """Residual rows of every layer, cold ones in a codec; their K/V are those of the decoded rows."""

    window: int | None = key(
        None, "rows kept hot; older blocks are coded (none or 0: nothing ever is)", minimum=0
    )
    codec: str = key("bf16", "of cold rows: bf16, int8, int4, ...; see docs/codecs.md")
    rows: Literal["device", "host"] | None = key(
        None, "where residual rows live: device, host (none: host with a window, else device)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        nats_of(self.codec)  # refuses a name without a bound

    @property
    def policy(self) -> StatePolicy:
        contract = BoundedKL(nats_of(self.codec))
        return StatePolicy(StateKind.RESIDUAL_CODES, StateKind.KV, contract)

    def build_state(self, model: Model) -> ResidualState:
        require_residual_sufficiency(model.config, self.engine_name)
        place = self.rows or ("host" if self.window else "device")
        return ResidualState(model, self.window, place, self._codecs(model))

    def cost_note(self, model: Model) -> str:
        return residual_cost(model, self._codecs(model), self.window)

    def _codecs(self, model: Model) -> list[RowCodec]:
        return [row_codec(self.codec)] * model.config.layer_count
