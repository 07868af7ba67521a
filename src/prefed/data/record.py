"""A preference: a prompt with a chosen and a rejected response, or with one response and a thumb."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

Role: TypeAlias = Literal["system", "user", "assistant"]
Split: TypeAlias = Literal["train", "validation", "test"]

_ROLES = ("system", "user", "assistant")
_SPLITS = ("train", "validation", "test")
_COLUMNS = ("client", "category", "domain", "split", "margin")
_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest 32-bit float, since margins are stored as 32-bit floats."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Raises:
        ValueError: the role is not system, user or assistant.
    """

    role: Role
    content: str

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"message role must be one of {', '.join(_ROLES)}, not {self.role!r}")
        if not isinstance(self.content, str):
            raise ValueError(f"message content must be text, not {type(self.content).__name__}")


Prompt: TypeAlias = "str | tuple[Message, ...]"
"""Text that is used unchanged, or the turns of a conversation (see :mod:`prefed.data.encoding`)."""


def prompt_texts(prompt: Prompt) -> list[str]:
    """Return the text of a prompt, or those of its turns."""
    return [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]


def plain_prompt(prompt: Prompt) -> str | list[dict[str, str]]:
    """Convert a prompt to JSON types."""
    if isinstance(prompt, str):
        return prompt
    return [{"role": turn.role, "content": turn.content} for turn in prompt]


def parse_prompt(plain: Any) -> Prompt:
    """Invert :func:`plain_prompt`."""
    return plain if isinstance(plain, str) else tuple(Message(**turn) for turn in plain)


def check_unicode(name: str, text: str) -> None:
    """Refuse half a surrogate pair, which JSON can write as an escape but UTF-8 cannot encode.

    Raises:
        ValueError: ``text`` contains one. The message contains ``name``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half a surrogate pair at character {error.start + 1}") from None


@dataclass(frozen=True)
class Record:
    """A preference pair, or a thumb: feedback on a single response.

    Attributes:
        prompt: text, or the messages of a conversation up to the response.
        chosen: the preferred response, without the prompt; empty for a thumb down.
        rejected: the other response; empty for a thumb up.
        margin: strength of the preference, on the scale of the source; larger is clearer.
        client: the person or organisation with this preference, if known.
        category: a label within the task, such as a subreddit, programming language or persona.
        domain: the dataset of the pair.
        split: the split assigned by the source.
        extra: other columns of the source with numbers or short texts, by name.
        label: of a thumb: whether it is up; ``None`` for a pair. See :meth:`thumb`.
        ended: whether chosen and rejected are whole; a response that was cut when it was generated has no
            end-of-text token.

    Raises:
        ValueError: a response is blank, both responses are equal, a text is not valid Unicode, the margin is
            not finite in 32 bits, or a thumb has a second response.

    >>> record = Record("Name a colour.", " Blue.", " A dog.", margin=0.8, extra={"worker": 7})
    >>> Record.from_json(record.to_json()) == record
    True
    >>> record.swapped().chosen
    ' A dog.'
    >>> Record.thumb("Name a colour.", " Blue.", up=True).swapped().label
    False
    """

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float | None = None
    client: str | None = None
    category: str | None = None
    domain: str | None = None
    split: Split | None = None
    extra: Mapping[str, str | float | int] = field(default_factory=dict)
    label: bool | None = None
    ended: tuple[bool, bool] = (True, True)

    @staticmethod
    def thumb(prompt: Prompt, response: str, *, up: bool, **columns: Any) -> Record:
        """Return the record of a response with a thumb up or down; ``columns`` are further fields."""
        chosen, rejected = (response, "") if up else ("", response)
        return Record(prompt, chosen, rejected, label=up, **columns)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", tuple(self.prompt))
        object.__setattr__(self, "extra", MappingProxyType(dict(self.extra)))
        object.__setattr__(self, "ended", (self.ended[0], self.ended[1]))
        responses = {"chosen": self.chosen, "rejected": self.rejected}
        if self.label is not None:
            if responses.pop("rejected" if self.label else "chosen"):
                raise ValueError("a thumb is feedback on one response, but this record has two")
            responses = {"completion": self.response}
        for name, response in responses.items():
            if not isinstance(response, str):
                raise ValueError(f"{name} must be text, not {type(response).__name__}")
            if not response.strip():
                raise ValueError(f"{name} is empty")
            check_unicode(name, response)
        for text in prompt_texts(self.prompt):
            check_unicode("prompt", text)
        for name in ("client", "category", "domain"):
            check_unicode(name, getattr(self, name) or "")
        for name, value in self.extra.items():
            check_unicode("a column name", name)
            check_unicode(name, value if isinstance(value, str) else "")
        if self.chosen == self.rejected:
            raise ValueError("chosen and rejected are the same")
        if self.margin is not None and not abs(self.margin) <= _LARGEST:
            raise ValueError(f"margin must be a finite 32-bit number, not {self.margin}")
        if self.split is not None and self.split not in _SPLITS:
            raise ValueError(f"split must be one of {', '.join(_SPLITS)}, not {self.split!r}")

    @property
    def response(self) -> str:
        """The response of a thumb."""
        return self.chosen if self.label else self.rejected

    def swapped(self) -> Record:
        """Return the same pair with the opposite preference, or the same response with the other thumb."""
        label, ended = None if self.label is None else not self.label, (self.ended[1], self.ended[0])
        return replace(self, chosen=self.rejected, rejected=self.chosen, label=label, ended=ended)

    def column(self, name: str) -> str | float | int | None:
        """Return the value of a column: a field of the record, or an entry of ``extra``."""
        value: str | float | None = getattr(self, name) if name in _COLUMNS else None
        return self.extra.get(name) if value is None else value

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns with a value."""
        return tuple(n for n in _COLUMNS if getattr(self, n) is not None) + tuple(self.extra)

    def to_json(self) -> str:
        """Return the record as one line of JSON, without empty fields."""
        plain: dict[str, Any] = {"prompt": plain_prompt(self.prompt)}
        if self.label is None:
            plain |= {"chosen": self.chosen, "rejected": self.rejected}
        else:
            plain |= {"completion": self.response, "label": self.label}
        for name in ("margin", "client", "category", "domain", "split"):
            if getattr(self, name) is not None:
                plain[name] = getattr(self, name)
        if self.extra:
            plain["extra"] = dict(self.extra)
        if not all(self.ended):
            plain["ended"] = self.ended
        return json.dumps(plain, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> Record:
        """Parse the output of :meth:`to_json`."""
        plain = json.loads(line)
        prompt = parse_prompt(plain.pop("prompt"))
        if "label" in plain:
            return Record.thumb(prompt, plain.pop("completion"), up=plain.pop("label"), **plain)
        return Record(prompt, **plain)


def pair_digest(client: str, record: Record) -> str:
    """Return the SHA-256 of a pair of a client (``""`` for a drawn partition), as its source has it.

    >>> pair_digest("ann", Record("Name a colour.", " Blue.", " A dog."))[:16]
    '80e61cf952265ce6'
    """
    whole = [client, plain_prompt(record.prompt), record.chosen, record.rejected]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()
