"""Which errors a person can do something about."""

from __future__ import annotations


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
