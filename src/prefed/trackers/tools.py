"""The tools of ``[track]``: what each is given, and its adapter."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from prefed.core.strict_settings import flatten
from prefed.core.text import safe_cell

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


TRACKERS: Mapping[str, type[Tracker]] = MappingProxyType(
    {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}
)
"""Name, which is also that of its extra → adapter."""


def trackers(names: Sequence[str]) -> dict[str, type[Tracker]]:
    """The classes of tools, each of which can be used on this machine.

    Raises:
        TrackerError: one cannot; the message says what to install or to set.
    """
    found: dict[str, type[Tracker]] = {}
    for name in names:
        kind = TRACKERS[name]
        try:
            kind.check()
        except ImportError as error:
            raise TrackerError(
                f"[track] to = {name!r}: its package cannot be imported ({error}); "
                f"pip install 'prefed[{name}]', or leave it out"
            ) from error
        found[name] = kind
    return found
