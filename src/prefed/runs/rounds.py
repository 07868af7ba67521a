"""Run the remaining rounds of an experiment in its directory, and conclude it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from prefed import engines
from prefed.config import Experiment, RayConfig
from prefed.config.file import code_of
from prefed.core import Callback, State
from prefed.core.text import pluralize, timed
from prefed.core.wire import decode_state
from prefed.engines import BACKENDS, Backend, BackendSettings, ClientStates, Job, check_devices
from prefed.models import ModelError
from prefed.runs.build import answered_prompts, job_factory, lockstep, of_parent
from prefed.runs.data_notices import announce
from prefed.runs.start_or_resume import (
    build_in_cache,
    commit_start,
    digests_of,
    moved,
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
from prefed.train.metrics.run_warnings import flat_loss_warning
from prefed.train.pair_trainer import PairTrainerFactory

if TYPE_CHECKING:
    from prefed.core.records import RoundRecord, Summary
    from prefed.runs.answers import RoundAnswers

ADAPTERS = "adapters"
Build = Callable[[Experiment, Path], Job]
"""Builds the job of an experiment, with a cache; see :func:`~prefed.runs.build.build_job`."""


def finish_rounds(experiment: Experiment, writer: RunWriter, callback: Callback, build: Build) -> State:
    """Run the remaining rounds, and return the server's state after the last one."""
    experiment = reconcile(experiment, writer)
    ended = writer.round == experiment.rounds or writer.stopped
    finished = ended and (writer.path / "summary.json").exists()
    if not finished or moved(experiment, writer):
        _run_rounds(experiment, writer, callback, build)
    else:
        update_config(experiment, writer)
        rounds = pluralize(writer.round, "round", "rounds")
        callback.on_note(f"the run in {writer.path} is already finished ({rounds})")
    return decode_state(writer.server())


def _run_rounds(experiment: Experiment, writer: RunWriter, callback: Callback, build: Build) -> None:
    job = _begin(experiment, writer, build)
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
    writer.write_summary(cast("Summary", summary), profiles, tastes)


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


def _begin(experiment: Experiment, writer: RunWriter, build: Build) -> Job:
    """Build the job, and commit round 0 or check that data and model of a resumed run are unchanged."""
    own = of_parent(experiment)
    if own.model.device != "cpu" and (numbers := check_devices(experiment.engine.devices or ())):
        # This process uses the first device.
        torch.cuda.set_device(numbers[0])
    job = build_in_cache(writer, lambda cache: build(own, cache))
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
    factory, ray = partial(job_factory, experiment, writer.path / "cache"), engine.ray or RayConfig()
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
