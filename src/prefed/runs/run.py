"""Run an experiment, up to a finished run directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from prefed import engines
from prefed.config import ConfigError, Experiment, RayConfig
from prefed.config.experiment import IN_MEMORY
from prefed.config.file import code_of
from prefed.core import Callback, Callbacks, State
from prefed.core.records import RoundRecord, Summary, metrics_of_clients
from prefed.core.text import pluralize, timed
from prefed.core.wire import decode_state
from prefed.engines import BACKENDS, Backend, BackendSettings, ClientStates, Job, check_devices
from prefed.models import ModelError
from prefed.runs.build import answered_prompts, job_factory, of_parent
from prefed.runs.data_notices import announce
from prefed.runs.preflight import check_start, checked_job, existing_parent, lockstep
from prefed.runs.start_or_resume import (
    build_in_cache,
    commit_start,
    digests_of,
    moved,
    open_run,
    reconcile,
    update_config,
)
from prefed.runs.summary import (
    Profiles,
    describe_data,
    describe_origin,
    mean_models,
    read_profiles,
    summarize,
)
from prefed.store import RunReader, RunWriter
from prefed.train.metrics import flat_loss_warning
from prefed.train.pair_trainer import PairTrainerFactory

if TYPE_CHECKING:
    import pandas

    from prefed.runs.answers import RoundAnswers
    from prefed.runs.memory import Rows

ADAPTERS = "adapters"
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
            from prefed.runs.memory import from_memory

            experiment = stack.enter_context(from_memory(experiment, data, writer))
        server = _finish(experiment, writer, callback)
    if experiment.align is not None:
        from prefed.runs.align import align

        align(path, experiment.align, callbacks=callbacks)
    return _result(path, server)


def _finish(experiment: Experiment, writer: RunWriter, callback: Callback) -> State:
    """Run the remaining rounds, and return the server's state after the last one."""
    experiment = reconcile(experiment, writer)
    ended = writer.round == experiment.rounds or writer.stopped
    finished = ended and (writer.path / "summary.json").exists()
    if not finished or moved(experiment, writer):
        _run_rounds(experiment, writer, callback)
    else:
        update_config(experiment, writer)
        rounds = pluralize(writer.round, "round", "rounds")
        callback.on_note(f"the run in {writer.path} is already finished ({rounds})")
    return decode_state(writer.server())


def _run_rounds(experiment: Experiment, writer: RunWriter, callback: Callback) -> None:
    job = _begin(experiment, writer)
    answers = round_answers(experiment, job, writer.path)
    announce(experiment, job, callback)
    with ExitStack() as stack:
        with timed("engine", experiment.engine.backend):
            backend = stack.enter_context(_backend(experiment, job, writer))
        rounds = engines.ServerRounds if job.graph is None else engines.NeighbourRounds
        server = rounds(job, writer, backend, callback, answers=answers).run()
        with timed("summary"):
            profiles = read_profiles(job, backend.states)
            tastes = _tastes(experiment, job, server, backend.states)
            data = describe_data(cast("PairTrainerFactory", job.trainers).dataset)
    with timed("adapters"):
        conclude(job, writer, server, profiles, callback, tastes, data=data)


def round_answers(
    experiment: Experiment, job: Job, folder: Path, *, personal: bool = True
) -> RoundAnswers | None:
    """Return what lets models answer after a round; ``None`` if there are no prompts.

    Args:
        folder: the run directory.
        personal: whether the clients' private states are here.

    Raises:
        ConfigError: as :class:`~prefed.runs.answers.RoundAnswers`.
    """
    tokenizer = cast("PairTrainerFactory", job.trainers).backbone.tokenizer
    if experiment.report is None and not answered_prompts(experiment, tokenizer):
        return None
    from prefed.runs.answers import RoundAnswers

    return RoundAnswers(experiment, job, folder, personal=personal)


def conclude(
    job: Job,
    writer: RunWriter,
    server: State,
    profiles: Profiles,
    callback: Callback,
    tastes: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Write the shared adapters and ``summary.json`` after the last round.

    Args:
        more: entries that are added to the summary, or replace entries.
    """
    rounds = RunReader(writer.path).rounds()
    if warning := flat_loss_warning([record["loss"] for record in rounds]) or dropped_warning(rounds):
        callback.on_warning(warning)
    _save_adapters(job, server, writer.path, callback)
    config = writer.config() or {}
    summary = {
        **summarize(job, writer, rounds, profiles),
        **more,
        "origin": describe_origin(code_of(config), config.get("method", {}).get("name", "")),
    }
    writer.write_summary(cast(Summary, summary), profiles, tastes)


def dropped_warning(rounds: Sequence[RoundRecord]) -> str:
    """Return a warning if no upload of a run was merged; else ``""``.

    >>> dropped = [{"client": "ann", "exchange": "train", "reason": "has NaN or infinite values in 'model'"}]
    >>> dropped_warning([{"cohort": ["ann"], "dropped": dropped}]).partition(";")[0]
    "no upload was merged in any round, so nothing was learned: has NaN or infinite values in 'model'"
    >>> dropped_warning([{"cohort": ["ann", "bob"], "dropped": dropped}])
    ''
    """
    asked = [(set(each["cohort"]), {drop["client"] for drop in each["dropped"]}) for each in rounds]
    if not any(cohort for cohort, _ in asked) or any(cohort - dropped for cohort, dropped in asked):
        return ""
    reason = next(drop["reason"] for each in rounds for drop in each["dropped"])
    advice = "; lower [method] lr" if re.search(r"\b(nan|inf|infinite|finite)\b", reason.lower()) else ""
    return f"no upload was merged in any round, so nothing was learned: {reason}{advice}"


def _begin(experiment: Experiment, writer: RunWriter) -> Job:
    """Build the job, and commit round 0 or check that data and model of a resumed run are unchanged."""
    own = of_parent(experiment)
    if own.model.device != "cpu" and (numbers := check_devices(experiment.engine.devices or ())):
        # This process uses the first device.
        torch.cuda.set_device(numbers[0])
    job = build_in_cache(writer, lambda cache: checked_job(own, cache))
    commit_start(experiment, job, writer, digests_of(experiment, job))
    return job


def _tastes(
    experiment: Experiment, job: Job, server: State, states: ClientStates | None
) -> dict[str, Any] | None:
    """Return the content of ``tastes.json``; ``None`` without tastes or local private states."""
    if not job.method.tastes or states is None:
        return None
    from prefed.runs.tastes import measured_tastes

    return measured_tastes(job, experiment.method.settings.goal(), server, states)


def _backend(experiment: Experiment, job: Job, writer: RunWriter) -> Backend:
    engine = experiment.engine
    factory, ray = job_factory(experiment, writer.path / "cache"), engine.ray or RayConfig()
    settings = BackendSettings(
        engine.workers,
        engine.threads or 1,
        engine.visit_timeout,
        ray.address,
        experiment.model.gpus if engine.name == "local" else ray.num_gpus,
        tuple(engine.devices or ()),
        lockstep(experiment, job),
    )
    make = BACKENDS[engine.backend]
    return make(job, factory, writer.states, settings)


def _save_adapters(job: Job, server: State, path: Path, callback: Callback) -> None:
    for name, model in mean_models(job, server).items():
        try:
            job.trainers.save_adapter(model, path / ADAPTERS / name)
        except ModelError as error:
            callback.on_warning(f"no adapter was saved: {error}")
            return


def _result(path: Path, server: State) -> RunResult:
    summary: Summary = json.loads((path / "summary.json").read_text("utf-8"))
    shared = path / ADAPTERS / SHARED
    adapters = tuple(path / ADAPTERS / name for name in summary.get("selectors", [SHARED]))
    adapters = tuple(adapter for adapter in adapters if adapter.exists())
    return RunResult(path, summary, server, shared if shared in adapters else None, adapters)
