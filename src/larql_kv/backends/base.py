"""What a backend offers the forward pass: the decoder's arithmetic, in composite steps that it may fuse."""

# coverage: types (imported by type checkers only)
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from larql_kv.codec.turbo import TurboCode
    from larql_kv.state.kv_rows import KvRows


class Decoder(Protocol):
    """One model's weights in a backend's execution form. Rows are float32 (n, hidden), contiguous.

    `attention_inputs` and `project_kv` make K/V by one row-invariant projection: a row's K/V have the
    same bits however many rows are run together, so that K/V derived again are the K/V that were dropped.
    On CUDA they are so within the noise floor: one row and many go through different products there.
    """

    name: str
    kv_dtype: torch.dtype
    device: torch.device

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 (n,) -> rows (n, hidden), embedding scale applied."""
        ...

    def attention_inputs(
        self, layer: int, rows: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q (n, heads, head_dim), k and v (n, kv_heads, head_dim), normed, rotated; k, v hold
        kv_dtype values."""
        ...

    def project_kv(self, layer: int, rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v alone, the bits `attention_inputs` gives."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        past: KvRows,
        first: int,
        q_codes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention over what `past` attends of its rows and the new ones -> (n, heads * head_dim).
        Rows held as codes meet the queries `q_codes`."""
        ...

    def append_rows(self, k: torch.Tensor, v: torch.Tensor, past: KvRows, first: int, skip: int) -> None:
        """Write K/V rows skip.. (position first + skip ..) into reserved slots of full precision."""
        ...

    def check_kv_rows(self, rows: Sequence[KvRows]) -> None:
        """Raises BackendUnavailable for layers whose rows this backend cannot attend."""
        ...

    def turned(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: KvRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a coded layer: (q, q_codes, k, v) rotated, fresh. q_codes were multiplied by `rows.scale`
        before; k and v hold values of the K/V dtype."""
        ...

    def turned_back(self, out: torch.Tensor, rows: KvRows) -> torch.Tensor:
        """Attention's result (n, heads * head_dim) out of the rotated domain; may change `out`."""
        ...

    def encode(
        self,
        code: TurboCode,
        x: torch.Tensor,
        mean: torch.Tensor | None,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Code rotated x (heads, n, head_dim) float32, less mean (heads, head_dim), into codes (heads, n,
        bytes) uint8 and scales (heads, n) float32: views of a block."""
        ...

    def attention_norm(self, layer: int) -> torch.Tensor:
        """The weight (hidden,) float32 of the norm that a layer's rows meet first."""
        ...

    def add_attention_(self, layer: int, rows: torch.Tensor, attended: torch.Tensor) -> None:
        """Output projection (and post-norm), added to rows in place."""
        ...

    def ffn_input(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """The FFN's normed input (n, hidden)."""
        ...

    def dense_ffn(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The model's own FFN on a normed input (n, hidden)."""
        ...

    def add_ffn_(self, layer: int, rows: torch.Tensor, update: torch.Tensor) -> None:
        """Post-norm (where the model has one) of the FFN's output, added to rows in place."""
        ...

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and head: (n, hidden) -> (n, vocab) float32."""
        ...

    def prepare(self) -> None:
        """Make every execution form ahead of the first prefill."""
        ...

    def facts(self) -> dict[str, Any]:
        """Resident and per-step weight bytes, and the execution form, for `info` and the bench."""
        ...
