"""Where windows lie, and how archived ones are scored, against brute force."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from larql_kv.state.windows_log import Recall, WindowLog
from larql_kv.state.windows_score import KeySummaries, fused, ranked, token_scores, unrotated
from tests.models import tiny


def _spans(width: int, flushes: list[int], length: int) -> list[tuple[int, int]]:
    """Closed windows and the open one, position by position."""
    spans, start = [], 0
    for position in range(1, length + 1):
        if position - start == width or (position in flushes and position > start):
            spans.append((start, position))
            start = position
    return [*spans, (start, start + width)]


@pytest.mark.parametrize("width", [1, 2, 7])
def test_windows_and_flushes(width: int) -> None:
    draw = random.Random(width)
    for _ in range(20):
        log, flushed, length = WindowLog(width), [], 0
        for _ in range(8):
            length += draw.randrange(1, 12)
            if log.span(length)[0] < length:
                log.flush(length)
                flushed.append(length)
        length += draw.randrange(12)
        expected = _spans(width, flushed, length)
        assert [log.window(index) for index in range(log.id_at(length) + 1)] == expected
        for index, (start, stop) in enumerate(expected):
            assert all(log.id_at(position) == index for position in range(start, min(stop, length)))
            assert all(log.span(position) == (start, stop) for position in range(start, min(stop, length)))
        keep = draw.randrange(length + 1)
        twin = log.fork()
        log.trim(keep)
        kept = [at for at in flushed if at <= keep]
        assert [log.window(index) for index in range(log.id_at(keep) + 1)] == _spans(width, kept, keep)
        assert [twin.window(index) for index in range(len(expected))] == expected


def test_recalls_hold_until_the_next_and_go_with_their_positions() -> None:
    log = WindowLog(4)
    log.recalls += [Recall(9, (0, 1), (9, 11)), Recall(14, (), (14, 14)), Recall(20, (2,), (20, 22))]
    assert [log.recalled(at) for at in (0, 8, 9, 13, 14, 19, 20, 99)] == [
        (), (), (0, 1), (0, 1), (), (), (2,), (2,)
    ]  # fmt: skip
    assert [log.next_recall(at) for at in (0, 9, 14, 20)] == [9, 14, 20, None]
    log.trim(20)
    assert log.recalled(30) == ()
    log.trim(10)
    assert log.recalled(30) == (0, 1)
    log.trim(9)
    assert not log.recalls


def _bm25(documents: list[list[int]], query: list[int]) -> list[float]:
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for term in set(query):
            having = sum(term in other for other in documents)
            rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            norm = 1.2 * (1 - 0.75 + 0.75 * len(document) / mean)
            score += rarity * counts[term] * 2.2 / (counts[term] + norm)
        scores.append(score)
    return scores


def test_token_scores_are_bm25() -> None:
    draw = random.Random(1)
    for sizes in ([5], [5, 5, 5], [1, 9, 4, 4, 2]):
        documents = [[draw.randrange(12) for _ in range(size)] for size in sizes]
        query = [draw.randrange(14) for _ in range(6)] + [5, 5]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        ids = torch.tensor([token for document in documents for token in document])
        got = token_scores(ids, starts, torch.tensor(query))
        assert got.tolist() == pytest.approx(_bm25(documents, query), abs=1e-12)


def test_a_rare_token_outweighs_common_ones() -> None:
    documents = torch.tensor([1, 2, 3, 1, 2, 9, 1, 2, 4, 1, 2, 3])
    assert ranked(token_scores(documents, [0, 3, 6, 9], torch.tensor([1, 2, 9])))[0] == 1


def test_equal_windows_rank_the_later_first() -> None:
    assert ranked(torch.tensor([1.0, 2.0, 1.0, 2.0])) == [3, 1, 2, 0]
    assert fused([[0, 1, 2], [1, 0, 2]]) == [1, 0, 2]
    assert fused([[2, 0, 1]]) == [2, 0, 1]
    assert fused([[3, 0, 1, 2], [2, 0, 1, 3]])[:2] == [3, 2]  # the first of either ranking is never lost


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama-yarn"])
def test_unrotated_keys_have_no_position(family: str) -> None:
    """The K of one residual row, at two positions."""
    model = tiny(family)
    rows = torch.randn(6, model.config.hidden)
    rope = model.config.layers[0].rope
    near, far = (model.decoder.project_kv(0, rows, first)[0] for first in (0, 777))
    assert (near - far).abs().max() > 0.1
    torch.testing.assert_close(unrotated(near, 0, rope), unrotated(far, 777, rope), atol=1e-4, rtol=1e-4)


def test_key_summaries_bound_every_row_and_find_what_stands_out() -> None:
    model = tiny("llama")
    config = model.config
    rope = config.layers[1].rope
    summaries = KeySummaries(model, [1])
    keys = torch.randn(70, 5, config.kv_heads, config.head_dim)
    keys[66, 3] *= 6
    for index, k in enumerate(keys):
        summaries.close(1, index, 5 * index, k)
    plain = torch.stack([unrotated(k, 5 * index, rope) for index, k in enumerate(keys)])
    bounds = summaries.pages.read(0, 70)[:, 0].float()
    torch.testing.assert_close(bounds[:, 0], plain.amin(1), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(bounds[:, 1], plain.amax(1), rtol=2**-8, atol=1e-6)
    # A query that wants row 3 of window 66, from position 400.
    wanted = plain[66, 3].repeat_interleave(config.heads // config.kv_heads, 0)
    q = -unrotated(-wanted.unsqueeze(0), -400, rope)  # turned the other way: as a query at 400 has it
    scores = summaries.score(1, 70, q, 400)
    assert scores.shape == (70,)
    assert int(scores.argmax()) == 66
    live = sum(item.live for item in summaries.entries(70) if item.role == "derivative")
    assert live == 70 * summaries.row_bytes
    summaries.trim(3)
    assert summaries.pages.block_count == 1
    summaries.drop(3)
    assert summaries.missing == 3
    assert not [item for item in summaries.entries(3) if item.role == "derivative"]
