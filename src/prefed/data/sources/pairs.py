"""Turns the values of a row into a pair: text or messages, implicit or repeated prompts, whole texts."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefed.data.config import Columns
from prefed.data.encoding import dialogue
from prefed.data.errors import RowError
from prefed.data.record import Message, Prompt, Role, Split
from prefed.data.sources.files import Row

TURN = "\n\nAssistant:"
"""The mark before a turn of the assistant, in a dialogue written as one text."""

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
"""Longer texts of unused columns are not kept with the record."""


@dataclass
class RawPair:
    """A pair as it stands in a row. Prompt and responses may be text, messages or whole dialogues."""

    prompt: Any
    chosen: Any
    rejected: Any
    margin: float | None = None
    client: str | None = None
    category: str | None = None
    domain: str | None = None
    split: Split | None = None
    extra: dict[str, str | float | int] = field(default_factory=dict)


def value_at(row: Row, path: str) -> Any:
    """The value at a dotted path. A column whose name contains the dots comes first.

    Raises:
        RowError: there is no such value. The message lists the columns.
    """
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        if not isinstance(value, Mapping) or step not in value:
            raise RowError(f"no column {path!r}; this row has {', '.join(map(str, row)) or 'none'}")
        value = value[step]
    return value


def text_at(row: Row, path: str) -> str:
    """The text at a dotted path.

    Raises:
        RowError: the value is missing or not text.
    """
    value = value_at(row, path)
    if not isinstance(value, str):
        raise RowError(f"{path} is {'missing' if value is None else type(value).__name__ + ', not text'}")
    return value


def list_at(row: Row, name: str) -> list[Any]:
    """The list in a column: a list, or JSON text of one, as in a CSV file.

    Raises:
        RowError: the value is missing or no such list.
    """
    value = value_at(row, name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name} is text, but not a JSON list ({error})") from error
    if not isinstance(value, list):
        raise RowError(f"{name} is {'missing' if value is None else type(value).__name__ + ', not a list'}")
    return value


def extra_columns(row: Row, used: Sequence[str]) -> dict[str, str | float | int]:
    """The finite numbers and short texts in the columns that are not ``used``."""
    values: dict[str, str | float | int] = {}
    for name, item in row.items():
        if name in used or item is None:
            continue
        if isinstance(item, bool):
            values[str(name)] = int(item)
        elif (
            isinstance(item, int)
            or (isinstance(item, float) and math.isfinite(item))
            or (isinstance(item, str) and len(item) <= _LONGEST)
        ):
            values[str(name)] = item
    return values


def usual_columns(row: Row) -> Columns:
    """The columns that are used without being named, where the row has them."""
    return Columns(**{n: n for n in ("margin", "client", "category", "domain", "split") if n in row})


def user_turn(content: str, system: Any = None) -> list[dict[str, str]]:
    """A text as the turn of a user, after a system message if there is one."""
    start = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    return [*start, {"role": "user", "content": content}]


def pair_from_columns(row: Row, columns: Columns, prompt: str | None) -> RawPair:
    """The pair in named columns. ``prompt`` is ``None`` where the responses contain the prompt.

    Raises:
        RowError: a named column is missing, or the margin, client or split is malformed.
    """
    start = None if prompt is None else value_at(row, prompt)
    if prompt is not None and start is None:
        raise RowError(f"{prompt} is missing")
    named = [columns.margin, columns.client, columns.category, columns.domain, columns.split]
    used = [name for name in (prompt, columns.chosen, columns.rejected, *named) if name is not None]
    return RawPair(
        prompt=start,
        chosen=value_at(row, columns.chosen),
        rejected=value_at(row, columns.rejected),
        margin=None
        if columns.margin is None
        else parse_number(value_at(row, columns.margin), columns.margin),
        client=_name_at(row, columns.client),
        category=_name_at(row, columns.category),
        domain=_name_at(row, columns.domain),
        split=None if columns.split is None else parse_split(value_at(row, columns.split)),
        extra=extra_columns(row, used),
    )


def parse_number(item: Any, name: str) -> float | None:
    """A finite number; ``None`` stays ``None``.

    Raises:
        RowError: the value is not a finite number.
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


def _name_at(row: Row, path: str | None) -> str | None:
    return None if path is None else parse_name(value_at(row, path), path)


def parse_name(item: Any, name: str) -> str | None:
    """The name of a client or category: text, or a whole number as text. ``None`` and "" become ``None``.

    Raises:
        RowError: the value is neither text nor a whole number.
    """
    if item is None:
        return None
    if isinstance(item, float) and item.is_integer():
        item = int(item)
    if isinstance(item, str | int):
        return str(item) or None
    raise RowError(f"{name} is {item!r}, not a name")


def parse_split(item: Any) -> Split | None:
    """The split for one of its usual names; ``None`` stays ``None``.

    Raises:
        RowError: the name is unknown.
    """
    if item is None:
        return None
    if isinstance(item, str) and item in _SPLITS:
        return _SPLITS[item]
    raise RowError(f"split is {item!r}, not one of {', '.join(_SPLITS)}")


def split_prompt(pair: RawPair) -> tuple[str | tuple[Message, ...], str, str, bool]:
    r"""Separate the prompt of a pair from its two responses.

    - Two texts and a prompt are used as they are. If both responses repeat the prompt, the repetition is
      removed.
    - Two texts without a prompt are whole dialogues. They are split at the last common ``"\n\nAssistant:"``.
      Without one they are split at the last blank before the first difference.
    - Two lists of messages: their common beginning, after the given prompt if there is one, is the prompt.
      Each list ends with one assistant message, the response.

    Returns:
        Prompt, chosen response, rejected response, and whether a repeated prompt was removed.

    Raises:
        RowError: the pair has none of these forms.
    """
    prompt, chosen, rejected = pair.prompt, pair.chosen, pair.rejected
    for name, item in (("chosen", chosen), ("rejected", rejected)):
        if item is None:
            raise RowError(f"{name} is missing")
        if not isinstance(item, str | list | tuple):
            raise RowError(f"{name} is {type(item).__name__}, neither text nor messages")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("chosen and rejected differ in form: one is text, the other messages")
    if not isinstance(chosen, str):
        both = parse_messages(chosen, "chosen"), parse_messages(rejected, "rejected")
        return (*_split_conversation(prompt, *both), False)
    if prompt is None:
        return (*split_dialogue(chosen, rejected), False)
    if not isinstance(prompt, str):
        return parse_messages(prompt, "prompt"), chosen, rejected, False
    if prompt.strip() and chosen.startswith(prompt) and rejected.startswith(prompt):
        return prompt, chosen[len(prompt) :], rejected[len(prompt) :], True
    return prompt, chosen, rejected, False


def split_dialogue(chosen: str, rejected: str) -> tuple[str, str, str]:
    r"""Split two dialogues with a common beginning into prompt, chosen and rejected response.

    >>> split_dialogue("\n\nHuman: Hi\n\nAssistant: Hello", "\n\nHuman: Hi\n\nAssistant: Hey")
    ('\n\nHuman: Hi\n\nAssistant:', ' Hello', ' Hey')
    >>> split_dialogue("The sky is blue", "The sky is green")
    ('The sky is', ' blue', ' green')
    """
    shared = chosen[: _common_length(chosen, rejected)]
    turn = shared.rfind(TURN)
    if turn >= 0:
        end = turn + len(TURN)
    elif shared.endswith((" ", "\n", "\t")):
        end = len(shared.rstrip())
    else:
        # Split at a blank, not within a word. It is the next character of both texts, or the last shared one.
        both_blank = all(text[len(shared) :][:1].isspace() for text in (chosen, rejected))
        end = len(shared) if both_blank else max(shared.rfind(" "), shared.rfind("\n"), 0)
    return chosen[:end], chosen[end:], rejected[end:]


def _common_length(one: str, other: str) -> int:
    """The length of the common beginning of two texts, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def parse_messages(item: Any, name: str) -> tuple[Message, ...]:
    """Messages from ``{role, content}`` or ``{from, value}`` objects.

    Raises:
        RowError: the value is not a list of such objects.
    """
    if not isinstance(item, list | tuple) or not item:
        raise RowError(f"{name} is {'empty' if not item else type(item).__name__}, neither text nor messages")
    turns = []
    for turn in item:
        if not isinstance(turn, Mapping):
            raise RowError(f"{name} holds {type(turn).__name__} where a message is expected")
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role not in _ROLES:
            raise RowError(f"{name} has a message with role {role!r}; known roles: {', '.join(_ROLES)}")
        if not isinstance(content, str):
            hint = "; join the parts of the list into one text" if isinstance(content, list) else ""
            raise RowError(f"{name} has a message whose content is not text{hint}")
        turns.append(Message(_ROLES[role], content))
    return tuple(turns)


def _split_conversation(
    prompt: Any, chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> tuple[tuple[Message, ...], str, str]:
    """Separate the common beginning of two conversations, joined to the prompt, from the two responses."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    for name, rest in (("chosen", chosen[shared:]), ("rejected", rejected[shared:])):
        if len(rest) != 1 or rest[0].role != "assistant":
            raise RowError(
                f"{name} is not one assistant message after what both dialogues share "
                f"(it continues with {', '.join(turn.role for turn in rest)})"
            )
    start = chosen[:shared]
    if isinstance(prompt, str):
        if not start or not _contains(start, prompt.strip()):
            start = (*start, Message("user", prompt))
    elif prompt is not None:
        start = _join(parse_messages(prompt, "prompt"), start)
    return start, chosen[-1].content, rejected[-1].content


def _contains(turns: tuple[Message, ...], prompt: str) -> bool:
    """Whether the shared turns contain a text prompt already, so that it is not added again."""
    contents = [turn.content.strip() for turn in turns]
    if not prompt or prompt in contents:
        return True
    # The last user turn may contain the prompt and more. Or the prompt may contain all turns, as one text.
    return turns[-1].role == "user" and (prompt in contents[-1] or all(text in prompt for text in contents))


def _join(prompt: tuple[Message, ...], shared: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns of the prompt, then those that both dialogues share. Turns that are in both stand once."""
    if any(shared[k : k + len(prompt)] == prompt for k in range(len(shared))):
        return shared
    overlap = next(n for n in range(len(prompt), -1, -1) if prompt[len(prompt) - n :] == shared[:n])
    return prompt + shared[overlap:]


def whole_texts(prompt: Prompt, responses: tuple[str, str], tail: int | None) -> tuple[str, str]:
    r"""Prompt and response as one text, for each response; of a conversation in the Human/Assistant form.

    Such texts are scored as a whole and may lose their beginning. Distributed DPO (arXiv:2605.20696), E.1:
    the last 300 characters of each branch of a dialogue are all that its model reads, and its code scores
    every token of them.

    Args:
        tail: keep so many characters of each, its last ones; ``None``: all.

    >>> whole_texts("\n\nHuman: Hi\n\nAssistant:", (" Hello", " Hey"), 10)
    ('ant: Hello', 'stant: Hey')
    """
    start = prompt if isinstance(prompt, str) else dialogue(prompt)
    apart = "" if isinstance(prompt, str) else " "
    chosen, rejected = (
        start + (response if response[:1].isspace() else apart + response) for response in responses
    )
    return (chosen, rejected) if tail is None else (chosen[-tail:], rejected[-tail:])
