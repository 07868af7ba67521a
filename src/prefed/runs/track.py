"""Connect runs, alignments and comparisons to the trackers of ``[track]``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from prefed.config import TrackConfig
from prefed.core import Callback, Callbacks
from prefed.core.proxies import direct_here
from prefed.core.records import RoundRecord, Summary
from prefed.runs.finished_run import read_config
from prefed.store import RunReader
from prefed.trackers.logged_metrics import judged_figures
from prefed.trackers.tools import Tracker, TrackerError, trackers
from prefed.trackers.tracking import AlignmentTracking, Tracking


def logged_settings(config: Mapping[str, Any], *, clients: bool = True) -> dict[str, Any]:
    """Return the tables of an experiment that may leave this machine, with paths cut to their last part.

    Args:
        clients: include named data sources, which may have the names of clients.

    >>> logged_settings({"data": {"train": {"ann": {"path": "/home/ann.jsonl"}}}, "seed": 1})
    {'data': {'train': {'ann': {'path': 'ann.jsonl'}}}, 'seed': 1}
    >>> logged_settings({"data": {"train": {"ann": {"path": "/home/ann.jsonl"}}}, "seed": 1}, clients=False)
    {'data': {}, 'seed': 1}
    """
    logged = {name: _last_part(value) for name, value in config.items()}
    if not clients:
        partition = {name: v for name, v in logged["data"].get("partition", {}).items() if name != "groups"}
        logged["data"] = {
            name: value
            for name, value in logged["data"].items()
            if name not in ("train", "validation", "test") or isinstance(value.get("path"), str)
        } | ({"partition": partition} if partition else {})
    return logged


def _last_part(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _last_part(inner) for name, inner in value.items()}
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


@contextmanager
def tracked(
    kinds: dict[str, type[Tracker]],
    config: TrackConfig,
    path: Path,
    callback: Callback,
    page: Callable[[Path], str] | None,
) -> Iterator[Callback]:
    """Yield a callback that also logs to the trackers; at the end of the block, log the summary of the run.

    Args:
        kinds: from :func:`~prefed.trackers.tools.trackers`.
        callback: receives all events, and a warning if a tracker fails.
        page: renders the page of a run directory.
    """
    os.environ.update(direct_here())
    tracking = _tracking(kinds, config, path, callback.on_warning)
    with _closing(tracking):
        yield Callbacks([callback, tracking])
        summary: Summary = json.loads((path / "summary.json").read_text("utf-8"))
        tracking.finish(summary, None if page is None or not config.page else lambda: page(path))


@contextmanager
def tracked_alignment(config: Mapping[str, Any], folder: Path, callback: Callback) -> Iterator[Callback]:
    """Yield a callback that also logs to the trackers of a run; at the end, log the alignment's summary.

    If a tracker cannot be used, there is a warning, and the alignment continues.

    Args:
        callback: as for :func:`tracked`.
    """
    if "track" not in config:
        yield callback
        return
    track = TrackConfig.model_validate(config["track"])
    tracking = AlignmentTracking(
        _usable_here(track, callback.on_warning),
        folder,
        track.project,
        f"{track.name or folder.resolve().parent.name}-align",
        lambda: logged_settings({"align": json.loads((folder / "settings.json").read_text("utf-8"))}),
        partial(_epochs, folder / "summary.json"),
        callback.on_warning,
    )
    with _closing(tracking):
        yield Callbacks([callback, tracking])
        tracking.end(json.loads((folder / "summary.json").read_text("utf-8")))


def log_verdicts(config: TrackConfig, path: Path, rounds: int, summary: Mapping[str, Any]) -> None:
    """Log the win rate of a comparison to the trackers of a run; failures are logged as warnings.

    Args:
        rounds: number of rounds of the run.
    """
    warn = logging.getLogger("prefed").warning
    tracking = _tracking(_usable_here(config, warn), config, path, warn)
    with _closing(tracking):
        tracking.add(rounds, judged_figures(summary))


def _tracking(
    kinds: Mapping[str, type[Tracker]], config: TrackConfig, path: Path, warn: Callable[[str], None]
) -> Tracking:
    return Tracking(
        kinds,
        path,
        config.project,
        config.name or path.resolve().name,
        lambda: logged_settings(read_config(path / "config.toml"), clients=config.clients),
        lambda: RunReader(path).rounds(),
        warn,
        config.clients,
    )


def _usable_here(config: TrackConfig, warn: Callable[[str], None]) -> dict[str, type[Tracker]]:
    """Return the usable trackers, and warn of the others."""
    found: dict[str, type[Tracker]] = {}
    for name in config.to:
        try:
            found |= trackers([name])
        except TrackerError as error:
            warn(str(error))
    return found


def _epochs(path: Path) -> list[RoundRecord]:
    """Return the epochs of a finished alignment as records; empty if it is not finished."""
    if not path.exists():
        return []
    epochs = json.loads(path.read_text("utf-8"))["train"]["epochs"]
    return [cast(RoundRecord, {**epoch, "round": number}) for number, epoch in enumerate(epochs, 1)]


@contextmanager
def _closing(tracking: Tracking) -> Iterator[None]:
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        tracking.close(succeeded=succeeded)
