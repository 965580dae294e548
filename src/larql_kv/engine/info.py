"""What can be read off an engine: nothing here changes it."""

from __future__ import annotations

from dataclasses import dataclass

from larql_kv.model.model import Model
from larql_kv.policy import FORM_BOUND, StatePolicy
from larql_kv.spec import EngineSpec
from larql_kv.state.base import State
from larql_kv.state.bridge import CaptureMask
from larql_kv.state.ledger import Ledger, shared_entries
from larql_kv.state.tokens import TokenLog


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is, for people and for `--json`."""

    name: str
    description: str
    backend: str  # with the path that the last call ran on, where there are several
    config: str
    capture: str  # the mask in force: what is staged to the host each step
    note: str = ""  # what the state costs on this model, where that is not plain to see

    @property
    def summary(self) -> str:
        return f"{self.name} [{self.backend}]" + (f" ({self.config})" if self.config else "")


class EngineFacts:
    """The identity of an engine, and what it holds."""

    spec: EngineSpec
    model: Model
    capture: CaptureMask
    _state: State
    _tokens: TokenLog
    _path: str  # of the last call: "graph", "eager", ...; empty where there is only one, or before a call

    @property
    def length(self) -> int:
        """How many tokens the sequence has."""
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The ids of the sequence so far."""
        return self._tokens.to_list()

    @property
    def held_positions(self) -> int:
        """Positions that the next call need not run again (0 for `no-cache`)."""
        return min(self._state.length, len(self._tokens))

    @property
    def policy(self) -> StatePolicy:
        return self.spec.policy

    @property
    def is_reference(self) -> bool:
        """Whether this engine is the one that `Exact` names."""
        return self.spec.is_reference

    @property
    def form_bound(self) -> float:
        """Mean KL (nats) that steps may differ by from one pass, in the form that the model runs in."""
        return getattr(self.model.decoder, "form_bound", FORM_BOUND)

    @property
    def widest_window(self) -> int:
        """The widest window below the model's context that rows retire behind, 0 for none."""
        windows = [layer.window or 0 for layer in self.model.config.layers] + [self.window_tokens]
        below = [window for window in windows if window < self.model.config.context]
        return max(below, default=0) if self._state.keeps_rows else 0

    @property
    def window_tokens(self) -> int:
        """The engine's own window in tokens, 0 without one."""
        return getattr(self.spec, "window", None) or 0

    @property
    def info(self) -> EngineInfo:
        doc = (self.spec.__doc__ or "").strip().splitlines()[0]
        name, _, config = self.spec.text.partition(":")
        backend = f"{self.model.decoder.name} {self._path}".strip()
        note = self.spec.cost_note(self.model)
        return EngineInfo(name, doc, backend, config, str(self.capture), note)

    def ledger(self) -> Ledger:
        """Bytes of every tensor this engine holds (weights are the model's). What a backend shares among all
        engines on the model is listed in each, as workspace."""
        own = [self._tokens.ledger_entry("canonical"), *self._state.entries()]
        return Ledger([*own, *shared_entries(self.model.decoder)])

    @property
    def memory_bytes(self) -> int:
        """All bytes the engine holds, allocated."""
        return self.ledger().capacity

    @property
    def cold_bytes(self) -> int:
        """Bytes of the cold tier, allocated."""
        return self.ledger().total(tier="cold", capacity=True)

    def read_forms(self) -> dict[str, float]:
        """Of all rows that attention read, the share read in each form (dtype or codec)."""
        total = sum(self._state.rows_read.values()) or 1
        return {form: count / total for form, count in self._state.rows_read.items()}

    def coded_share(self) -> float | None:
        return self._state.coded_share()
