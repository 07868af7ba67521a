"""Templates and encoders: how a record becomes token ids."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from prefed.data.errors import DataError, RowError
from prefed.data.record import Message, Prompt, Record, plain_prompt

if TYPE_CHECKING:
    from prefed.data.config import DataConfig


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


MARK = "\ufdd0"
"""Separates parts of a text that are tokenised one after the other; not a character of Unicode."""


def text_of(tokenizer: Tokenizer) -> Callable[[str], str]:
    r"""Return a function that puts a :data:`MARK` in each control token that a text contains.

    Control tokens are the special tokens of the tokenizer, such as ``<|im_end|>``. With the mark after its
    first character, it is tokenised as the text that it is, and cannot end a turn or begin another. If the
    tokenizer looks for control tokens in what its normalizer returns, so does the function: the normalizer
    may change other characters, such as ``<|IM_END|>``, to those of a control token.
    """
    added = [t for t in getattr(tokenizer, "added_tokens_decoder", {}).values() if t.special]
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    normalize: Callable[[str], str] = getattr(normalizer, "normalize_str", str)
    normalized = [str(token) for token in added if token.normalized]
    names = {*map(str, added), *getattr(tokenizer, "all_special_tokens", ())}
    names |= {*map(normalize, normalized)}
    # A single character cannot be divided.
    names = {name for name in names if len(name) > 1}
    if not names:
        return lambda text: text
    firsts = {name[0] for name in names}
    rests = {first: [re.escape(name[1:]) for name in names if name[0] == first] for first in firsts}
    # A look-ahead, to find tokens that overlap.
    pattern = re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rests[first])})" for first in rests))

    def mark(text: str) -> str:
        if normalized and len(pattern.findall(text)) < len(pattern.findall(normalize(text))):
            text = normalize(text)
        return pattern.sub(lambda match: match[0] + MARK, text)

    return mark


Note: TypeAlias = Literal["control", "ends", "unlike", "plain", "glued"]
NOTES: dict[Note, str] = {
    "control": "a control token in a text is encoded as text",
    "ends": "an end-of-text token before the end of a response",
    "unlike": "the chat template renders the prompt differently with a response, which is used unchanged",
    "plain": "without the chat template",
    "glued": "no blank between the prompt and its response",
}
"""What to report about a record."""
Kind: TypeAlias = Literal["auto", "chat", "dialogue", "instruction", "rendered"]
"""The values of ``[data] template``."""


SCORING_DATE = "2026-01-01"
"""Today's date for the chat templates of judges and reward models, so that scores do not depend on it."""


class Rendered(NamedTuple):
    """The texts of a prompt and of two responses, with a :data:`MARK` in control tokens that are text."""

    start: str
    chosen: str
    rejected: str
    notes: frozenset[Note] = frozenset()


class Template:
    """Render prompts and responses for one tokenizer, and encode prompts.

    A text prompt and its responses are used unchanged. A conversation is rendered with the tokenizer's chat
    template: the prompt includes the beginning of the assistant turn, and each response the end of it.
    Without a chat template, a conversation is rendered in the Human/Assistant form or as an
    :func:`instruction`, and a response begins with a space.

    Control tokens in texts are encoded as text, see :func:`text_of`.

    Args:
        kind: ``chat`` renders a text prompt as a user turn. ``rendered`` reads control tokens in text prompts
            and their responses as such; it is for texts that a chat template has rendered already.
        today: the date for chat templates that contain today's, as ``2026-01-31``; ``None``: today's.

    Raises:
        DataError: ``kind`` is ``chat`` and the tokenizer has no chat template, or its date cannot be fixed.
    """

    def __init__(self, tokenizer: Tokenizer, kind: Kind = "auto", today: str | None = None) -> None:
        self._tokenizer = tokenizer
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if kind == "chat" and not has_template:
            raise DataError(
                'template = "chat", but the tokenizer has no chat template; use "dialogue" or "auto"'
            )
        self.chat = has_template and kind in ("auto", "chat", "rendered")
        self._kind, self._has_template = kind, has_template
        self._plain = _instruction_of if kind == "instruction" else dialogue
        self._fixed = {"chat_template": _dated(tokenizer, today)} if self.chat and today else {}

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: DataConfig) -> Template:
        """Return the template that the ``[data]`` table asks for."""
        return cls(tokenizer, config.template, config.today)

    @cached_property
    def mark(self) -> Callable[[str], str]:
        """:func:`text_of` of the tokenizer."""
        return text_of(self._tokenizer)

    @cached_property
    def _start(self) -> list[int]:
        return start_tokens(self._tokenizer)

    def prompt(self, prompt: Prompt) -> str:
        """Return the text before the response.

        Raises:
            RowError: the template rejects the conversation.
        """
        return self._prompt(self.formed(prompt)).replace(MARK, "")

    def _prompt(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return self._text(prompt)
        return self._render(prompt, generate=True) if self.chat else self._plain(self._marked(prompt))

    def pair(
        self, prompt: Prompt, chosen: str, rejected: str, ended: tuple[bool, bool] = (True, True)
    ) -> tuple[str, str, str]:
        """Return the texts of a prompt and of two responses that continue it, as :meth:`render`."""
        rendered = self.render(prompt, chosen, rejected, ended)
        start, first, second = (text.replace(MARK, "") for text in rendered[:3])
        return start, first, second

    def render(
        self, prompt: Prompt, chosen: str, rejected: str, ended: tuple[bool, bool] = (True, True)
    ) -> Rendered:
        """Render a prompt and two responses that continue it, with marks.

        Args:
            ended: as :attr:`~prefed.data.Record.ended`. The turn of a response that was cut has no end.

        Raises:
            RowError: the template rejects the conversation.
        """
        prompt = self.formed(prompt)
        start, notes = self._prompt(prompt), set[Note]()
        if isinstance(prompt, str):
            first, second = (self._ended(self._text(text)) for text in (chosen, rejected))
            notes.update(self._notes(prompt, chosen, rejected) if MARK not in start else ())
        else:
            first, second = (
                self._response(prompt, start, text, notes) if whole else self._text(text)
                for text, whole in zip((chosen, rejected), ended, strict=True)
            )
        if MARK in start or MARK in first or MARK in second:
            notes.add("control")
        return Rendered(start, first, second, frozenset(notes))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, including special tokens.

        Raises:
            RowError: the template rejects the conversation.
        """
        (ids,) = token_ids(self._tokenizer, [self._prompt(self.formed(prompt))])
        head, rest = self.split_start(prompt, ids)
        return [*head, *rest]

    def split_start(self, prompt: Prompt, ids: list[int]) -> tuple[list[int], list[int]]:
        """Return the special tokens before a prompt with the given ids, and the ids after them.

        They are those of the chat template for a conversation, otherwise those that the tokenizer adds; a
        prompt is never empty.
        """
        tokenizer = self._tokenizer
        start = [] if self.chat and not isinstance(self.formed(prompt), str) else self._start
        if ids[:1] == [tokenizer.bos_token_id]:
            return ids[:1], ids[1:]
        if not start and not ids:
            end, begin = tokenizer.eos_token_id, tokenizer.bos_token_id
            return [token for token in (begin, end) if token is not None][:1], []
        return start, ids

    def formed(self, prompt: Prompt) -> Prompt:
        """Return a prompt as the turns that it is rendered as, or the text that is used unchanged."""
        return (Message("user", prompt),) if self._kind == "chat" and isinstance(prompt, str) else prompt

    def _text(self, text: str) -> str:
        return text if self._kind == "rendered" else self.mark(text)

    def _ended(self, response: str) -> str:
        """Remove blanks after the end-of-text token of a rendered response."""
        end, text = getattr(self._tokenizer, "eos_token", None), response.rstrip()
        return text if self._kind == "rendered" and end and text.endswith(end) else response

    def _marked(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(Message(turn.role, self.mark(turn.content)) for turn in messages)

    def _notes(self, prompt: str, *responses: str) -> Iterator[Note]:
        """Yield what is unusual about a text prompt."""
        if self._kind == "rendered" or not prompt:
            return
        if self._has_template and self._kind == "auto" and not prompt.endswith("\n\nAssistant:"):
            yield "plain"
        if _ENDS_WORD.search(prompt) and all(text[:1].isalnum() for text in responses if text):
            yield "glued"

    def _response(self, prompt: tuple[Message, ...], start: str, response: str, notes: set[Note]) -> str:
        if not response:
            return response
        if self.chat:
            whole = self._render((*prompt, Message("assistant", response)), generate=False)
            if whole.startswith(start):
                return whole[len(start) :].rstrip()
            # Some templates change earlier turns if there is a response.
            notes.add("unlike")
            return self.mark(response)
        response = self.mark(response)
        return response if response[:1].isspace() else " " + response

    def _render(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        from prefed.data.template_limits import limited

        conversation = plain_prompt(self._marked(messages))
        what = "the chat template that comes with the tokenizer"
        try:
            with limited(f"{what}, for one conversation,"):
                text = self._tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=generate, **self._fixed
                )
        except DataError:
            raise
        except Exception as error:  # errors of jinja, and of the template itself
            raise RowError(f"the tokenizer's chat template rejects this conversation: {error}") from error
        assert isinstance(text, str)
        if len(text) > _ADDED + 10 * sum(len(turn.content) for turn in messages):
            raise DataError(f"{what} makes {len(text):,} characters of one conversation")
        return text


_ADDED = 1_000_000
"""Characters that a chat template may add to a conversation, besides ten times its text."""

_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")


def _dated(tokenizer: Any, today: str) -> str:
    """Return the chat template with a fixed date; transformers passes no functions to templates.

    Raises:
        DataError: the template computes the format of the date.
    """
    day = datetime.fromisoformat(today)
    template: str = tokenizer.get_chat_template()
    dated = _CLOCK.sub(lambda match: repr(day.strftime(match["format"])), template)
    if "strftime_now(" in dated:
        raise DataError(
            "the chat template computes the format of today's date, so the date cannot be fixed; write the "
            'format in the template, as strftime_now("%d %b %Y")'
        )
    return dated


_ENDS_WORD = re.compile(r"[\w.?!:;,)\"']\Z")


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
        cut: the beginning of the prompt, or of its turns, was truncated.
        shortened: the end of a response was truncated.
        notes: what to report about it.
    """

    prompt: list[int]
    branches: tuple[list[int], list[int]]
    cut: bool = False
    shortened: bool = False
    notes: frozenset[Note] = frozenset()


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
    """Return the token ids of each text, without special tokens. Parts between marks are concatenated."""
    if not texts:
        return []
    parts = [text.split(MARK) for text in texts]
    tokens = tokenizer(
        [first for first, *_ in parts],
        add_special_tokens=False,
        return_attention_mask=False,
        padding=False,
        truncation=False,
        verbose=False,
    )["input_ids"]
    whole = [list(ids) for ids in tokens]
    for ids, (_, *rest) in zip(whole, parts, strict=True):
        if rest:
            ids += _joined_ids(tokenizer, rest)
    return whole


def _joined_ids(tokenizer: Tokenizer, parts: Sequence[str]) -> list[int]:
    """Return the token ids of parts of a text, without the spaces that a tokenizer puts before texts."""
    joining = _without_blank(getattr(tokenizer, "backend_tokenizer", None))
    if joining is None:
        return [token for ids in token_ids(tokenizer, parts) for token in ids]
    encoded = joining.encode_batch(list(parts), add_special_tokens=False)
    return [token for each in encoded for token in each.ids]


def continuation_ids(tokenizer: Tokenizer, starts: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text as the continuation of its start, without special tokens.

    Usually, these are the ids of the text itself. If the tokenizer puts a space before every text, as that of
    Llama 2 does, they are the ids of start and text together, without those of the start. If one token would
    span both, the text is tokenised by itself, without the space.
    """
    if _without_blank(getattr(tokenizer, "backend_tokenizer", None)) is None or not texts:
        return token_ids(tokenizer, texts)
    together = [start + text for start, text in zip(starts, texts, strict=True)]
    before, whole = token_ids(tokenizer, starts), token_ids(tokenizer, together)
    return [
        ids[len(start) :] if ids[: len(start)] == start else _joined_ids(tokenizer, text.split(MARK))
        for start, ids, text in zip(before, whole, texts, strict=True)
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
    with the end-of-text token, unless it was cut (:attr:`~prefed.data.Record.ended`); the absent response of
    a thumb has no tokens. A long conversation loses its oldest turns, then the beginning of its last one, but
    keeps its system turn; any other long prompt is truncated at its beginning, but keeps its
    beginning-of-text token.

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

    def encode(self, records: Sequence[Record]) -> list[Outcome]:
        """Encode each record; see :class:`Encoder`."""
        texts: list[Rendered] = []
        refused: dict[int, RowError] = {}
        for k, record in enumerate(records):
            try:
                pair = record.prompt, record.chosen, record.rejected
                texts.append(self._template.render(*pair, record.ended))
            except RowError as error:
                refused[k] = error
        tokens = zip(texts, triple_ids(self._tokenizer, [text[:3] for text in texts]), strict=True)
        outcomes: list[Outcome] = []
        for k, record in enumerate(records):
            try:
                outcomes.append(refused[k] if k in refused else self._fit(record, *next(tokens)))
            except RowError as error:  # of a shorter conversation
                outcomes.append(error)
        return outcomes

    def _fit(
        self, record: Record, texts: Rendered, tokens: tuple[list[int], list[int], list[int]]
    ) -> Encoded | TooLong | None:
        """Add special tokens and truncate to ``max_length``."""
        prompt, chosen, rejected = tokens
        head, prompt = self._template.split_start(record.prompt, prompt)
        chosen, rejected = (
            [*ids, self._end] if text and whole and ids[-1:] != [self._end] else ids
            for text, ids, whole in zip(
                (record.chosen, record.rejected), (chosen, rejected), record.ended, strict=True
            )
        )
        notes = texts.notes
        if any(self._end in ids[:-1] for ids in (chosen, rejected)):
            notes |= {"ends"}
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
        cut, prompt = len(head) + len(prompt) > room, [*head, *prompt]
        if cut and not isinstance(record.prompt, str):
            shorter = self._shorter(record.prompt, room)
            if isinstance(shorter, int):
                return TooLong(
                    f"the shortest prompt with its system turn has {shorter} tokens, and the longer response "
                    f"{longest}, but max_length is {self.max_length}",
                    needed=shorter + longest,
                )
            prompt = shorter
        elif cut:
            kept = min(len(head), room)
            prompt = [*head[:kept], *prompt[len(prompt) - (room - kept) :]]
        return Encoded(prompt, (chosen, rejected), cut, shortened, notes)

    def _shorter(self, prompt: tuple[Message, ...], room: int) -> list[int] | int:
        """Encode a conversation without its oldest turns or, at last, the beginning of the last user turn.

        Returns:
            Up to ``room`` token ids; or, if it has more with a single character of that turn, their number.
        """
        system = prompt[: prompt[0].role == "system" and len(prompt) > 1]
        users = [k for k, turn in enumerate(prompt) if turn.role == "user"] or [len(prompt) - 1]
        shorter = [(*system, *prompt[k:]) for k in users if k > len(system)]
        for messages in shorter:
            if len(ids := self._ids_of(messages)) <= room:
                return ids
        last, *after = prompt[users[-1] :]

        def ending(start: int) -> list[int]:
            return self._ids_of((*system, replace(last, content=last.content[start:]), *after))

        text = range(len(last.content) - 1)
        ids = ending(bisect_left(text, True, key=lambda start: len(ending(start)) <= room))
        return ids if len(ids) <= room else len(ids)

    def _ids_of(self, messages: tuple[Message, ...]) -> list[int]:
        return self._template.prompt_ids(messages)
