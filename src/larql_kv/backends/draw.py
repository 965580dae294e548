"""How a token is drawn from logits, where a device does it: the settings, and nothing of how."""

from __future__ import annotations

from typing import NamedTuple


class Draw(NamedTuple):
    """Cuts in this order, after the temperature. The random number of a draw is a function of the seed and
    the position alone."""

    temperature: float  # > 0
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    seed: int
