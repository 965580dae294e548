"""One answer: run the engine, stream the text, take the times, and stop well on Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from larql_kv.cli.timing import seconds_since_start

if TYPE_CHECKING:
    import torch

    from larql_kv.engine import KvEngine


@dataclass
class Answer:
    """What came back for one prompt. `token_ids` includes the stop token, `text` does not."""

    prompt_tokens: int
    reused_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = "length"  # stop, length, context, or interrupted
    prefill_s: float = 0.0  # until the first token: prefill, head and its choice
    decode_s: float = 0.0  # the other tokens
    first_token_s: float | None = None  # since the command began
    top: list[tuple[int, str, float]] = field(default_factory=list)  # id, text, probability

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate, the first token (which the prefill gives) left out; None for fewer than two."""
        steps = len(self.token_ids) - 1
        return steps / self.decode_s if steps > 0 and self.decode_s > 0 else None


class Interrupts:
    """Ctrl-C while an answer streams: the step in progress is finished first, so that engine and history
    agree on what was said. A second Ctrl-C, or one before the first token, interrupts at once (the
    engine rolls a broken call back)."""

    def __init__(self) -> None:
        self.requested = False
        self.streaming = False

    def _handle(self, _signal: int, _frame: Any) -> None:
        if self.requested or not self.streaming:
            self.requested = True
            raise KeyboardInterrupt
        self.requested = True

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Handle SIGINT inside the block (in the main thread; elsewhere Python allows no handler)."""
        try:
            before = signal.signal(signal.SIGINT, self._handle)
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def stream_answer(
    engine: KvEngine,
    ids: Sequence[int],
    max_tokens: int,
    options: dict[str, Any],
    write: Callable[[str], None],
    top: int = 1,
    began: float | None = None,
) -> Answer:
    """Continue `ids`, calling `write` with each piece of text. `top` > 1 keeps the best first tokens.

    An interrupted answer is returned as far as it came, finish `interrupted`; other errors are raised.
    """
    answer = Answer(prompt_tokens=len(ids))
    interrupts = Interrupts()
    start = now = time.perf_counter()
    pieces = []
    with interrupts.caught():
        try:
            for token in engine.generate(ids, max_tokens, with_logits=top > 1, **options):
                now = time.perf_counter()
                if not answer.token_ids:
                    interrupts.streaming = True
                    _first_token(answer, engine, now - start, start if began is None else began)
                    if top > 1 and token.logits is not None:
                        answer.top = best_tokens(engine, token.logits, top)
                answer.token_ids.append(token.id)
                pieces.append(token.text)
                if token.text:
                    write(token.text)
                answer.finish = token.finish or answer.finish
                if interrupts.requested:
                    answer.finish = token.finish or "interrupted"
                    break
        except KeyboardInterrupt:
            answer.finish = "interrupted"
    if answer.token_ids:
        answer.decode_s = now - start - answer.prefill_s
    else:  # nothing was asked for, or the prefill was interrupted
        _first_token(answer, engine, time.perf_counter() - start, None)
    answer.text = "".join(pieces)
    return answer


def _first_token(answer: Answer, engine: KvEngine, prefill_s: float, began: float | None) -> None:
    answer.prefill_s = prefill_s
    answer.reused_tokens = engine.reused_tokens
    if began is not None:
        answer.first_token_s = seconds_since_start(began)


def best_tokens(engine: KvEngine, logits: torch.Tensor, count: int) -> list[tuple[int, str, float]]:
    """The `count` most probable ids of logits (1, vocab), with their text and probability."""
    probabilities = logits[0].double().softmax(-1)
    best = probabilities.topk(min(count, len(probabilities)))
    text_of = engine.model.tokenizer.token_text
    vocabulary = engine.model.tokenizer.vocab_size
    return [
        (token, text_of(token) if token < vocabulary else "", value)
        for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
