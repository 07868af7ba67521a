"""Trackio: a database on this machine, or a Space of the Hugging Face hub."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import redirect_stdout

from prefed.trackers.base import Told, TrackedRun, Tracker, page_file


class Trackio(Tracker):
    """A run of trackio, in ``TRACKIO_DIR`` or where ``TRACKIO_SPACE_ID`` says.

    The library prints what it does; that is left out.
    """

    package = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                run.project,
                name=run.known or f"{run.name}-{os.urandom(3).hex()}",
                config=dict(run.config),
                resume="must" if run.known else "never",
                # A Space that it makes is not for everybody to read.
                private=True,
                embed=False,
            )
        self.known = str(self._run.name)

    def log(self, number: int, figures: Mapping[str, float]) -> None:
        """The round is the step."""
        self._run.log(dict(figures), step=number)

    def finish(self, told: Told) -> None:
        """The summary, a table and an artifact."""
        import trackio

        self._run.log(dict(told.figures), step=told.rounds)
        if told.rows:
            rows = [list(row) for row in told.rows]
            self._run.log({"clients": trackio.Table(columns=list(told.columns), data=rows)}, step=told.rounds)
        if told.page is not None:
            with page_file(told.page) as path, redirect_stdout(io.StringIO()):
                self._run.log_artifact(path, name=f"report-{self.known}", type="report")

    def close(self, *, succeeded: bool) -> None:
        """Wait until all is sent or written."""
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()
