"""Rows and vectors <-> bytes. Importing this package registers every row codec."""

from __future__ import annotations

import importlib
import pkgutil

from larql_kv.codec.rows import Measured, RowCodec, channel_weights, codec_names, row_codec
from larql_kv.codec.turbo import TurboCode

__all__ = ["Measured", "RowCodec", "TurboCode", "channel_weights", "codec_names", "row_codec"]

for _module in sorted(item.name for item in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
