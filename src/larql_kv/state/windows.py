"""Windows of K/V rows, one after the other: the last row of each is kept as a checkpoint, from which, and
from the token ids, a window that is gone can be run again."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import torch

from larql_kv.errors import ModelError
from larql_kv.model.forward import Ffn
from larql_kv.model.model import Model
from larql_kv.state.kv import KvLayout, KVState
from larql_kv.state.kv_code import KvCoding
from larql_kv.state.ledger import LedgerEntry
from larql_kv.state.pages import BLOCK, PagedRows, allocate_block
from larql_kv.state.tokens import TokenLog
from larql_kv.state.windows_log import Recall, WindowLog
from larql_kv.state.windows_rows import Capture, put_rows, rows_of
from larql_kv.state.windows_score import KeySummaries, WindowScores, token_scores

Score = Literal["both", "tokens", "keys"]
_ROWS_AT_ONCE = 512  # as a prefill runs them


@dataclass(frozen=True)
class _Call:
    """What a call brings that the state does not hold: the ids, and the FFN that rows go through."""

    tokens: TokenLog
    ffn: Ffn


class WindowState(KVState):
    """The K/V rows of the open window, a checkpoint of each closed one, and at most `replay` closed ones that
    the last query brought back.

    What a query brings back stands in the layers' sink pages: rows that are attended wherever the window is.
    """

    def __init__(
        self,
        model: Model,
        window: int,
        replay: int | None = None,
        score: Score = "both",
        coding: KvCoding | None = None,
    ) -> None:
        """`replay`: windows a query brings back, not on layers with a window of their own."""
        super().__init__(model, KvLayout(tumbling=window, coding=coding))
        config = model.config
        self.log = WindowLog(window)
        self.replay, self.score = replay, score
        self.work: Counter[str] = Counter()  # windows and tokens replayed, tokens run to score a query
        self.scores: WindowScores | None = None  # of the last query
        self._seeing = [index for index, layer in enumerate(config.layers) if layer.window is None]
        shape = (config.layer_count, 2, config.kv_heads, config.head_dim)
        self.checkpoints = PagedRows(
            lambda rows: allocate_block((rows, *shape), model.kv_dtype, model.device), None
        )
        self.checkpoint_bytes = 2 * config.layer_count * config.kv_dim * model.kv_dtype.itemsize
        if replay is not None and not self._seeing:
            raise ModelError(
                f"replay={replay} brings K/V rows back to layers that see the whole text, and every layer of "
                f"this {config.architecture} has a window of its own: leave replay out"
            )
        by_keys = replay is not None and score != "tokens"
        self.summaries = KeySummaries(model, self._seeing) if by_keys else None
        self._call: _Call | None = None
        self._settled = 0  # rows of positions below it have had their query
        self._query: Recall | None = None  # about to be asked
        self._shown: tuple[int, ...] = ()  # the windows whose rows stand in the sink pages
        self._closing: list[tuple[int, int]] = []  # (window, its last row) of the chunk that runs
        self._capture: Capture | None = None
        self._memo: dict[int, torch.Tensor] | None = None  # K/V of windows that this replay needed so far
        self._standing_out: torch.Tensor | None = None  # of a probe: the key scores so far

    @property
    def archived(self) -> int:
        """How many windows are closed."""
        return self.log.id_at(self.length)

    # -- running -------------------------------------------------------------------------------------

    def begin_call(self, tokens: TokenLog, ffn: Ffn, query: bool) -> None:
        self._call = _Call(tokens, ffn)
        stop, new = len(tokens), self._settled
        self._settled = max(new, stop)
        if self.replay is None or not query or stop <= new:
            return
        last = self.log.recalls[-1] if self.log.recalls else Recall(0, (), (0, 0))
        at = max(new, self.log.span(stop - 1)[0])
        if new < at and last.ids:  # what lies between is text, and attends what no query asked for
            self.log.recalls.append(Recall(new, (), (new, new)))
        cut = last.asked[1] > new and last.asked[0] >= self.log.span(at)[0]
        self._query = Recall(at, (), (last.asked[0] if cut else at, stop))

    def chunk_end(self, first: int, stop: int) -> int:
        changes = self.log.next_recall(first)
        if self._query is not None and first < self._query.first < stop:
            stop = self._query.first
        if changes is not None:
            stop = min(stop, changes)
        return min(stop, self.log.span(first)[1]) if self.log.recalled(first) else stop

    def begin(self, first: int, count: int) -> None:
        if self._query is not None and first == self._query.first:
            query, self._query = self._query, None
            self.log.recalls.append(replace(query, ids=self._choose(query)))
        self._show(self.log.recalled(first), first)
        super().begin(first, count)
        if self._capture is None:
            opened, closed = self.log.id_at(first), self.log.id_at(first + count)
            self._closing = [
                (index, self.log.window(index)[1] - 1 - first) for index in range(opened, closed)
            ]
            if self._closing:
                self.checkpoints.reserve(opened, closed)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for index, row in self._closing:
            block, slot = divmod(index, BLOCK)
            kept = self.checkpoints.block(block)[slot, layer]
            kept[0], kept[1] = k[row], v[row]
        if self._capture is not None:
            self._capture.take(layer, self.first, k, v)
        if self._standing_out is not None and layer in self._seeing:
            assert self.summaries is not None
            self._standing_out += self.summaries.score(layer, len(self._standing_out), q, self.first)
        return super().attend(layer, q, k, v)

    def attend_at(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int
    ) -> torch.Tensor:
        out = super().attend_at(layer, q, k, v, first)
        if self.summaries is not None and layer in self._seeing and self._closing:
            start, stop = self.log.span(first)
            if first + len(q) == stop:
                keys = rows_of(self.rows[layer].hot, start, stop)[0]
                self.summaries.close(layer, self.log.id_at(first), start, keys)
        return out

    def end_step(self) -> None:
        self._call = self._query = None
        self._closing = []

    def _span(self, position: int) -> tuple[int, int]:
        return self.log.span(position)

    # -- choosing ------------------------------------------------------------------------------------

    def _choose(self, query: Recall) -> tuple[int, ...]:
        """The archived windows that the query is about, ascending; scored only where there is a choice."""
        assert self._call is not None
        assert self.replay is not None
        windows = self.log.id_at(query.first)
        if windows <= self.replay:
            self.scores = None
            return tuple(range(windows))
        tokens = keys = None
        if self.score != "keys":
            starts = [self.log.window(index)[0] for index in range(windows)]
            archive = self._call.tokens.since(0, self.log.window(windows)[0])
            tokens = token_scores(archive, starts, self._call.tokens.since(*query.asked))
        if self.summaries is not None:
            keys = self._key_scores(query, windows)
        self.scores = WindowScores.of(tokens, keys)
        return tuple(sorted(self.scores.order[: self.replay]))

    def _key_scores(self, query: Recall, windows: int) -> torch.Tensor:
        """Runs the query's rows once without anything brought back, for what they ask of each layer."""
        assert self.summaries is not None
        self._summarise_missing()
        probe = self.fork()
        probe.log.recalls.append(Recall(query.first, (), query.asked))
        probe._call, probe.replay, probe.clock = self._call, None, self.clock
        probe._standing_out = torch.zeros(windows)
        probe._run(query.first, query.asked[1])
        self.work["probed_tokens"] += query.asked[1] - query.first
        return probe._standing_out

    def _summarise_missing(self) -> None:
        assert self.summaries is not None
        memo = self._memo_of_shown()
        for index in range(self.summaries.missing):
            start = self.log.window(index)[0]
            rows = self._run_again(index, dict(memo))  # a copy: the whole text's K/V must not pile up
            for layer in self._seeing:
                self.summaries.close(layer, index, start, rows[layer, 0])
        self.summaries.missing = 0

    # -- bringing back -------------------------------------------------------------------------------

    def _show(self, ids: tuple[int, ...], first: int) -> None:
        """Let rows from `first` on attend the archived windows `ids`, ascending."""
        if ids != self._shown:
            memo = self._memo_of_shown()
            windows = [self._recalled(index, memo) for index in ids]
            self._hide()
            if windows:
                for layer, both in zip(self._seeing, torch.cat(windows, 2), strict=True):
                    self.rows[layer].sink_pages = pages = self.rows[layer].new_pages()
                    put_rows(pages, both)
            self._shown = ids
        if ids:
            count = self._rows_shown()
            if self.log.window(ids[-1])[1] == self.log.span(first)[0]:
                count -= 1  # its last row is the checkpoint that the open window begins with
            for layer in self._seeing:
                rows = self.rows[layer]
                if rows.sinks != count:
                    rows.sinks = rows.kept_sinks = count
                    rows.view = None

    def _rows_shown(self) -> int:
        return sum(stop - start for start, stop in map(self.log.window, self._shown))

    def _hide(self) -> None:
        if self._shown:
            for layer in self._seeing:
                rows = self.rows[layer]
                rows.sinks, rows.kept_sinks, rows.sink_pages, rows.view = 0, 0, None, None
        self._shown = ()

    def _memo_of_shown(self) -> dict[int, torch.Tensor]:
        """K/V of the windows that are shown, of layers that see the whole text; where replays start."""
        if self._memo is not None:
            return self._memo
        memo, offset = {}, 0
        pages = [self.rows[layer].sink_pages for layer in self._seeing]
        for index in self._shown:
            start, stop = self.log.window(index)
            end = offset + stop - start
            memo[index] = torch.stack([rows_of(each, offset, end) for each in pages if each is not None])
            offset = end
        return memo

    def _recalled(self, window_id: int, memo: dict[int, torch.Tensor]) -> torch.Tensor:
        """K/V of a closed window on the layers that see the whole text, run again unless `memo` has them."""
        if window_id not in memo:
            memo[window_id] = self._run_again(window_id, memo)[self._seeing]
        return memo[window_id]

    def _run_again(
        self, window_id: int, memo: dict[int, torch.Tensor], stop: int | None = None
    ) -> torch.Tensor:
        """K/V (layers, 2, n, kv_heads, head_dim) that a window had when it was open (below `stop`, where it
        still is): from its ids, the checkpoint before it, and what was brought back for it then."""
        start, end = self.log.window(window_id)
        stop = end if stop is None else stop
        twin = copy.copy(self)
        twin.rows = self.layout.rows(self.model)
        twin.rows_read, twin._shown, twin._memo = Counter(), (), memo
        for mine, theirs in zip(self.rows, twin.rows, strict=True):
            theirs.scale = mine.scale
        twin.summaries, twin._query, twin._standing_out, twin._closing = None, None, None, []
        twin._capture = capture = Capture(self.model, start, stop - start)
        twin._restart(start)
        stage = self.clock.switch("recompute_cold")
        twin._run(start, stop)
        self.clock.switch(stage)
        self.work["replayed_windows"] += 1
        self.work["replayed_tokens"] += stop - start
        return capture.rows

    def _run(self, first: int, stop: int) -> None:
        """Run the ids of positions first..stop-1 of the call."""
        assert self._call is not None
        while first < stop:
            end = self.chunk_end(first, min(stop, first + _ROWS_AT_ONCE))
            rows = self.model.embed(self._call.tokens.since(first, end))
            self.begin(first, end - first)
            self.model.forward(rows, first, self, self._call.ffn)
            self.commit(end)
            first = end

    def replay_window(self, window_id: int) -> torch.Tensor:
        """K/V (layers, 2, n, kv_heads, head_dim) of a closed window, run again; inside a call."""
        return self._run_again(window_id, self._memo_of_shown())

    # -- time ----------------------------------------------------------------------------------------

    def flush(self) -> int | None:
        """Close the open window; its id, None when it is empty. Its last row becomes its checkpoint; inside a
        call."""
        window_id, stop = self.log.id_at(self.length), self.length
        start = self.log.window(window_id)[0]
        if start == stop:
            return None
        # Coded layers hold their rows rotated, and turned back they would not have the same bits.
        again = None if self.layout.coding is None else self._run_again(window_id, {}, stop)
        self.checkpoints.reserve(window_id, window_id + 1)
        block, slot = divmod(window_id, BLOCK)
        for layer, rows in enumerate(self.rows):
            last = rows_of(rows.hot, stop - 1, stop)[:, 0] if again is None else again[layer, :, -1]
            self.checkpoints.block(block)[slot, layer] = last
            if self.summaries is not None and layer in self._seeing:
                self.summaries.close(layer, window_id, start, rows_of(rows.hot, start, stop)[0])
        self.log.flush(stop)
        return window_id

    def trim(self, length: int) -> None:
        asked = min(length, self.length)
        self._query, self._settled = None, min(self._settled, length)
        if self._shown and self.log.window(self._shown[-1])[1] > asked:
            self._hide()
        self.log.trim(length)
        start = self.log.span(asked)[0]
        if asked and self._holds(start, asked):
            self.length = asked
            for rows in self.rows:
                rows.truncate(asked)
        else:
            self._restart(start)
        self.checkpoints.truncate(self.archived)
        if self.summaries is not None:
            self.summaries.trim(self.archived)

    def _holds(self, start: int, length: int) -> bool:
        """Whether every row that position `length` of the window from `start` on sees is still there."""
        for ring, window in {(ring, window) for ring, window in zip(self.rings, self.windows, strict=True)}:
            needed = start - 1 if window is None else max(start - 1, length - window + 1)
            if ring is not None and self._written - ring > max(needed, 0):
                return False
        # What would not be coded yet has to be there in full precision.
        return all(rows.code is None or rows.coded <= rows.code.edge(length) for rows in self.rows)

    def _restart(self, start: int) -> None:
        """Hold what a window that begins at `start` begins with."""
        self.length = self._written = 0
        checkpoint = None if start == 0 else self._checkpoint(self.log.id_at(start) - 1)
        for layer, rows in enumerate(self.rows):
            scale, pages = rows.scale, rows.sink_pages
            rows.sink_pages = None if self._shown else pages
            rows.clear()
            rows.sink_pages = pages
            if self._shown:  # the row before `start` lies with those of the window, whatever is shown
                rows.sinks = rows.kept_sinks = min(rows.kept_sinks, start - 1)
            if checkpoint is not None:
                rows.scale, rows.coded = scale, 0 if rows.code is None else start - 1
                self.put(
                    layer, checkpoint[layer, 0].unsqueeze(0), checkpoint[layer, 1].unsqueeze(0), start - 1
                )
        self.length = self._written = start

    def _checkpoint(self, window_id: int) -> torch.Tensor:
        """(layers, 2, kv_heads, head_dim) float32"""
        block, slot = divmod(window_id, BLOCK)
        return self.checkpoints.block(block)[slot].float()

    def fork(self) -> WindowState:
        twin = copy.copy(self)
        twin.rows = [rows.fork() for rows in self.rows]
        twin.rows_read, twin.work = self.rows_read.copy(), self.work.copy()
        twin.log, twin.checkpoints = self.log.fork(), self.checkpoints.fork()
        twin.summaries = None if self.summaries is None else self.summaries.fork()
        twin._call = twin._query = None
        return twin

    def drop_derivative(self) -> int:
        freed = sum(item.capacity for item in self.entries() if item.role == "derivative")
        self._hide()
        if self.summaries is not None:
            self.summaries.drop(self.archived)
        return freed

    def entries(self) -> list[LedgerEntry]:
        start = self.log.span(self.length)[0]
        in_use = self.length - max(0, start - 1)
        listed = []
        for rows in self.rows:
            items = rows.entries(self._role, self.length if rows.code else in_use)
            if self._shown and rows.sink_pages is not None:
                brought = rows.sink_pages.entries("replayed K/V rows", "derivative", self._rows_shown())
                storages = {item.storage for item in brought}
                items = [item for item in items if item.storage not in storages] + brought
            listed += items
        listed += self.checkpoints.entries("checkpoints", "canonical", self.archived)
        if self.summaries is not None:
            listed += self.summaries.entries(self.archived)
        return listed
