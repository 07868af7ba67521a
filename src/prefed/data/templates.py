"""What a model reads: a prompt as text, and how a response goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from prefed.data.errors import DataError, RowError
from prefed.data.record import Message, Prompt

__all__ = ["Template", "Tokenizer", "dialogue"]


class Tokenizer(Protocol):
    """What is asked of a tokenizer; any of transformers' has it."""

    eos_token_id: int | None
    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: Any, **options: Any) -> Any:
        """Token ids of one or several texts under ``"input_ids"``."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The text of a conversation."""


def dialogue(messages: Sequence[Message]) -> str:
    r"""A conversation in the Human/Assistant form, ending where the assistant speaks next.

    >>> dialogue([Message("user", "Hi")])
    '\n\nHuman: Hi\n\nAssistant:'
    """
    names = {"user": "\n\nHuman: ", "assistant": "\n\nAssistant: ", "system": ""}
    return "".join(names[turn.role] + turn.content for turn in messages) + "\n\nAssistant:"


class Template:
    """Renders prompts and responses for one tokenizer.

    A text prompt is used as it is and its responses follow it as they are. A conversation goes through the
    tokenizer's chat template, up to and including the mark after which the assistant speaks; its responses
    end as the template ends a turn. Without a chat template it takes the Human/Assistant form, in which a
    response starts with a blank.

    Args:
        tokenizer: a transformers tokenizer.
        kind: ``auto``, ``chat`` or ``dialogue`` as in ``data.template``.

    Raises:
        DataError: ``chat`` is asked for and the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, kind: Literal["auto", "chat", "dialogue"] = "auto") -> None:
        self._tokenizer = tokenizer
        has = bool(getattr(tokenizer, "chat_template", None))
        if kind == "chat" and not has:
            raise DataError(
                'template = "chat", but the tokenizer has no chat template; use "dialogue" or "auto"'
            )
        self.chat = has and kind != "dialogue"

    def prompt(self, prompt: Prompt) -> str:
        """The text that a response follows.

        Raises:
            RowError: the chat template refuses the conversation.
        """
        if isinstance(prompt, str):
            return prompt
        return self._render(prompt, generate=True) if self.chat else dialogue(prompt)

    def pair(self, prompt: Prompt, chosen: str, rejected: str) -> tuple[str, str, str]:
        """The texts of a prompt and two responses, each of which continues the prompt."""
        start = self.prompt(prompt)
        if isinstance(prompt, str):
            return start, chosen, rejected
        return start, self._response(prompt, start, chosen), self._response(prompt, start, rejected)

    def _response(self, prompt: tuple[Message, ...], start: str, response: str) -> str:
        if self.chat:
            whole = self._render((*prompt, Message("assistant", response)), generate=False)
            # A template may render the past differently once there is a reply; then the reply stands alone.
            return whole[len(start) :].rstrip() if whole.startswith(start) else response
        return response if response[:1].isspace() else " " + response

    def _render(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        plain = [{"role": turn.role, "content": turn.content} for turn in messages]
        try:
            text = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate)
        except Exception as error:  # jinja's and the template's own kinds
            raise RowError(f"the tokenizer's chat template refuses this conversation: {error}") from error
        assert isinstance(text, str)
        return text


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that the tokenizer puts before a text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for k in range(len(whole) - len(plain) + 1):
        if whole[k : k + len(plain)] == plain:
            return whole[:k]
    return []
