"""The forms an engine may hold K/V rows in, as its key `kv` names them."""

from __future__ import annotations

from typing import Literal

from larql_kv.state.kv_code import KvCoding

KvForm = Literal["full", "turbo4", "turbo3", "turbo2"]

# Nats that a step may be off the same engine with full K/V, by the fewer of the bits of K and of V:
# docs/turbo-quant.md has the runs that they are at most twice of.
_LLOYD_NATS = {4: 0.14, 3: 0.6, 2: 5.0}
_UNIFORM_NATS = {4: 0.2, 3: 0.6, 2: 5.0}


def coding_of(form: KvForm) -> KvCoding | None:
    """How rows are coded in that form; None for full precision."""
    return None if form == "full" else KvCoding(bits := int(form[-1]), bits)


def nats_of(coding: KvCoding) -> float:
    """The KL bound of rows coded so."""
    nats = _LLOYD_NATS if coding.kind == "lloyd" else _UNIFORM_NATS
    return nats[min(coding.k_bits, coding.v_bits)]
