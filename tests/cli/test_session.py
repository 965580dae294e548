"""A chat keeps the ids of what was said; where a template changes the text, the common part is kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from larql_kv.cli.answer import Answer
from larql_kv.cli.session import PlainText, Session
from larql_kv.errors import ModelError

START, END = "\u0001", "\u0002"  # special tokens: encoded alone


class WordTokenizer:
    """Ids of characters, except that `encode` merges "ab" into one: a model that says "a", "b" spells it
    in another way than the tokenizer would."""

    prefix_ids = (7,)
    stop_ids = frozenset({ord(END)})
    AB = 1000

    def encode(self, text, add_special=True):
        ids = []
        while text:
            ab = text.startswith("ab")
            ids.append(self.AB if ab else ord(text[0]))
            text = text[2:] if ab else text[1:]
        return [*self.prefix_ids, *ids] if add_special else ids

    def decode(self, ids):
        return "".join("ab" if token == self.AB else chr(token) for token in ids)


class Marked:
    """A template; `change` is what it does to an assistant's text."""

    def __init__(self, change=lambda text: text):
        self.change = change

    def render(self, messages, add_generation_prompt=True):
        text = ""
        for message in messages:
            content = message["content"]
            text += (
                START
                + message["role"][0]
                + (self.change(content) if message["role"] == "assistant" else content)
            )
            text += END
        return text + START + "a" if add_generation_prompt else text


class FakeEngine:
    def __init__(self):
        self.model = SimpleNamespace(tokenizer=WordTokenizer())
        self.resets = 0

    def reset(self):
        self.resets += 1


def says(text, finish="stop", seen=None, ids=None):
    """An engine's answer `text`, spelled character by character."""

    def answer_ids(prompt):
        if seen is not None:
            seen.append(list(prompt))
        spelled = [ord(char) for char in text] if ids is None else ids
        return Answer(
            len(prompt),
            token_ids=spelled + ([ord(END)] if finish == "stop" else []),
            text=text,
            finish=finish,
        )

    return answer_ids


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_ids_that_were_said_are_kept():
    session, seen = Session(FakeEngine(), Marked(), system="S"), []
    session.ask("hi", says("cab", seen=seen))
    session.ask("more", says("x", seen=seen))
    first, second = seen
    # "cab" would be encoded as c, AB; the engine holds c, a, b.
    assert second[: len(first) + 4] == [*first, *map(ord, "cab"), ord(END)]
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 2]


def test_without_a_stop_token_the_answer_is_kept_whole():
    session, seen = Session(FakeEngine(), Marked()), []
    session.ask("hi", says("cab", finish="length", seen=seen))
    session.ask("more", says("x", seen=seen))
    assert seen[1][: len(seen[0]) + 3] == [*seen[0], *map(ord, "cab")]


@pytest.mark.parametrize("change", [str.strip, lambda text: ""], ids=["trims", "drops"])
def test_a_template_that_changes_answers_keeps_the_prompt(change):
    session, seen = Session(FakeEngine(), Marked(change)), []
    session.ask("hi", says(" cab ", seen=seen))
    rendered, ids = session.encode([*session.messages, {"role": "user", "content": "q"}])
    assert WordTokenizer().decode(ids) == rendered
    assert common(ids, seen[0]) == len(seen[0])


def test_an_answer_cut_by_a_stop_string_is_encoded_again():
    session, seen = Session(FakeEngine(), Marked()), []
    session.ask("hi", says("c", finish="stop", ids=[*map(ord, "c###")], seen=seen))
    rendered, ids = session.encode([*session.messages, {"role": "user", "content": "q"}])
    assert WordTokenizer().decode(ids) == rendered
    assert common(ids, seen[0]) == len(seen[0])


def test_a_cut_inside_a_token_is_not_kept():
    session = Session(FakeEngine(), PlainText())
    session._known = [("xa", [7, ord("x"), ord("a")])]
    _, ids = session.encode([{"role": "user", "content": "xab"}])
    # The tail "b" is how the tokenizer would never begin: the whole text's ids are taken.
    assert ids == [7, ord("x"), WordTokenizer.AB]


def test_plain_text_continues_with_the_prefix_once():
    session, seen = Session(FakeEngine(), PlainText()), []
    session.ask("hi", says("cab", finish="length", seen=seen))
    session.ask("go", says("x", seen=seen))
    assert seen[0] == [7, *map(ord, "hi")]
    assert not session.facts()["template"]
    assert WordTokenizer().decode(seen[1][1:]) == "hi\ncab\ngo"


def test_a_turn_that_fails_or_says_nothing_is_dropped():
    session = Session(FakeEngine(), Marked(), system="S")
    session.ask("hi", says("there"))
    before, known = list(session.messages), list(session._known)

    def refuse(ids):
        raise ModelError("too long")

    with pytest.raises(ModelError):
        session.ask("x", refuse)
    answer = session.ask("x", lambda ids: Answer(len(ids), finish="interrupted"))
    assert answer.finish == "interrupted"
    assert (session.messages, session._known) == (before, known)
    session.reset()
    assert session.engine.resets == 1
    assert [message["role"] for message in session.messages] == ["system"]
