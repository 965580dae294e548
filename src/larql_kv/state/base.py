"""What the forward pass and the engines ask of a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from larql_kv.model.clock import NULL_CLOCK, Clock
from larql_kv.state.ledger import LedgerEntry
from larql_kv.state.pages import BLOCK, PagedRows

if TYPE_CHECKING:
    from larql_kv.model.forward import Ffn
    from larql_kv.model.model import Model
    from larql_kv.state.bridge import CaptureMask, HostBridge
    from larql_kv.state.kv_rows import KvRows
    from larql_kv.state.tokens import TokenLog


@dataclass
class StepRows:
    """Where a captured one-row step at position p reads and writes, by layer.

    It attends the rows of `kv` and writes row p there, into `residual` (the row entering the layer, in the
    K/V dtype) and into half p & 1 of `bridge.staging`, where there are such.
    """

    kv: list[KvRows]
    residual: list[PagedRows] | None = None
    bridge: HostBridge | None = None
    _pages: list[PagedRows] = field(init=False, repr=False)
    _rings: set[int | None] = field(init=False, repr=False)
    _reserved: int = field(init=False, default=-1, repr=False)  # the version that was reserved in

    def __post_init__(self) -> None:
        self._pages = [*(rows.hot for rows in self.kv), *(self.residual or [])]
        self._rings = {pages.ring for pages in self._pages}

    @property
    def version(self) -> int:
        """Goes up whenever a block list or an address changes; told apart between states by the object."""
        return sum([pages.version for pages in self._pages])

    def reserve(self, position: int) -> int:
        """Make row `position` writable on every layer; returns `version`, by which to upload the tables.

        Does nothing within a block: this runs before every step.
        """
        version = self.version
        slots = (position if ring is None else position % ring for ring in self._rings)
        if version != self._reserved or any(slot % BLOCK == 0 for slot in slots):
            for pages in self._pages:
                pages.reserve(position, position + 1)
            version = self._reserved = self.version
        return version


class State(ABC):
    """The state of one sequence, as a parameter of the forward pass.

    Protocol of a chunk: `begin(first, count)`; then for each layer `observe(layer, rows)` and
    `attend(layer, q, k, v)`; then `commit(first + count)`; after the last chunk of a call
    `end_step()`. Positions are absolute. A chunk that dies before `commit` leaves `length` as it was:
    the engine then calls `trim`.

    A captured step at position p: `begin(p, 1)`, `rows = step_rows()`, `rows.reserve(p)`, launch,
    `count_step(p)`, `commit(p + 1)`; neither `observe` nor `attend` is called.
    """

    best_capture: CaptureMask | None = None  # what it needs on the host; None: it stages nothing, ever
    keeps_rows = True  # whether anything outlives a call: rows belong to the FFN they went through

    def __init__(self, model: Model) -> None:
        self.model = model
        self.length = 0  # positions 0..length-1 need not be run again
        self.first = 0
        self.clock: Clock = NULL_CLOCK
        self.rows_read: Counter[str] = Counter()  # attended rows by the form they were read in

    def begin_call(self, tokens: TokenLog, ffn: Ffn, query: bool) -> None:
        """A call is about to run what the state does not hold of `tokens`, through `ffn`, layer by layer.
        `query`: the new ones are a prompt, not a step."""
        return

    def chunk_end(self, first: int, stop: int) -> int:
        """Where the chunk of rows first.. has to end, at most at `stop`."""
        return stop

    def begin(self, first: int, count: int) -> None:
        """Rows first..first+count-1 are about to be run."""
        self.first = first

    def observe(self, layer: int, rows: torch.Tensor) -> None:
        """`rows` (n, hidden) float32 enter `layer`. Must not change them."""
        return

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append K/V (n, kv_heads, head_dim), attend with q (n, heads, head_dim) -> (n, heads * head_dim)."""

    def commit(self, length: int) -> None:
        """Every layer has run rows up to `length`."""
        self.length = length

    capturable = False  # whether `step_rows` gives rows

    def step_rows(self) -> StepRows | None:
        """The rows of a captured one-row step at `length`, derived first if they were dropped; None where
        steps run layer by layer. A subclass that changes `observe` or `attend` must answer for it here."""
        return None

    def count_step(self, first: int) -> None:
        """Count in `rows_read` what a captured step at position `first` attended."""
        return

    def set_capture(self, mask: CaptureMask) -> None:
        """Stage by `mask` from now on (before any row)."""
        return

    def end_step(self) -> None:
        """The call is over; a state that keeps nothing between steps lets go here."""
        return

    @abstractmethod
    def trim(self, length: int) -> None:
        """Forget positions >= `length`. Afterwards `self.length` <= `length`: what lies between was
        overwritten and has to be run again from the ids."""

    def coded_past(self, length: int) -> bool:
        """Whether rows are codes that would not be yet, had the text ended at `length`."""
        return False

    @abstractmethod
    def fork(self) -> State:
        """An independent continuation of this state; blocks are shared until one side writes."""

    @abstractmethod
    def entries(self) -> list[LedgerEntry]:
        """The ledger's lines for all that this state holds."""

    def drop_derivative(self) -> int:
        """Let all derivative state go; returns the bytes freed."""
        return 0

    def coded_share(self) -> float | None:
        """Of the rows read on layers that compress, the share read compressed; None without a codec."""
        return None


class RowState(State):
    """A state that holds rows per layer, in rings where a layer has a window.

    `rings` gives the rows each layer keeps (None for all). The high-water mark tells whether a ring has
    overwritten a row that position `length` would still see.
    """

    def __init__(self, model: Model, rings: Sequence[int | None]) -> None:
        super().__init__(model)
        self.rings = rings
        self._smallest_ring = min((ring for ring in rings if ring is not None), default=None)
        self._written = 0  # one past the highest position that may have been written

    def begin(self, first: int, count: int) -> None:
        super().begin(first, count)
        self._written = max(self._written, first + count)

    def _resolve_trim(self, length: int) -> int:
        """The length that is left when positions >= `length` go: `length`, or 0 when a ring lost a row."""
        length = self.length = min(length, self.length)  # before `_written`: an interrupt may fall between
        wrapped = self._smallest_ring is not None and self._written > self._smallest_ring
        if wrapped and length < self._written - 1:
            length = 0
        if not wrapped or length == 0:
            self._written = length
        return length
