"""Where windows begin and end, and which archived ones each query brought back."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recall:
    """From position `first` on (until the next recall), rows attend the archived windows `ids` too.

    `asked` are the positions (first, stop) of the query that chose them; empty where no query did.
    """

    first: int
    ids: tuple[int, ...]
    asked: tuple[int, int]


@dataclass
class WindowLog:
    """Windows of `width` tokens, one after the other; `flush` ends one early and the next begins there.

    Positions are absolute, window ids count from 0, spans are (first position, one past the last).
    """

    width: int
    runs: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # (position, its window's id)
    recalls: list[Recall] = field(default_factory=list)

    def id_at(self, position: int) -> int:
        """The window that a row at `position` belongs to; so many windows end at or before `position`."""
        start, first_id = self.runs[bisect_right(self.runs, position, key=lambda run: run[0]) - 1]
        return first_id + (position - start) // self.width

    def window(self, window_id: int) -> tuple[int, int]:
        """The span of a window, as if it were full where nothing ended it yet."""
        at = bisect_right(self.runs, window_id, key=lambda run: run[1]) - 1
        start, first_id = self.runs[at]
        first = start + (window_id - first_id) * self.width
        stop = first + self.width
        return first, min(stop, self.runs[at + 1][0]) if at + 1 < len(self.runs) else stop

    def span(self, position: int) -> tuple[int, int]:
        """The span of the window that a row at `position` belongs to."""
        return self.window(self.id_at(position))

    def flush(self, length: int) -> None:
        """End the window that is open, and not empty, after `length` positions."""
        self.runs.append((length, self.id_at(length) + 1))

    def recalled(self, position: int) -> tuple[int, ...]:
        """The archived windows that a row at `position` attends, ascending."""
        at = bisect_right(self.recalls, position, key=lambda recall: recall.first)
        return self.recalls[at - 1].ids if at else ()

    def next_recall(self, position: int) -> int | None:
        """The first position after `position` at which that changes."""
        at = bisect_right(self.recalls, position, key=lambda recall: recall.first)
        return self.recalls[at].first if at < len(self.recalls) else None

    def trim(self, length: int) -> None:
        """Forget what happened after the first `length` positions; a flush at `length` itself stays."""
        while self.runs[-1][0] > length:
            self.runs.pop()
        while self.recalls and self.recalls[-1].first >= length:
            self.recalls.pop()

    def fork(self) -> WindowLog:
        return WindowLog(self.width, list(self.runs), list(self.recalls))
