"""Which layers hold their K/V as codes, and by which code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from larql_kv.codec.turbo import TurboCode
from larql_kv.errors import ModelError
from larql_kv.model.config import ModelConfig
from larql_kv.state.kv_rows import KvCode
from larql_kv.state.pages import BLOCK


@dataclass(frozen=True)
class KvCoding:
    """K/V rows become codes when they leave the last `recent` positions, but for the first `sinks`.

    `skip`: so many of the first and of the last layers stay in full precision. `layers`: those that see the
    whole text ("global"), or sliding-window layers too ("all").
    """

    k_bits: int = 4
    v_bits: int = 4
    kind: Literal["lloyd", "uniform"] = "lloyd"
    recent: int = 64
    sinks: int = 4
    skip: int = 0
    layers: Literal["global", "all"] = "global"
    centred: bool = True
    scaled: bool = True

    def code(self, config: ModelConfig) -> KvCode:
        """The code of this model's heads. Raises SpecError for a head size without a format."""
        k, v = (TurboCode(bits, self.kind, config.head_dim) for bits in (self.k_bits, self.v_bits))
        return KvCode(k, v, self.recent, self.centred, self.scaled)

    def layers_coded(self, config: ModelConfig, kept: int | None) -> list[bool]:
        """By layer, whether its rows are coded, when an engine keeps the last `kept` rows (None: all).

        Raises ModelError where that leaves no layer.
        """
        count = config.layer_count
        coded = []
        for index, layer in enumerate(config.layers):
            alive = min((rows for rows in (layer.window, kept) if rows is not None), default=None)
            wanted = self.layers == "all" or layer.window is None
            wanted = wanted and self.skip <= index < count - self.skip
            coded.append(wanted and (alive is None or alive > self.recent + BLOCK))
        if not any(coded):
            raise ModelError(
                f"no layer of this model would hold codes: skip={self.skip} of {count} layers, "
                f"layers={self.layers}, recent={self.recent} of {kept or 'all'} rows kept; a layer is coded "
                f"when it keeps more than recent + {BLOCK} rows"
            )
        return coded
