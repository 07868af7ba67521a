"""Start or resume a run in its directory; used by ``run``, ``federate`` and ``peer``."""

from __future__ import annotations

import json
import logging
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import date
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import tomli_w
import torch

from prefed.config import ConfigError, Experiment, to_toml
from prefed.config.file import code_names, code_of, parse_toml, remember_code
from prefed.core import Callback, Callbacks, files
from prefed.core.plugins import version_of
from prefed.core.strict_settings import differing, flatten
from prefed.core.text import pluralize
from prefed.core.wire import encode
from prefed.data import DataMismatchError
from prefed.engines import Job
from prefed.models.pretrained import reads_clock, with_dtype, with_kernels
from prefed.runs.build import code_digests
from prefed.runs.reference_cache import NOT_CACHED
from prefed.runs.summary import command
from prefed.store import CheckpointConfig, RunWriter, StoreError
from prefed.store.directory import LOG, refuse_foreign
from prefed.trackers.log import RunLog

_PLACES = ("data.*.path", "model.name", "method.reward_model", "fleet.trace", "graph.file")
"""Settings that are paths of data, models, traces and graphs."""

CODE = "code of "
"""Start of the keys in a fingerprint that hold digests of code from outside prefed."""

_CHANGEABLE = {
    *("engine.name", "engine.workers", "engine.visit_timeout", "engine.devices", "model.checkpointing"),
    "model.gpus",
}
"""Settings that do not affect results and may change when a run is resumed."""


def reconcile(experiment: Experiment, writer: RunWriter, *, started: bool = False) -> Experiment:
    """Check an experiment against the run in a directory, and write ``config.toml`` if it is missing.

    Before the first round, another experiment replaces the one in the directory.

    Args:
        started: do not replace the experiment, even before the first round.

    Returns:
        The experiment with the defaults of :func:`fitted` and the number of threads filled in.

    Raises:
        ConfigError: the directory contains a run of another experiment.
        StoreError: ``config.toml`` was edited after the start of the run.
    """
    config = writer.config()
    started = started or writer.round > 0
    changed_since = changed_code(experiment, writer.commit.fingerprint) if writer.commit else ""
    if started and changed_since:
        raise StoreError(
            f"{writer.path} cannot continue: {changed_since} changed since it started; restore it, or start "
            "a new run with another --out"
        )
    if not started:
        changed = differing(config or {}, fitted(experiment).tables())
        if changed_since or any(n != "engine.threads" and not _changes_nothing(n) for n in changed):
            same_data = {name.partition(".")[0] for name in changed} <= NOT_CACHED
            reset_run(writer, keep_cache=same_data and not changed_since)
            config = None
    try:
        stored = None if config is None else Experiment.from_tables(config, f"{writer.path / 'config.toml'}")
    except ConfigError as error:
        if absent := absent_code(config or {}, writer.commit.fingerprint if writer.commit else {}):
            raise StoreError(f"{writer.path} cannot continue: {absent}") from error
        raise StoreError(
            f"{error}\nrestore config.toml from a backup, or start a new run with another --out"
        ) from error
    experiment = with_threads(fitted(experiment, stored), stored)
    if started:
        _check_digest(config, experiment, writer)
    if config is None or stored is None:
        writer.write_config(to_toml(experiment))
        return experiment
    _check_settings(stored, experiment, writer)
    return experiment


def moved(experiment: Experiment, writer: RunWriter) -> bool:
    """Whether paths of data or models differ from those in the ``config.toml`` of the run."""
    return any(is_place(name) for name in differing(writer.config() or {}, experiment.tables()))


def update_config(experiment: Experiment, writer: RunWriter) -> None:
    """Write settings that may change on resume to ``config.toml``. Call it after the fingerprints match."""
    config = writer.config() or {}
    updated = _updated(config, experiment.tables())
    if updated != config:
        writer.write_config(tomli_w.dumps(updated))


def reset_run(writer: RunWriter, *, keep_cache: bool = False) -> None:
    """Delete what a run wrote before its first round; ``keep_cache`` keeps ``cache/``."""
    writer.forget()
    if not keep_cache:
        shutil.rmtree(writer.path / "cache", ignore_errors=True)


def is_place(name: str) -> bool:
    """Whether a setting is the path of data or of a model.

    >>> is_place("data.train.path"), is_place("data.train.code.path"), is_place("data.train.format")
    (True, True, False)
    """
    return any(fnmatchcase(name, pattern) for pattern in _PLACES)


def settings_digest(config: Mapping[str, Any]) -> str:
    """Return the digest of the settings in a ``config.toml`` that must not change on resume."""
    settings = {
        name: value for name, value in flatten(config).items() if name != "rounds" and not _may_change(name)
    }
    return files.digest(json.dumps(settings, sort_keys=True, default=str).encode())


def fitted(experiment: Experiment, stored: Experiment | None = None) -> Experiment:
    """Fill in the defaults that depend on ``rounds``, this machine (dtype and kernels) or the date.

    Values of ``stored`` take precedence, so that a run with raised ``rounds``, or on another machine, keeps
    its original values.
    """
    left_out = experiment.method.settings
    settings = left_out.for_rounds(experiment.rounds)
    if stored is not None and isinstance(stored.method.settings, type(settings)):
        names = (name for name in type(settings).model_fields if getattr(left_out, name) is None)
        stored_values = {
            name: getattr(stored.method.settings, name) for name in names if getattr(settings, name)
        }
        settings = settings.model_copy(update=stored_values)
    method = experiment.method.model_copy(update={"settings": settings})
    own = experiment.model
    recorded = stored.model if stored else own
    kept = {"dtype": own.dtype or recorded.dtype, "kernels": own.kernels or recorded.kernels}
    model = with_dtype(own.model_copy(update=kept))
    # A run that started on a CPU records no kernels.
    model = model if stored else with_kernels(model)
    data = experiment.data
    if data.today is None and (stored.data.today if stored else reads_clock(own)):
        today = stored.data.today if stored else date.today().isoformat()
        data = data.model_copy(update={"today": today})
    return experiment.model_copy(update={"method": method, "model": model, "data": data})


def with_threads(experiment: Experiment, stored: Experiment | None) -> Experiment:
    """Fill in the number of threads: that of the stored run, or the cores divided by the workers.

    On a Ray cluster it is one, since the number of workers per machine is unknown.
    """
    engine = experiment.engine
    if engine.threads is not None:
        return experiment
    threads = stored.engine.threads if stored else None
    cores = torch.get_num_threads() if engine.name == "local" else 1
    threads = threads or max(1, cores // max(1, engine.workers))
    return experiment.model_copy(update={"engine": engine.model_copy(update={"threads": threads})})


def _check_digest(config: Mapping[str, Any] | None, experiment: Experiment, writer: RunWriter) -> None:
    """Check that ``config.toml`` was not edited or, if it is missing, that the settings are the same."""
    digest = writer.commit.settings if writer.commit else None
    if digest is None or settings_digest(experiment.tables() if config is None else config) == digest:
        return
    path, asked = writer.path / "config.toml", experiment.tables()
    if config is None:
        raise StoreError(
            f"{path} is missing, and the given settings are not the original ones of the run; restore "
            "config.toml from a backup, resume with the original settings, or start a new run with another "
            "--out"
        )
    if settings_digest(asked) != digest:
        raise StoreError(
            f"{path} was edited after the start of the run, and the given settings are not the original ones "
            "either; restore config.toml from a backup, resume with the original experiment file and --set "
            "options, or start a new run with another --out"
        )
    lines = [
        f"  {name}: {original!r} → {edited!r}"
        for name, (original, edited) in differing(asked, config).items()
        if name != "rounds" and not _may_change(name)
    ]
    raise StoreError(
        f"{path} was edited after the start of the run (original → edited):\n"
        + "\n".join(lines)
        + "\nTo resume the run, delete config.toml and repeat this command, which writes the original file "
        "again. For other settings, start a new run with another --out"
    )


def _check_settings(stored: Experiment, experiment: Experiment, writer: RunWriter) -> None:
    changed = differing(stored.tables(), experiment.tables())
    lines = [
        f"  {name}: {before!r} → {after!r}"
        for name, (before, after) in changed.items()
        if not _may_change(name)
        and not (name == "rounds" and experiment.rounds >= max(stored.rounds, writer.round))
    ]
    if lines:
        raise ConfigError(
            f"the run in {writer.path} has other settings (run → given):\n"
            + "\n".join(lines)
            + "\nresume it with its own settings (rounds may be raised; engine.name, engine.ray, "
            "engine.workers and engine.visit_timeout may change), or start a new run with another --out"
        )


def _may_change(name: str) -> bool:
    """Whether a setting may have any other value when a run is resumed.

    Paths may change, since fingerprints detect other data or another model. There is no fingerprint of the
    reward model, so its path must stay. The stages of an alignment check their own settings.
    """
    if _changes_nothing(name) or name.partition(".")[0] == "align":
        return True
    return is_place(name) and name != "method.reward_model"


def _changes_nothing(name: str) -> bool:
    """Whether a setting, of the engine, of kept commits or of trackers, does not affect results."""
    return name in _CHANGEABLE or name.startswith(("engine.ray", "checkpoint.", "track."))


def _updated(stored: Mapping[str, Any], experiment: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Merge the stored settings with ``rounds`` and the changeable settings of ``experiment``.

    All others stay as written, even if this version has additional defaults.
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


def refuse_existing(experiment: Experiment, path: Path, resume: bool) -> None:
    """Check that a directory is suitable for a run, as :func:`~prefed.store.directory.refuse_foreign`.

    Raises:
        StoreError: it is not. If it contains a run, the message lists the settings in which that differs.
    """
    try:
        refuse_foreign(path, resume)
    except StoreError as error:
        try:
            config = parse_toml((path / "config.toml").read_text("utf-8"), "its config.toml")
            own = fitted(experiment).tables()
        except (OSError, ValueError):
            raise error from None
        lines = [
            f"\n  {name}: {before!r} → {after!r}"
            for name, (before, after) in differing(config, own).items()
            if not _changes_nothing(name) and (name, after) != ("engine.threads", None)
        ]
        which = "that run has other settings (run → given):" if lines else "that run has the same settings"
        raise StoreError(f"{error}; {which}{''.join(lines)}") from None


T = TypeVar("T")


@contextmanager
def open_run(
    experiment: Experiment,
    path: Path,
    callbacks: Sequence[Callback],
    *,
    resume: bool,
    returnable: bool = False,
    spaced: CheckpointConfig | None = None,
    page: Callable[[Path], str] | None = None,
) -> Iterator[tuple[RunWriter, Callback]]:
    """Open a run directory for writing, with its log and the trackers of ``[track]``.

    If the start of a run fails, the directory is removed; if it is killed or interrupted, it can be resumed.

    Args:
        callbacks: receive the events of the run, before the log and the trackers.
        resume, returnable, spaced: as for :class:`~prefed.store.RunWriter`.
        page: renders the page of a run directory, for the trackers.

    Yields:
        The writer, and the callback that receives the events of the run.

    Raises:
        TypeError: ``callbacks`` is not a list of :class:`~prefed.core.Callback` instances.
        TrackerError: a tracker of ``[track]`` cannot be used on this machine.
        StoreError: as :class:`~prefed.store.RunWriter`.
    """
    first = Callbacks(callbacks)
    refuse_existing(experiment, path, resume)
    tracking: Callable[[Callback], AbstractContextManager[Callback]] = nullcontext
    if experiment.track is not None:
        from prefed.runs.track import tracked
        from prefed.trackers.tools import trackers

        kinds = trackers(experiment.track.to)
        tracking = partial(tracked, kinds, experiment.track, path, page=page)
    with (
        RunWriter(path, resume=resume, returnable=returnable, spaced=spaced) as writer,
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
        if not writer.discard() and isinstance(error, files.WriteError) and writer.commit is not None:
            kept = pluralize(writer.round, "complete round is", "complete rounds are")
            error.add_note(f"({kept} kept; continue with --resume)")
        raise


def build_in_cache(writer: RunWriter, build: Callable[[Path], T]) -> T:
    """Call ``build`` with the ``cache/`` of a run. Before round 1, the folder is emptied if the data changed.

    Raises:
        DataMismatchError: the data changed, and the run has rounds.
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
    """Return digests of data, model, trace and graph: a run can only be resumed with the same ones."""
    fleet, graph = experiment.fleet, experiment.whole_graph
    named = {"trace": fleet.trace if fleet else None, "graph": graph.file if graph else None}
    of_files = {name: files.file_digest(Path(path)) for name, path in named.items() if path is not None}
    code = {CODE + name: digest for name, digest in code_digests(experiment).items()}
    return {**job.trainers.fingerprint, **of_files, **code}


def changed_code(experiment: Experiment, fingerprint: Mapping[str, str]) -> str:
    """Name an experiment's code whose digest differs from the run's fingerprint; empty if there is none."""
    digests = code_digests(experiment)
    return ", ".join(name for name in digests if fingerprint.get(CODE + name, digests[name]) != digests[name])


def absent_code(
    config: Mapping[str, Any],
    fingerprint: Mapping[str, str],
    used: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> str:
    """Say which entry points of a run are not installed here; empty if all are.

    Args:
        config: the nested tables of the run.
        used: the code in the summary of the run, see :func:`~prefed.runs.summary.describe_origin`.
    """
    present = code_of(config)
    missing = {
        name: used.get(name, {})
        for name in sorted({table[key] for table, key, _ in code_names(config)})
        if CODE + name in fingerprint and name not in present
    }
    packages = [f"{code['place']} {code['version']}".strip() for code in missing.values() if code]
    install = f"install {', '.join(packages)}" if packages else "install the package that provides it"
    return f"{', '.join(missing)}, from outside prefed, is not installed here; {install}" if missing else ""


def commit_start(experiment: Experiment, job: Job, writer: RunWriter, digests: Mapping[str, str]) -> None:
    """Commit round 0, or continue a run with the same digests. The user may look at its code from here on.

    Args:
        digests: those of :func:`digests_of`, and any others that must not change.

    Raises:
        StoreError: the run in the directory has other digests.
    """
    remember_code(experiment.tables())
    server = encode(job.method.init_server(job.trainers.initial))
    writer.begin(server, digests, settings_digest(experiment.tables()))
    update_config(experiment, writer)
    writer.reopen()


@contextmanager
def run_log(path: Path) -> Iterator[RunLog]:
    """Write the versions, and the warnings of prefed, to the log of an existing run directory."""
    log = RunLog(path / LOG)
    log.on_note(f"prefed {version_of('prefed')}: {command(sys.argv)}")
    log.on_note(
        f"Python {platform.python_version()}, PyTorch {version_of('torch')}, "
        f"transformers {version_of('transformers')}, {platform.platform(terse=True)}"
    )
    logger = logging.getLogger("prefed")

    def heard(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            log.on_warning(record.getMessage())
        return True

    # A filter, not a handler: with a handler, Python would not print warnings to standard error.
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
