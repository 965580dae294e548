"""A lane on which copies happen as late as the rules allow: what works on it does not lean on luck."""

from __future__ import annotations

import copy
import dataclasses

import torch

from larql_kv.model.model import Model
from larql_kv.state.transit import Event
from tests.models import tiny


class LateEvent:
    """Done when somebody waits, or (`patience` > 0) at that many questions."""

    def __init__(self, lane: LateLane, target: torch.Tensor, source: torch.Tensor) -> None:
        self.lane, self.target, self.source = lane, target, source
        self.done, self.asked = False, 0

    def query(self) -> bool:
        self.asked += 1
        if self.lane.patience and self.asked >= self.lane.patience:
            self.synchronize()
        return self.done

    def synchronize(self) -> None:
        while not self.done:  # a stream keeps its order
            self.lane.waiting.pop(0).land()

    def land(self) -> None:
        self.target.copy_(self.source)
        self.done = True
        del self.target, self.source


class LateLane:
    """The side stream is late; the main stream is the caller, and waits only where it is told to."""

    def __init__(self, patience: int = 0) -> None:
        self.patience = patience
        self.waiting: list[LateEvent] = []

    def download(self, target: torch.Tensor, source: torch.Tensor, transient: bool) -> Event:
        event = LateEvent(self, target, source)
        self.waiting.append(event)
        return event

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        event = LateEvent(self, target, source)
        event.land()
        return event

    def hold_main(self, event: Event) -> None:
        event.synchronize()


def staging(family: str, dtype: str = "float32") -> Model:
    """A tiny model whose backend stages by mask, as a device would: its rows cross to other host memory."""
    model = tiny(family, dtype)
    decoder = copy.copy(model.decoder)
    decoder.masked_capture = True  # type: ignore[attr-defined]
    return dataclasses.replace(model, decoder=decoder)
