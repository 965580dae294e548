"""boundary-per-layer: residual rows are the state, cold ones in one codec a layer, by calibration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from larql_kv.codec.rows import RowCodec, row_codec
from larql_kv.engine.calibration import CalibrationRecord, read_record
from larql_kv.engine.preconditions import require_residual_sufficiency
from larql_kv.engine.residual_cost import residual_cost
from larql_kv.engine.row_codecs import nats_of
from larql_kv.errors import ModelError, SpecError, StoreError
from larql_kv.model.model import Model
from larql_kv.policy import BoundedKLPerLayer, StateKind, StatePolicy
from larql_kv.spec import EngineSpec, engine, key
from larql_kv.state.residual import ResidualState

_UNCALIBRATED = "bf16"  # the policy that needs no record


@engine("boundary-per-layer", aliases=("boundary_per_layer", "boundary-pl", "boundary_pl"))
@dataclass(frozen=True)
class BoundaryPerLayer(EngineSpec):
    """Residual rows of every layer, cold ones in one codec a layer, chosen by `larql calibrate`."""

    window: int | None = key(
        None, "rows kept hot; older blocks are coded (none or 0: nothing ever is)", minimum=0
    )
    layers: int | None = key(None, "refuse a model of another layer count (none: any)", minimum=0)
    policy_: str = key(
        _UNCALIBRATED, "of cold rows: bf16 on every layer, or a file of `larql calibrate` (no comma in it)"
    )
    rows: Literal["device", "host"] | None = key(
        None, "where residual rows live: device, host (none: host with a window, else device)"
    )
    budget_nats: float | None = key(None, "refuse a policy with a larger bound", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "," in self.policy_:
            raise SpecError(f"policy={self.policy_!r} holds a comma, which separates the keys of a spec")
        if self.policy_ != _UNCALIBRATED and _is_codec(self.policy_):
            raise SpecError(
                f"policy={self.policy_!r} names a codec: one codec on all layers is "
                f"markov-rs-codec:codec={self.policy_}; a policy is {_UNCALIBRATED} or a file of "
                f"`larql calibrate` (./{self.policy_} where it is called so)"
            )

    @cached_property
    def record(self) -> CalibrationRecord | None:
        """The record that the policy names, read once; None for bf16. Raises StoreError."""
        return None if self.policy_ == _UNCALIBRATED else read_record(self.policy_)

    @property
    def bound(self) -> float:
        """Nats that a step may be off `standard`: the record's, or those of bf16. Raises StoreError."""
        return nats_of(_UNCALIBRATED) if self.record is None else self.record.kl_bound_nats

    @property
    def policy(self) -> StatePolicy:
        return StatePolicy(StateKind.RESIDUAL_CODES, StateKind.KV, BoundedKLPerLayer(self.bound))

    def build_state(self, model: Model) -> ResidualState:
        """Raises ModelError for another layer count, StoreError for a record that does not speak for this
        model, window and budget."""
        require_residual_sufficiency(model.config, self.engine_name)
        count = model.config.layer_count
        if self.layers not in (None, count):
            raise ModelError(f"layer count mismatch: layers={self.layers}, the model has {count}")
        self._require_budget()
        if self.record is not None:
            found = self.record.differences(model, self.window)
            if found:
                raise StoreError(f"{self.policy_}: is no record for this run: {'; '.join(found)}")
        place = self.rows or ("host" if self.window else "device")
        return ResidualState(model, self.window, place, self._codecs(model))

    def cost_note(self, model: Model) -> str:
        if self.record is None:
            source = "bf16 on every layer, lossless against bf16 rows by construction"
        else:
            source = (
                f"{self.record.policy.summary}: {self.record.saving:.0%} smaller than bf16 rows, bound "
                f"{self.bound:g} nats from {self.record.held_out.steps:,} held-out steps"
            )
        return f"{source}; {residual_cost(model, self._codecs(model), self.window)}"

    def _codecs(self, model: Model) -> list[RowCodec]:
        if self.record is None:
            return [row_codec(_UNCALIBRATED)] * model.config.layer_count
        return [row_codec(name) for name in self.record.policy.codecs]

    def _require_budget(self) -> None:
        if self.budget_nats is not None and self.bound > self.budget_nats:
            raise StoreError(
                f"policy={self.policy_}: its bound of {self.bound:g} nats is above budget_nats="
                f"{self.budget_nats:g}: calibrate with a smaller budget"
            )


def _is_codec(name: str) -> bool:
    try:
        row_codec(name)
    except SpecError:
        return False
    return True
