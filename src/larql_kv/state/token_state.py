"""Token ids as canonical state, K/V as derivative state."""

from __future__ import annotations

from larql_kv.state.derived import DerivedKVState
from larql_kv.state.ledger import LedgerEntry


class TokenState(DerivedKVState):
    """K/V that come from the token ids alone: once dropped, the next call runs every id again.

    The ids belong to the engine. Run again in other portions, K/V have the same bits where the forward pass
    is row-invariant (float32 on the CPU), elsewhere they are within its noise floor.
    """

    def drop_derivative(self) -> int:
        freed = super().drop_derivative()
        self.trim(0)
        return freed

    def fork(self) -> TokenState:
        twin = self._twin()
        self._fork_bridge(twin)
        return twin

    def entries(self) -> list[LedgerEntry]:
        if self.bridge is not None:
            self.bridge.drain()
        return [*self.kv.entries(), *self._bridge_entries()]
