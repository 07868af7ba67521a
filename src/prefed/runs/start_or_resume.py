"""What ``run``, ``federate`` and ``peer`` share: a run directory is opened, its run started or resumed."""

from __future__ import annotations

import json
import logging
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
import torch

from prefed.config import ConfigError, Experiment, to_toml
from prefed.core import Callback, Callbacks, files
from prefed.core.strict_settings import flatten
from prefed.core.wire import encode
from prefed.data import DataMismatchError
from prefed.engines import Job
from prefed.runs.reference import NOT_CACHED
from prefed.runs.summary import command
from prefed.store import RunWriter, StoreError
from prefed.store.directory import LOG
from prefed.trackers.log import RunLog

_PLACES = ("data.*.path", "model.name", "method.reward_model", "fleet.trace", "graph.file")
"""Settings that say where data, models, traces and graphs lie."""

_CHANGEABLE = {
    *("engine.name", "engine.workers", "engine.visit_timeout", "engine.devices", "model.checkpointing"),
}
"""Settings that change no number. A resumed run may have others."""

_REMEDY = "put a copy of it back, or start a new run with another --out"


def reconcile(experiment: Experiment, writer: RunWriter, *, begun: bool = False) -> Experiment:
    """Check an experiment against the run in a directory, and write ``config.toml`` if there is none.

    Before the first round, another experiment replaces the one in the directory.

    Args:
        begun: the run has begun, even if it has no round: no other experiment replaces it.

    Returns:
        The experiment with its number of threads, and what follows the number of rounds, filled in.

    Raises:
        ConfigError: the directory holds a run of another experiment.
        StoreError: ``config.toml`` changed since the run began.
    """
    config = writer.config()
    begun = begun or writer.round > 0
    if not begun:
        changed = differing(config or {}, fitted(experiment).tables())
        if any(name != "engine.threads" and not _changes_nothing(name) for name in changed):
            reset_run(writer, keep_cache={name.partition(".")[0] for name in changed} <= NOT_CACHED)
            config = None
    try:
        stored = None if config is None else Experiment.from_tables(config, f"{writer.path / 'config.toml'}")
    except ConfigError as error:
        raise StoreError(f"{error}\n{_REMEDY}") from error
    experiment = with_threads(fitted(experiment, stored), stored)
    if begun:
        _check_digest(config, experiment, writer)
    if config is None or stored is None:
        writer.write_config(to_toml(experiment))
        return experiment
    _check_settings(stored, experiment, writer)
    return experiment


def moved(experiment: Experiment, writer: RunWriter) -> bool:
    """Whether data or model of the run lie elsewhere than its ``config.toml`` says."""
    return any(is_place(name) for name in differing(writer.config() or {}, experiment.tables()))


def update_config(experiment: Experiment, writer: RunWriter) -> None:
    """Write what a resumed run may change into ``config.toml``, once its fingerprint is compared."""
    config = writer.config() or {}
    updated = _updated(config, experiment.tables())
    if updated != config:
        writer.write_config(tomli_w.dumps(updated))


def reset_run(writer: RunWriter, *, keep_cache: bool = False) -> None:
    """Delete what a run wrote before its first round, but for ``cache/`` with ``keep_cache``."""
    writer.forget()
    if not keep_cache:
        shutil.rmtree(writer.path / "cache", ignore_errors=True)


def is_place(name: str) -> bool:
    """Whether a setting says where data or a model lie.

    >>> is_place("data.train.path"), is_place("data.train.code.path"), is_place("data.train.format")
    (True, True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in _PLACES)


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name → both values of each setting that differs; an absent setting counts as ``None``.

    >>> differing({"seed": 1, "method": {"lr": 0.1}}, {"seed": 2, "method": {"lr": 0.1}})
    {'seed': (1, 2)}
    """
    old, new = flatten(before), flatten(after)
    pairs = {name: (old.get(name), new.get(name)) for name in sorted({*old, *new})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def settings_digest(config: Mapping[str, Any]) -> str:
    """The digest of those settings of a ``config.toml`` that a resumed run must share."""
    settings = {
        name: value for name, value in flatten(config).items() if name != "rounds" and not _may_change(name)
    }
    return files.digest(json.dumps(settings, sort_keys=True, default=str).encode())


def fitted(experiment: Experiment, stored: Experiment | None = None) -> Experiment:
    """Fill in the settings that follow the number of rounds, as the stored run has them if there is one.

    So a run whose rounds are raised keeps those that it was begun with.
    """
    left_out = experiment.method.settings
    settings = left_out.for_rounds(experiment.rounds)
    if stored is not None and isinstance(stored.method.settings, type(settings)):
        names = (name for name in type(settings).model_fields if getattr(left_out, name) is None)
        begun = {name: getattr(stored.method.settings, name) for name in names if getattr(settings, name)}
        settings = settings.model_copy(update=begun)
    method = experiment.method.model_copy(update={"settings": settings})
    return experiment.model_copy(update={"method": method})


def with_threads(experiment: Experiment, stored: Experiment | None) -> Experiment:
    """Fill in the number of threads: the stored run's, or the machine's shared out over the workers.

    Nobody knows how many workers each machine of a cluster will have: there it is one.
    """
    engine = experiment.engine
    if engine.threads is not None:
        return experiment
    threads = stored.engine.threads if stored else None
    cores = 1 if engine.name == "ray" else torch.get_num_threads()
    threads = threads or max(1, cores // max(1, engine.workers))
    return experiment.model_copy(update={"engine": engine.model_copy(update={"threads": threads})})


def _check_digest(config: Mapping[str, Any] | None, experiment: Experiment, writer: RunWriter) -> None:
    """Refuse a changed ``config.toml``, and other settings where the file is missing."""
    digest = writer.commit.settings if writer.commit else None
    if digest is None or settings_digest(experiment.tables() if config is None else config) == digest:
        return
    path, asked = writer.path / "config.toml", experiment.tables()
    if config is None:
        raise StoreError(
            f"{path} is missing, and the settings asked for are not those that its run was begun with; "
            "put a copy of config.toml back, resume with the settings of that start, or start a new run with "
            "another --out"
        )
    if settings_digest(asked) != digest:
        raise StoreError(
            f"{path} was edited since its run began, and the settings asked for are not those of that start "
            "either. Put a copy of config.toml back as the run wrote it, resume with the experiment file and "
            "--set that it was begun with, or start a new run with another --out"
        )
    lines = [
        f"  {name}: {begun!r} → {edited!r}"
        for name, (begun, edited) in differing(asked, config).items()
        if name != "rounds" and not _may_change(name)
    ]
    raise StoreError(
        f"{path} was edited since its run began (begun with → edited):\n"
        + "\n".join(lines)
        + "\nA run keeps its settings. Delete config.toml and resume as now: it is written again as it was. "
        "For other settings start a new run with another --out"
    )


def _check_settings(stored: Experiment, experiment: Experiment, writer: RunWriter) -> None:
    """Refuse to resume a run with other settings; the message names each."""
    changed = differing(stored.tables(), experiment.tables())
    lines = [
        f"  {name}: {before!r} → {after!r}"
        for name, (before, after) in changed.items()
        if not _may_change(name)
        and not (name == "rounds" and experiment.rounds >= max(stored.rounds, writer.round))
    ]
    if lines:
        raise ConfigError(
            f"the run in {writer.path} was begun with other settings (run → asked for):\n"
            + "\n".join(lines)
            + "\nresume it with its own (rounds may be raised, engine.workers and engine.visit_timeout may "
            "change, engine.name and engine.ray too), or start another with --out"
        )


def _may_change(name: str) -> bool:
    """Whether a resumed run may have another value of a setting, whatever the value.

    Other data or another model at a new place are found by their fingerprints. The commit has no fingerprint
    of the reward model, so its place may not change. The stages of an alignment have manifests of their own.
    """
    if _changes_nothing(name) or name.partition(".")[0] == "align":
        return True
    return is_place(name) and name != "method.reward_model"


def _changes_nothing(name: str) -> bool:
    """Whether a setting is one of those, of the engine and of trackers, that change no number."""
    return name in _CHANGEABLE or name.startswith(("engine.ray", "track."))


def _updated(stored: Mapping[str, Any], experiment: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The stored settings, with ``rounds`` and whatever may change from ``experiment``.

    The rest stays as it was written, even if this version has more defaults to fill in.
    """
    updated: dict[str, Any] = {}
    for key in {**stored, **experiment}:
        name, before, after = prefix + key, stored.get(key), experiment.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            updated[key] = _updated(before, after, f"{name}.")
        else:
            value = after if name == "rounds" or _may_change(name) else before
            updated |= {} if value is None else {key: value}
    return updated


T = TypeVar("T")


@contextmanager
def open_run(
    experiment: Experiment,
    path: Path,
    callbacks: Sequence[Callback],
    *,
    resume: bool,
    returnable: bool = False,
    page: Callable[[Path], str] | None = None,
) -> Iterator[tuple[RunWriter, Callback]]:
    """Open a run directory to write to, with its log and the tools of ``[track]``.

    A directory whose start fails is removed. One whose start was killed or interrupted stays, to be resumed.

    Args:
        callbacks: receive the events of the run, before the log and the tools.
        resume, returnable: as :class:`~prefed.store.RunWriter` takes them.
        page: makes the page about the run in a directory, for the tools.

    Yields:
        The writer, and the callback that receives the events of the run.

    Raises:
        TypeError: ``callbacks`` is no list of :class:`~prefed.core.Callback` instances.
        TrackerError: a tool of ``[track]`` cannot be used on this machine.
        StoreError: as :class:`~prefed.store.RunWriter`.
    """
    first = Callbacks(callbacks)
    tracking: Callable[[Callback], AbstractContextManager[Callback]] = nullcontext
    if experiment.track is not None:
        from prefed.runs.track import tracked, usable

        tracking = partial(tracked, usable(experiment.track), experiment.track, path, page=page)
    with (
        RunWriter(path, resume=resume, returnable=returnable) as writer,
        run_log(path) as log,
        tracking(Callbacks([first, log])) as callback,
        _discarding(writer),
    ):
        yield writer, callback


@contextmanager
def _discarding(writer: RunWriter) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, files.WriteError) and writer.commit is not None:
            error.add_note(f"(complete rounds are kept, {writer.round} of them: then continue with --resume)")
        writer.discard()
        raise


def build_in_cache(writer: RunWriter, build: Callable[[Path], T]) -> T:
    """What ``build`` makes in the run's ``cache/``. Before round 1, changed data empty the folder.

    Raises:
        DataMismatchError: a run with rounds has other data.
    """
    cache = writer.path / "cache"
    try:
        return build(cache)
    except DataMismatchError:
        if writer.round:
            raise
        reset_run(writer)
        return build(cache)


def digests_of(experiment: Experiment, job: Job) -> dict[str, str]:
    """Digests of what numbers depend on: the job's data and model, and the files that the settings name."""
    fleet, graph = experiment.fleet, experiment.whole_graph
    named = {"trace": fleet.trace if fleet else None, "graph": graph.file if graph else None}
    of_files = {name: files.file_digest(Path(path)) for name, path in named.items() if path is not None}
    return {**job.trainers.fingerprint, **of_files}


def commit_start(experiment: Experiment, job: Job, writer: RunWriter, digests: Mapping[str, str]) -> None:
    """Commit round 0, or continue a run with the same digests.

    Args:
        digests: from :func:`digests_of`, and what else must not change.

    Raises:
        StoreError: the run in the directory has other digests.
    """
    server = encode(job.method.init_server(job.trainers.initial))
    writer.begin(server, digests, settings_digest(experiment.tables()))
    update_config(experiment, writer)
    writer.reopen()


@contextmanager
def run_log(path: Path) -> Iterator[RunLog]:
    """The log of a run directory while something works there.

    Args:
        path: the run directory, which exists.
    """
    log = RunLog(path / LOG)
    log.write(f"prefed {version('prefed')}: {command(sys.argv)}")
    log.write(
        f"Python {platform.python_version()}, PyTorch {version('torch')}, "
        f"transformers {version('transformers')}, {platform.platform(terse=True)}"
    )
    logger = logging.getLogger("prefed")

    def heard(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            log.on_warning(record.getMessage())
        return True

    # With a handler of ours Python would no longer write the library's warnings on standard error.
    logger.addFilter(heard)
    try:
        yield log
    except BaseException as error:
        log.ended(error)
        raise
    else:
        log.ended(None)
    finally:
        logger.removeFilter(heard)
