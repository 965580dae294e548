"""Streaming an answer: times, best tokens, and Ctrl-C at each moment."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest
import torch

from larql_kv.cli.answer import Answer, best_tokens, stream_answer
from larql_kv.cli.timing import process_age


class FakeEngine:
    """Says `count` tokens; `interrupt_at` raises SIGINT before that token is made (as Ctrl-C would)."""

    reused_tokens = 3

    def __init__(self, count=5, interrupt_at=()):
        self.count, self.interrupt_at, self.made = count, interrupt_at, 0
        tokenizer = SimpleNamespace(token_text=lambda token: f"<{token}>", vocab_size=4)
        self.model = SimpleNamespace(tokenizer=tokenizer)

    def generate(self, ids, max_tokens, with_logits=False, **options):
        for index in range(min(self.count, max_tokens)):
            if index in self.interrupt_at:
                signal.raise_signal(signal.SIGINT)
            self.made += 1
            last = index + 1 == min(self.count, max_tokens)
            logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 3.0]]) if with_logits else None
            yield SimpleNamespace(
                id=index, text=f"t{index} ", finish="length" if last else None, logits=logits
            )


def stream(engine, **options):
    pieces = []
    before = signal.getsignal(signal.SIGINT)
    answer = stream_answer(engine, [1, 2, 3, 4], 10, {}, pieces.append, **options)
    assert signal.getsignal(signal.SIGINT) is before
    assert "".join(pieces) == answer.text
    return answer


def test_a_whole_answer():
    answer = stream(FakeEngine())
    assert (answer.token_ids, answer.finish, answer.reused_tokens) == ([0, 1, 2, 3, 4], "length", 3)
    assert answer.tokens_per_second is not None
    assert answer.first_token_s is not None
    assert answer.first_token_s >= 0


def test_ctrl_c_while_streaming_finishes_the_step():
    engine = FakeEngine(interrupt_at=(2,))
    answer = stream(engine)
    assert (answer.token_ids, answer.text, answer.finish) == ([0, 1, 2], "t0 t1 t2 ", "interrupted")
    assert engine.made == 3


def test_ctrl_c_during_the_prefill_stops_at_once():
    answer = stream(FakeEngine(interrupt_at=(0,)))
    assert (answer.token_ids, answer.finish, answer.first_token_s) == ([], "interrupted", None)


def test_a_second_ctrl_c_does_not_wait():
    class Twice(FakeEngine):
        def generate(self, ids, max_tokens, **options):
            yield SimpleNamespace(id=0, text="a", finish=None, logits=None)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")

    assert stream(Twice()).finish == "interrupted"


def test_no_tokens_asked_for():
    answer = stream(FakeEngine(count=0))
    assert (answer.token_ids, answer.tokens_per_second, answer.finish) == ([], None, "length")


def test_outside_the_main_thread_there_is_no_handler():
    results: list[Answer] = []
    thread = threading.Thread(
        target=lambda: results.append(stream_answer(FakeEngine(), [1], 2, {}, lambda text: None))
    )
    thread.start()
    thread.join()
    assert results[0].token_ids == [0, 1]


def test_best_tokens():
    answer = stream(FakeEngine(), top=3)
    assert [token for token, _, _ in answer.top] == [4, 1, 2]
    assert answer.top[0][1] == ""  # a padded row of the head: no text
    assert answer.top[1][1] == "<1>"
    every = best_tokens(FakeEngine(), torch.zeros(1, 4), 99)  # type: ignore[arg-type]
    assert sum(p for _, _, p in every) == pytest.approx(1.0)


def test_process_age():
    age = process_age()
    assert age is None or 0 < age < 1e6
