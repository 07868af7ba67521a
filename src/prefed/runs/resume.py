"""Whether the run in a directory is the one that is asked for."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w
import torch
from pydantic import ValidationError

from prefed import files
from prefed.config import FREE, ConfigError, Experiment, to_toml
from prefed.config.errors import explain
from prefed.store import RunWriter, StoreError

__all__ = ["settings_digest", "settle", "start_again", "written"]

_FREE = {"rounds", "model.name", *FREE}
"""Settings that may change while a run goes on; so may the paths of its data. Model and data are told by
their content, so where they lie does not matter."""

_UNCACHED = {"rounds", "cohort", "evaluate", "engine", "merge", "privacy"}
"""Keys and tables of an experiment on which nothing in ``cache/`` depends."""


def settle(experiment: Experiment, store: RunWriter) -> Experiment:
    """The experiment to run: with the number of threads filled in, and equal to the stored one.

    Before the first round another experiment takes the stored one's place.

    Args:
        experiment: what is asked for.
        store: of the run's directory; its ``config.toml`` is written where it is missing or changes.

    Raises:
        ConfigError: the stored experiment is another one.
        StoreError: ``config.toml`` is not the one that the run was begun with.
    """
    held = store.config()
    if store.round == 0:
        asked = dict(_leaves(written(experiment)))
        changed = _differing(dict(_leaves(held or {})), asked)
        if changed - {"engine.threads", *FREE}:
            start_again(store, keep_cache={name.partition(".")[0] for name in changed} <= _UNCACHED)
            held = None
    stored = _valid(held, store) if held is not None else None
    engine = experiment.engine
    if engine.threads is None:
        kept = stored.engine.threads if stored else None
        threads = kept or max(1, torch.get_num_threads() // max(1, engine.workers))
        experiment = experiment.model_copy(update={"engine": engine.model_copy(update={"threads": threads})})
    _as_begun(held, experiment, store)
    if held is None or stored is None:
        store.write_config(to_toml(experiment))
        return experiment
    _same(stored, experiment, store)
    # All that may not change stays as it was written, also where this version would fill in more defaults.
    asked = written(experiment)["engine"]
    tables = {
        name: asked if f"engine.{name}" in FREE else held["engine"] for name in {**asked, **held["engine"]}
    }
    table = {name: source[name] for name, source in tables.items() if name in source}
    now = {**held, "rounds": experiment.rounds, "engine": table}
    if now != held:
        store.write_config(tomli_w.dumps(now))
    return experiment


def start_again(store: RunWriter, *, keep_cache: bool = False) -> None:
    """Delete what a start left that came to no round.

    Args:
        store: of the run's directory.
        keep_cache: leave ``cache/``, its tokens and log-probabilities, as it is.
    """
    store.forget()
    if not keep_cache:
        shutil.rmtree(store.path / "cache", ignore_errors=True)


def written(experiment: Experiment) -> dict[str, Any]:
    """What a ``config.toml`` of ``experiment`` holds once it is read again."""
    return tomllib.loads(to_toml(experiment))


def settings_digest(config: Mapping[str, Any]) -> str:
    """The digest of the settings of a ``config.toml`` that may not change while a run goes on."""
    held = {
        name: value
        for name, value in _leaves(config)
        if name not in _FREE and not (name.startswith("data.") and name.endswith(".path"))
    }
    return files.digest(json.dumps(held, sort_keys=True, default=str).encode())


def _valid(held: dict[str, Any], store: RunWriter) -> Experiment:
    try:
        return Experiment.model_validate(held)
    except ValidationError as error:
        wrong = explain(error, Experiment, held, str(store.path / "config.toml"), {})
        raise StoreError(f"{wrong}\nput a copy of it back, or start a new run with another --out") from error


def _as_begun(held: Mapping[str, Any] | None, experiment: Experiment, store: RunWriter) -> None:
    """Refuse a ``config.toml`` that was changed, or that is gone while other settings are asked for."""
    begun = store.commit.settings if store.commit and store.round else None
    if begun is None or settings_digest(written(experiment) if held is None else held) == begun:
        return
    path = store.path / "config.toml"
    if held is None:
        wrong = "is missing, and the settings asked for are not those that its run was begun with"
    else:
        wrong = "is not what its run was begun with"
    raise StoreError(f"{path} {wrong}; put a copy of it back, or start a new run with another --out")


def _same(stored: Experiment, asked: Experiment, store: RunWriter) -> None:
    """Refuse to go on with settings that are not the run's own, naming each."""
    before = dict(_leaves(stored.model_dump(mode="json", exclude_none=True)))
    after = dict(_leaves(asked.model_dump(mode="json", exclude_none=True)))
    changed = _differing(before, after) - FREE
    if asked.rounds >= max(stored.rounds, store.round):
        changed -= {"rounds"}
    if changed:
        lines = [f"  {name}: {before.get(name)!r} → {after.get(name)!r}" for name in sorted(changed)]
        raise ConfigError(
            f"the run in {store.path} was begun with other settings (run → asked for):\n"
            + "\n".join(lines)
            + "\nresume it with its own (rounds may be raised, engine.workers and engine.visit_timeout may "
            "change), or start another with --out"
        )


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """The names under which two flat trees differ."""
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted name and value of each setting in a tree of tables."""
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found
