"""The forms an engine may hold K/V rows in, as its key `kv` names them."""

from __future__ import annotations

from typing import Literal

from larql_kv.state.kv_code import KvCoding

KvForm = Literal["full", "turbo4", "turbo3", "turbo2"]

# Nats that a step may be off the same engine with full K/V, by (bits of K, bits of V): at most twice the
# largest seen on two models over 1,000 tokens (docs/turbo-quant.md).
_NATS = {(4, 4): 0.14, (4, 3): 0.3, (3, 4): 0.6, (3, 3): 0.5}
_UNIFORM_NATS = {(4, 4): 0.2}
_COARSE = 5.0  # 2 bits, and uniform levels at fewer than 4


def coding_of(form: KvForm) -> KvCoding | None:
    """How rows are coded in that form; None for full precision."""
    return None if form == "full" else KvCoding(bits := int(form[-1]), bits)


def nats_of(coding: KvCoding) -> float:
    """The KL bound of rows coded so."""
    nats = _NATS if coding.kind == "lloyd" else _UNIFORM_NATS
    return nats.get((coding.k_bits, coding.v_bits), _COARSE)
