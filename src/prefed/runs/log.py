"""``run.log``: what happened in a run, with times, for a person."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefed.core import Callback
from prefed.core.records import RoundRecord
from prefed.core.text import pluralize, printable
from prefed.runs.origin import command
from prefed.store.directory import LOG
from prefed.trackers.lines import round_line, stage_line


class RunLog(Callback):
    """Appends a line to a run's log for each event, with the time at its beginning.

    A line is made of what :class:`~prefed.core.Callback` tells, and of what the library warns of: of counts,
    figures and names of clients, as ``rounds.jsonl`` is, and of no prompt or response. An error is named by
    its kind alone, because its message may quote the data.

    A log that cannot be written ends no run.

    Args:
        path: the run directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path / LOG
        self._rounds = self._done = 0

    def write(self, text: str) -> None:
        """Append a line."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        # A link in the place of the log is not followed, as with the other files of the directory.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with suppress(OSError), os.fdopen(os.open(self._path, flags, 0o666), "ab") as file:
            file.write(f"{now} {printable(text)}\n".encode())

    def on_run_begin(self, done: int, rounds: int) -> None:
        """How many rounds there are, and how many of them are done."""
        self._rounds, self._done = rounds, done
        self.write(pluralize(rounds, "round", "rounds") if done == 0 else f"on after round {done}/{rounds}")

    def on_round_end(self, record: RoundRecord) -> None:
        """The round's figures."""
        self._done = record["round"]
        self.write(round_line(record, self._rounds))

    def on_note(self, text: str) -> None:
        """What a person should know."""
        self.write(text)

    def on_warning(self, text: str) -> None:
        """What went wrong."""
        self.write(f"warning: {text}")

    def on_stage_end(self, stage: str, figures: Mapping[str, Any]) -> None:
        """What a stage of an alignment did."""
        self.write(stage_line(stage, figures))

    def ended(self, error: BaseException | None) -> None:
        """How it ended."""
        done = f" after round {self._done}/{self._rounds}" if self._rounds else ""
        if error is None:
            self.write("done")
        elif isinstance(error, KeyboardInterrupt):
            self.write(f"interrupted{done}")
        else:
            self.write(f"ended by {type(error).__name__}{done}")


@contextmanager
def run_log(path: Path) -> Iterator[RunLog]:
    """The log of a run directory while something works there.

    Args:
        path: the run directory, which exists.
    """
    log = RunLog(path)
    log.write(f"prefed {version('prefed')}: {command(sys.argv)}")
    log.write(
        f"Python {platform.python_version()}, PyTorch {version('torch')}, "
        f"transformers {version('transformers')}, {platform.platform(terse=True)}"
    )
    logger = logging.getLogger("prefed")

    def heard(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            log.on_warning(record.getMessage())
        return True

    # With a handler of ours Python would no longer write the library's warnings on standard error.
    logger.addFilter(heard)
    try:
        yield log
    except BaseException as error:
        log.ended(error)
        raise
    else:
        log.ended(None)
    finally:
        logger.removeFilter(heard)
