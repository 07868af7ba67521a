"""Run an experiment, up to a finished run directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.config import ConfigError, Experiment
from prefed.config.experiment import IN_MEMORY
from prefed.core import Callback, Callbacks, State
from prefed.runs.preflight import check_start, checked_job, existing_parent
from prefed.runs.rounds import ADAPTERS, finish_rounds
from prefed.runs.start_or_resume import open_run
from prefed.store import RunReader

if TYPE_CHECKING:
    import pandas

    from prefed.core.records import RoundRecord, Summary
    from prefed.runs.pairs_from_memory import Rows

SHARED = "shared"


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        summary: the content of ``summary.json``.
        server: the server's state after the last round.
        adapter: the folder of the shared adapter; ``None`` if the method shares no model or several, or if
            the model cannot be saved as an adapter.
        adapters: the folders of all shared adapters: the one above, or one for each selector.
    """

    path: Path
    summary: Summary
    server: State
    adapter: Path | None
    adapters: tuple[Path, ...] = ()

    @cached_property
    def rounds(self) -> list[RoundRecord]:
        """The content of ``rounds.jsonl``, one record per round."""
        return RunReader(self.path).rounds()

    @cached_property
    def clients(self) -> pandas.DataFrame:
        """One row per client, by name: its pairs by split, and its metrics in the summary.

        A metric is NaN for a client that was not evaluated, or that is too small to be listed separately.

        Raises:
            RuntimeError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise RuntimeError(
                "RunResult.clients needs the package pandas: pip install 'prefed[datasets]'"
            ) from error
        from prefed.core.records import metrics_of_clients

        pairs = pandas.DataFrame.from_dict(self.summary["clients"], orient="index")
        metrics = {
            name: pandas.Series(metric["per_client"], dtype=float)
            for name, metric in metrics_of_clients(self.summary).items()
        }
        return pairs.assign(**metrics).sort_index().rename_axis("client")


def default_out(experiment: Experiment, name: str = "") -> Path:
    """The default run directory, ``runs/NAME-METHOD-seedSEED``."""
    method = experiment.method.kind.name
    stem = [name] if name and name != method else []
    return Path("runs", "-".join([*stem, method, f"seed{experiment.seed}"]))


def run(
    experiment: Experiment | str | Path,
    out: str | Path | None = None,
    *,
    data: Rows | Mapping[Any, Any] | None = None,
    resume: bool = False,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    page: Callable[[Path], str] | None = None,
) -> RunResult:
    """Run an experiment to its end.

    A run that was killed or interrupted can be resumed, and then ends with the same numbers as a run without
    interruption.

    Args:
        experiment: an experiment, whose relative paths start at the working directory; or the path of an
            experiment file.
        out: the run directory, new or empty; defaults to :func:`default_out`. It is removed if the experiment
            fails before its first round.
        data: pairs from memory, instead of the sources in ``experiment.data``; its other settings apply. A
            ``datasets.Dataset``, a ``pandas.DataFrame`` or a list of dicts with the columns that a file would
            have; a mapping from each client to such rows; or a mapping from ``"train"``, ``"validation"`` and
            ``"test"`` to one of these. The run directory keeps a copy. In messages, rows count from 1.
        resume: continue the run in ``out``, which must exist. ``resume=out.exists()`` starts a new run or
            continues the existing one. ``rounds`` may be raised; ``engine.name``, ``engine.ray``,
            ``engine.workers``, ``engine.visit_timeout``, ``[checkpoint]``, ``[track]`` and the paths of data
            and model may change, and so may ``[align]`` unless a stage was done with other settings. All
            other settings must be the same.
        progress: show the progress on the terminal.
        callbacks: receive the events of the run, in this order. An exception from one of them ends the run;
            committed rounds are kept.
        page: renders the page of a run directory for the trackers of ``[track]``; ``prefed run`` passes
            :func:`prefed.ui.pages.page.public_page`.

    Raises:
        TypeError: ``callbacks`` is not a list of :class:`~prefed.core.Callback` instances, or ``data`` has
            rows of another type.
        StoreError: ``out`` is in use, not empty, damaged, or has no run to resume; or the data or the model
            changed.
        OSError: a file cannot be written, e.g. because the disk is full. Committed rounds can be resumed.
        ConfigError: the run in ``out`` has other settings; or there are no data, or no partition for them.
        DataError, ModelError: the data or the model cannot be used.
        TrackerError: a tracker of ``[track]`` cannot be used on this machine.
        RoundError: no client answered in a round, or none could be evaluated after the last one.
        AlignError: the alignment failed.
        WorkerError: a device in ``engine.devices`` does not exist; a worker process died or exceeded
            ``engine.visit_timeout``; or, with engine ``ray``, the package is missing, the cluster is too
            small or has no machine left, or a visit has lost several actors.
    """
    if isinstance(experiment, str | Path):
        experiment = Experiment.load(experiment)
    if data is None and experiment.data.sources()[0][2].path == IN_MEMORY:
        raise ConfigError(
            "the experiment has no data: pass data= to run, or set data={'train': ...} in the experiment"
        )
    path = Path(out) if out is not None else default_out(experiment)
    callbacks = [Callbacks(callbacks)]
    if progress:
        from prefed.trackers.terminal import Terminal

        callbacks = [Terminal(), *callbacks]
    check_start(experiment)
    existing_parent(path)
    opened = open_run(experiment, path, callbacks, resume=resume, spaced=experiment.checkpoint, page=page)
    with opened as (writer, callback), ExitStack() as stack:
        if data is not None:
            from prefed.runs.pairs_from_memory import from_memory

            experiment = stack.enter_context(from_memory(experiment, data, writer))
        server = finish_rounds(experiment, writer, callback, checked_job)
    if experiment.align is not None:
        from prefed.runs.align import align

        align(path, experiment.align, callbacks=callbacks)
    return _result(path, server)


def _result(path: Path, server: State) -> RunResult:
    summary: Summary = json.loads((path / "summary.json").read_text("utf-8"))
    shared = path / ADAPTERS / SHARED
    adapters = tuple(path / ADAPTERS / name for name in summary.get("selectors", [SHARED]))
    adapters = tuple(adapter for adapter in adapters if adapter.exists())
    return RunResult(path, summary, server, shared if shared in adapters else None, adapters)
