"""Copies from a device to host memory: one staging buffer, one pinned ring, a stream of their own.

A step leaves its rows in `staging[position & 1]`; `stage` sends them to the ring's next slot while the
device goes on. What has landed is handed to its owner in runs of positions. Many rows at once (a prefill)
use the same ring as two halves, and so does the way back (`upload`).
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from larql_kv.state.ledger import LedgerEntry, entry

STAGES = 2  # step p+1 writes one half while the other is still being copied


class Event(Protocol):
    """The end of a copy; torch.cuda.Event is one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Lane(Protocol):
    """How bytes travel between the device and the host."""

    def download(self, target: torch.Tensor, source: torch.Tensor, transient: bool) -> Event:
        """Host `target` <- device `source`, after all that the main stream was given so far. `transient`:
        the caller lets go of the source."""
        ...

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Device `target` <- host `source`, in the main stream's order."""
        ...

    def hold_main(self, event: Event) -> None:
        """What the main stream is given from now on waits for the event."""
        ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class PlainLane:
    """Copies at once: the host is the device."""

    _DONE = _Done()

    def download(self, target: torch.Tensor, source: torch.Tensor, transient: bool) -> Event:
        target.copy_(source)
        return self._DONE

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        target.copy_(source)
        return self._DONE

    def hold_main(self, event: Event) -> None:
        return


class SideStream:  # pragma: cuda only
    """Copies on a stream of their own, ordered by events; nothing here makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._given = torch.cuda.Event()  # what the main stream was given so far

    def download(self, target: torch.Tensor, source: torch.Tensor, transient: bool) -> Event:
        self._given.record(torch.cuda.current_stream(self._device))
        self._side.wait_event(self._given)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        if transient:
            source.record_stream(self._side)
        landed = torch.cuda.Event()
        landed.record(self._side)
        return landed

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        target.copy_(source, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record(torch.cuda.current_stream(self._device))
        return landed

    def hold_main(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)


class Receiver(Protocol):
    """Who rows travel for: they go home in host memory."""

    def receive_steps(self, first: int, rows: torch.Tensor) -> None:
        """Rows (n, layers, width) of positions first.. ."""
        ...

    def receive_bulk(self, kind: str, layer: int, first: int, rows: torch.Tensor) -> None:
        """Rows (n, elements) of one kind and layer, positions first.. ."""
        ...


@dataclass
class _Copy:
    """Rows under way or landed, not yet home. Weak: a conversation that was dropped receives nothing."""

    owner: weakref.ref[Receiver]
    first: int
    count: int  # positions still wanted: `cancel` lowers it
    source: torch.Tensor
    event: Event
    slot: int = -1  # of the ring, for a step; the half of the ring, for rows in bulk
    bulk: tuple[str, int] | None = None  # kind, layer


class Transit:
    """The buffers and the copies under way, shared by owners that take turns on one stream.

    `slots` steps fit the ring; landed ones are taken out a quarter of it at a time. Buffers are made when
    first used. Host and device agree on the order by events alone, except where `drain` has to wait.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: int,
        lane: Lane | None = None,
    ) -> None:
        if slots < 2:
            raise ValueError(f"the ring needs at least 2 slots, got {slots}")
        self._shape, self._dtype, self._device, self._slots = (layers, width), dtype, device, slots
        self._on_host = device.type == "cpu"
        self._lane: Lane = lane or (PlainLane() if self._on_host else SideStream(device))
        self._staging: torch.Tensor | None = None
        self._ring: torch.Tensor | None = None
        self._pending: deque[_Copy] = deque()
        self._slot = 0
        self._half = 0
        self._last_stage = -1  # half of the staging buffer that was sent last
        self._stage_events: list[Event | None] = [None] * STAGES
        self._upload_events: list[Event | None] = [None, None]

    @property
    def staging(self) -> torch.Tensor:
        """(2, layers, width) on the device, contiguous: a step at position p writes half p & 1."""
        if self._staging is None:
            self._staging = torch.zeros(STAGES, *self._shape, dtype=self._dtype, device=self._device)
        return self._staging

    @property
    def ring(self) -> torch.Tensor:
        """(slots, layers, width) in pinned host memory."""
        if self._ring is None:
            shape = (self._slots, *self._shape)
            self._ring = torch.empty(shape, dtype=self._dtype, pin_memory=not self._on_host)
        return self._ring

    def before_step(self, position: int) -> None:
        """A step at `position` is about to be enqueued: its half of the staging buffer must be free."""
        half = position % STAGES
        event = self._stage_events[half]
        if half == self._last_stage and event is not None:  # not so for positions in sequence
            self._lane.hold_main(event)

    def stage(self, owner: Receiver, position: int) -> None:
        """The step at `position` was enqueued: its rows go to the host as soon as they are there."""
        if self._pending and self._pending[-1].bulk is not None:
            self.drain()
        while (
            len(self._pending) >= self._slots
        ):  # room for a few: waiting for all would let the device run dry
            self._deliver(self._batch(self._slots // 4))
        half, slot = position % STAGES, self._slot
        source = self.ring[slot]
        event = self._lane.download(source, self.staging[half], transient=False)
        self._pending.append(_Copy(weakref.ref(owner), position, 1, source, event, slot))
        self._slot = (slot + 1) % self._slots
        before = self._stage_events[1 - half]
        if before is not None and not before.query():
            self._lane.hold_main(before)  # the next step writes that half
        self._stage_events[half], self._last_stage = event, half
        quarter = self._slots // 4
        # One by one they would cost the host more than the device's step.
        if len(self._pending) > quarter and self._pending[quarter - 1].event.query():
            self._deliver(self._batch(quarter))

    def send(self, owner: Receiver, kind: str, layer: int, first: int, rows: torch.Tensor) -> None:
        """Rows (n, elements) of positions first.. go to the host; the caller lets go of `rows`."""
        if self._pending and self._pending[-1].bulk is None:
            self.drain()
        size = self._rows_at_once(rows.shape[1])
        for start in range(0, len(rows), size):
            piece = rows[start : start + size]
            half, buffer = self._free_half(piece.shape[0], piece.shape[1])
            event = self._lane.download(buffer, piece, transient=True)
            copy = _Copy(weakref.ref(owner), first + start, len(piece), buffer, event, half, (kind, layer))
            self._pending.append(copy)

    def upload(self, rows: int, elements: int, fill: Filler) -> torch.Tensor:
        """Rows (rows, elements) on the device, that `fill(start, buffer)` puts into pinned pieces."""
        self.drain()
        target = torch.empty(rows, elements, dtype=self._dtype, device=self._device)
        size = self._rows_at_once(elements)
        for start in range(0, rows, size):
            half, buffer = self._free_half(min(size, rows - start), elements)
            fill(start, buffer)
            self._upload_events[half] = self._lane.upload(target[start : start + len(buffer)], buffer)
        return target

    def _rows_at_once(self, elements: int) -> int:
        return self.ring.numel() // 2 // elements

    def _free_half(self, rows: int, elements: int) -> tuple[int, torch.Tensor]:
        """A half of the ring (its index, and room for the rows) that no copy reads or writes any more."""
        half, self._half = self._half, 1 - self._half
        while any(copy.bulk and copy.slot == half for copy in self._pending):
            self._deliver(self._batch())
        event = self._upload_events[half]
        if event is not None:
            event.synchronize()
            self._upload_events[half] = None
        start = half * (self.ring.numel() // 2)
        return half, self.ring.view(-1)[start : start + rows * elements].view(rows, elements)

    def drain(self) -> None:
        """Wait for all that was sent, and bring it home.

        An interrupted drain loses nothing: a copy is forgotten only after it was written.
        """
        while self._pending:
            self._deliver(self._batch())

    def _batch(self, most: int | None = None) -> list[_Copy]:
        """The oldest copy, and the steps that follow it in owner, position and slot, `most` in all."""
        batch = [self._pending[0]]
        for copy in itertools.islice(self._pending, 1, most):
            last = batch[-1]
            in_sequence = copy.first == last.first + 1 and copy.slot == last.slot + 1
            steps = copy.bulk is last.bulk is None and copy.count and last.count
            if not (in_sequence and steps and copy.owner() is last.owner()):
                break
            batch.append(copy)
        return batch

    def _deliver(self, batch: list[_Copy]) -> None:
        """Wait for a batch, also for what nobody wants any more: its place in the ring is free then."""
        batch[-1].event.synchronize()
        oldest, owner = batch[0], batch[0].owner()
        if owner is None or not oldest.count:
            pass
        elif oldest.bulk is not None:
            owner.receive_bulk(*oldest.bulk, oldest.first, oldest.source[: oldest.count])
        else:
            owner.receive_steps(oldest.first, self.ring[oldest.slot : oldest.slot + len(batch)])
        for _ in batch:
            self._pending.popleft()

    def cancel(self, owner: Receiver, length: int) -> None:
        """Positions >= `length` of `owner` are not wanted any more, wherever they are on their way."""
        for copy in self._pending:
            if copy.owner() is owner:
                copy.count = max(0, min(copy.count, length - copy.first))

    def entries(self) -> list[LedgerEntry]:
        """The ledger's lines of the buffers made so far."""
        named = (("capture staging", self._staging), ("capture ring", self._ring))
        return [
            entry(name, "workspace", tensor, tensor.nbytes) for name, tensor in named if tensor is not None
        ]


class Filler(Protocol):
    """Puts rows start.. into a host buffer (n, elements)."""

    def __call__(self, start: int, buffer: torch.Tensor) -> None: ...
