"""Turn the values of a row into a pair: text or messages, implicit or repeated prompts, whole texts."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from prefed.data.config import Columns
from prefed.data.encoding import dialogue
from prefed.data.errors import RowError
from prefed.data.record import Message, Prompt, Record, Role, Split
from prefed.data.sources.files import Row, has_value, peek, type_name, unmarked

TURN = "\n\nAssistant:"
"""The marker of an assistant turn in a dialogue written as one text."""

_ASSISTANT_TURN = re.compile(re.escape(TURN))
_LATER_TURN = re.compile(
    r"\n\n(?:Human|Assistant):|<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|user\|>|\[INST\]"
)
"""The beginning of a turn in a dialogue written as one text."""
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
_MESSAGE_KEYS = {"role", "content", "from", "value"}
_SPLITS: Mapping[str, Split] = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
SYSTEM_NAMES = ("system", "system_prompt", "system_message")
"""Usual names of the column of system messages, in order of precedence."""
_ALPACA = ("history", "instruction", "input")
_PROMPTS = (
    *("history", "question", "instruction", "query", "problem", "input"),
    *("messages", "conversations", "conversation", "trajectory"),
)
"""Usual names of a prompt's column, other than ``prompt``; what comes first precedes the others."""
_LONGEST = 1000
"""Maximum length of a text from an unused column that is kept with the record."""


@dataclass
class RawPair:
    """A pair as read from a row. Prompt and responses may be text, messages or whole dialogues.

    A thumb has its response as both ``chosen`` and ``rejected``, and a ``label``. ``whole`` responses repeat
    the prompt, which may end within a word. ``columns`` are those that were read, if a setting can name them.
    """

    prompt: Any
    chosen: Any
    rejected: Any
    margin: float | None = None
    client: str | None = None
    category: str | None = None
    domain: str | None = None
    split: Split | None = None
    extra: dict[str, str | float | int] = field(default_factory=dict)
    label: bool | None = None
    whole: bool = False
    columns: Columns | None = None


def value_at(row: Row, path: str) -> Any:
    """Return the value at a dotted path, in which numbers count the entries of lists from 0.

    A column with dots in its name takes precedence.

    Raises:
        RowError: there is no such value. The message lists the columns.
    """
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        if isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, Mapping) and step in value:
            value = value[step]
        else:
            raise RowError(f"no column {path!r}; available columns: {', '.join(map(str, row)) or 'none'}")
    return value


def text_at(row: Row, path: str) -> str:
    """Return the text at a dotted path.

    Raises:
        RowError: the value is missing or not text.
    """
    value = value_at(row, path)
    if not isinstance(value, str):
        raise _mismatch(path, "text", value)
    return value


def number_at(row: Row, path: str) -> float | None:
    """Return the finite number at a dotted path, or ``None`` if the value is ``None``.

    Raises:
        RowError: the value is missing or not a finite number.
    """
    return parse_number(value_at(row, path), path)


def list_at(row: Row, name: str) -> list[Any]:
    """Return the list in a column: a list, or a JSON text, as in CSV files.

    Raises:
        RowError: the value is missing or not a list.
    """
    value = value_at(row, name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name} must be a list or its JSON text ({error})") from error
    if not isinstance(value, list):
        raise _mismatch(name, "a list", value)
    return value


def messages_or_text(value: Any) -> Any:
    """Return the messages in a JSON text, as in CSV files; any other value unchanged.

    Raises:
        RowError: the text is a list of messages as Python, not JSON, writes it.
    """
    if not isinstance(value, str) or not (start := re.match(r"\s*\[\s*\{\s*(?:'(\w+)')?", value)):
        return value
    if start[1] in _MESSAGE_KEYS:
        raise RowError(
            "a list of messages is written as Python text, as pandas does in CSV files, not as JSON; write "
            'the rows with to_json(FILE, orient="records", lines=True)'
        )
    try:
        messages = json.loads(value)
    except (ValueError, RecursionError):
        return value
    # Other lists of objects are text, e.g. a task about JSON.
    known = all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in messages)
    return messages if known and any(turn.keys() & {"content", "value"} for turn in messages) else value


def _mismatch(name: str, expected: str, value: Any) -> RowError:
    what = "is missing" if value is None else f"must be {expected}, not {type_name(value)}"
    return RowError(f"{name} {what}")


def extra_columns(row: Row, used: Sequence[str]) -> dict[str, str | float | int]:
    """Return the finite numbers and short texts in the columns that are not ``used``."""
    values: dict[str, str | float | int] = {}
    for name, item in unmarked(row):
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


def contradicts(row: Row, records: Sequence[Record]) -> bool:
    """Whether a row rates its rejected response higher: by its columns, or by a negative margin.

    Columns are those like ``score_chosen`` and ``score_rejected``.
    """
    if any(record.label is None and (record.margin or 0) < 0 for record in records):
        return True
    return any(_is_less(peek(row, one), peek(row, other)) for one, other in _rated(tuple(row)))


@lru_cache
def _rated(names: tuple[Any, ...]) -> list[tuple[str, str]]:
    """Return the columns that rate the chosen and the rejected response."""
    rates = [name for name in map(str, names) if re.search("score|rating|reward", name)]
    pairs = [(name, name.replace("chosen", "rejected")) for name in rates]
    return [(one, other) for one, other in pairs if one != other and other in rates]


def _is_less(one: Any, other: Any) -> bool:
    try:
        return float(one) < float(other)
    except (TypeError, ValueError):
        return False


def usual_columns(row: Row) -> Columns:
    """Return the columns of a row that are used by default: those of well-known layouts.

    A column ``prompt`` is used unchanged. Without one, an instruction with its input, or the only column with
    another usual name of a prompt, becomes a conversation. Dialogues that contain their prompt need none.
    """
    named: dict[str, Any] = {n: n for n in ("margin", "client", "category", "domain", "split") if n in row}
    if "chosen" not in row and "chosen_response" in row:
        named |= {"chosen": "chosen_response", "rejected": "rejected_response"}
    response = peek(row, next((n for n in (named.get("chosen", "chosen"), "completion") if n in row), ""))
    if "prompt" in row:
        named["prompt"] = "prompt"
    elif not is_dialogue(response):
        found = [name for name in _PROMPTS if has_value(peek(row, name))]
        if "instruction" in found:
            found = [name for name in _ALPACA if name in found]
        if "instruction" in found or len([name for name in found if name != "history"]) == 1:
            named["prompt"] = tuple(found)
    systems = [name for name in SYSTEM_NAMES if name in row]
    if systems and ("prompt" in named or isinstance(messages_or_text(response), list)):
        named["system"] = next((name for name in systems if has_value(peek(row, name))), systems[0])
    return _columns(tuple(named.items()))


@lru_cache
def _columns(named: tuple[tuple[str, Any], ...]) -> Columns:
    """Return validated columns. Most rows of a file have the same ones."""
    return Columns(**dict(named))


def is_dialogue(response: Any) -> bool:
    """Whether a response contains its prompt: several messages, or the text of a dialogue."""
    response = messages_or_text(response)
    return TURN in response if isinstance(response, str) else isinstance(response, list) and len(response) > 1


def is_marked(prompt: Prompt) -> bool:
    """Whether a prompt is a conversation, or a text with marks of its turns."""
    return not isinstance(prompt, str) or bool(_LATER_TURN.search(prompt))


def user_turn(content: str, system: Any = None) -> list[dict[str, str]]:
    """Return a text as a user turn, after the system message, if any."""
    start = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    return [*start, {"role": "user", "content": content}]


def read_prompt(row: Row, columns: Columns) -> Any:
    """Return the prompt in the named columns: a text, messages, or ``None`` without a prompt.

    A text in ``columns.prompt = "…"`` is used unchanged, unless a column of system messages is named. The
    text of a dialogue is used unchanged, too, if it contains the system message, if any. Otherwise the prompt
    is a conversation: the system message, the messages of the columns, and their texts, joined by new lines,
    as user turns.

    Raises:
        RowError: a column is missing, all are empty, or there are two system messages.
    """
    names = columns.prompts
    values = [_history_or_text(messages_or_text(value_at(row, name))) for name in names]
    if names and all(value is None for value in values):
        raise RowError(f"{' and '.join(names)} is missing")
    system = None if columns.system is None else value_at(row, columns.system)
    if system is not None and not isinstance(system, str):
        raise _mismatch(str(columns.system), "text", system)
    system = system if system and system.strip() else None
    text = values[0] if len(values) == 1 else None
    plain = isinstance(columns.prompt, str)
    # Someone may write a chat template's tokens into a question; a prompt may be rendered with them.
    marks = _LATER_TURN if plain else _ASSISTANT_TURN
    rendered = isinstance(text, str) and marks.search(text) and (system or "") in text
    if rendered or (plain and (columns.system is None or (system is None and not isinstance(text, str)))):
        return text
    turns: list[Any] = []
    texts: list[str] = []
    for name, value in zip(names, values, strict=True):
        if isinstance(value, str):
            if marks.search(value):
                raise RowError(f"{name} is a dialogue in one text; write it as a list of messages")
            texts += [value] if has_value(value) else []
        elif value:
            turns += user_turn("\n".join(texts)) if texts else []
            turns, texts = [*turns, *_turns(value, name)], []
    turns += user_turn("\n".join(texts)) if texts else []
    if names and not turns:
        raise RowError(f"{' and '.join(names)} is empty")
    if system is None:
        return turns or None
    first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
    if _ROLES.get(str(first.get("role", first.get("from")))) != "system":
        return [{"role": "system", "content": system}, *turns]
    if first.get("content", first.get("value")) != system:
        raise RowError(f"{columns.system} differs from the system message in {' and '.join(names)}")
    return turns


def _history_or_text(value: Any) -> Any:
    """Return the pairs of a history in a JSON text, as in CSV files; any other value unchanged."""
    if not isinstance(value, str) or not re.match(r'\s*\[\s*\[\s*"', value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _turns(value: Any, name: str) -> list[Any]:
    """Return messages, or the pairs of question and answer of a history, as messages."""
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, list):
        raise _mismatch(name, "text or a list of messages", value)
    turns: list[Any] = []
    for item in value:
        pair = isinstance(item, list | tuple) and len(item) == 2
        roles = ("user", "assistant")
        turns += [{"role": r, "content": t} for r, t in zip(roles, item, strict=True)] if pair else [item]
    return turns


def pair_from_columns(
    row: Row, columns: Columns, found: tuple[Any, Any, float | None] | None = None, used: Sequence[str] = ()
) -> RawPair:
    """Return the pair or thumb in the named columns.

    Args:
        found: chosen, rejected and margin, instead of the values in their columns.
        used: further columns that are not kept as ``extra``.

    Raises:
        RowError: a named column is missing, or the margin, client, split or label is malformed.
    """
    start = read_prompt(row, columns)
    named = [columns.margin, columns.client, columns.category, columns.domain, columns.split, columns.system]
    completion, label = columns.thumb or (None, None)
    responses = [columns.chosen, columns.rejected] if completion is None else [completion, completion]
    named += [*columns.prompts, *responses, label, *used]
    margin = None if columns.margin is None else number_at(row, columns.margin)
    if found is None:
        chosen, rejected = (_one_message(value_at(row, name)) for name in responses)
    else:
        chosen, rejected, margin = found
    parsed = [messages_or_text(item) for item in (chosen, rejected)]
    if all(isinstance(item, list) for item in parsed):
        # Otherwise the task is to write such JSON, and only one response did.
        chosen, rejected = parsed
    _check_prompt(start, chosen, columns)
    return RawPair(
        prompt=start,
        chosen=chosen,
        rejected=rejected,
        margin=margin,
        client=_name_at(row, columns.client),
        category=_name_at(row, columns.category),
        domain=_name_at(row, columns.domain),
        split=None if columns.split is None else parse_split(value_at(row, columns.split)),
        extra=extra_columns(row, [name for name in named if name is not None]),
        label=None if label is None else parse_label(value_at(row, label), label),
        columns=columns if found is None or columns.preference else None,
    )


_TIES = ("tie", "tie (bothbad)", "both bad", "bothbad", "neither", "equal", "same", "none", "draw")


def voted(row: Row, columns: Columns) -> tuple[Any, Any, None] | None:
    """Return the better and the worse of two responses by a vote, without a margin; ``None`` for a tie.

    Raises:
        RowError: a column is missing, or the vote names neither response.
    """
    names = columns.responses
    assert names is not None
    assert columns.preference is not None
    winner = better_of(value_at(row, columns.preference), names, columns.preference)
    values = [_one_message(value_at(row, name)) for name in names]
    return None if winner is None else (values[winner], values[1 - winner], None)


def better_of(vote: Any, names: Sequence[str], column: str) -> int | None:
    """Return the index of the better of two responses; ``None`` for a tie.

    Raises:
        RowError: the vote names neither response.

    >>> names = ("response_a", "response_b")
    >>> [better_of(vote, names, "winner") for vote in ("model_b", "A", "left", "tie")]
    [1, 0, 0, None]
    """
    whole = isinstance(vote, float) and vote.is_integer()
    text = str(int(vote) if whole else vote).strip().lower().replace("_", " ")
    if not text or vote is None or text in _TIES:
        return None
    ends = [name.rpartition(".")[2].lower().replace("_", " ") for name in names]
    parts = different_parts(*ends)
    # The last part of "model b"; -2 is a strength, and no vote for response 2.
    last = re.split(r"[^a-z0-9]+", text)[-1] if text[0].isalpha() else text
    found = [k for k in (0, 1) if text in (ends[k], parts[k], _SIDES[k]) or last == parts[k]]
    if len(found) != 1:
        raise RowError(f"{column} is {vote!r}, which names neither {names[0]} nor {names[1]}")
    return found[0]


_SIDES = ("left", "right")


def different_parts(one: str, other: str) -> tuple[str, str]:
    """Return two names without their common beginning and end.

    >>> different_parts("model_a_output", "model_b_output")
    ('a', 'b')
    """
    start = _common_length(one, other)
    ends = one[start:], other[start:]
    stop = _common_length(ends[0][::-1], ends[1][::-1])
    first, second = (end[: len(end) - stop].strip(" _-") for end in ends)
    return first, second


def _one_message(item: Any) -> Any:
    """Return a single message as a list of messages; any other value unchanged."""
    return [item] if _is_turn(item) else item


def _check_prompt(start: Any, chosen: Any, columns: Columns) -> None:
    """Refuse a prompt that a response cannot follow.

    Raises:
        RowError: the prompt ends with an answer, a system message comes before a dialogue in one text, or a
            dialogue begins with another system message.
    """
    if not isinstance(start, list):
        return
    turns = [(t.get("role", t.get("from")), t.get("content", t.get("value"))) for t in start if _is_turn(t)]
    if isinstance(chosen, list):
        first = next(((t.get("role", t.get("from")), t.get("content")) for t in chosen if _is_turn(t)), None)
        if columns.system and first and turns and first[0] == turns[0][0] == "system" and first != turns[0]:
            raise RowError(f"{columns.system} differs from the system message of the dialogue")
        if len(chosen) > 1:
            return
    elif columns.prompt is None:
        raise RowError(
            f"{columns.system} cannot precede dialogues in one text; write them as lists of messages"
        )
    if turns and _ROLES.get(str(turns[-1][0])) == "assistant":
        raise RowError(
            f"{' and '.join(columns.prompts)} ends with a message of the assistant, to which no response can "
            "be given; remove it"
        )


def _is_turn(item: Any) -> bool:
    return isinstance(item, Mapping) and bool(item.keys() & {"role", "from"})


def parse_number(item: Any, name: str) -> float | None:
    """Parse a finite number; ``None`` stays ``None``.

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
        raise RowError(f"{name} must be a finite number, not {reprlib.repr(item)}")
    return result


def _name_at(row: Row, path: str | None) -> str | None:
    return None if path is None else parse_name(value_at(row, path), path)


def parse_name(item: Any, name: str) -> str | None:
    """Parse the name of a client or category: a text or an integer. ``None`` and "" become ``None``.

    Raises:
        RowError: the value is neither a text nor an integer.
    """
    if item is None:
        return None
    if isinstance(item, float) and item.is_integer():
        item = int(item)
    if isinstance(item, str | int):
        return str(item) or None
    raise RowError(f"{name} must be a text or an integer, not {item!r}")


# No -1: where it is a thumb down, 0 may be no thumb at all.
_LABELS = {"1": True, "true": True, "up": True, "0": False, "false": False, "down": False}
_LABELS |= {"👍": True, "thumbs up": True, "thumbs_up": True}
_LABELS |= {"👎": False, "thumbs down": False, "thumbs_down": False}
# How spreadsheets write true and false in other languages.
_SPREADSHEETS = (
    "WAHR/FALSCH VRAI/FAUX VERDADERO/FALSO VERDADEIRO/FALSO VERO/FALSO WAAR/ONWAAR SAND/FALSK SANN/USANN "
    "SANT/FALSKT TOSI/EPÄTOSI PRAWDA/FAŁSZ PRAVDA/NEPRAVDA IGAZ/HAMIS ADEVĂRAT/FALS DOĞRU/YANLIŞ ИСТИНА/ЛОЖЬ"
)
for _pair in _SPREADSHEETS.lower().split():
    _LABELS |= dict(zip(_pair.split("/"), (True, False), strict=True))


def parse_label(item: Any, name: str) -> bool:
    """Parse a thumb: true, 1 or "up", or false, 0 or "down".

    Raises:
        RowError: the value is none of these.
    """
    plain = int(item) if isinstance(item, float) and item.is_integer() else item
    if str(plain).lower() not in _LABELS:
        raise RowError(
            f'{name} must be true, 1 or "up" for a thumb up, or false, 0 or "down" for a thumb down, not '
            f"{reprlib.repr(item)}"
        )
    return _LABELS[str(plain).lower()]


def parse_split(item: Any) -> Split | None:
    """Parse the name of a split; ``None`` stays ``None``.

    Raises:
        RowError: the name is unknown.
    """
    if item is None:
        return None
    if isinstance(item, str) and item in _SPLITS:
        return _SPLITS[item]
    raise RowError(f"split must be one of {', '.join(_SPLITS)}, not {item!r}")


def split_prompt(
    pair: RawPair, *, several_turns: bool = False
) -> tuple[str | tuple[Message, ...], str, str, bool]:
    r"""Separate the prompt of a pair from its two responses.

    - Two texts and a prompt are used unchanged, except that a prompt repeated by both responses, as whole
      words, is removed from them.
    - Two texts without a prompt are whole dialogues. They are split at the last common ``"\n\nAssistant:"``,
      or else at the last whitespace before the first difference. Responses with later turns of the user are
      refused, as in lists of messages.
    - Two lists of messages each end with one assistant message, the response. Their common beginning, after
      the given prompt, if any, is the prompt.

    For a thumb, the two responses are the same. Since one response may start like its prompt by chance, only
    a prompt that ends in a colon or whitespace is removed.

    Args:
        several_turns: allow later turns in the responses of whole dialogues.

    Returns:
        Prompt, chosen response, rejected response, and whether a repeated prompt was removed.

    Raises:
        RowError: the pair has none of these forms.
    """
    prompt, chosen, rejected = pair.prompt, pair.chosen, pair.rejected
    names = ("chosen", "rejected") if pair.label is None else ("completion", "completion")
    for name, item in zip(names, (chosen, rejected), strict=True):
        if not isinstance(item, str | list | tuple):
            raise _mismatch(name, "text or a list of messages", item)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("chosen and rejected must be both text or both lists of messages")
    if not isinstance(chosen, str):
        both = parse_messages(chosen, names[0]), parse_messages(rejected, names[1])
        if pair.label is not None and both[0][-1].role != "assistant":
            raise RowError(f"completion must end with an assistant message, not {both[0][-1].role}")
        return (*_split_conversation(prompt, *both), False)
    if prompt is None:
        start, *responses = split_dialogue(chosen, rejected)
        for name, text in zip(names, responses, strict=True):
            if not several_turns and (turn := _LATER_TURN.search(text)):
                raise RowError(
                    f"{name} must have one assistant message after the common beginning of both dialogues, "
                    f"but continues with {turn[0].strip()!r}; end both dialogues with the response"
                )
        return start, responses[0], responses[1], False
    if not isinstance(prompt, str):
        return parse_messages(prompt, "prompt"), chosen, rejected, False
    if prompt.strip() and chosen.startswith(prompt) and rejected.startswith(prompt):
        rest = chosen[len(prompt) :], rejected[len(prompt) :]
        apart = prompt[-1] == ":" or prompt[-1].isspace()
        if pair.label is None and not apart:
            apart = not prompt[-1].isalnum() or all(not text or text[0].isspace() for text in rest)
        if apart or pair.whole:
            return prompt, *rest, True
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
        # Split at whitespace, not within a word: before the next character of both texts, or before the last
        # shared whitespace.
        both_blank = all(text[len(shared) :][:1].isspace() for text in (chosen, rejected))
        end = len(shared) if both_blank else max(shared.rfind(" "), shared.rfind("\n"), 0)
    return chosen[:end], chosen[end:], rejected[end:]


def _common_length(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def parse_messages(item: Any, name: str) -> tuple[Message, ...]:
    """Parse messages from ``{role, content}`` or ``{from, value}`` objects.

    Raises:
        RowError: the value is not a list of such objects.
    """
    if not isinstance(item, list | tuple):
        raise _mismatch(name, "text or a list of messages", item)
    if not item:
        raise RowError(f"{name} is empty")
    turns = []
    for turn in item:
        if not isinstance(turn, Mapping):
            raise RowError(f"{name} must contain only messages, not {type_name(turn)}")
        keys = "from" if "role" not in turn else "role", "value" if "content" not in turn else "content"
        _refuse_other_keys(turn, keys, f"{name} has a message")
        role, content = (turn.get(key) for key in keys)
        if not isinstance(role, str) or role not in _ROLES:
            raise RowError(f"{name} has a message with role {role!r}; known roles: {', '.join(_ROLES)}")
        turns.append(Message(_ROLES[role], _content(content, name)))
    return tuple(turns)


def _content(value: Any, name: str) -> str:
    """Return the content of a message: a text, or text parts, which are joined by line breaks as in vLLM."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise RowError(f"{name} has a message with content that is not text, but {type_name(value)}")
    texts = []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type_name(part)
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise RowError(f"{name} has a message with a part of type {kind!r}; only text is supported")
        if isinstance(part, Mapping):
            _refuse_other_keys(part, ("type", "text"), f"{name} has a text part")
        texts.append(text)
    return "\n".join(texts)


_TEXT_PARTS = ("text", "input_text", "output_text", type_name(""))


def _refuse_other_keys(item: Mapping[Any, Any], known: Sequence[str], what: str) -> None:
    """Refuse what would be lost, such as ``tool_calls`` or ``weight``. Empty values are no loss.

    Raises:
        RowError: another key has a value.
    """
    others = [str(key) for key, value in item.items() if key not in known and value not in (None, "", [], {})]
    if others:
        raise RowError(
            f"{what} with {', '.join(others)}, but only its role and text are used; write what the model "
            "should see into the text, and remove the other keys"
        )


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
                f"{name} must have one assistant message after the common beginning of both dialogues, not "
                + ", ".join(turn.role for turn in rest)
            )
    start = chosen[:shared]
    if isinstance(prompt, str):
        if not start or not _contains(start, prompt.strip()):
            # The prompt comes first, but answers a last turn of the assistant, so that roles alternate.
            roles = [turn.role for turn in start]
            place = len(start) if roles[-1:] == ["assistant"] else int(roles[:1] == ["system"])
            start = (*start[:place], Message("user", prompt), *start[place:])
    elif prompt is not None:
        start = _join(parse_messages(prompt, "prompt"), start)
    return start, chosen[-1].content, rejected[-1].content


_TAGS = rf"[^\w<]|_|<[^<>\n]*>|(?i:\b(?:{'|'.join(_ROLES)}|inst)\b)"
"""Pattern of what may be around the turns of a dialogue in one text: role names, special tokens, spaces."""


def _contains(turns: tuple[Message, ...], prompt: str) -> bool:
    """Whether the shared turns already contain a text prompt."""
    contents = [turn.content.strip() for turn in turns]
    if not prompt or prompt in contents:
        return True
    if turns[-1].role != "user":
        return False
    # The last user turn may contain the prompt, or the prompt may consist of all turns as one text.
    if re.search(rf"(?<!\w){re.escape(prompt)}(?!\w)", contents[-1]):
        return True
    one, other = (re.sub(_TAGS, "", text) for text in (prompt, "\n".join(contents)))
    return one == other and all(text in prompt for text in contents)


def _join(prompt: tuple[Message, ...], shared: tuple[Message, ...]) -> tuple[Message, ...]:
    """Join the turns of the prompt and those shared by both dialogues, without repeating common turns."""
    if any(shared[k : k + len(prompt)] == prompt for k in range(len(shared))):
        return shared
    overlap = next(n for n in range(len(prompt), -1, -1) if prompt[len(prompt) - n :] == shared[:n])
    return prompt + shared[overlap:]


def whole_texts(prompt: Prompt, responses: tuple[str, str], tail: int | None) -> tuple[str, str]:
    r"""Join the prompt and each response into one text, conversations in the Human/Assistant form.

    Distributed DPO (arXiv:2605.20696), E.1: its model reads only the last 300 characters of each dialogue,
    and its code scores every token of them.

    Args:
        prompt: text or messages.
        tail: number of characters to keep at the end of each text; ``None`` keeps all.

    >>> whole_texts("\n\nHuman: Hi\n\nAssistant:", (" Hello", " Hey"), 10)
    ('ant: Hello', 'stant: Hey')
    """
    start = prompt if isinstance(prompt, str) else dialogue(prompt)
    apart = "" if isinstance(prompt, str) else " "
    chosen, rejected = (
        start + (response if response[:1].isspace() else apart + response) for response in responses
    )
    return (chosen, rejected) if tail is None else (chosen[-tail:], rejected[-tail:])
