"""standard: the K/V rows are the state."""

from __future__ import annotations

from dataclasses import dataclass

from larql_kv.errors import SpecError
from larql_kv.model.model import Model
from larql_kv.policy import Exact, ExactWithinWindow, StateKind, StatePolicy
from larql_kv.spec import Alias, EngineSpec, engine, key
from larql_kv.state.kv import KvLayout, KVState

_WINDOWED = tuple(Alias(name, requires=("window",)) for name in ("markov-bounded", "bounded", "sliding"))


@engine("standard", aliases=("full", "fp32", *_WINDOWED))
@dataclass(frozen=True)
class Standard(EngineSpec):
    """K/V rows of every position, or of the last `window` positions; attention reads them in place."""

    window: int | None = key(None, "keep the last N rows on every layer (none or 0: all)", minimum=0)
    sinks: int = key(0, "with a window: keep the first N rows too", minimum=0, maximum=4096)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks and self.window is None:
            raise SpecError(f"sinks={self.sinks} are rows that a window does not drop: give window=N too")

    @property
    def policy(self) -> StatePolicy:
        contract = Exact() if self.window is None else ExactWithinWindow(self.window, self.sinks)
        return StatePolicy(StateKind.KV, StateKind.NOTHING, contract)

    @property
    def is_reference(self) -> bool:
        return self.window is None

    def build_state(self, model: Model) -> KVState:
        return KVState(model, KvLayout(self.window, self.sinks))
