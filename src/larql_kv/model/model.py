"""A loaded model: config, tokenizer, and its weights in one backend's execution form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from larql_kv.errors import ModelError
from larql_kv.model.clock import NULL_CLOCK, Clock
from larql_kv.model.forward import AfterLayer, AttentionState, Ffn, forward

if TYPE_CHECKING:
    from larql_kv.backends.base import Decoder
    from larql_kv.ffn.cache import FfnCache
    from larql_kv.model.config import ModelConfig
    from larql_kv.model.tensors import TensorSource
    from larql_kv.model.tokenizer import Tokenizer


@dataclass
class Model:
    """A decoder-only transformer, ready to run. Its state lives in engines, never here."""

    config: ModelConfig
    tokenizer: Tokenizer
    decoder: Decoder
    source: str  # where it came from, for messages
    tensors: TensorSource = field(repr=False)  # as stored, patches of a vindex applied

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of K/V and residual rows: float32 when the model runs in float32, else bfloat16."""
        return self.decoder.kv_dtype

    @cached_property
    def ffn_l2_cache(self) -> FfnCache:
        """The cache of FFN outputs that walks on this model may share: keys of whole inputs, 4,096 entries a
        layer, new ones dropped when full. Assign an `FfnCache.lru(...)` for one that makes room instead."""
        made = import_module("larql_kv.ffn.cache")  # by name: FFN backends are built on models
        return made.FfnCache(self.config.layer_count)

    def embed(self, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Token ids (n,) -> hidden rows (n, hidden) float32.

        Raises ModelError for an id outside the vocabulary.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        try:
            return self.decoder.embed(ids)  # checks the range itself: it reads memory at these offsets
        except ValueError:
            bad = next(
                (token for token in ids.flatten().tolist() if not 0 <= token < self.config.vocab), None
            )
            if bad is None:
                raise
            raise ModelError(f"token id {bad} is outside the vocabulary of {self.config.vocab} ids") from None

    def forward(
        self,
        rows: torch.Tensor,
        first_position: int,
        state: AttentionState,
        ffn: Ffn,
        layers: range | None = None,
        after_layer: AfterLayer | None = None,
        clock: Clock = NULL_CLOCK,
    ) -> torch.Tensor:
        """`forward.forward` over this model's weights; all layers unless a range is given."""
        layers = range(self.config.layer_count) if layers is None else layers
        return forward(self.decoder, rows, first_position, layers, state, ffn, after_layer, clock)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: (n, hidden) -> (n, vocab) float32."""
        return self.decoder.logits(hidden)
