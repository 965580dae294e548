"""What residual rows cost on a model, beside the K/V they derive: on grouped-query models they are larger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from larql_kv.model.model import Model
from larql_kv.state.pages import BLOCK

if TYPE_CHECKING:
    from larql_kv.codec.rows import RowCodec

_TOKENS = 4096  # that costs are stated at, or the model's context


def state_bytes(model: Model, codecs: Sequence[RowCodec], window: int | None, tokens: int) -> tuple[int, int]:
    """Live bytes of a text's residual rows, cold ones in `codecs` (one a layer), and of its K/V: those that
    are derived, which `standard` would keep. Sliding layers hold their window."""
    config, size = model.config, model.kv_dtype.itemsize
    rows = kv = 0
    for layer, codec in zip(config.layers, codecs, strict=True):
        hot = alive = min(tokens, layer.window or tokens)
        cold = 0
        if window is not None and (layer.window is None or layer.window > window + BLOCK):
            coded = max(0, tokens - 1 - window) // BLOCK * BLOCK
            hot = tokens - coded
            cold = coded if layer.window is None else min(coded, layer.window - window)
        rows += hot * config.hidden * size + cold * codec.bytes_per_row(config.hidden)
        kv += 2 * alive * config.kv_dim * size
    return rows, kv


def residual_cost(model: Model, codecs: Sequence[RowCodec], window: int | None) -> str:
    """One line: residual rows against plain K/V on this model, with derived K/V and without (parked)."""
    tokens = min(_TOKENS, model.config.context)
    rows, kv = state_bytes(model, codecs, window, tokens)
    form = str(model.kv_dtype).removeprefix("torch.")
    verdict = "less" if rows < kv else "more"
    parked = "as much as" if rows == kv else f"{abs(rows / kv - 1):.0%} {verdict} than"
    uncoded = "" if window is not None else "nothing is coded without window=N; "
    return (
        f"{uncoded}at {tokens:,} tokens a step holds {rows / kv:.0%} more than plain K/V in {form} "
        f"(residual rows {rows / 1e6:.1f} MB beside derived K/V of {kv / 1e6:.1f} MB); with K/V dropped "
        f"(parked) the rows are {parked} plain K/V"
    )
