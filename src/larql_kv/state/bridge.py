"""The bridge from a device to host memory: what a capture mask stages each step, and where it goes home.

Nothing crosses under `none`. Under `h_only` the residual rows do, under `full` K and V too. Rows that an
engine keeps on the host are canonical and lie in the state's own pages; the others are a derivative copy.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from larql_kv.state.pages import PagedRows, allocate_block
from larql_kv.state.transit import Lane, Transit

if TYPE_CHECKING:
    from larql_kv.backends.base import Decoder
    from larql_kv.model.model import Model
    from larql_kv.state.coded_rows import CodedRows
    from larql_kv.state.ledger import LedgerEntry

SLOTS = 64  # steps that the pinned ring holds
_HOST = torch.device("cpu")


class CaptureMask(StrEnum):
    """What is staged from the device to the host each step, of every layer."""

    FULL = "full"  # the residual row, K and V
    H_ONLY = "h_only"  # the residual row
    NONE = "none"

    @property
    def reach(self) -> int:
        """Orders the masks by what they stage: NONE < H_ONLY < FULL."""
        return (CaptureMask.NONE, CaptureMask.H_ONLY, CaptureMask.FULL).index(self)


def crosses_to_host(decoder: Decoder) -> bool:
    """Whether there is anything to stage: on the CPU the device's memory is the host's.

    A backend that stages by mask says so (`masked_capture`), its interpreter on the CPU included.
    """
    return decoder.device.type != "cpu" or stages_by_mask(decoder)


def stages_by_mask(decoder: Decoder) -> bool:
    """Whether the backend can leave out what a mask leaves out."""
    return bool(getattr(decoder, "masked_capture", False))


# One pair of buffers serves every engine on a model: a captured step has their address in it. By decoder,
# width and slots; gone with the last engine that uses it.
_TRANSITS: weakref.WeakValueDictionary[tuple[int, int, int], Transit] = weakref.WeakValueDictionary()


def _transit(model: Model, width: int, slots: int, lane: Lane | None) -> Transit:
    """The model's transit of that width; one of its own for a `lane` that is given."""
    key = (id(model.decoder), width, slots)
    made = None if lane else _TRANSITS.get(key)
    if made is None:
        layers, dtype, device = model.config.layer_count, model.kv_dtype, model.device
        made = Transit(layers=layers, width=width, dtype=dtype, device=device, slots=slots, lane=lane)
        if lane is None:
            _TRANSITS[key] = made
    return made


class HostBridge:
    """One state's rows on their way to the host.

    A step (captured or not) writes row p of every layer into `staging[p & 1]` (2, layers, width), in the
    model's K/V dtype: the residual row (`hidden` elements), then under FULL K and V (`kv_dim` each). Then
    `stage(p)`. Many rows at once go through `append_rows_bulk`. `home` are the state's own pages of residual
    rows on the host, or None: then they are a host copy that this bridge owns.
    """

    def __init__(
        self,
        model: Model,
        mask: CaptureMask,
        home: Sequence[PagedRows | CodedRows] | None = None,
        slots: int | None = None,
        lane: Lane | None = None,
    ) -> None:
        config, dtype = model.config, model.kv_dtype
        self.mask = mask
        self.hidden, self.kv_dim = config.hidden, config.kv_dim
        self.full = mask == CaptureMask.FULL
        self.width = self.hidden + (2 * self.kv_dim if self.full else 0)
        rings = [layer.window for layer in config.layers]

        def pages(elements: int) -> list[PagedRows]:
            def make_block(rows: int) -> torch.Tensor:
                return allocate_block((rows, elements), dtype, _HOST)

            return [PagedRows(make_block, ring) for ring in rings]

        self._owns_rows = home is None
        self.rows: Sequence[PagedRows | CodedRows] = pages(self.hidden) if home is None else home
        self.kv = pages(2 * self.kv_dim) if self.full else []
        self._transit = _transit(model, self.width, slots or SLOTS, lane)
        self._first = self._count = 0

    @property
    def staging(self) -> torch.Tensor:
        """(2, layers, width): the device buffer that a step at position p writes half p & 1 of."""
        return self._transit.staging

    @property
    def transit(self) -> Transit:
        """Holds `staging`; the engines on a model share it, and it is gone when nobody holds it."""
        return self._transit

    # -- a chunk of the forward pass -----------------------------------------------------------------

    def begin(self, first: int, count: int) -> None:
        """Rows first..first+count-1 are about to be run."""
        self._first, self._count = first, count
        if count == 1:
            self._transit.before_step(first)

    def take_rows(self, layer: int, rows: torch.Tensor) -> None:
        """The chunk's residual rows (n, hidden) that enter `layer`."""
        if self._count == 1:
            self._staged(layer)[: self.hidden].copy_(rows[0])
        else:
            self.append_rows_bulk(layer, self._first, rows)

    def take_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """The chunk's K and V (n, kv_heads, head_dim)."""
        if not self.full:
            return
        if self._count == 1:
            staged = self._staged(layer)[self.hidden :].view(2, self.kv_dim)
            staged[0].copy_(k.reshape(-1))
            staged[1].copy_(v.reshape(-1))
        else:
            self.append_rows_bulk(layer, self._first, None, k, v)

    def _staged(self, layer: int) -> torch.Tensor:
        return self.staging[self._first % 2, layer]

    def commit(self) -> None:
        """Every layer of the chunk was enqueued: a single row is staged now (many were sent on the way)."""
        if self._count == 1:
            self.stage(self._first)
        self._count = 0

    # -- moving --------------------------------------------------------------------------------------

    def stage(self, position: int) -> None:
        """The step at `position` was enqueued: send its rows. The host does not wait for the device, unless
        the ring is full."""
        self._transit.stage(self, position)

    def append_rows_bulk(
        self,
        layer: int,
        first: int,
        h: torch.Tensor | None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> None:
        """Send rows of one layer, positions first..: residual rows (n, hidden), and under FULL K and V
        (n, kv_heads, head_dim). The tensors may be changed afterwards."""
        if h is not None:
            self._transit.send(self, "rows", layer, first, h.to(self.staging.dtype, copy=True))
        if self.full and k is not None and v is not None:
            both = torch.empty(len(k), 2, self.kv_dim, dtype=self.staging.dtype, device=k.device)
            both[:, 0].copy_(k.reshape(len(k), -1))
            both[:, 1].copy_(v.reshape(len(v), -1))
            self._transit.send(self, "kv", layer, first, both.view(len(k), -1))

    def refill(self, layer: int, first: int, h: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """K/V of positions first.. were derived again: so is the host copy that went with them."""
        self.append_rows_bulk(layer, first, h if self._owns_rows else None, k, v)

    def upload(self, layer: int, first: int, stop: int) -> torch.Tensor:
        """Residual rows first..stop-1 of a layer, from their host pages: (n, hidden) on the device."""
        pages = self.rows[layer]

        def fill(start: int, buffer: torch.Tensor) -> None:
            pages.read(first + start, first + start + len(buffer), out=buffer)

        return self._transit.upload(stop - first, self.hidden, fill)

    def drain(self) -> None:
        """Wait for what is under way and bring it home: before host rows are read, shared or counted."""
        self._transit.drain()

    def receive_steps(self, first: int, rows: torch.Tensor) -> None:
        for layer, pages in enumerate(self.rows):
            pages.put(rows[:, layer, : self.hidden], first)
        for layer, pages in enumerate(self.kv):
            pages.put(rows[:, layer, self.hidden :], first)

    def receive_bulk(self, kind: str, layer: int, first: int, rows: torch.Tensor) -> None:
        (self.rows if kind == "rows" else self.kv)[layer].put(rows, first)

    # -- what the state asks -------------------------------------------------------------------------

    def trim(self, length: int) -> None:
        """Forget positions >= `length`, those under way too. `home` is truncated by its owner."""
        self._transit.cancel(self, length)
        for pages in self._copies():
            pages.truncate(pages.live_rows(length))

    def drop(self) -> int:
        """Let the host copies go (never `home`); returns the bytes freed."""
        self.drain()
        freed = sum(item.capacity for item in self._copy_entries(0) if item.role == "derivative")
        for pages in self._copies():
            pages.clear()
        return freed

    def fork(self, home: Sequence[PagedRows | CodedRows] | None) -> HostBridge:
        """The bridge of a forked state (`home`: its pages). Buffers are shared; `drain` came before."""
        twin = copy.copy(self)
        twin.rows = [pages.fork() for pages in self.rows] if home is None else home
        twin.kv = [pages.fork() for pages in self.kv]
        twin._count = 0
        return twin

    def _copies(self) -> list[PagedRows | CodedRows]:
        return [*(self.rows if self._owns_rows else []), *self.kv]

    def entries(self, length: int) -> list[LedgerEntry]:
        """Buffers, and the host copies of a state that holds `length` positions. Drain first."""
        return [*self._transit.entries(), *self._copy_entries(length)]

    def _copy_entries(self, length: int) -> list[LedgerEntry]:
        named = [("residual rows (host copy)", self.rows if self._owns_rows else [])]
        named.append(("K/V rows (host copy)", self.kv))
        return [
            item
            for name, pages in named
            for page in pages
            for item in page.entries(name, "derivative", length)
        ]
