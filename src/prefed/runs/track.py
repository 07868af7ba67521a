"""The tools of ``[track]`` for a run in a directory, and for what is made of it later."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from prefed.config import TrackConfig
from prefed.core import Callback, Callbacks
from prefed.core.records import RoundRecord, Summary
from prefed.runs.record import read_config
from prefed.store import RunReader
from prefed.trackers.logged_metrics import judged_figures
from prefed.trackers.tools import Tracker, TrackerError, trackers
from prefed.trackers.tracking import AlignmentTracking, Tracking


def usable(config: TrackConfig) -> dict[str, type[Tracker]]:
    """The tools of ``[track]``.

    Raises:
        TrackerError: one of them cannot be used on this machine; the message says what to install or to set.
    """
    return trackers(config.to)


def told_settings(config: Mapping[str, Any], *, clients: bool = True) -> dict[str, Any]:
    """An experiment's tables as they may leave this machine: of a path its last part alone.

    Args:
        clients: whether sources of data that are named, as after the clients who hold them, may leave too.

    >>> told_settings({"data": {"train": {"ann": {"path": "/home/eve/ann.jsonl"}}}, "seed": 1})
    {'data': {'train': {'ann': {'path': 'ann.jsonl'}}}, 'seed': 1}
    >>> told_settings({"data": {"train": {"ann": {"path": "/home/eve/ann.jsonl"}}}, "seed": 1}, clients=False)
    {'data': {}, 'seed': 1}
    """
    told = {name: _last_part(value) for name, value in config.items()}
    if not clients:
        partition = {name: v for name, v in told["data"].get("partition", {}).items() if name != "groups"}
        told["data"] = {
            name: value
            for name, value in told["data"].items()
            if name not in ("train", "validation", "test") or isinstance(value.get("path"), str)
        } | ({"partition": partition} if partition else {})
    return told


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
    """A callback that tells the tools too, and at the end of the block what the run in ``path`` came to.

    Args:
        kinds: from :func:`usable`.
        callback: is told of everything, and of a tool's failure.
        page: makes the page about the run in a directory.
    """
    tracking = _tracking(kinds, config, path, callback.on_warning)
    with _closing(tracking):
        yield Callbacks([callback, tracking])
        summary: Summary = json.loads((path / "summary.json").read_text("utf-8"))
        tracking.finish(summary, None if page is None or not config.page else lambda: page(path))


@contextmanager
def tracked_alignment(config: Mapping[str, Any], folder: Path, callback: Callback) -> Iterator[Callback]:
    """A callback that tells the tools of a run's ``[track]`` of its alignment, and at the end its summary.

    A tool that cannot be used is warned of, and the alignment goes on.

    Args:
        config: the run's tables.
        folder: of the alignment, in the run directory.
        callback: is told of everything, and of a tool's failure.
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
        lambda: told_settings({"align": json.loads((folder / "settings.json").read_text("utf-8"))}),
        partial(_epochs, folder / "summary.json"),
        callback.on_warning,
    )
    with _closing(tracking):
        yield Callbacks([callback, tracking])
        tracking.end(json.loads((folder / "summary.json").read_text("utf-8")))


def tell_judged(config: TrackConfig, path: Path, rounds: int, summary: Mapping[str, Any]) -> None:
    """Tell the tools the win rate of a comparison, where they were told of the run in ``path``.

    Whatever goes wrong is a warning of the library's.

    Args:
        rounds: that the run has.
        summary: of the comparison.
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
        lambda: told_settings(read_config(path / "config.toml"), clients=config.clients),
        lambda: RunReader(path).rounds(),
        warn,
        config.clients,
    )


def _usable_here(config: TrackConfig, warn: Callable[[str], None]) -> dict[str, type[Tracker]]:
    """The tools that can be used; ``warn`` is told of the others."""
    found: dict[str, type[Tracker]] = {}
    for name in config.to:
        try:
            found |= trackers([name])
        except TrackerError as error:
            warn(str(error))
    return found


def _epochs(path: Path) -> list[RoundRecord]:
    """The epochs in the summary of an alignment, as records; none before its end."""
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
