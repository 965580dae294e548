"""The windows of an engine that archives: figures, listing, replays, flush."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from larql_kv.errors import BackendUnavailable
from larql_kv.state.windows import WindowState
from larql_kv.state.windows_score import WindowScores

if TYPE_CHECKING:
    from larql_kv.engine.base import KvEngine
    from larql_kv.state.base import State

_ID_BYTES = 4


@dataclass(frozen=True)
class ArchivedWindow:
    """A closed window: its tokens stand at positions first.. ."""

    id: int
    first: int
    token_ids: list[int]
    checkpoint_bytes: int


@dataclass(frozen=True)
class WindowRows:
    """K/V rows of a window, (layers, n, kv_heads, head_dim) in the K/V dtype, keys rotated to their positions
    first..first+n-1."""

    id: int
    first: int
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class WindowStats:
    """What an engine of windows has done, in tokens and bytes.

    total_boundary_bytes    checkpoints and archived ids: what grows with the text
    equivalent_kv_bytes     K/V of every token on every layer, 2 bytes a value
    compression_ratio       of the two; None before a window is closed
    held_bytes, held_ratio  the same against all that the ledger counts, the open window included
    shown_windows           the archived windows that the next row attends
    replayed_windows, replayed_tokens, probed_tokens    run again so far: for rows, and to score a query
    scores                  of the last query that had a choice
    """

    total_tokens: int
    archived_windows: int
    current_window_id: int
    current_window_tokens: int
    checkpoint_bytes: int
    archive_bytes: int
    total_boundary_bytes: int
    equivalent_kv_bytes: int
    compression_ratio: float | None
    held_bytes: int
    held_ratio: float
    shown_windows: tuple[int, ...]
    replayed_windows: int
    replayed_tokens: int
    probed_tokens: int
    scores: WindowScores | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def windows_of(engine: KvEngine, state: State) -> Windows:
    """Raises BackendUnavailable for an engine without windows."""
    if not isinstance(state, WindowState):
        raise BackendUnavailable(
            f"engine {engine.spec.engine_name!r} keeps no windows: build 'unlimited-context' instead"
        )
    return Windows(engine, state)


class Windows:
    """What `KvEngine.windows` gives. Ids count windows from 0."""

    def __init__(self, engine: KvEngine, state: WindowState) -> None:
        self._engine, self._state = engine, state

    def stats(self) -> WindowStats:
        engine, state = self._engine, self._state
        config, archived = engine.model.config, state.archived
        start = state.log.window(archived)[0]
        checkpoints, ids = archived * state.checkpoint_bytes, _ID_BYTES * start
        equivalent = engine.length * config.layer_count * 2 * config.kv_dim * 2
        held = engine.memory_bytes
        return WindowStats(
            total_tokens=engine.length,
            archived_windows=archived,
            current_window_id=archived,
            current_window_tokens=engine.length - start,
            checkpoint_bytes=checkpoints,
            archive_bytes=ids,
            total_boundary_bytes=checkpoints + ids,
            equivalent_kv_bytes=equivalent,
            compression_ratio=equivalent / (checkpoints + ids) if archived else None,
            held_bytes=held,
            held_ratio=equivalent / held,
            shown_windows=state.log.recalled(engine.length),
            replayed_windows=state.work["replayed_windows"],
            replayed_tokens=state.work["replayed_tokens"],
            probed_tokens=state.work["probed_tokens"],
            scores=state.scores,
        )

    def archive(self) -> Iterator[ArchivedWindow]:
        """Every closed window, oldest first."""
        tokens = self._engine.tokens
        for index in range(self._state.archived):
            first, stop = self._state.log.window(index)
            yield ArchivedWindow(index, first, tokens[first:stop], self._state.checkpoint_bytes)

    def replay_window(self, window_id: int) -> WindowRows:
        """The K/V rows of a closed window, run again from its ids and the checkpoint before it: the bits that
        it had when it was open, in float32 on the CPU. The engine's own state does not change.

        Raises IndexError for a window that is not closed; otherwise as `prefill`.
        """
        index, archived = operator.index(window_id), self._state.archived
        if not 0 <= index < archived:
            raise IndexError(f"no closed window {index}: {archived} are archived")
        with self._engine.replaying():
            rows = self._state.replay_window(index)
        return WindowRows(index, self._state.log.window(index)[0], rows[:, 0], rows[:, 1])

    def flush(self) -> int | None:
        """Close the open window though it is not full, and begin the next one behind it. Returns its id;
        None, doing nothing, when it holds no token."""
        with self._engine.replaying():
            return self._state.flush()
