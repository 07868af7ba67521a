"""TensorBoard: event files in the run directory."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence

from prefed.trackers.base import Told, TrackedRun, Tracker

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Writes ``RUN/tensorboard``; ``tensorboard --logdir runs`` shows it. It has no place for a page."""

    package = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # What an interrupted run wrote of later rounds does not count, nor an alignment that is done again.
        folder = run.folder / FOLDER
        self._writer = SummaryWriter(str(folder), purge_step=run.first if folder.exists() else None)
        self.known = FOLDER
        if run.known is None:
            config = json.dumps(run.config, indent=2, ensure_ascii=False)
            self._writer.add_text("config", f"```json\n{config}\n```", 0)

    def log(self, number: int, figures: Mapping[str, float]) -> None:
        """A curve for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def finish(self, told: Told) -> None:
        """A point for each figure of the summary, and the clients as a table in a text."""
        self.log(told.rounds, told.figures)
        if told.rows:
            self._writer.add_text("clients", markdown(told.columns, told.rows), told.rounds)

    def close(self, *, succeeded: bool) -> None:
        """Write what is left."""
        self._writer.close()


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str | float | None]]) -> str:
    r"""A table in Markdown.

    What a name holds is shown and loads nothing.

    >>> print(markdown(["client", "test_accuracy"], [["a|b", 0.25], ["![x](http://eve)", None]]))
    | client | test_accuracy |
    | --- | --- |
    | a\|b | 0.25 |
    | \!\[x\]\(http://eve\) |  |
    """
    named = [[_cell(value) for value in row] for row in rows]
    cells = [columns, ["---"] * len(columns), *named]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cell(value: str | float | None) -> str:
    if isinstance(value, str):
        return re.sub(r"([\\`*_\[\]()!|])", r"\\\1", html.escape(value, quote=False))
    return "" if value is None else str(value)
