"""Which capture mask an engine runs under: what is staged from the device to the host each step.

LARQL_W10_DISABLE=1   engines of the cascade stage everything (`full`), to bisect a fault of the masks
LARQL_W10_HONLY=1     accepted, and without effect: the cascade takes the best mask by itself
"""

from __future__ import annotations

import os

from larql_kv.backends.base import Decoder
from larql_kv.errors import SpecError
from larql_kv.state.base import State
from larql_kv.state.bridge import CaptureMask, stages_by_mask

DISABLE = "LARQL_W10_DISABLE"


def cascade_disabled() -> bool:
    """Whether the environment asks for `full` wherever something may be staged."""
    return os.environ.get(DISABLE, "") not in ("", "0")


def parse_mask(mask: str | CaptureMask) -> CaptureMask:
    """A mask by its name. Raises SpecError."""
    try:
        return CaptureMask(mask)
    except ValueError:
        raise SpecError(f"unknown capture mask {mask!r} (one of: {', '.join(CaptureMask)})") from None


def mask_in_force(
    state: State, decoder: Decoder, engine_name: str, asked: CaptureMask | None = None
) -> CaptureMask:
    """The mask that `state` runs under on this backend; `asked` None: the best one.

    A backend that cannot stage by mask stages everything; on the CPU, where the host is the device, that
    moves no byte. Raises SpecError for a mask that does not serve the engine.
    """
    best = state.best_capture
    if best is None:
        if asked not in (None, CaptureMask.NONE):
            raise SpecError(
                f"engine {engine_name!r} stages nothing to the host: its capture mask is always none, "
                f"not {asked}"
            )
        return CaptureMask.NONE
    if asked is None:
        asked = CaptureMask.FULL if cascade_disabled() else best
    if asked.reach < best.reach:
        raise SpecError(
            f"capture mask {asked} does not serve {engine_name!r} with residual rows on the host: each step "
            f"has to stage them (at least {best})"
        )
    return asked if stages_by_mask(decoder) else CaptureMask.FULL
