"""Weights & Biases, online or, with ``WANDB_MODE=offline``, in the run directory alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from prefed.trackers.base import Told, TrackedRun, Tracker, TrackerError, page_file


class WandB(Tracker):
    """A run of Weights & Biases. Neither code, nor a git state, nor anything printed is captured."""

    package = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", disable_code=True, disable_git=True, x_save_requirements=False
        )
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.known,
            resume="allow" if run.known else None,
            config=dict(run.config),
            dir=str(run.folder),
            settings=settings,
        )
        self.known = str(self._run.id)

    @classmethod
    def check(cls) -> None:
        """Log in before the run, when there is still somebody to answer a question."""
        super().check()
        import wandb

        if os.environ.get("WANDB_MODE", "online") != "online":
            return
        try:
            wandb.login()
        except wandb.Error as error:
            raise TrackerError(
                f"[track] to = 'wandb': {error} Or WANDB_MODE=offline, which keeps it on this machine"
            ) from error

    def log(self, number: int, figures: Mapping[str, float]) -> None:
        """The round is the step."""
        self._run.log(dict(figures), step=number)

    def finish(self, told: Told) -> None:
        """The summary, a table and an artifact."""
        import wandb

        self._run.summary.update(dict(told.figures))
        if told.rows:
            table = wandb.Table(columns=list(told.columns), data=[list(row) for row in told.rows])
            self._run.log({"clients": table})
        if told.page is not None:
            with page_file(told.page) as path:
                artifact = wandb.Artifact(f"report-{self.known}", type="report")
                artifact.add_file(str(path))
                self._run.log_artifact(artifact)

    def close(self, *, succeeded: bool) -> None:
        """Wait until all is sent or written."""
        self._run.finish(exit_code=0 if succeeded else 1)
