"""Which columns of a row are read; others are counted, or refused if the model would miss their content."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from prefed.core.text import listed
from prefed.data.config import Columns
from prefed.data.errors import RowError
from prefed.data.record import Message, Prompt
from prefed.data.sources.files import Row, has_value, peek, unmarked
from prefed.data.sources.pairs import SYSTEM_NAMES, is_dialogue, messages_or_text, value_at

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values

PROMPT_NAMES = {
    *["prompt", "question", "instruction", "instructions", "query", "problem", "input", "inputs"],
    *["user_prompt", "user_input", "messages", "conversations", "conversation", "dialogue", "dialog"],
    *["trajectory", "history", "context", "document", "documents", "passage", "article", "background"],
    *SYSTEM_NAMES,
}
"""Names of columns that are part of a prompt."""
_BEYOND_TEXT = {
    *["tools", "tool_calls", "tool_choice", "functions", "function_call", "chat_template_kwargs"],
    *["image", "images", "video", "videos", "audio", "audios", "reasoning_content", "thinking"],
}
"""Names of columns that change what a model sees, but are not part of a text; ``_url`` etc. may follow."""


class TrackedRow(dict[str, Any]):
    """A row that records which columns are read, nested ones by their dotted path.

    Whoever copies a row, or goes through its values, reads all columns.

    Attributes:
        read: paths of the columns that were read.

    >>> row = TrackedRow({"input": {"messages": "Hi", "tools": ["t"]}, "id": 7, "empty": [None]})
    >>> row["input"]["messages"], [path for path, _ in row.unread()]
    ('Hi', ['input.tools', 'id'])
    """

    def __init__(self, row: Row, read: set[str] | None = None, path: str = "") -> None:
        super().__init__(row)
        self.read: set[str] = set() if read is None else read
        self._path = path

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read.add(f"{self._path}{name}")
        return TrackedRow(value, self.read, f"{self._path}{name}.") if isinstance(value, dict) else value

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a column, or ``default``."""
        return self[name] if name in self else default  # noqa: SIM401 - that would be a call of itself

    def __iter__(self) -> Iterator[str]:
        # With its own iterator, {**row} and dict(row) fetch each value by its name.
        return super().__iter__()

    def items(self) -> dict_items[str, Any]:
        """Return all columns with their values, which are then read."""
        self.read.update(f"{self._path}{name}" for name in self)
        return super().items()

    def values(self) -> dict_values[str, Any]:
        """Return the values of all columns, which are then read."""
        self.read.update(f"{self._path}{name}" for name in self)
        return super().values()

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield path and value of the columns with a value that were not read."""
        for name, value in unmarked(self):
            path = f"{self._path}{name}"
            if path not in self.read:
                if has_value(value):
                    yield path, value
            elif isinstance(value, dict) and any(other.startswith(f"{path}.") for other in self.read):
                yield from TrackedRow(value, self.read, f"{path}.").unread()


def check_unread(
    row: TrackedRow,
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    ignored: Sequence[str] = (),
    columns: Columns | None = None,
    remedy: str = "",
) -> list[str]:
    """Return the columns with a value that were not read and are not ``ignored``.

    Args:
        prompts: the prompts that were made from the row.
        responses: the responses that were made from it.
        columns: how the row was read; ``None`` if by a format that has no named columns.
        remedy: what to do about a column that is refused. Default: name it in ``data.columns`` or
            ``data.metadata``.

    Raises:
        RowError: a column named like a part of a prompt contains what no prompt contains, or a column changes
            what the model sees.
    """
    unread = []
    for path, value in row.unread():
        if path in ignored or any(path.startswith(f"{name}.") for name in ignored):
            continue
        name = path.rpartition(".")[2].strip().lower()
        if re.sub(r"_(urls?|paths?|files?|bytes)$", "", name) in _BEYOND_TEXT and not isinstance(
            value, int | float
        ):
            problem = "changes what a model sees, but prefed trains on texts only"
            use = "leave out such rows"
        elif name in PROMPT_NAMES and not _is_date(value) and not _contained(value, prompts, responses):
            more = columns and with_column(columns, path, row)
            problem = "is not read, but named like a part of the prompt"
            use = f"read it with {columns_line(more)}" if more else "add it to the prompt"
        else:
            unread.append(path)
            continue
        drop = f"if the model should not see it, set [data] metadata = {json.dumps([path])}"
        raise RowError(f"{path} {problem}; {remedy or f'{use}, or, {drop}'}")
    return unread


def unused_text(columns: Iterable[str]) -> str:
    """Report the columns that were not used.

    >>> unused_text(["worker", ""])
    "columns not used: worker, ''"
    """
    return f"columns not used: {listed(tuple(columns), lambda name: name or repr(name), 12)}"


def with_column(columns: Columns, path: str, row: TrackedRow) -> Columns | None:
    """Return columns that also read the one at ``path``, as the system message or as a part of the prompt.

    Return ``None`` for dialogues that contain their prompt, except for a system message before lists.
    """
    chosen = messages_or_text(peek(row, columns.thumb[0] if columns.thumb else columns.chosen))
    system = columns.system is None and path.rpartition(".")[2].lower() in SYSTEM_NAMES
    if is_dialogue(chosen) and not (system and isinstance(chosen, list)):
        return None
    if system:
        return columns.model_copy(update={"system": path})
    order = [str(name) for name in row]

    def place(name: str) -> tuple[bool, int]:
        # Messages come before the texts that follow them.
        return isinstance(messages_or_text(value_at(row, name)), str), order.index(name.partition(".")[0])

    return columns.model_copy(update={"prompt": tuple(sorted((*columns.prompts, path), key=place))})


def columns_line(columns: Columns) -> str:
    """Return the setting of these columns as TOML.

    >>> columns_line(Columns(prompt=("instruction", "input"), rejected="bad"))
    'columns = {prompt = ["instruction", "input"], rejected = "bad"}'
    """
    given = columns.model_dump(mode="json", exclude_defaults=True)
    pairs = ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
    return f"columns = {{{pairs}}}"


def _is_date(value: Any) -> bool:
    """Whether a value is a date, which is no part of a prompt, in ISO 8601 or as 28.11.2026 or 11/28/2026.

    >>> [_is_date(text) for text in ("2026-11-28T10:00:00Z", "28.11.2026 10:00", "12 / 4", "12")]
    [True, True, False, False]
    """
    if not isinstance(value, str) or value.strip().isdigit():
        return False
    try:
        return bool(datetime.fromisoformat(value.strip()))
    except ValueError:
        return bool(re.fullmatch(r"\d{1,2}([./])\d{1,2}\1\d{4}( \d{1,2}:\d\d(:\d\d)?)?", value.strip()))


def _contained(value: Any, prompts: Sequence[Prompt], responses: Sequence[str]) -> bool:
    """Whether the prompts contain a text, or prompts and responses all messages of a list."""
    value = messages_or_text(value)
    found = "\n".join(_texts(prompts if isinstance(value, str) else [*prompts, *responses]))
    return all(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", found) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value, without roles."""
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item) if name not in ("role", "from") else ()
    elif isinstance(value, Message):
        yield from _texts(value.content)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)
