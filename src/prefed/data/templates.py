"""Templates: a prompt as text, and the responses as they continue it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from prefed.data.errors import DataError, RowError
from prefed.data.record import Message, Prompt


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token_id: int | None
    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: Any, **options: Any) -> Any:
        """The token ids of one or several texts, under the key ``"input_ids"``."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The text of a conversation."""


def dialogue(messages: Sequence[Message]) -> str:
    r"""A conversation in the Human/Assistant form. The text ends where the assistant's response begins.

    >>> dialogue([Message("user", "Hi")])
    '\n\nHuman: Hi\n\nAssistant:'
    """
    names = {"user": "\n\nHuman: ", "assistant": "\n\nAssistant: ", "system": ""}
    return "".join(names[turn.role] + turn.content for turn in messages) + "\n\nAssistant:"


def instruction(text: str, context: str | None = None) -> str:
    r"""An instruction as a prompt: the generation templates of FedBiscuit (ICLR 2025), figure 4.

    Args:
        context: what the instruction is about, where it does not say it itself.

    >>> instruction("Name a colour.").splitlines()[-3:]
    ['Name a colour.', '', '### Response:']
    """
    paired = "" if context is None else ", paired with an input that provides further context"
    between = "" if context is None else f"### Input:\n{context}\n\n"
    return (
        f"Below is an instruction that describes a task{paired}. Write a response that appropriately "
        f"completes the request.\n\n### Instruction:\n{text}\n\n{between}### Response:"
    )


def _instruction_of(messages: Sequence[Message]) -> str:
    """The instruction in a user's turn, with the input that it is about if it names one.

    Raises:
        RowError: there are other turns.
    """
    if [turn.role for turn in messages] != ["user"]:
        raise RowError('template = "instruction" takes a prompt of one turn, a user\'s')
    text, mark, context = messages[0].content.partition("\n\n### Input:\n")
    return instruction(text, context if mark else None)


class Template:
    """Renders prompts and responses for one tokenizer.

    A text prompt and its responses are used unchanged. A conversation is rendered with the tokenizer's chat
    template, up to and including the mark that opens the assistant's turn. Its responses end with the mark
    that closes a turn. Without a chat template a conversation takes the Human/Assistant form, or that of an
    :func:`instruction`. There a response begins with a blank.

    Raises:
        DataError: ``kind`` is ``chat`` and the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: Tokenizer, kind: Literal["auto", "chat", "dialogue", "instruction"] = "auto"
    ) -> None:
        self._tokenizer = tokenizer
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if kind == "chat" and not has_template:
            raise DataError(
                'template = "chat", but the tokenizer has no chat template; use "dialogue" or "auto"'
            )
        self.chat = has_template and kind in ("auto", "chat")
        self._plain = _instruction_of if kind == "instruction" else dialogue

    def prompt(self, prompt: Prompt) -> str:
        """The text that a response follows.

        Raises:
            RowError: the template refuses the conversation.
        """
        if isinstance(prompt, str):
            return prompt
        return self._render(prompt, generate=True) if self.chat else self._plain(prompt)

    def pair(self, prompt: Prompt, chosen: str, rejected: str) -> tuple[str, str, str]:
        """The texts of a prompt and two responses, each of which continues the prompt."""
        start = self.prompt(prompt)
        if isinstance(prompt, str):
            return start, chosen, rejected
        return start, self._response(prompt, start, chosen), self._response(prompt, start, rejected)

    def _response(self, prompt: tuple[Message, ...], start: str, response: str) -> str:
        if self.chat:
            whole = self._render((*prompt, Message("assistant", response)), generate=False)
            # Some templates change earlier turns once there is a response. Then it is used unchanged.
            return whole[len(start) :].rstrip() if whole.startswith(start) else response
        return response if response[:1].isspace() else " " + response

    def _render(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        plain = [{"role": turn.role, "content": turn.content} for turn in messages]
        try:
            text = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generate)
        except Exception as error:  # errors of jinja, and of the template itself
            raise RowError(f"the tokenizer's chat template refuses this conversation: {error}") from error
        assert isinstance(text, str)
        return text


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that the tokenizer adds before a text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for k in range(len(whole) - len(plain) + 1):
        if whole[k : k + len(plain)] == plain:
            return whole[:k]
    return []
