"""Callbacks that log a run or an alignment to tools. Whatever goes wrong in a tool, the run continues."""

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
from prefed.trackers.tools import Told, TrackedRun, Tracker

STATE = "track.json"
"""The file in the run directory that says what each tool was told."""


@dataclass
class _Listener:
    """A tool, and what it was told.

    Attributes:
        known: as :class:`~prefed.trackers.tools.TrackedRun` has it.
        told: the last round that it was told of.
        finished: the number of rounds with which it was told of the run's end; 0 before that.
        tracker: the run there, once it is begun or gone on with.
        failed: whether it failed in this process.
    """

    kind: type[Tracker]
    known: str | None = None
    told: int = 0
    finished: int = 0
    tracker: Tracker | None = None
    failed: bool = False

    @property
    def state(self) -> dict[str, Any]:
        """What the file keeps of it."""
        return {"known": self.known, "told": self.told, "finished": self.finished}


@dataclass
class Tracking(Callback):
    """Tells tools of a run, from its first committed round on: a start that fails leaves nothing there.

    A tool that has missed rounds, since the run was stopped before it was told of them, is told of them with
    the next one. A tool that fails is warned of once, and tried again at the end of the run.

    Attributes:
        kinds: name → tool.
        folder: the run directory.
        config: reads the experiment's tables.
        rounds: reads the records of the committed rounds.
        warn: is told of failures.
        clients: whether the tools are told figures of single clients.
        figures: the numbers of a round's record that are told.
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
    """What the file keeps of tools that are not told now."""

    def __post_init__(self) -> None:
        path = self.folder / STATE
        try:
            state = dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}
            self._listeners = {
                name: _Listener(kind, **state.pop(name, {})) for name, kind in self.kinds.items()
            }
            self._others = state
        except (OSError, ValueError, TypeError) as error:
            self.warn(f"[track] {path} cannot be used ({error}): trackers will log a new run")
            self._listeners = {name: _Listener(kind) for name, kind in self.kinds.items()}
            self._others = {}

    def on_run_begin(self, done: int, rounds: int) -> None:
        """A run that was taken back to an earlier round tells of the later ones again."""
        for listener in self._listeners.values():
            listener.told = min(listener.told, done)

    def on_round_end(self, record: RoundRecord) -> None:
        """Tell the round's figures."""
        for name, listener in self._listeners.items():
            if not listener.failed:
                self._try(name, partial(self._tell, listener, int(record["round"]), record))

    def finish(self, summary: Summary, page: Callable[[], str] | None) -> None:
        """Tell what came of the run, unless it was told before.

        Args:
            summary: what ``summary.json`` holds.
            page: makes the page; ``None`` for no page.
        """

        def told() -> Told:
            columns, rows = client_table(summary) if self.clients else ([], [])
            html = page() if page is not None and self.clients else None
            return Told(rounds, summary_figures(summary), columns, rows, html)

        rounds = int(summary["rounds"])
        self.finish_once(rounds, told)

    def finish_once(self, rounds: int, told: Callable[[], Told]) -> None:
        """Tell what came of ``rounds`` rounds to all tools that were not told it."""
        for name, listener in self._listeners.items():
            if listener.finished < rounds:
                self._try(name, partial(self._finish, listener, rounds, told))

    def add(self, rounds: int, figures: Mapping[str, float]) -> None:
        """Tell numbers of a finished run beside those of its summary."""

        def tell(listener: _Listener) -> None:
            self._tell(listener, rounds).finish(Told(rounds, figures, (), (), None))

        for name, listener in self._listeners.items():
            self._try(name, partial(tell, listener))

    def close(self, *, succeeded: bool) -> None:
        """Leave all tools."""
        for name, listener in self._listeners.items():
            if listener.tracker is not None:
                self._try(name, partial(listener.tracker.close, succeeded=succeeded))
                listener.tracker = None

    def _tell(self, listener: _Listener, last: int, record: RoundRecord | None = None) -> Tracker:
        """Tell of the rounds that were not told, to the round ``last``, whose record may be given."""
        tracker = listener.tracker
        if tracker is None:
            listener.tracker = tracker = listener.kind(
                TrackedRun(
                    folder=self.folder,
                    project=self.project,
                    name=self.name,
                    config=self.config(),
                    known=listener.known,
                    first=listener.told + 1,
                )
            )
            listener.known = tracker.known
            self._keep()
        if record is not None and listener.told == last - 1:
            untold: Sequence[RoundRecord] = [record]
        else:
            untold = self.rounds()[listener.told : last] if listener.told < last else []
        for each in untold:
            tracker.log(int(each["round"]), self.figures(each))
            listener.told = int(each["round"])
            self._keep()
        return tracker

    def _finish(self, listener: _Listener, rounds: int, told: Callable[[], Told]) -> None:
        self._tell(listener, rounds).finish(told())
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
        told = {name: each.state for name, each in self._listeners.items() if each.known is not None}
        text = json.dumps({**self._others, **told}, indent=1)
        files.write(self.folder / STATE, text.encode() + b"\n", durable=False)


def _reason(error: Exception) -> str:
    r"""An error in a line, without the password that an address in it may have.

    >>> _reason(ValueError("no answer of https://ann:secret@host/api\nmore"))
    'ValueError: no answer of https://…@host/api'
    """
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {printable(re.sub('://[^/@ ]+@', '://…@', first))}"


@dataclass
class AlignmentTracking(Tracking):
    """Tells tools of an alignment, from its first epoch on. Epochs are counted over all generations.

    Its figures are those of :func:`~prefed.trackers.logged_metrics.epoch_figures`, and at the end those of
    :func:`~prefed.trackers.logged_metrics.alignment_figures`: never a text, and nothing of a client.
    """

    figures: Callable[[Mapping[str, Any]], Mapping[str, float]] = epoch_figures

    def on_stage_begin(self, stage: str, done: int, of: int) -> None:
        """Training that is done again is a new run in the tools."""
        epoch, _ = _place(stage, done, of)
        for listener in self._listeners.values():
            if epoch is not None and epoch < listener.told:
                listener.known, listener.told, listener.finished = None, 0, 0

    def on_stage_step(self, stage: str, done: int, of: int, figures: Mapping[str, float]) -> None:
        """Tell the epoch's figures."""
        epoch, generation = _place(stage, done, of)
        if epoch is not None:
            self.on_round_end(cast(RoundRecord, {"round": epoch, **generation, **figures}))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell what came of the alignment, unless it was told before.

        Args:
            summary: what ``align/summary.json`` holds.
        """
        epochs = len(summary["train"]["epochs"])
        self.finish_once(epochs, lambda: Told(epochs, alignment_figures(summary), (), (), None))


def _place(stage: str, done: int, of: int) -> tuple[int | None, dict[str, int]]:
    """The number of an epoch over all generations, and that of its generation; none of another stage.

    >>> _place("train-3", 1, 2), _place("train", 1, 2), _place("labels-3", 1, 2)
    ((5, {'generation': 3}), (1, {}), (None, {}))
    """
    name, _, number = stage.partition("-")
    if name != "train":
        return None, {}
    return (int(number or 1) - 1) * of + done, {"generation": int(number)} if number else {}
