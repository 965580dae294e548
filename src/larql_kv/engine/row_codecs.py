"""What a codec of residual rows promises of the logits."""

from __future__ import annotations

from larql_kv.codec.rows import row_codec

# Nats a step may be off `standard`: at most twice the largest seen over 1,000 tokens past the window
# (docs/codecs.md, `python benchmarks/coded_kl.py`).
_NATS = {
    row_codec(name).name: nats
    for name, nats in {"float32": 1e-6, "bf16": 0.01, "int8": 0.05, "int4": 0.2}.items()
}
_COARSE = 5.0  # everything else


def nats_of(codec: str) -> float:
    """The KL bound of cold rows in that codec. Raises SpecError for an unknown one."""
    return _NATS.get(row_codec(codec).name, _COARSE)
