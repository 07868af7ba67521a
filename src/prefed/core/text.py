"""Text for people: escaped characters, sizes, durations, the nearest name, errors, and times in the log."""

from __future__ import annotations

import difflib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Invisible characters that a terminal or a line of text obeys, and halves of surrogate pairs.

These are controls, marks of direction and line separators. Joiners are not: names in many scripts need them.
Halves of surrogate pairs cannot be encoded.
"""


def control_character(text: str) -> str | None:
    r"""The code point of the first control character in ``text``, or ``None``.

    >>> control_character("ward\t7"), control_character("Zoë 安娜")
    ('U+0009', None)
    """
    match = _CONTROL.search(text)
    return None if match is None else f"U+{ord(match[0]):04X}"


def printable(text: str) -> str:
    r"""``text`` with control characters escaped.

    >>> print(printable("ward\t7 \x1b[31m"))
    ward\t7 \x1b[31m
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    r"""As :func:`printable` for a text of several lines: line breaks stay, and tabs become spaces.

    >>> print(printable_lines("one\ttwo\nthree\x1b[2J"))
    one     two
    three\x1b[2J
    """
    return "\n".join(map(printable, text.expandtabs().split("\n")))


def printable_json(content: Any) -> str:
    r"""JSON of several lines, every letter as itself, but for control characters, which JSON may escape.

    >>> print(printable_json(["é", "\x9b2J", "\ud83d"]))
    [
      "é",
      "\u009b2J",
      "\ud83d"
    ]
    """
    lines = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False).split("\n")
    return "\n".join(_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", line) for line in lines)


def safe_cell(text: str) -> str:
    """A cell of a CSV file that no spreadsheet runs: what it would take for a formula gets an apostrophe.

    >>> safe_cell("=1+1"), safe_cell("＝1+1"), safe_cell("-0.5"), safe_cell("ann")
    ("'=1+1", "'＝1+1", '-0.5', 'ann')
    """
    if not text.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def size(amount: float) -> str:
    """A number of bytes as text.

    >>> size(812), size(2_359_296), size(5e9)
    ('812 B', '2.4 MB', '5.0 GB')
    """
    units = ["TB", "GB", "MB", "kB", "B"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop()
    return f"{amount:.0f} B" if units[-1] == "B" else f"{amount:.1f} {units[-1]}"


def duration(seconds: float) -> str:
    """A time in seconds as text.

    >>> duration(4.26), duration(95), duration(7384)
    ('4.3 s', '1m35s', '2h03m')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def pluralize(number: int, one: str, more: str) -> str:
    """A number with the words for one or for several things.

    >>> pluralize(1, "client has", "clients have"), pluralize(1200, "round", "rounds")
    ('1 client has', '1,200 rounds')
    """
    return f"{number:,} {one if number == 1 else more}"


def listed(names: Sequence[str], show: Callable[[str], str] = repr, most: int = 8) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d"], str, 2)
    ("'a', 'b'", 'a, b and 2 more')
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(show, names[:most])) + more


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, show: Callable[[str], str] = repr) -> str:
    """The end of an error message about an unknown name: the nearest known names, or nothing if none is near.

    Args:
        most: how many of them are offered.
        show: how each is written in the message.

    >>> did_you_mean("batchsize", ["lr", "batch_size"]), did_you_mean("x", ["lr"])
    ("; did you mean 'batch_size'?", '')
    >>> did_you_mean("ward7", ["ward-7", "ward-8"], most=2, show=str)
    '; did you mean ward-7 or ward-8?'
    """
    near = difflib.get_close_matches(name, list(known), most)
    return f"; did you mean {' or '.join(map(show, near))}?" if near else ""


def is_ours(error: BaseException) -> bool:
    """Whether an error is of one of prefed's own classes: its message says what to do, and where.

    >>> from prefed.core.files import WriteError
    >>> is_ours(WriteError("the disk is full")), is_ours(ValueError("not enough values to unpack"))
    (True, False)
    """
    return type(error).__module__.startswith("prefed.")


def one_line(error: BaseException) -> str:
    r"""An error's message in one line.

    >>> one_line(ValueError("2 rows:\n  row 3: empty"))
    '2 rows: row 3: empty'
    """
    return " ".join(filter(None, map(str.strip, str(error).splitlines())))


_log = logging.getLogger("prefed")


@contextmanager
def timed(part: str, about: str = "") -> Iterator[None]:
    """Log how long a part of a run took, once it is done, at level ``INFO``.

    The log record has ``part`` and ``seconds``, so that a handler can add them up. Nobody sees it unless the
    level of the logger ``prefed`` is set: ``prefed -v`` does so.

    Args:
        part: what the times of several such stretches are added up under, e.g. ``"evaluation"``.
        about: which stretch this is, e.g. ``"round 3, 5 clients"``. It holds nothing private.
    """
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    name = f"{part} ({about})" if about else part
    _log.info("%s: %s", name, duration(seconds), extra={"part": part, "seconds": seconds})
