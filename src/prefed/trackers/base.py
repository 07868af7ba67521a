"""What a run tells a tool that keeps records of experiments."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

PAGE = "report.html"
"""The name of the page in a tool."""


class TrackerError(ValueError):
    """A tool cannot be told of runs on this machine. The message says what to install or to set."""


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tool is told of it at its start.

    Attributes:
        folder: the run directory.
        config: the experiment's tables, every default filled in.
        known: what the tool called the run when it was first told of it; ``None`` for a new run.
        first: the first round that it will be told of.
    """

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]
    known: str | None
    first: int


@dataclass(frozen=True)
class Told:
    """What a finished run tells.

    Attributes:
        rounds: its number of rounds.
        figures: name → number.
        columns, rows: the clients' figures as a table, a row for each client; both empty if they stay here.
        page: an HTML page; ``None`` without one.
    """

    rounds: int
    figures: Mapping[str, float]
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    page: str | None


class Tracker(ABC):
    """A run in one tool, begun or gone on with when this is made.

    Any method may raise what the tool's library raises.

    Attributes:
        package: what the library is imported as.
        known: what finds the run in the tool again.
    """

    package: ClassVar[str]
    known: str

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @classmethod
    def check(cls) -> None:
        """See that the library can be used on this machine.

        Raises:
            ImportError: it is not installed.
            TrackerError: it needs something else.
        """
        module = import_module(cls.package)
        if module.__file__ is None:
            # A folder that the tool left in the working directory can be imported too.
            raise ImportError(f"No module named {cls.package!r}")

    @abstractmethod
    def log(self, number: int, figures: Mapping[str, float]) -> None:
        """Tell the figures of a round."""

    @abstractmethod
    def finish(self, told: Told) -> None:
        """Tell what came of the run."""

    @abstractmethod
    def close(self, *, succeeded: bool) -> None:
        """Leave the run; it may be gone on with later."""


@contextmanager
def page_file(page: str) -> Iterator[Path]:
    """A page as the file :data:`PAGE` within the block, for a library that takes files alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PAGE
        path.write_text(page, encoding="utf-8")
        yield path
