"""Progress on standard output: a progress bar on a terminal, plain lines in a pipe or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from prefed.core import Callback
from prefed.core.records import RoundRecord
from prefed.core.text import printable
from prefed.trackers.log import loss_and_accuracy, round_line, stage_line

PIPE_WIDTH = 120
"""Columns of an output that is not a terminal, wide enough for tables with long names."""


def stdout_console() -> Console:
    """A console on standard output with the width of the terminal or of ``COLUMNS``."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, PIPE_WIDTH)
    return console


class Terminal(Callback):
    """Shows the progress of a run on a console (default: standard output).

    Args:
        label: prefix of each line if several processes write to one terminal; disables the bar.
        lines: write a line for each round even if there is a bar.
    """

    def __init__(self, console: Console | None = None, label: str = "", lines: bool = False) -> None:
        self.console, self._lines = console or stdout_console(), lines
        self._label = f"{label}: " if label else ""
        self._rounds = 0
        self._bar: Progress | None = None
        self._tenth = ("", 0)

    def _started(self, label: str, *more: TextColumn) -> Progress:
        """Start a bar with ``label``, the task's ``figures``, ``more`` columns and times."""
        bar = Progress(
            TextColumn(label),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            *more,
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        bar.start()
        return bar

    def on_run_begin(self, done: int, rounds: int) -> None:
        """Start the bar at ``done`` rounds."""
        self._rounds = rounds
        if not self.console.is_terminal or self._label or done >= rounds:
            return
        step = TextColumn("[dim]{task.fields[step]}")
        self._bar = self._started("round {task.fields[round]}/{task.total:.0f}", step)
        self._task = self._bar.add_task("", total=rounds, completed=done, round=done, figures="", step="")

    def on_task_end(self, what: str, done: int, of: int) -> None:
        """Show the progress of the round."""
        if self._bar is not None:
            self._bar.update(self._task, step=f"{what} {done}/{of}")

    def on_round_end(self, record: RoundRecord) -> None:
        """Advance the bar or write a line."""
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=record["round"],
                round=record["round"],
                figures="  ".join(loss_and_accuracy(record)),
            )
        if self._bar is None or self._lines:
            line = f"{self._label}{round_line(record, self._rounds)}"
            self.console.print(line, markup=False, soft_wrap=True)

    def on_note(self, text: str) -> None:
        """Write a line above the bar."""
        self.console.print(f"{self._label}{printable(text)}", markup=False, soft_wrap=True)

    def on_warning(self, text: str) -> None:
        """Write a line above the bar."""
        line = f"{self._label}warning: {printable(text)}"
        self.console.print(line, style="yellow", markup=False, soft_wrap=True)

    def on_run_end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_stage_begin(self, stage: str, done: int, of: int) -> None:
        """Start a bar at ``done`` steps."""
        if not self.console.is_terminal or done >= of:
            return
        self._bar = self._started(f"{stage} {{task.completed:.0f}}/{{task.total:.0f}}")
        self._task = self._bar.add_task("", total=of, completed=done, figures="")

    def on_stage_step(self, stage: str, done: int, of: int, figures: Mapping[str, float]) -> None:
        """Advance the bar; in a pipe or a file, write a line for each tenth of the steps."""
        text = "  ".join(f"{name.replace('_per_', '/')} {value:.4g}" for name, value in figures.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=done, figures=text)
        elif not self.console.is_terminal and self._tenth != (stage, 10 * done // of):
            self._tenth = stage, 10 * done // of
            self.console.print(f"{stage} {done}/{of}  {text}", soft_wrap=True)

    def on_stage_end(self, stage: str, figures: Mapping[str, Any]) -> None:
        """Remove the bar and write the stage's counts and duration."""
        self.on_run_end()
        self.console.print(stage_line(stage, figures), markup=False, soft_wrap=True)
