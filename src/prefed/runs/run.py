"""From an experiment to a finished run directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from prefed.align import check_inputs
from prefed.config import Experiment, RayConfig
from prefed.core import Callback, Callbacks, State, files
from prefed.core.text import pluralize
from prefed.core.timing import timed
from prefed.core.wire import decode_state, encode
from prefed.data import DataMismatchError
from prefed.engines import (
    BACKENDS,
    Backend,
    BackendSettings,
    Job,
    NeighbourRounds,
    ServerRounds,
    backend_name,
    check_backend,
    check_devices,
)
from prefed.models import ModelError
from prefed.runs.align import align, check_judge, check_named_tastes
from prefed.runs.build import build_job
from prefed.runs.data_notices import announce
from prefed.runs.log import run_log
from prefed.runs.origin import describe_data, describe_origin
from prefed.runs.resume import moved, reconcile, reset_run, settings_digest, update_config
from prefed.runs.summary import Profiles, mean_models, read_profiles, summarize
from prefed.runs.taste_figures import tell_tastes
from prefed.runs.track import tracked, usable
from prefed.runs.worker_job import job_factory
from prefed.store import RunReader, RunWriter
from prefed.train.metrics import flat_loss_warning
from prefed.train.trainer_factory import PairTrainerFactory

ADAPTERS = "adapters"
SHARED = "shared"


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        summary: what ``summary.json`` holds.
        server: the server's state after the last round.
        adapter: the folder of the shared adapter. ``None`` if the method shares no model or several, or if no
            adapter can hold the model.
        adapters: the folders of all shared adapters: that one, or one for each selector.
    """

    path: Path
    summary: Mapping[str, Any]
    server: State
    adapter: Path | None
    adapters: tuple[Path, ...] = ()

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """What ``rounds.jsonl`` holds, one record per round; read when asked for."""
        return RunReader(self.path).rounds()


def default_out(experiment: Experiment, name: str = "") -> Path:
    """The default run directory, ``runs/NAME-METHOD-seedSEED``."""
    stem = [name] if name and name != experiment.method.name else []
    return Path("runs", "-".join([*stem, experiment.method.name, f"seed{experiment.seed}"]))


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    page: Callable[[Path], str] | None = None,
) -> RunResult:
    """Run an experiment to its end.

    A run that was killed or interrupted at any moment can be resumed. It then ends with the same numbers as a
    run without interruption.

    Args:
        experiment: the experiment. Its relative paths start at the working folder.
        out: the run directory, new or empty; by default :func:`default_out`. It is removed again if the
            experiment fails before its first round.
        resume: continue the run in ``out``, which must exist. ``resume=out.exists()`` starts a new run or
            continues the existing one. ``rounds`` may be raised, ``engine.workers`` and
            ``engine.visit_timeout`` may change, ``engine.name`` and ``engine.ray`` too, and data and model
            may have moved. ``[track]`` and ``[align]`` may change too, but a stage of the alignment that was
            done with other settings is refused. All other settings must be the same.
        progress: show the progress on the terminal.
        callbacks: receive the events of the run, in this order. An exception from one of them ends the run.
            Committed rounds are kept.
        page: makes the page about the run in a directory, for the tools of ``[track]``; left out: they get no
            page. ``prefed run`` gives :func:`prefed.ui.pages.public.public_page`.

    Raises:
        TypeError: ``callbacks`` is no list of :class:`~prefed.core.Callback` instances.
        StoreError: ``out`` is in use, not empty, damaged, or holds no run to resume; or the data or the model
            changed.
        OSError: a file cannot be written, for example on a full disk. Committed rounds can be resumed.
        ConfigError: the run in ``out`` has other settings.
        DataError, ModelError: the data or the model cannot be used.
        TrackerError: a tool of ``[track]`` cannot be used on this machine.
        RoundError: no client answered in a round, or none could be evaluated after the last.
        AlignError: the alignment after the rounds cannot go on.
        WorkerError: ``engine.devices`` names one that is not there; a worker process died or took longer than
            ``engine.visit_timeout``; or with the engine ``ray``, its package is missing, the cluster is too
            small or has no machine left, or a visit has lost several actors.
    """
    path = Path(out) if out is not None else default_out(experiment)
    callback = Callbacks(callbacks)
    if progress:
        from prefed.trackers.terminal import Terminal

        callback = Callbacks([Terminal(), callback])
    check_backend(experiment.engine.name)
    if numbers := check_devices(experiment.engine.devices or ()):
        # The model of this process lies on the first.
        torch.cuda.set_device(numbers[0])
    if experiment.align is not None:
        check_inputs(experiment.align, experiment.data)
        check_judge(experiment.align)
    kinds = usable(experiment.track)
    with ExitStack() as stack:
        with RunWriter(path, resume=resume) as writer:
            # The log begins in a directory that is this run's, and goes on with the alignment.
            callback = Callbacks([callback, stack.enter_context(run_log(path))])
            with tracked(kinds, experiment.track, path, callback, page) as telling:
                server = _finish(experiment, writer, telling)
        if experiment.align is not None:
            align(path, experiment.align, callbacks=[callback])
    return _result(path, server)


def _finish(experiment: Experiment, writer: RunWriter, callback: Callback) -> State:
    """Run the rounds that are left. Gives the server's state after the last."""
    try:
        experiment = reconcile(experiment, writer)
        ended = writer.round == experiment.rounds or writer.stopped
        finished = ended and (writer.path / "summary.json").exists()
        if not finished or moved(experiment, writer):
            _run_rounds(experiment, writer, callback)
        else:
            update_config(experiment, writer)
            rounds = pluralize(writer.round, "round", "rounds")
            callback.on_note(f"{writer.path} holds a finished run of {rounds}: nothing was left to do")
    except Exception as error:
        if isinstance(error, files.WriteError) and writer.commit is not None:
            error.add_note(f"(whole rounds are kept, {writer.round} of them: then go on with --resume)")
        # A start that failed is removed. One that was killed or interrupted stays, for --resume.
        writer.discard()
        raise
    return decode_state(writer.server())


def _run_rounds(experiment: Experiment, writer: RunWriter, callback: Callback) -> None:
    job = _begin(experiment, writer)
    announce(experiment, job, callback)
    with ExitStack() as stack:
        with timed("engine", backend_name(experiment.engine.name, experiment.engine.workers)):
            backend = stack.enter_context(_backend(experiment, job, writer))
        rounds = ServerRounds if job.graph is None else NeighbourRounds
        server = rounds(job, writer, backend, callback).run()
        with timed("summary"):
            profiles = read_profiles(job, backend.states)
            tastes = tell_tastes(job, experiment.method.settings.goal(), server, backend.states)
            data = describe_data(cast("PairTrainerFactory", job.trainers).dataset)
    with timed("adapters"):
        conclude(job, writer, server, profiles, callback, tastes, data=data)


def conclude(
    job: Job,
    writer: RunWriter,
    server: State,
    profiles: Profiles,
    callback: Callback,
    tastes: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Write what a run leaves after its last round: the shared adapters and ``summary.json``.

    Args:
        profiles: from :func:`~prefed.runs.summary.read_profiles`.
        tastes: from :func:`~prefed.runs.taste_figures.tell_tastes`.
        more: what the summary says besides, or in the place of what it would say.
    """
    if warning := flat_loss_warning([record["loss"] for record in RunReader(writer.path).rounds()]):
        callback.on_warning(warning)
    _save_adapters(job, server, writer.path, callback)
    summary = {**summarize(job, writer, profiles), **more, "origin": describe_origin()}
    writer.write_summary(summary, profiles, tastes)


def _begin(experiment: Experiment, writer: RunWriter) -> Job:
    """Build the job, and commit round 0. A resumed run must have the same data and model."""
    cache = writer.path / "cache"
    try:
        job = build_job(experiment, cache)
    except DataMismatchError:
        if writer.round:
            raise
        reset_run(writer)
        job = build_job(experiment, cache)
    check_named_tastes(experiment, job)
    server = encode(job.method.init_server(job.trainers.initial))
    digests = {**job.trainers.fingerprint, **file_digests(experiment)}
    writer.begin(server, digests, settings_digest(experiment.tables()))
    update_config(experiment, writer)
    writer.reopen()
    return job


def file_digests(experiment: Experiment) -> dict[str, str]:
    """Digests of the files, besides the data, on which numbers depend."""
    fleet, graph = experiment.whole_fleet, experiment.whole_graph
    named = {"trace": fleet.trace if fleet else None, "graph": graph.file if graph else None}
    return {name: files.file_digest(Path(path)) for name, path in named.items() if path is not None}


def _backend(experiment: Experiment, job: Job, writer: RunWriter) -> Backend:
    engine = experiment.engine
    factory, ray = job_factory(experiment, writer.path / "cache"), engine.ray or RayConfig()
    settings = BackendSettings(
        engine.workers,
        engine.threads or 1,
        engine.visit_timeout,
        ray.address,
        ray.num_gpus,
        tuple(engine.devices or ()),
    )
    make = BACKENDS[backend_name(engine.name, engine.workers)]
    return make(job, factory, writer.states, settings)


def _save_adapters(job: Job, server: State, path: Path, callback: Callback) -> None:
    for name, model in mean_models(job, server).items():
        try:
            job.trainers.save_adapter(model, path / ADAPTERS / name)
        except ModelError as error:
            callback.on_warning(f"no adapter is saved: {error}")
            return


def _result(path: Path, server: State) -> RunResult:
    summary = json.loads((path / "summary.json").read_text("utf-8"))
    shared = path / ADAPTERS / SHARED
    adapters = tuple(path / ADAPTERS / name for name in summary.get("selectors", [SHARED]))
    adapters = tuple(adapter for adapter in adapters if adapter.exists())
    return RunResult(path, summary, server, shared if shared in adapters else None, adapters)
