"""Limits on the memory and the time of code that comes with a model: its chat template."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NoReturn

from prefed.data.errors import DataError

MEMORY = 1 << 30
"""Bytes by which the address space may grow."""
SECONDS = 60.0
"""CPU time."""

_LOCK = threading.Lock()


class _OutOfTimeError(BaseException):
    """Not an ``Exception``: jinja ignores those while it simplifies a template."""


@contextmanager
def limited(what: str) -> Iterator[None]:
    """Limit how much the memory of this process may grow, and its time.

    Memory is limited on Linux only (RLIMIT_AS of setrlimit(2)), time in the main thread only (ITIMER_VIRTUAL
    of setitimer(2)). Python handles a signal between two operations, so a single long one, such as the
    product of huge integers, is not interrupted. Other threads can allocate no more than what is left.

    Args:
        what: the subject of the message.

    Raises:
        DataError: a limit is reached.
    """
    problem = None
    with _LOCK:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        timed = threading.current_thread() is threading.main_thread()
        try:
            if (most := _most(soft)) is not None:
                resource.setrlimit(resource.RLIMIT_AS, (most, hard))
            if timed:
                _handle()
                signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            yield
        except MemoryError:
            problem = f"{MEMORY / 2**30:g} GiB of memory"
        except _OutOfTimeError:
            problem = f"{SECONDS:g} s of CPU time"
        finally:
            if timed:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    if problem is not None:  # raised here, to free what the first error refers to
        raise DataError(f"{what} needs more than {problem}")


@lru_cache
def _handle() -> None:
    """Handle the timer's signal; this takes too long to be done, and undone, for every conversation."""
    signal.signal(signal.SIGVTALRM, _stop)


def _stop(number: int, frame: object) -> NoReturn:
    raise _OutOfTimeError


def _most(soft: int) -> int | None:
    """Return the limit of the address space in bytes; ``None`` where the system does not report its size."""
    if (file := _size_of(os.getpid())) is None:
        return None
    most = int(os.pread(file, 64, 0).split()[0]) * resource.getpagesize() + MEMORY
    return most if soft == resource.RLIM_INFINITY else min(soft, most)


@lru_cache(maxsize=1)
def _size_of(process: int) -> int | None:
    """Open the file with the sizes of a process, which stays open: this is done for every conversation."""
    try:
        return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
