"""Characters that a reader does not see but a terminal or a line of text obeys."""

from __future__ import annotations

import re

__all__ = ["counted", "duration", "hidden", "size", "visible", "visible_lines"]

_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls, marks of direction, line separators, and halves of surrogate pairs, which no output can hold.

Joiners are none of them: names in many scripts need them.
"""


def hidden(text: str) -> str | None:
    r"""The first such character of ``text`` by its number, or ``None``.

    >>> hidden("ward\t7"), hidden("Zoë 安娜")
    ('U+0009', None)
    """
    found = _HIDDEN.search(text)
    return None if found is None else f"U+{ord(found[0]):04X}"


def visible(text: str) -> str:
    r"""``text`` with such characters written out.

    >>> print(visible("ward\t7 \x1b[31m"))
    ward\t7 \x1b[31m
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_lines(text: str) -> str:
    r"""As :func:`visible`, for a text of several lines: its line breaks stay, and tabs become blanks.

    >>> print(visible_lines("one\ttwo\nthree\x1b[2J"))
    one     two
    three\x1b[2J
    """
    return "\n".join(map(visible, text.expandtabs().split("\n")))


def size(amount: float) -> str:
    """A number of bytes.

    >>> size(812), size(2_359_296), size(5e9)
    ('812 B', '2.4 MB', '5.0 GB')
    """
    units = ["TB", "GB", "MB", "kB", "B"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop()
    return f"{amount:.0f} B" if units[-1] == "B" else f"{amount:.1f} {units[-1]}"


def duration(seconds: float) -> str:
    """A span of time.

    >>> duration(4.26), duration(95), duration(7384)
    ('4.3 s', '1m35s', '2h03m')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def counted(number: int, one: str, more: str) -> str:
    """A number with the words for one or for several.

    >>> counted(1, "client has", "clients have"), counted(1200, "round", "rounds")
    ('1 client has', '1,200 rounds')
    """
    return f"{number:,} {one if number == 1 else more}"
