"""Templates and encoders: how a record becomes token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeAlias

from prefed.data.errors import DataError, RowError
from prefed.data.record import Message, Prompt, Record, plain_prompt


class Tokenizer(Protocol):
    """The interface of a transformers tokenizer."""

    eos_token_id: int | None
    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return the token ids of one or several texts, under the key ``"input_ids"``."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return the text of a conversation."""


def dialogue(messages: Sequence[Message]) -> str:
    r"""Render a conversation in the Human/Assistant form, up to the beginning of the response.

    >>> dialogue([Message("user", "Hi")])
    '\n\nHuman: Hi\n\nAssistant:'
    """
    names = {"user": "\n\nHuman: ", "assistant": "\n\nAssistant: ", "system": ""}
    return "".join(names[turn.role] + turn.content for turn in messages) + "\n\nAssistant:"


def instruction(text: str, context: str | None = None) -> str:
    r"""Render an instruction with the generation templates of FedBiscuit (ICLR 2025), figure 4.

    Args:
        context: its input, if any.

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
    if [turn.role for turn in messages] != ["user"]:
        raise RowError('template = "instruction" requires prompts of a single user turn')
    text, mark, context = messages[0].content.partition("\n\n### Input:\n")
    return instruction(text, context if mark else None)


class Template:
    """Render prompts and responses for one tokenizer.

    A text prompt and its responses are used unchanged. A conversation is rendered with the tokenizer's chat
    template: the prompt includes the beginning of the assistant turn, and each response the end of it.
    Without a chat template, a conversation is rendered in the Human/Assistant form or as an
    :func:`instruction`, and a response begins with a space.

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
        """Return the text before the response.

        Raises:
            RowError: the template rejects the conversation.
        """
        if isinstance(prompt, str):
            return prompt
        return self._render(prompt, generate=True) if self.chat else self._plain(prompt)

    def pair(self, prompt: Prompt, chosen: str, rejected: str) -> tuple[str, str, str]:
        """Return the texts of a prompt and of two responses that continue it."""
        start = self.prompt(prompt)
        if isinstance(prompt, str):
            return start, chosen, rejected
        return start, self._response(prompt, start, chosen), self._response(prompt, start, rejected)

    def _response(self, prompt: tuple[Message, ...], start: str, response: str) -> str:
        if not response:
            return response
        if self.chat:
            whole = self._render((*prompt, Message("assistant", response)), generate=False)
            # Some templates change earlier turns if there is a response, which is then used unchanged.
            return whole[len(start) :].rstrip() if whole.startswith(start) else response
        return response if response[:1].isspace() else " " + response

    def _render(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                plain_prompt(messages), tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:  # errors of jinja, and of the template itself
            raise RowError(f"the tokenizer's chat template rejects this conversation: {error}") from error
        assert isinstance(text, str)
        return text


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer adds before a text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for k in range(len(whole) - len(plain) + 1):
        if whole[k : k + len(plain)] == plain:
            return whole[:k]
    return []


@dataclass(frozen=True)
class Encoded:
    """The token ids of a record.

    Attributes:
        prompt: with the beginning-of-text token if the tokenizer adds one.
        branches: the two continuations of the prompt; for a thumb, one of them is empty.
        cut: the beginning of the prompt was truncated.
        shortened: the end of a response was truncated.
    """

    prompt: list[int]
    branches: tuple[list[int], list[int]]
    cut: bool = False
    shortened: bool = False


@dataclass(frozen=True)
class TooLong:
    """A record that does not fit: the reason, and the ``max_length`` it needs."""

    problem: str
    needed: int


Outcome: TypeAlias = Encoded | TooLong | RowError | None
"""The result of encoding a record; ``None`` if both responses have the same tokens."""


class Encoder(Protocol):
    """An encoder of records.

    Attributes:
        letters: token ids of the letters A and B if the branches are the two orders of a selector question;
            ``None`` if they are the chosen and the rejected response.
        max_length: maximum number of tokens of a record.
        refuses: report a record that is too long as an error instead of dropping it.
        hint: last line of that error, a remedy.
    """

    letters: tuple[int, int] | None
    max_length: int
    refuses: bool
    hint: str

    def encode(self, records: Sequence[Record]) -> list[Outcome]:
        """Encode each record independently of the others."""


def token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens."""
    if not texts:
        return []
    tokens = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        padding=False,
        truncation=False,
        verbose=False,
    )["input_ids"]
    return [list(ids) for ids in tokens]


def continuation_ids(tokenizer: Tokenizer, starts: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text as the continuation of its start, without special tokens.

    Usually, these are the ids of the text itself. If the tokenizer puts a space before every text, as that of
    Llama 2 does, they are the ids of start and text together, without those of the start. If one token would
    span both, the text is tokenised by itself, without the space.
    """
    joining = _without_blank(getattr(tokenizer, "backend_tokenizer", None))
    if joining is None or not texts:
        return token_ids(tokenizer, texts)
    together = [start + text for start, text in zip(starts, texts, strict=True)]
    before, whole = token_ids(tokenizer, starts), token_ids(tokenizer, together)
    alone = joining.encode_batch(list(texts), add_special_tokens=False)
    return [
        ids[len(start) :] if ids[: len(start)] == start else list(own.ids)
        for start, ids, own in zip(before, whole, alone, strict=True)
    ]


def triple_ids(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, str, str]]
) -> list[tuple[list[int], list[int], list[int]]]:
    """Return the token ids of each start and of its two continuations, without special tokens."""
    starts = [start for start, *_ in texts]
    first, second = ([each[k] for each in texts] for k in (1, 2))
    parts = (
        token_ids(tokenizer, starts),
        *(continuation_ids(tokenizer, starts, own) for own in (first, second)),
    )
    return list(zip(*parts, strict=True))


def continuation_text(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Decode token ids that follow a prompt, without special tokens.

    A tokenizer that puts a space before every text also removes one when decoding. Therefore, the last token
    of the prompt is decoded too, or its last tokens if one character spans several of them.
    """

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    if _without_blank(getattr(tokenizer, "backend_tokenizer", None)) is None:
        return text(ids)
    # Bytes from the middle of a character cannot be decoded. A character has at most four bytes.
    ends = (prompt[-count:] for count in range(1, 5))
    before = next((end for end in ends if "\ufffd" not in text(end)), prompt[-1:])
    return text([*before, *ids])[len(text(before)) :]


@lru_cache(maxsize=4)
def _without_blank(backend: Any) -> Any:
    """Copy a tokenizer so that it puts no space before a text; ``None`` if it puts none anyway."""
    if backend is None:
        return None
    state = json.loads(backend.to_str())
    joining = {name: _joining(state[name]) for name in ("normalizer", "pre_tokenizer")}
    if all(state[name] == part for name, part in joining.items()):
        return None
    return type(backend).from_str(json.dumps({**state, **joining, "truncation": None, "padding": None}))


def _joining(part: Any) -> Any:
    """Remove from a normalizer or pre-tokenizer, as JSON, the parts that put a space before a text."""
    if isinstance(part, list):
        return [_joining(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: never.get(name, _joining(value)) for name, value in part.items()}


class PolicyEncoder:
    """Encode pairs and thumbs for a policy: a prompt, the chosen and the rejected response.

    The prompt and its responses are tokenised separately, see :func:`continuation_ids`. Each response ends
    with the end-of-text token; the absent response of a thumb has no tokens. A long prompt is truncated at
    its beginning but keeps its beginning-of-text token.

    Args:
        max_length: maximum number of tokens of the prompt with the longer response.
        too_long: how to treat a pair with a response that leaves no room for a token of the prompt.
        shortens: truncate the end of such a response, including its end-of-text token, instead.

    Raises:
        DataError: the tokenizer has no end-of-text token.
    """

    letters: tuple[int, int] | None = None
    hint = 'Responses are never truncated: raise max_length, or drop such pairs with too_long = "drop".'

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        *,
        max_length: int,
        too_long: Literal["drop", "error"],
        shortens: bool = False,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-text token; set its eos_token")
        self._tokenizer, self._template = tokenizer, template
        self.max_length, self._shortens = max_length, shortens
        self.refuses = too_long == "error"
        self._end: int = tokenizer.eos_token_id
        self._start = start_tokens(tokenizer)
        self._empty = self._end if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def encode(self, records: Sequence[Record]) -> list[Outcome]:
        """Encode each record; see :class:`Encoder`."""
        texts: list[tuple[str, str, str]] = []
        refused: dict[int, RowError] = {}
        for k, record in enumerate(records):
            try:
                texts.append(self._template.pair(record.prompt, record.chosen, record.rejected))
            except RowError as error:
                refused[k] = error
        tokens = iter(triple_ids(self._tokenizer, texts))
        return [
            refused[k] if k in refused else self._fit(record, *next(tokens))
            for k, record in enumerate(records)
        ]

    def _fit(
        self, record: Record, prompt: list[int], chosen: list[int], rejected: list[int]
    ) -> Encoded | TooLong | None:
        """Add special tokens and truncate to ``max_length``."""
        head: list[int] = [] if self._template.chat and not isinstance(record.prompt, str) else self._start
        if not head and prompt[:1] == [self._tokenizer.bos_token_id]:
            head, prompt = prompt[:1], prompt[1:]
        if not head and not prompt:
            head = [self._empty]
        chosen, rejected = (
            ids if not text or ids[-1:] == [self._end] else [*ids, self._end]
            for text, ids in ((record.chosen, chosen), (record.rejected, rejected))
        )
        most, longest = self.max_length - 1, max(len(chosen), len(rejected))
        shortened = self._shortens and longest > most
        if shortened:
            chosen, rejected, longest = chosen[:most], rejected[:most], most
            if chosen == rejected:
                return None
        room = self.max_length - longest
        if room < 1:
            which = "chosen" if len(chosen) >= len(rejected) else "rejected"
            which = which if record.label is None else "completion"
            return TooLong(
                f"{which} has {longest} tokens, but max_length is {self.max_length}", needed=longest + 1
            )
        cut = len(head) + len(prompt) > room
        if cut:
            head = head[:room]
            prompt = prompt[len(prompt) - (room - len(head)) :]
        return Encoded([*head, *prompt], (chosen, rejected), cut, shortened)
