"""The one decoder forward pass. It serves prefill and decode, every engine, every architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from larql_kv.errors import BackendFailure
from larql_kv.model.clock import NULL_CLOCK, Clock

if TYPE_CHECKING:
    from larql_kv.backends.base import Decoder

AfterLayer = Callable[[int, torch.Tensor], torch.Tensor]


class AttentionState(Protocol):
    """The part of a state that the forward pass sees."""

    def observe(self, layer: int, rows: torch.Tensor) -> None: ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class Ffn(Protocol):
    """An FFN backend: `x` (n, hidden) float32, already normed, to (n, hidden) float32."""

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor: ...


def forward(
    decoder: Decoder,
    rows: torch.Tensor,
    first_position: int,
    layers: range,
    state: AttentionState,
    ffn: Ffn,
    after_layer: AfterLayer | None = None,
    clock: Clock = NULL_CLOCK,
) -> torch.Tensor:
    """Run hidden `rows` (n, hidden) float32 at positions first_position.. through `layers`.

    Returns (n, hidden): what left the last of those layers, before the final norm. `after_layer(layer,
    rows)` may replace the rows that leave a layer (injection). `rows` is not changed.
    """
    hidden = rows.clone()
    for layer in layers:
        state.observe(layer, hidden)
        clock.switch("attention")
        q, k, v = decoder.attention_inputs(layer, hidden, first_position)
        decoder.add_attention_(layer, hidden, state.attend(layer, q, k, v))
        clock.switch("ffn")
        update = ffn.forward(layer, decoder.ffn_input(layer, hidden))
        if (
            not isinstance(update, torch.Tensor)
            or update.shape != hidden.shape
            or update.dtype != hidden.dtype
        ):
            raise BackendFailure(
                f"the FFN gave {_described(update)} for layer {layer}, expected float32 {tuple(hidden.shape)}"
            )
        decoder.add_ffn_(layer, hidden, update.contiguous())
        if after_layer is not None:
            hidden = after_layer(layer, hidden)
    return hidden


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
