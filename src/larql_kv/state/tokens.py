"""The token ids of a conversation: 4 bytes each, growth amortised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from larql_kv.state.ledger import LedgerEntry, entry

_FIRST_CAPACITY = 256


class TokenLog:
    """An append-only list of token ids with `truncate`; int32, so 4 bytes a token."""

    def __init__(self) -> None:
        self._ids = torch.empty(_FIRST_CAPACITY, dtype=torch.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, ids: Sequence[int]) -> None:
        needed = self._length + len(ids)
        if needed > len(self._ids):
            grown = torch.empty(max(needed, len(self._ids) * 3 // 2), dtype=torch.int32)
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
        self._ids[self._length : needed] = torch.tensor(ids, dtype=torch.int32)
        self._length = needed

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def since(self, start: int, stop: int | None = None) -> torch.Tensor:
        """Ids from position `start` on, below `stop` where it is given, int64 (n,), a copy."""
        return self._ids[start : self._length if stop is None else stop].to(torch.int64)

    def to_list(self) -> list[int]:
        return self._ids[: self._length].tolist()

    def fork(self) -> TokenLog:
        twin = TokenLog()
        twin._ids, twin._length = self._ids.clone(), self._length
        return twin

    def ledger_entry(self, role: str) -> LedgerEntry:
        return entry("token ids", role, self._ids, 4 * self._length)  # type: ignore[arg-type]
