"""What must be true of a model for residual rows to be a sufficient state."""

from __future__ import annotations

from larql_kv.errors import ModelError
from larql_kv.model.config import ModelConfig

_SUFFICIENT = frozenset({"residual", "position"})


def require_residual_sufficiency(config: ModelConfig, engine_name: str) -> None:
    """Refuse a model whose K/V are not a function of (residual row entering the layer, absolute position).

    That is: the residual determines the layer's K/V, norms keep no state, the positional code and the mask
    depend on positions only. Raises ModelError with the reason.
    """
    extra = config.kv_inputs - _SUFFICIENT
    if extra:
        raise ModelError(
            f"engine {engine_name!r} cannot keep residual rows for {config.architecture!r}: its K/V also "
            f"depend on {', '.join(sorted(extra))}; use engine 'standard'"
        )
