"""Adapters for the tools of ``[track]``."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from prefed.core.plugins import Registry
from prefed.core.strict_settings import flatten
from prefed.core.text import markdown_text, safe_cell

PAGE = "report.html"
"""File name of the page in a tool."""


class TrackerError(ValueError):
    """A tool cannot be used on this machine."""


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for a tool.

    Attributes:
        config: the experiment's tables with all defaults.
        known: the tool's name of the run; ``None`` for a new run.
        first: the first round to be logged.
    """

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]
    known: str | None
    first: int


@dataclass(frozen=True)
class Results:
    """The results of a finished run for a tool.

    Attributes:
        figures: name → metric.
        columns, rows: table of clients' metrics; empty if they are not logged.
        page: an HTML page, or ``None``.
    """

    rounds: int
    figures: Mapping[str, float]
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    page: str | None


class Tracker(ABC):
    """A run in a tool, which the constructor starts or resumes.

    Methods may raise any exception of the tool's library.

    Attributes:
        package: import name of the library.
        known: the tool's name of the run, with which it can be resumed.
    """

    package: ClassVar[str]
    known: str

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @classmethod
    def check(cls) -> None:
        """Check that the tool can be used on this machine.

        Raises:
            ImportError: its library is not installed.
            TrackerError: it is not set up.
        """
        module = import_module(cls.package)
        if module.__file__ is None:
            # A folder of the tool in the working directory could be imported as a namespace package.
            raise ImportError(f"No module named {cls.package!r}")

    @abstractmethod
    def log(self, number: int, figures: Mapping[str, float]) -> None:
        """Log the metrics of a round."""

    @abstractmethod
    def finish(self, results: Results) -> None:
        """Log the results of the run."""

    @abstractmethod
    def close(self, *, succeeded: bool) -> None:
        """Close the run. It can be resumed later."""


@contextmanager
def page_file(page: str) -> Iterator[Path]:
    """Context with a page as a temporary file called :data:`PAGE`, for libraries that need a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PAGE
        path.write_text(page, encoding="utf-8")
        yield path


BATCH, LONGEST = 1000, 6000
"""MLflow's maximum number of metrics per request, and of characters per parameter."""


class MLflow(Tracker):
    """A run in MLflow at ``MLFLOW_TRACKING_URI``. The project is MLflow's experiment."""

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
        """Also check the packages that MLflow needs for a database."""
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

    def finish(self, results: Results) -> None:
        """Log the summary, ``clients.csv`` and ``report.html``."""
        self.log(results.rounds, results.figures)
        if results.rows:
            table = io.StringIO()
            rows = (
                [safe_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in results.rows
            )
            csv.writer(table).writerows([results.columns, *rows])
            self._client.log_text(self.known, table.getvalue(), "clients.csv")
        if results.page is not None:
            self._client.log_text(self.known, results.page, PAGE)

    def close(self, *, succeeded: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self.known, "FINISHED" if succeeded else "FAILED")


FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Event files in ``RUN/tensorboard``, for ``tensorboard --logdir runs``. The page is not logged."""

    package = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # Discard later rounds of an interrupted run, and earlier attempts of an alignment.
        folder = run.folder / FOLDER
        self._writer = SummaryWriter(str(folder), purge_step=run.first if folder.exists() else None)
        self.known = FOLDER
        if run.known is None:
            config = json.dumps(run.config, indent=2, ensure_ascii=False)
            self._writer.add_text("config", f"```json\n{config}\n```", 0)

    def log(self, number: int, figures: Mapping[str, float]) -> None:
        """Log each metric as a curve."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def finish(self, results: Results) -> None:
        """Log each metric of the summary, and the clients as a table in a text."""
        self.log(results.rounds, results.figures)
        if results.rows:
            self._writer.add_text("clients", markdown(results.columns, results.rows), results.rounds)

    def close(self, *, succeeded: bool) -> None:
        """Flush and close the event file."""
        self._writer.close()


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str | float | None]]) -> str:
    r"""Format a table in Markdown. Cells are escaped, so that names cannot load images or links.

    >>> print(markdown(["client", "test_accuracy"], [["a|b", 0.25], ["![x](http://eve)", None]]))
    | client | test_accuracy |
    | --- | --- |
    | a\|b | 0.25 |
    | !\[x\](http://eve) |  |
    """
    named = [["" if value is None else markdown_text(str(value)) for value in row] for row in rows]
    cells = [columns, ["---"] * len(columns), *named]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


class Trackio(Tracker):
    """A run in Trackio, in ``TRACKIO_DIR`` or ``TRACKIO_SPACE_ID``. The library's output is suppressed."""

    package = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                run.project,
                name=run.known or f"{run.name}-{os.urandom(3).hex()}",
                config=dict(run.config),
                resume="must" if run.known else "never",
                # Create Spaces as private ones.
                private=True,
                embed=False,
            )
        self.known = str(self._run.name)

    def log(self, number: int, figures: Mapping[str, float]) -> None:
        """The round is the step."""
        self._run.log(dict(figures), step=number)

    def finish(self, results: Results) -> None:
        """The summary, a table and an artifact."""
        import trackio

        self._run.log(dict(results.figures), step=results.rounds)
        if results.rows:
            rows = [list(row) for row in results.rows]
            self._run.log(
                {"clients": trackio.Table(columns=list(results.columns), data=rows)}, step=results.rounds
            )
        if results.page is not None:
            with page_file(results.page) as path, redirect_stdout(io.StringIO()):
                self._run.log_artifact(path, name=f"report-{self.known}", type="report")

    def close(self, *, succeeded: bool) -> None:
        """Wait until all is sent or written."""
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()


class WandB(Tracker):
    """A run in Weights & Biases. Code, git state and output are not captured."""

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
        """Also log in, before the run starts, because it may ask for a key."""
        super().check()
        import wandb

        if os.environ.get("WANDB_MODE", "online") != "online":
            return
        try:
            wandb.login()
        except wandb.Error as error:
            raise TrackerError(
                f"[track] to = 'wandb': {error} Alternatively, set WANDB_MODE=offline to log to this machine"
            ) from error

    def log(self, number: int, figures: Mapping[str, float]) -> None:
        """The round is the step."""
        self._run.log(dict(figures), step=number)

    def finish(self, results: Results) -> None:
        """The summary, a table and an artifact."""
        import wandb

        self._run.summary.update(dict(results.figures))
        if results.rows:
            table = wandb.Table(columns=list(results.columns), data=[list(row) for row in results.rows])
            self._run.log({"clients": table})
        if results.page is not None:
            with page_file(results.page) as path:
                artifact = wandb.Artifact(f"report-{self.known}", type="report")
                artifact.add_file(str(path))
                self._run.log_artifact(artifact)

    def close(self, *, succeeded: bool) -> None:
        """Wait until all is sent or written."""
        self._run.finish(exit_code=0 if succeeded else 1)


TRACKERS: Registry[type[Tracker]] = Registry(
    "trackers",
    {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio},
    "TRACKER",
    type,
)
"""Name of a tool, and of its extra → adapter."""


def trackers(names: Sequence[str]) -> dict[str, type[Tracker]]:
    """The adapters of tools, checked to be usable on this machine.

    Raises:
        TrackerError: a tool cannot be used.
    """
    found: dict[str, type[Tracker]] = {}
    for name in names:
        kind = TRACKERS[name]
        try:
            kind.check()
        except ImportError as error:
            raise TrackerError(
                f"[track] to = {name!r}: cannot import its package ({error}): install it with pip install "
                f"'prefed[{name}]', or remove {name!r}"
            ) from error
        found[name] = kind
    return found
