"""unlimited-context with replay: what a query brings back, by hand; a needle lost and found."""

from __future__ import annotations

import random

import pytest
import torch

import larql_kv as lk
from larql_kv.engine.base import KvEngine
from larql_kv.errors import BackendFailure
from larql_kv.model.model import Model
from larql_kv.state.windows import WindowState
from larql_kv.state.windows_log import WindowLog
from tests.engine.live_rows import FAMILIES, Live, check_replays, ids_of, recorded
from tests.models import needs_smollm2, real, tiny
from tests.storages import held_storages


def _log(engine: KvEngine) -> WindowLog:
    assert isinstance(engine._state, WindowState)
    return engine._state.log


# -- replay ----------------------------------------------------------------------------------------


class Attending:
    """A state by hand: rows attend what a query may see, by plain softmax in float64."""

    def __init__(self, model: Model, live: Live, first: int, start: int, shown: list[int]) -> None:
        self.model, self.live, self.first, self.start, self.shown = model, live, first, start, shown

    def observe(self, layer: int, rows: torch.Tensor) -> None: ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        config, own = self.model.config, self.model.config.layers[layer].window
        assert config.attention_softcap is None
        out = []
        for i in range(len(q)):
            position = self.first + i
            near = range(max(0, self.start - 1), self.first)
            seen = [] if own else [at for at in self.shown if at not in near]
            seen += [at for at in near if own is None or at > position - own]
            past = [self.live.rows[layer, at] for at in seen]
            new = range(0 if own is None else max(0, i - own + 1), i + 1)
            keys, values = (
                torch.stack([row[part] for row in past] + [(k, v)[part][at] for at in new]).double()
                for part in (0, 1)
            )
            group = config.heads // config.kv_heads
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("hd,nhd->hn", q[i].double(), keys) * config.attention_scale
            out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values).flatten())
        return torch.stack(out).float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("replay", [1, 3, 64])
def test_a_query_attends_the_windows_it_chose(
    family: str, replay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the window right before the open one, whose last row is the checkpoint and counts once."""
    model = tiny(family)
    ids, query = ids_of(model, 13 * 5 + 4), ids_of(model, 6, seed=9)
    engine = lk.build_engine(f"unlimited-context:window=13,replay={replay}", model)
    with recorded(engine, monkeypatch) as live:
        engine.prefill(ids)
        got = engine.prefill_rows(query)
        shown = engine.windows.stats().shown_windows
        assert len(shown) == min(replay, 5)
        positions = [at for index in shown for at in range(13 * index, 13 * index + 13)]
        state = Attending(model, live, len(ids), 65, positions)
        expected = model.forward(model.embed(query), len(ids), state, engine.ffn)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        plain = lk.build_engine("unlimited-context:window=13", model)
        plain.prefill(ids)
        assert not torch.equal(plain.prefill_rows(query), got)
        check_replays(engine, live)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_nothing_archived_replay_is_standard(family: str) -> None:
    model = tiny(family)
    ids = ids_of(model, 13)
    engine, standard = (lk.build_engine(spec, model) for spec in ("unlimited:window=13,replay=4", "standard"))
    assert torch.equal(engine.prefill_rows(ids[:7]), standard.prefill_rows(ids[:7]))
    for token in ids[7:]:
        assert torch.equal(engine.decode_step(token), standard.decode_step(token))
    assert engine.windows.stats().shown_windows == ()


def test_a_selection_lasts_while_decoding_and_ends_with_the_next_prompt() -> None:
    model = tiny("llama")
    engine = lk.build_engine("unlimited-context:window=10,replay=2,score=tokens", model)
    ids = ids_of(model, 90)
    engine.prefill(ids)
    engine.prefill([*ids[23:28], *ids[41:45]])
    asked = engine.windows.stats()
    shown = asked.shown_windows
    assert shown == (2, 4)
    assert asked.scores is not None
    assert asked.scores.order[:2] == [2, 4]
    for token in ids[:25]:  # over two edges of windows
        engine.decode_step(token)
    stats = engine.windows.stats()
    assert stats.shown_windows == shown
    assert stats.replayed_windows == asked.replayed_windows  # the edges cost nothing
    engine.prefill(ids_of(model, 50, seed=5))  # text, and its end the query
    assert _log(engine).recalled(engine.length - 20) == ()
    assert len(engine.windows.stats().shown_windows) == 2


def test_the_same_windows_are_not_run_again_and_dropped_ones_are() -> None:
    model = tiny("llama")
    ids = ids_of(model, 64)
    engine = lk.build_engine("unlimited-context:window=10,replay=2", model)
    engine.prefill(ids)
    engine.prefill(ids[20:23])
    kept = engine.fork()
    first = engine.windows.stats()
    assert engine.drop_derivative() > 0
    for token in ids[:12]:
        assert torch.equal(engine.decode_step(token), kept.decode_step(token))
    assert engine.windows.stats().replayed_windows == first.replayed_windows + 2
    assert kept.windows.stats().replayed_windows == first.replayed_windows
    # The summaries were dropped too: a query makes them again, window by window, and chooses the same.
    assert torch.equal(engine.prefill(ids[30:35]), kept.prefill(ids[30:35]))
    assert engine.windows.stats().scores == kept.windows.stats().scores
    assert engine.windows.stats().probed_tokens > first.probed_tokens


def test_asking_again_after_a_trim_asks_the_same() -> None:
    """`generate` on a prompt that is held runs its last token only; the query is the whole prompt's."""
    model = tiny("llama")
    prompt = [*ids_of(model, 60), *ids_of(model, 60)[12:17]]
    engine = lk.build_engine("unlimited-context:window=10,replay=1,score=tokens", model)
    once = [token.id for token in engine.generate(prompt, 5)]
    shown = engine.windows.stats().shown_windows
    again = [token.id for token in engine.generate(prompt, 5)]
    assert engine.reused_tokens == len(prompt) - 1
    assert (again, engine.windows.stats().shown_windows) == (once, shown)


@pytest.mark.parametrize(("window", "ahead"), [(65, 1), (16, 30)])
def test_trims_leave_what_is_shown_whole(window: int, ahead: int) -> None:
    """Rows brought back end in a block of their own (65 = 64 + 1), or begin right before a window that a trim
    comes back to: the row between the two lies with the window."""
    model = tiny("llama")
    ids = ids_of(model, 3 * window + 60)
    trimmed, straight = (
        lk.build_engine(f"unlimited-context:window={window},replay=2", model) for _ in range(2)
    )
    for engine in (trimmed, straight):
        engine.prefill(ids[: 2 * window])
        engine.prefill(ids[2 * window : 2 * window + 4])
        assert engine.windows.stats().shown_windows == (0, 1)
    for token in ids[:ahead]:
        trimmed.decode_step(token)
    trimmed.trim(2 * window + 4)
    for token in ids[2 * window + 4 :][: window + 10]:
        assert torch.equal(trimmed.decode_step(token), straight.decode_step(token))


def test_a_query_that_fails_changes_nothing() -> None:
    model = tiny("llama")
    ids = ids_of(model, 50)

    class Failing(lk.DenseFfn):
        calls = 10**9

        def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            self.calls -= 1
            if not self.calls:
                raise RuntimeError("no answer")
            return super().forward(layer, x)

    for calls in (1, 2, 3, 4, 5, 7):  # in the probe, in a replay, in the rows themselves
        ffn = Failing(model)
        engine = lk.build_engine("unlimited-context:window=10,replay=2", model, ffn=ffn)
        witness = lk.build_engine("unlimited-context:window=10,replay=2", model)
        for each in (engine, witness):
            each.prefill(ids[:43])
        ffn.calls = calls
        with pytest.raises(BackendFailure, match="no answer"):
            engine.prefill(ids[43:46])
        ffn.calls = 10**9
        assert engine.tokens == ids[:43]
        assert engine.ledger().capacity == sum(held_storages(engine).values())
        assert torch.equal(engine.prefill(ids[40:45]), witness.prefill(ids[40:45]))


# -- a needle in an archived window ----------------------------------------------------------------


@needs_smollm2
def test_a_needle_is_lost_without_replay_and_found_with_it() -> None:
    """50 windows of 32 tokens, the fact in the 11th. `standard` finds it: it is the window that loses it."""
    model = real("smollm2-135m")

    def ids_of(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special=False)

    draw = random.Random(4)
    parts = (
        ("The miller", "A carter", "The old captain", "Her sister", "The baker", "A stranger"),
        ("walked to", "looked at", "talked about", "waited near", "painted", "sat beside"),
        ("the river", "the market", "the bridge", "the stone wall", "the harbour", "the church"),
        ("in the morning", "before the rain came", "after supper", "on a cold day", "with great care"),
    )
    question, answer = ids_of(" The access code of the Elmsea light is"), ids_of(" 7 4 1 9")
    text, window = ids_of("Notes of the harbour office."), 32
    while len(text) < 50 * window + 9:
        if len(text) // window == 10 and text.count(answer[-1]) == 0 and len(text) % window < 12:
            text += [*question, *answer, *ids_of(".")]
        text += ids_of(" " + " ".join(draw.choice(part) for part in parts) + ".")
    needle = next(i for i in range(len(text)) if text[i : i + len(question)] == question) // window
    assert needle == 10
    answered, shown = {}, {}
    for spec in ("standard", "unlimited-context:window=32", "unlimited-context:window=32,replay=2"):
        engine = lk.build_engine(spec, model)
        engine.prefill(text)
        hidden, said = engine.prefill(question), []
        for _ in answer:
            said.append(int(model.logits(hidden).argmax()))
            hidden = engine.decode_step(said[-1])
        answered[spec] = said == answer
        if spec != "standard":
            stats = shown[spec] = engine.windows.stats()
            assert stats.archived_windows >= 50
    assert list(answered.values()) == [True, False, True]
    assert needle in stats.shown_windows
    assert stats.scores is not None
    assert stats.scores.tokens is not None
    assert max(stats.scores.tokens) == stats.scores.tokens[needle]
