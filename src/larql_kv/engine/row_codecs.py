"""What a codec of residual rows promises of the logits."""

from __future__ import annotations

from larql_kv.codec.rows import row_codec
from larql_kv.errors import SpecError

# Nats a step may be off `standard`: at most twice the largest seen on two models over 1,000 tokens past the
# window (docs/codecs.md, `python benchmarks/coded_kl.py`).
_NATS = {"float32": 1e-6, "bf16": 0.01, "int8": 0.05, "int4": 0.2}


def nats_of(codec: str) -> float:
    """The KL bound of cold rows in that codec. Raises SpecError where it is unknown or was not measured."""
    name = row_codec(codec).name
    if name not in _NATS:
        raise SpecError(
            f"codec={codec} has no measured bound on logits and is not offered for cold rows; offered: "
            f"{', '.join(_NATS)} (a layer by calibration: boundary-per-layer)"
        )
    return _NATS[name]
