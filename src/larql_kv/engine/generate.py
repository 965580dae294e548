"""The generation loop: prefix reuse, sampling, stop tokens and strings, streaming text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from larql_kv.engine.base import KvEngine
from larql_kv.engine.ids import token_list
from larql_kv.engine.sampling import SamplingOptions
from larql_kv.engine.source import token_source
from larql_kv.errors import EmptyPrompt
from larql_kv.ffn.base import FfnBackend

__all__ = ["SamplingOptions", "Token", "generate", "generate_with_engine"]


@dataclass(frozen=True)
class Token:
    """One generated token. `text` is what became printable with it: never part of a UTF-8 character,
    nothing that may still turn out to be a stop string. `finish` is set on the last token."""

    id: int
    text: str
    finish: str | None = None  # "stop" (token or string), "length", "context"
    logits: torch.Tensor | None = None  # (1, vocab) float32 that it was chosen from, when asked for


def generate(
    engine: KvEngine, prompt: str | Sequence[int], max_tokens: int, options: SamplingOptions
) -> Iterator[Token]:
    """Yield the continuation of `prompt` token by token. Whenever iteration stops, the engine holds the
    prompt and every token that was run (all but the last one chosen).

    Raises, at the call: ValueError for a negative `max_tokens`, EmptyPrompt. While iterating: as `prefill`,
    and InvariantViolation when the engine was used for something else in between.
    """
    if max_tokens < 0:
        raise ValueError(f"max_tokens must be >= 0, got {max_tokens}")
    ids = engine.model.tokenizer.encode(prompt) if isinstance(prompt, str) else token_list(prompt)
    if not ids:
        raise EmptyPrompt()
    return _tokens(engine, ids, max_tokens, options)


def _tokens(engine: KvEngine, ids: list[int], max_tokens: int, options: SamplingOptions) -> Iterator[Token]:
    source = token_source(engine, prefill_reusing(engine, ids), options)
    text, context = _TextStream(engine, options.stop_strings), engine.model.config.context
    stop_ids = frozenset() if options.ignore_stop_tokens else engine.model.tokenizer.stop_ids
    try:
        for count in range(1, max_tokens + 1):
            limit = "length" if count == max_tokens else "context" if len(ids) + count > context else None
            token, logits = source.next(more=limit is None)
            piece, stopped = ("", True) if token in stop_ids else text.push(token)
            finish = "stop" if stopped else limit
            if finish is not None:
                tail, stopped = text.flush()
                piece, finish = piece + tail, "stop" if stopped else finish
            yield Token(token, piece, finish, logits if options.with_logits else None)
            if finish is not None:
                return
    finally:
        source.close()


def prefill_reusing(engine: KvEngine, ids: list[int]) -> torch.Tensor:
    """Make the engine hold exactly `ids`, running only what differs; returns the last hidden (1, hidden).

    Interrupted, it holds the common prefix. Raises as `prefill`, and then before anything is forgotten.
    """
    engine.check_ids(ids, held=0)
    held = engine.tokens
    common = 0
    while common < min(len(held), len(ids) - 1) and held[common] == ids[common]:
        common += 1  # the last token is run in any case: its hidden is what is asked for
    if common:
        engine.check_ffn()
    recomputed = engine.trim(common)
    engine.reused_tokens = engine.held_positions - recomputed
    return engine.prefill(ids[common:])


class _TextStream:
    """Text that is safe to print: whole characters, held back while a stop string may begin."""

    def __init__(self, engine: KvEngine, stops: tuple[str, ...]) -> None:
        self._decoder = engine.model.tokenizer.stream()
        self._stops = stops
        self._held = ""
        self._stopped = False

    def push(self, token: int) -> tuple[str, bool]:
        """(printable text, whether a stop string was reached)"""
        return self._take(self._decoder.push(token), final=False)

    def flush(self) -> tuple[str, bool]:
        """What is still held, at the end; nothing after a stop string."""
        return ("", True) if self._stopped else self._take(self._decoder.flush(), final=True)

    def _take(self, piece: str, final: bool) -> tuple[str, bool]:
        self._held += piece
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._stopped = True
            return self._held[: min(found)], True
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready, False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next(
        (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0
    )


def generate_with_engine(
    engine: KvEngine,
    ffn: FfnBackend | None,
    prompt_tokens: Sequence[int],
    max_tokens: int,
    on_token: Callable[[int, str], None] | None = None,
) -> list[int]:
    """Prefill `prompt_tokens`, then decode greedily; returns the new ids, the stop token included.

    `ffn` (None: the engine's own) holds for this call. `on_token(id, text)` is called as tokens are chosen.
    Raises InvariantViolation when the engine holds rows made under another FFN.
    """
    tokens = []
    with engine.using(engine.ffn if ffn is None else ffn):
        for token in engine.generate(prompt_tokens, max_tokens):
            tokens.append(token.id)
            if on_token is not None:
                on_token(token.id, token.text)
    return tokens
