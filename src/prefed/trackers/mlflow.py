"""MLflow: a server, or a database on this machine."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from importlib import import_module

from prefed.core.strict import flatten
from prefed.core.text import safe_cell
from prefed.trackers.base import PAGE, Told, TrackedRun, Tracker

BATCH, LONGEST = 1000, 6000
"""The most numbers of one request, and the most characters of a setting that MLflow keeps."""


class MLflow(Tracker):
    """A run of MLflow, where ``MLFLOW_TRACKING_URI`` says. The project is called an experiment there."""

    package = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        if run.known is not None:
            self.known = run.known
            self._client.update_run(self.known, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        self.known = str(self._client.create_run(number, run_name=run.name).info.run_id)
        for name, value in flatten(run.config).items():
            self._client.log_param(self.known, name, str(value)[:LONGEST])

    @classmethod
    def check(cls) -> None:
        """A database needs more packages than a server does."""
        super().check()
        import mlflow

        if mlflow.get_tracking_uri().partition(":")[0] not in ("http", "https", "file", "databricks"):
            for package in ("sqlalchemy", "alembic"):
                import_module(package)

    def log(self, number: int, figures: Mapping[str, float]) -> None:
        """The round is the step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, number) for name, value in figures.items()]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self.known, metrics=metrics[start : start + BATCH])

    def finish(self, told: Told) -> None:
        """The summary, a table and the page, as ``clients.csv`` and ``report.html``."""
        self.log(told.rounds, told.figures)
        if told.rows:
            table = io.StringIO()
            rows = ([safe_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in told.rows)
            csv.writer(table).writerows([told.columns, *rows])
            self._client.log_text(self.known, table.getvalue(), "clients.csv")
        if told.page is not None:
            self._client.log_text(self.known, told.page, PAGE)

    def close(self, *, succeeded: bool) -> None:
        """The run is finished there, or failed."""
        self._client.set_terminated(self.known, "FINISHED" if succeeded else "FAILED")
