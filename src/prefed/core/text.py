"""Text for people: escaping, sizes, durations, suggestions, error messages, and timings in the log."""

from __future__ import annotations

import difflib
import html
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control terminals or text layout, and surrogate halves, which cannot be encoded.

Joiners are not included: names in many scripts need them.
"""


def control_character(text: str) -> str | None:
    r"""Return the code point of the first control character in ``text``, or ``None``.

    >>> control_character("ward\t7"), control_character("Zoë 安娜")
    ('U+0009', None)
    """
    match = _CONTROL.search(text)
    return None if match is None else f"U+{ord(match[0]):04X}"


def printable(text: str) -> str:
    r"""Return ``text`` with control characters escaped.

    >>> print(printable("ward\t7 \x1b[31m"))
    ward\t7 \x1b[31m
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    r"""Escape control characters in text of several lines: line breaks are kept, and tabs become spaces.

    >>> print(printable_lines("one\ttwo\nthree\x1b[2J"))
    one     two
    three\x1b[2J
    """
    return "\n".join(map(printable, text.expandtabs().split("\n")))


def printable_json(content: Any) -> str:
    r"""Return indented JSON with non-ASCII letters as they are and control characters escaped.

    >>> print(printable_json(["é", "\x9b2J", "\ud83d"]))
    [
      "é",
      "\u009b2J",
      "\ud83d"
    ]
    """
    lines = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False).split("\n")
    return "\n".join(_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", line) for line in lines)


def markdown_text(text: str) -> str:
    r"""Escape ``text`` for Markdown: one line, without links, images, code, HTML or table cells.

    >>> print(markdown_text("a|b ![x](http://eve) <b>\x1b"))
    a\|b !\[x\](http://eve) &lt;b&gt;\x1b
    """
    return printable(re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(text, quote=False)))


def safe_cell(text: str) -> str:
    """Escape a CSV cell that a spreadsheet would run as a formula.

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
    """Format a number of bytes.

    >>> size(812), size(2_359_296), size(5e9)
    ('812 B', '2.4 MB', '5.0 GB')
    """
    units = ["TB", "GB", "MB", "kB", "B"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop()
    return f"{amount:.0f} B" if units[-1] == "B" else f"{amount:.1f} {units[-1]}"


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(4.26), duration(95), duration(7384)
    ('4.3 s', '1m35s', '2h03m')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def pluralize(number: int, one: str, more: str) -> str:
    """Format a number with the singular or plural form.

    >>> pluralize(1, "client has", "clients have"), pluralize(1200, "round", "rounds")
    ('1 client has', '1,200 rounds')
    """
    return f"{number:,} {one if number == 1 else more}"


def listed(names: Sequence[str], show: Callable[[str], str] = repr, most: int = 8) -> str:
    """List the first names and the number of further ones.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d"], str, 2)
    ("'a', 'b'", 'a, b and 2 more')
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(show, names[:most])) + more


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, show: Callable[[str], str] = repr) -> str:
    """Return the end of an error message that suggests the nearest known names, or ``""`` if none is near.

    Args:
        most: maximum number of suggestions.
        show: formats a suggestion.

    >>> did_you_mean("batchsize", ["lr", "batch_size"]), did_you_mean("x", ["lr"])
    ("; did you mean 'batch_size'?", '')
    >>> did_you_mean("ward7", ["ward-7", "ward-8"], most=2, show=str)
    '; did you mean ward-7 or ward-8?'
    """
    near = difflib.get_close_matches(name, list(known), most)
    return f"; did you mean {' or '.join(map(show, near))}?" if near else ""


def is_ours(error: BaseException) -> bool:
    """Return whether prefed defines the class of an error. Such messages can be shown without a traceback.

    >>> from prefed.core.files import WriteError
    >>> is_ours(WriteError("the disk is full")), is_ours(ValueError("not enough values to unpack"))
    (True, False)
    """
    return type(error).__module__.startswith("prefed.")


def one_line(error: BaseException) -> str:
    r"""Return the message of an error as a single line.

    >>> one_line(ValueError("2 rows:\n  row 3: empty"))
    '2 rows: row 3: empty'
    """
    return " ".join(filter(None, map(str.strip, str(error).splitlines())))


_log = logging.getLogger("prefed")


@contextmanager
def timed(part: str, about: str = "") -> Iterator[None]:
    """Log the duration of a block at level ``INFO``.

    The log record has the attributes ``part`` and ``seconds`` for handlers that add them up. It is visible if
    the level of the logger ``prefed`` is set, as ``prefed -v`` does.

    Args:
        part: name under which durations are added up, e.g. ``"evaluation"``.
        about: details, e.g. ``"round 3, 5 clients"``, without private data.
    """
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    name = f"{part} ({about})" if about else part
    _log.info("%s: %s", name, duration(seconds), extra={"part": part, "seconds": seconds})
