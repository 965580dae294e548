"""Messages -> prompt, by the chat template that a model brings along."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from larql_kv.errors import ModelError
from larql_kv.model.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 64 << 10  # the longest in use have 20,000; 64k compile in 2 s


class ChatTemplate:
    """A compiled chat template; renders what transformers' `apply_chat_template` renders.

    Templates come with model files, so they run sandboxed and bounded (see `chat_sandbox`). Raises
    ModelError when the template is too long or no valid Jinja.
    """

    def __init__(
        self, template: str, bos: str | None = None, eos: str | None = None, **named: str | None
    ) -> None:
        """`bos` and `eos` are the tokens' texts; `named` holds other variables such as `unk_token`."""
        if len(template) > MAX_TEMPLATE_CHARS:
            raise ModelError(
                f"the chat template has {len(template)} characters, the limit is {MAX_TEMPLATE_CHARS}"
            )
        from larql_kv.model.chat_sandbox import BoundedEnvironment

        variables = {"bos_token": bos, "eos_token": eos, **named}
        self._variables = {name: text for name, text in variables.items() if text is not None}
        self._environment = BoundedEnvironment()
        self._lock = threading.Lock()  # the environment holds the budget of one rendering
        try:
            self._template = self._environment.from_string(template)
        except Exception as error:  # SyntaxError, RecursionError, ... as well as jinja2's
            raise ModelError(f"the chat template is broken: {_reason(error)}") from error

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of the model's files. Raises ModelError when they have none (a base model)."""
        if tokenizer.chat_template is None:
            raise ModelError(
                "the model has no chat template (a base model): pass plain text, or use an instruct model"
            )
        bos, eos = (
            None if index is None else tokenizer.token_text(index)
            for index in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return cls(tokenizer.chat_template, bos, eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of `messages`, each with a `role` and a `content`.

        Raises ModelError for messages of another shape, for what the template refuses (its
        `raise_exception`), and for a template that goes beyond its bounds.
        """
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ModelError(f"message {index} is no object with a role and a content: {message!r:.200}")
        from larql_kv.model.chat_sandbox import MAX_VALUE, Budget

        given = sum(len(str(message.get("content") or "")) for message in messages)
        limit = max(MAX_VALUE, 4 * given)
        names = {"tools": None, "documents": None, **self._variables, **variables}
        with self._lock:
            self._environment.budget = Budget(limit)
            parts: list[str] = []
            size = 0
            try:
                for part in self._template.generate(
                    messages=list(messages), add_generation_prompt=add_generation_prompt, **names
                ):
                    size += len(part)
                    if size > limit:
                        raise ModelError(f"the chat template wrote more than {limit} characters")
                    parts.append(part)
            except ModelError:
                raise
            except Exception as error:  # whatever a template does is the template's fault
                raise ModelError(f"the chat template failed: {_reason(error)}") from error
        return "".join(parts)


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if isinstance(line, int) else ""
    return f"{type(error).__name__}: {str(error)[:500]}{where}"
