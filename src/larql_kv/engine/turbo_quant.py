"""turbo-quant: K/V rows are coded once, when they leave the recent tail, and attended as codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from larql_kv.engine.kv_forms import nats_of
from larql_kv.model.model import Model
from larql_kv.policy import BoundedKL, StateKind, StatePolicy
from larql_kv.spec import Alias, EngineSpec, engine, key
from larql_kv.state.kv import KvLayout, KVState
from larql_kv.state.kv_code import KvCoding


@engine(
    "turbo-quant",
    aliases=("turbo_quant", "turboquant", Alias("tq4", {"bits": 4}), Alias("tq3", {"bits": 3})),
)
@dataclass(frozen=True)
class TurboQuant(EngineSpec):
    """K/V at 4, 3 or 2 bits a value, coded once when they leave the recent rows, and attended as codes."""

    bits: Literal[4, 3, 2] = key(4, "bits a value of K and of V: 4, 3 or 2")
    k_bits: Literal[4, 3, 2] | None = key(None, "bits of K, where they differ")
    v_bits: Literal[4, 3, 2] | None = key(None, "bits of V, where they differ")
    sinks: int = key(4, "first rows: in full precision, in sight of any window", minimum=0, maximum=4096)
    recent: int = key(64, "latest rows that stay in full precision", minimum=0, maximum=4096)
    skip: int = key(0, "so many first and last layers stay in full precision", minimum=0)
    code: Literal["lloyd", "uniform"] = key("lloyd", "levels: of least error, or in equal steps")
    layers: Literal["global", "all"] = key("global", "coded: layers that see the whole text, or all")
    window: int | None = key(None, "keep the last N rows on every layer (none or 0: all)", minimum=0)

    @property
    def coding(self) -> KvCoding:
        return KvCoding(
            self.k_bits or self.bits,
            self.v_bits or self.bits,
            self.code,
            self.recent,
            self.sinks,
            self.skip,
            self.layers,
        )

    @property
    def policy(self) -> StatePolicy:
        window, sinks = (self.window, self.sinks) if self.window else (0, 0)
        contract = BoundedKL(nats_of(self.coding), window=window, sinks=sinks)
        return StatePolicy(StateKind.KV_CODES, StateKind.NOTHING, contract)

    def build_state(self, model: Model) -> KVState:
        return KVState(model, KvLayout(self.window, self.sinks, coding=self.coding))
