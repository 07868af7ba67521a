"""Reconcile an experiment with the run that a directory holds already."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

import tomli_w
import torch

from prefed import files
from prefed.config import ConfigError, Experiment, to_toml
from prefed.core.strict import flatten
from prefed.store import RunWriter, StoreError

_CHANGEABLE = {"engine.workers", "engine.visit_timeout"}
"""Settings that change no number. A resumed run may have others."""

_NOT_DIGESTED = {"rounds", "model.name", *_CHANGEABLE}
"""Settings outside the digest of a run's settings.

So are the paths of its data. Model and data have digests of their contents, so their places do not matter.
"""

_NOT_CACHED = {"rounds", "cohort", "evaluate", "engine", "merge", "privacy"}
"""Keys and tables of an experiment that nothing in ``cache/`` depends on."""

_REMEDY = "put a copy of it back, or start a new run with another --out"


def reconcile(experiment: Experiment, writer: RunWriter) -> Experiment:
    """Check an experiment against the run in a directory, and write ``config.toml``.

    Before the first round, another experiment replaces the one in the directory.

    Returns:
        The experiment with its number of threads filled in.

    Raises:
        ConfigError: the directory holds a run of another experiment.
        StoreError: ``config.toml`` changed since the run began.
    """
    config = writer.config()
    if writer.round == 0:
        changed = _differing(flatten(config or {}), flatten(experiment.tables()))
        if changed - {"engine.threads", *_CHANGEABLE}:
            reset_run(writer, keep_cache={name.partition(".")[0] for name in changed} <= _NOT_CACHED)
            config = None
    try:
        stored = None if config is None else Experiment.from_tables(config, f"{writer.path / 'config.toml'}")
    except ConfigError as error:
        raise StoreError(f"{error}\n{_REMEDY}") from error
    experiment = _with_threads(experiment, stored)
    _check_digest(config, experiment, writer)
    if config is None or stored is None:
        writer.write_config(to_toml(experiment))
        return experiment
    _check_settings(stored, experiment, writer)
    # All other settings stay as they were written, even if this version has more defaults to fill in.
    before, after = config["engine"], experiment.tables()["engine"]
    names = {**after, **before}
    sources = {name: after if f"engine.{name}" in _CHANGEABLE else before for name in names}
    engine = {name: source[name] for name, source in sources.items() if name in source}
    updated = {**config, "rounds": experiment.rounds, "engine": engine}
    if updated != config:
        writer.write_config(tomli_w.dumps(updated))
    return experiment


def reset_run(writer: RunWriter, *, keep_cache: bool = False) -> None:
    """Delete what a run wrote before its first round, but for ``cache/`` with ``keep_cache``."""
    writer.forget()
    if not keep_cache:
        shutil.rmtree(writer.path / "cache", ignore_errors=True)


def settings_digest(config: Mapping[str, Any]) -> str:
    """The digest of those settings of a ``config.toml`` that a resumed run must share."""
    settings = {
        name: value
        for name, value in flatten(config).items()
        if name not in _NOT_DIGESTED and not (name.startswith("data.") and name.endswith(".path"))
    }
    return files.digest(json.dumps(settings, sort_keys=True, default=str).encode())


def _with_threads(experiment: Experiment, stored: Experiment | None) -> Experiment:
    """Fill in the number of threads: the stored run's, or the machine's shared out over the workers."""
    engine = experiment.engine
    if engine.threads is not None:
        return experiment
    threads = stored.engine.threads if stored else None
    threads = threads or max(1, torch.get_num_threads() // max(1, engine.workers))
    return experiment.model_copy(update={"engine": engine.model_copy(update={"threads": threads})})


def _check_digest(config: Mapping[str, Any] | None, experiment: Experiment, writer: RunWriter) -> None:
    """Refuse a changed ``config.toml``, and other settings where the file is missing."""
    digest = writer.commit.settings if writer.commit and writer.round else None
    if digest is None or settings_digest(experiment.tables() if config is None else config) == digest:
        return
    if config is None:
        wrong = "is missing, and the settings asked for are not those that its run was begun with"
    else:
        wrong = "is not what its run was begun with"
    raise StoreError(f"{writer.path / 'config.toml'} {wrong}; {_REMEDY}")


def _check_settings(stored: Experiment, experiment: Experiment, writer: RunWriter) -> None:
    """Refuse to resume a run with other settings; the message names each."""
    before, after = flatten(stored.tables()), flatten(experiment.tables())
    changed = _differing(before, after) - _CHANGEABLE
    if experiment.rounds >= max(stored.rounds, writer.round):
        changed -= {"rounds"}
    if changed:
        lines = [f"  {name}: {before.get(name)!r} → {after.get(name)!r}" for name in sorted(changed)]
        raise ConfigError(
            f"the run in {writer.path} was begun with other settings (run → asked for):\n"
            + "\n".join(lines)
            + "\nresume it with its own (rounds may be raised, engine.workers and engine.visit_timeout may "
            "change), or start another with --out"
        )


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """The names at which two flat tables differ."""
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}
