"""What takes the time of a run, told to the log of the library."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefed.core.text import duration

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
