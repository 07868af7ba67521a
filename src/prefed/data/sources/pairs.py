"""From what a row says to a pair: messages or text, implicit prompts, dialogues, repeated prefixes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefed.data.config import Columns
from prefed.data.errors import RowError
from prefed.data.record import Message, Role, Split
from prefed.data.sources.files import Row

__all__ = [
    "TURN",
    "Draft",
    "common",
    "extra",
    "label",
    "messages",
    "number",
    "separate",
    "split_dialogue",
    "split_name",
    "text",
    "value",
]

TURN = "\n\nAssistant:"
"""What precedes the assistant's words in a dialogue written as one text."""

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
_SPLITS: Mapping[str, Split] = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
_LONGEST = 1000
"""Longer texts in other columns are not carried along as extra."""


@dataclass
class Draft:
    """A pair as a row gives it: prompt and responses may still be text, messages or whole dialogues."""

    prompt: Any
    chosen: Any
    rejected: Any
    margin: float | None = None
    client: str | None = None
    category: str | None = None
    domain: str | None = None
    split: Split | None = None
    extra: dict[str, str | float | int] = field(default_factory=dict)


def value(row: Row, path: str) -> Any:
    """The value at a dotted path; a column whose own name has a dot comes first.

    Raises:
        RowError: there is none, with the names there are.
    """
    if path in row:
        return row[path]
    found: Any = row
    for step in path.split("."):
        if not isinstance(found, Mapping) or step not in found:
            raise RowError(f"no column {path!r}; this row has {', '.join(map(str, row)) or 'none'}")
        found = found[step]
    return found


def text(row: Row, path: str) -> str:
    """The text at ``path``.

    Raises:
        RowError: it is missing or not text.
    """
    found = value(row, path)
    if not isinstance(found, str):
        raise RowError(f"{path} is {'missing' if found is None else type(found).__name__ + ', not text'}")
    return found


def extra(row: Row, used: Sequence[str]) -> dict[str, str | float | int]:
    """The row's other plain values: finite numbers and texts that are not long."""
    kept: dict[str, str | float | int] = {}
    for name, item in row.items():
        if name in used or item is None:
            continue
        if isinstance(item, bool):
            kept[str(name)] = int(item)
        elif (
            isinstance(item, int)
            or (isinstance(item, float) and math.isfinite(item))
            or (isinstance(item, str) and len(item) <= _LONGEST)
        ):
            kept[str(name)] = item
    return kept


def common(row: Row, columns: Columns, prompt: str | None) -> Draft:
    """A draft from named columns.

    Args:
        row: the row.
        columns: where everything is.
        prompt: the prompt's column, ``None`` where the responses contain it.

    Raises:
        RowError: a named column is missing, or the margin, client or split makes no sense.
    """
    start = None if prompt is None else value(row, prompt)
    if prompt is not None and start is None:
        raise RowError(f"{prompt} is missing")
    named = [columns.margin, columns.client, columns.category, columns.domain, columns.split]
    used = [name for name in (prompt, columns.chosen, columns.rejected, *named) if name is not None]
    return Draft(
        prompt=start,
        chosen=value(row, columns.chosen),
        rejected=value(row, columns.rejected),
        margin=None if columns.margin is None else number(value(row, columns.margin), columns.margin),
        client=_label(row, columns.client),
        category=_label(row, columns.category),
        domain=_label(row, columns.domain),
        split=None if columns.split is None else split_name(value(row, columns.split)),
        extra=extra(row, used),
    )


def number(item: Any, name: str) -> float | None:
    """A finite number, or ``None`` where there is none.

    Raises:
        RowError: not a number, or not a finite one.
    """
    if item is None:
        return None
    try:
        result = math.nan if isinstance(item, bool) else float(item)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise RowError(f"{name} is {reprlib.repr(item)}, not a finite number")
    return result


def _label(row: Row, name: str | None) -> str | None:
    return None if name is None else label(value(row, name), name)


def label(item: Any, name: str) -> str | None:
    """A client's or category's name: text, or a whole number written out.

    Raises:
        RowError: something else.
    """
    if item is None:
        return None
    if isinstance(item, float) and item.is_integer():
        item = int(item)
    if isinstance(item, str | int):
        return str(item) or None
    raise RowError(f"{name} is {item!r}, not a name")


def split_name(item: Any) -> Split | None:
    """A split by one of its usual names.

    Raises:
        RowError: another name.
    """
    if item is None:
        return None
    if isinstance(item, str) and item in _SPLITS:
        return _SPLITS[item]
    raise RowError(f"split is {item!r}, not one of {', '.join(_SPLITS)}")


def separate(draft: Draft) -> tuple[str | tuple[Message, ...], str, str, bool]:
    r"""Prompt, chosen and rejected response of a draft, and whether a repeated prompt was taken off.

    - Two texts and a prompt: as they are; where both responses repeat the prompt, they lose it.
    - Two texts alone: they are whole dialogues and are split at the last common ``"\n\nAssistant:"``, or
      where there is none at the last blank before they differ.
    - Two lists of messages: the common beginning, joined to the prompt where one is given, is the prompt, and
      each goes on with one assistant message.

    Raises:
        RowError: neither.
    """
    prompt, chosen, rejected = draft.prompt, draft.chosen, draft.rejected
    for name, item in (("chosen", chosen), ("rejected", rejected)):
        if item is None:
            raise RowError(f"{name} is missing")
        if not isinstance(item, str | list | tuple):
            raise RowError(f"{name} is {type(item).__name__}, neither text nor messages")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("chosen and rejected are not of one form: one is text, the other messages")
    if not isinstance(chosen, str):
        return (*_conversation(prompt, messages(chosen, "chosen"), messages(rejected, "rejected")), False)
    if prompt is None:
        return (*split_dialogue(chosen, rejected), False)
    if not isinstance(prompt, str):
        return messages(prompt, "prompt"), chosen, rejected, False
    if prompt.strip() and chosen.startswith(prompt) and rejected.startswith(prompt):
        return prompt, chosen[len(prompt) :], rejected[len(prompt) :], True
    return prompt, chosen, rejected, False


def split_dialogue(chosen: str, rejected: str) -> tuple[str, str, str]:
    r"""Two dialogues that begin alike, as their prompt and the two responses.

    >>> split_dialogue("\n\nHuman: Hi\n\nAssistant: Hello", "\n\nHuman: Hi\n\nAssistant: Hey")
    ('\n\nHuman: Hi\n\nAssistant:', ' Hello', ' Hey')
    >>> split_dialogue("The sky is blue", "The sky is green")
    ('The sky is', ' blue', ' green')
    """
    shared = chosen[: _agree(chosen, rejected)]
    turn = shared.rfind(TURN)
    if turn >= 0:
        end = turn + len(TURN)
    elif shared.endswith((" ", "\n", "\t")):
        end = len(shared.rstrip())
    else:
        # Cut at a blank, so that no word is torn: where both go on with one, or before the last shared one.
        both_blank = all(len(t) > len(shared) and t[len(shared)].isspace() for t in (chosen, rejected))
        end = len(shared) if both_blank else max(shared.rfind(" "), shared.rfind("\n"), 0)
    return chosen[:end], chosen[end:], rejected[end:]


def _agree(one: str, other: str) -> int:
    """How many characters two texts share at their beginning, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def messages(item: Any, name: str) -> tuple[Message, ...]:
    """Messages from ``{role, content}`` (or ``{from, value}``) objects.

    Raises:
        RowError: something else.
    """
    if not isinstance(item, list | tuple) or not item:
        raise RowError(f"{name} is {'empty' if not item else type(item).__name__}, neither text nor messages")
    found = []
    for turn in item:
        if not isinstance(turn, Mapping):
            raise RowError(f"{name} holds {type(turn).__name__} where a message is expected")
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role not in _ROLES:
            raise RowError(f"{name} has a message of role {role!r}; known are {', '.join(_ROLES)}")
        if not isinstance(content, str):
            raise RowError(f"{name} has a message whose content is not text")
        found.append(Message(_ROLES[role], content))
    return tuple(found)


def _conversation(
    prompt: Any, chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> tuple[tuple[Message, ...], str, str]:
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    for name, rest in (("chosen", chosen[shared:]), ("rejected", rejected[shared:])):
        if len(rest) != 1 or rest[0].role != "assistant":
            raise RowError(
                f"{name} is not one assistant message after what both dialogues share "
                f"(it goes on with {', '.join(turn.role for turn in rest)})"
            )
    start = chosen[:shared]
    if isinstance(prompt, str):
        if not start or not _asks(start, prompt.strip()):
            start = (*start, Message("user", prompt))
    elif prompt is not None:
        start = _join(messages(prompt, "prompt"), start)
    return start, chosen[-1].content, rejected[-1].content


def _asks(turns: tuple[Message, ...], question: str) -> bool:
    """Whether turns that both dialogues share hold the prompt, so that it is not asked twice."""
    told = [turn.content.strip() for turn in turns]
    if not question or question in told:
        return True
    # The last question may hold the prompt and more; or the prompt may be all the turns, written as one text.
    return turns[-1].role == "user" and (question in told[-1] or all(text in question for text in told))


def _join(given: tuple[Message, ...], shared: tuple[Message, ...]) -> tuple[Message, ...]:
    """Given turns and those that both dialogues share, without repeating those that are in both."""
    if any(shared[k : k + len(given)] == given for k in range(len(shared))):
        return shared
    both = next(n for n in range(len(given), -1, -1) if given[len(given) - n :] == shared[:n])
    return given + shared[both:]
