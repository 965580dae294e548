"""A conversation on one engine: messages -> token ids, so that the engine can keep its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from larql_kv.cli.answer import Answer

if TYPE_CHECKING:
    from larql_kv.engine import KvEngine
    from larql_kv.model.tokenizer import Tokenizer

Message = dict[str, str]


class Template(Protocol):
    """Messages -> the text that the model continues."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str: ...


class PlainText:
    """No template: the messages one after another, each on a line of its own. A model continues them."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        return "\n".join(message["content"] for message in messages)


def model_template(tokenizer: Tokenizer) -> Template | None:
    """The model's own chat template, or None when its files hold none.

    Raises ModelError for a template that does not compile.
    """
    if not tokenizer.chat_template:
        return None
    from larql_kv.model.chat import ChatTemplate

    return ChatTemplate.from_tokenizer(tokenizer)


class Session:
    """The messages of a chat, and the ids they became.

    A model seldom spells a word as its tokenizer would, so encoding the whole history again would part
    from what the engine holds in the middle of an answer. The session keeps the ids that were run and
    encodes only what follows them. Where a template changes what was said (trims it, drops the reasoning
    of earlier turns), the ids are kept up to the change, and the engine reuses the longest common prefix.
    """

    def __init__(self, engine: KvEngine, template: Template, system: str | None = None) -> None:
        self.engine = engine
        self.template = template
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._opening)
        # Rendered beginnings of the history with the ids that stand for them, shortest first.
        self._known: list[tuple[str, list[int]]] = []

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)
        self._known = []
        self.engine.reset()

    def ask(self, content: str, answer_ids: Callable[[list[int]], Answer]) -> Answer:
        """Add a user message and the answer that `answer_ids` gives to the rendered conversation.

        When that raises, or is interrupted before the first token, the turn is dropped: the conversation
        is what it was.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        rendered, ids = self.encode(messages)
        answer = answer_ids(ids)
        if answer.finish == "interrupted" and not answer.token_ids:
            return answer
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        said = self._ids_of_text(answer)
        self._known = [(rendered, ids)]
        if said is not None:
            self._known.append((rendered + answer.text, ids + said))
        return answer

    def encode(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """The rendered text of `messages`, and its ids, those of earlier turns kept."""
        rendered = self.template.render(messages, add_generation_prompt=True)
        tokenizer = self.engine.model.tokenizer
        whole = tokenizer.encode(rendered, add_special=False)
        if isinstance(self.template, PlainText):  # a template writes its own beginning-of-text token
            whole = [*tokenizer.prefix_ids, *whole]
        for text, ids in reversed(self._known):
            if not rendered.startswith(text) or len(rendered) == len(text):
                continue
            tail = tokenizer.encode(rendered[len(text) :], add_special=False)
            # Cut at a place where the tokenizer would not have: take the whole text's own ids instead.
            if tail and whole[-len(tail) :] == tail:
                return rendered, ids + tail
        return rendered, whole

    def _ids_of_text(self, answer: Answer) -> list[int] | None:
        """The generated ids that stand for exactly the answer's text, or None (a stop string cut it)."""
        tokenizer = self.engine.model.tokenizer
        ids: list[int] = list(answer.token_ids)
        if ids and ids[-1] in tokenizer.stop_ids and answer.finish == "stop":
            ids.pop()
        return ids if tokenizer.decode(ids) == answer.text else None

    def facts(self) -> dict[str, Any]:
        """What `--json` says about how the prompt was built."""
        return {"template": not isinstance(self.template, PlainText), "messages": len(self.messages)}
