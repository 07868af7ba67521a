"""Callbacks that log a run or an alignment to tools. Errors of a tool do not end the run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from prefed.core import Callback, files
from prefed.core.records import RoundRecord, Summary
from prefed.core.text import printable
from prefed.trackers.logged_metrics import (
    alignment_figures,
    client_table,
    epoch_figures,
    round_figures,
    summary_figures,
)
from prefed.trackers.tools import Results, TrackedRun, Tracker

STATE = "track.json"
"""File in the run directory that records what was logged to each tool."""


@dataclass
class _Listener:
    """A tool, and what was logged to it.

    Attributes:
        known: see :class:`~prefed.trackers.tools.TrackedRun`.
        logged: the last round that was logged.
        finished: number of rounds of the run when its results were logged; 0 before that.
        tracker: the run in the tool, once it is started or resumed.
        failed: whether the tool failed in this process.
    """

    kind: type[Tracker]
    known: str | None = None
    logged: int = 0
    finished: int = 0
    tracker: Tracker | None = None
    failed: bool = False

    @property
    def state(self) -> dict[str, Any]:
        """The entry in :data:`STATE`."""
        return {"known": self.known, "logged": self.logged, "finished": self.finished}


@dataclass
class Tracking(Callback):
    """Logs a run to tools, from its first committed round on.

    Rounds that were committed but not logged are logged with the next one. If a tool fails, one warning is
    issued, and the tool is tried again at the end of the run.

    Attributes:
        kinds: name → tool.
        config: returns the experiment's tables.
        rounds: returns the records of the committed rounds.
        warn: called with a message if a tool fails.
        clients: whether metrics of single clients are logged.
        figures: record of a round → the metrics to log.
    """

    kinds: Mapping[str, type[Tracker]]
    folder: Path
    project: str
    name: str
    config: Callable[[], Mapping[str, Any]]
    rounds: Callable[[], Sequence[RoundRecord]]
    warn: Callable[[str], None]
    clients: bool = True
    figures: Callable[[Mapping[str, Any]], Mapping[str, float]] = round_figures
    _listeners: dict[str, _Listener] = field(init=False)
    _others: dict[str, Any] = field(init=False)
    """Entries in :data:`STATE` of other tools."""

    def __post_init__(self) -> None:
        path = self.folder / STATE
        try:
            state = dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}
            self._listeners = {
                name: _Listener(kind, **state.pop(name, {})) for name, kind in self.kinds.items()
            }
            self._others = state
        except (OSError, ValueError, TypeError) as error:
            self.warn(f"[track] cannot read {path} ({error}): trackers will log a new run")
            self._listeners = {name: _Listener(kind) for name, kind in self.kinds.items()}
            self._others = {}

    def on_run_begin(self, done: int, rounds: int) -> None:
        """If the run returned to an earlier round, log the later rounds again."""
        for listener in self._listeners.values():
            listener.logged = min(listener.logged, done)

    def on_round_end(self, record: RoundRecord) -> None:
        """Log the metrics of a round."""
        for name, listener in self._listeners.items():
            if not listener.failed:
                self._try(name, partial(self._log_missing, listener, int(record["round"]), record))

    def finish(self, summary: Summary, page: Callable[[], str] | None) -> None:
        """Log the results of the run to tools that do not have them.

        Args:
            page: builds the page; ``None``: no page.
        """

        def results() -> Results:
            columns, rows = client_table(summary) if self.clients else ([], [])
            html = page() if page is not None and self.clients else None
            return Results(rounds, summary_figures(summary), columns, rows, html)

        rounds = int(summary["rounds"])
        self.finish_once(rounds, results)

    def finish_once(self, rounds: int, results: Callable[[], Results]) -> None:
        """Log the results after ``rounds`` rounds to tools that do not have them."""
        for name, listener in self._listeners.items():
            if listener.finished < rounds:
                self._try(name, partial(self._finish, listener, rounds, results))

    def add(self, rounds: int, figures: Mapping[str, float]) -> None:
        """Log additional metrics of a finished run."""

        def log(listener: _Listener) -> None:
            self._log_missing(listener, rounds).finish(Results(rounds, figures, (), (), None))

        for name, listener in self._listeners.items():
            self._try(name, partial(log, listener))

    def close(self, *, succeeded: bool) -> None:
        """Close the run in all tools."""
        for name, listener in self._listeners.items():
            if listener.tracker is not None:
                self._try(name, partial(listener.tracker.close, succeeded=succeeded))
                listener.tracker = None

    def _log_missing(self, listener: _Listener, last: int, record: RoundRecord | None = None) -> Tracker:
        """Log all missing rounds up to ``last``, whose record may be given."""
        tracker = listener.tracker
        if tracker is None:
            listener.tracker = tracker = listener.kind(
                TrackedRun(
                    folder=self.folder,
                    project=self.project,
                    name=self.name,
                    config=self.config(),
                    known=listener.known,
                    first=listener.logged + 1,
                )
            )
            listener.known = tracker.known
            self._keep()
        if record is not None and listener.logged == last - 1:
            missing: Sequence[RoundRecord] = [record]
        else:
            missing = self.rounds()[listener.logged : last] if listener.logged < last else []
        for each in missing:
            tracker.log(int(each["round"]), self.figures(each))
            listener.logged = int(each["round"])
            self._keep()
        return tracker

    def _finish(self, listener: _Listener, rounds: int, results: Callable[[], Results]) -> None:
        self._log_missing(listener, rounds).finish(results())
        listener.finished = rounds
        self._keep()

    def _try(self, name: str, do: Callable[[], object]) -> None:
        listener = self._listeners[name]
        try:
            do()
        except Exception as error:
            if not listener.failed:
                self.warn(f"[track] {name} failed; the run continues: {_reason(error)}")
            listener.failed = True

    def _keep(self) -> None:
        states = {name: each.state for name, each in self._listeners.items() if each.known is not None}
        text = json.dumps({**self._others, **states}, indent=1)
        files.write(self.folder / STATE, text.encode() + b"\n", durable=False)


def _reason(error: Exception) -> str:
    r"""Format an error in one line, without passwords in URLs.

    >>> _reason(ValueError("no answer of https://ann:secret@host/api\nmore"))
    'ValueError: no answer of https://…@host/api'
    """
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {printable(re.sub('://[^/@ ]+@', '://…@', first))}"


@dataclass
class AlignmentTracking(Tracking):
    """Logs an alignment to tools. Epochs are numbered over all generations.

    The metrics are those of :func:`~prefed.trackers.logged_metrics.epoch_figures`, and at the end those of
    :func:`~prefed.trackers.logged_metrics.alignment_figures`: no texts, and nothing about clients.
    """

    figures: Callable[[Mapping[str, Any]], Mapping[str, float]] = epoch_figures

    def on_stage_begin(self, stage: str, done: int, of: int) -> None:
        """If training starts again, start a new run in the tools."""
        epoch, _ = _place(stage, done, of)
        for listener in self._listeners.values():
            if epoch is not None and epoch < listener.logged:
                listener.known, listener.logged, listener.finished = None, 0, 0

    def on_stage_step(self, stage: str, done: int, of: int, figures: Mapping[str, float]) -> None:
        """Log the metrics of an epoch."""
        epoch, generation = _place(stage, done, of)
        if epoch is not None:
            self.on_round_end(cast(RoundRecord, {"round": epoch, **generation, **figures}))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Log the results of the alignment to tools that do not have them."""
        epochs = len(summary["train"]["epochs"])
        self.finish_once(epochs, lambda: Results(epochs, alignment_figures(summary), (), (), None))


def _place(stage: str, done: int, of: int) -> tuple[int | None, dict[str, int]]:
    """The number of an epoch over all generations, and its generation; ``None`` for other stages.

    >>> _place("train-3", 1, 2), _place("train", 1, 2), _place("labels-3", 1, 2)
    ((5, {'generation': 3}), (1, {}), (None, {}))
    """
    name, _, number = stage.partition("-")
    if name != "train":
        return None, {}
    return (int(number or 1) - 1) * of + done, {"generation": int(number)} if number else {}
