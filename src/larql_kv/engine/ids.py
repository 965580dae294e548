"""Token ids as they are handed in: what is no list of ids, or does not fit the model, is refused by name."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set

import torch

from larql_kv.errors import EmptyPrompt, ModelError
from larql_kv.model.config import ModelConfig


def token_list(token_ids: Sequence[int] | torch.Tensor) -> list[int]:
    """Ids as Python ints, from any sequence or 1-D array of integers.

    Raises ModelError for anything that is not a list of integers: text, floats and flags would be coerced
    into ids that nobody meant.
    """
    if isinstance(token_ids, (str, bytes, bytearray, Mapping, Set)):
        raise ModelError(f"token ids must be a sequence of integers, got {type(token_ids).__name__}")
    try:
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)  # type: ignore[union-attr]
        if any(isinstance(token, bool) for token in ids):
            raise TypeError("bool")
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ModelError(f"token ids must be a sequence of integers: {error}") from error


def check_ids(ids: Sequence[int], held: int, config: ModelConfig) -> None:
    """Refuse `ids` that cannot follow `held` tokens: EmptyPrompt, ModelError."""
    if not ids:
        raise EmptyPrompt()
    bad = next((token for token in ids if not 0 <= token < config.vocab), None)
    if bad is not None:
        raise ModelError(f"token id {bad} is outside the vocabulary of {config.vocab} ids")
    if held + len(ids) > config.context:
        over = held + len(ids) - config.context
        held_text = f", or reset ({held} are held)" if held else ""
        raise ModelError(
            f"{held + len(ids)} tokens do not fit the model's context of {config.context}: "
            f"shorten the text by {over}{held_text}"
        )
