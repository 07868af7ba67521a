"""The tools of ``[track]`` for a run in a directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefed.config import TrackConfig
from prefed.core import Callback, Callbacks
from prefed.runs.schema import read_config
from prefed.store import RunReader
from prefed.trackers.base import Tracker
from prefed.trackers.registry import trackers
from prefed.trackers.tracking import Tracking


def usable(config: TrackConfig | None) -> dict[str, type[Tracker]]:
    """The tools of ``[track]``; none without the table.

    Raises:
        TrackerError: one of them cannot be used on this machine; the message says what to install or to set.
    """
    return {} if config is None else trackers(config.to)


@contextmanager
def tracked(
    kinds: dict[str, type[Tracker]],
    config: TrackConfig | None,
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
    if config is None:
        yield callback
        return
    tracking = Tracking(
        kinds,
        path,
        config.project,
        config.name or path.resolve().name,
        lambda: read_config(path / "config.toml"),
        lambda: RunReader(path).rounds(),
        callback.on_warning,
        config.clients,
    )
    succeeded = False
    try:
        yield Callbacks([callback, tracking])
        summary = json.loads((path / "summary.json").read_text("utf-8"))
        tracking.finish(summary, None if page is None or not config.page else lambda: page(path))
        succeeded = True
    finally:
        tracking.close(succeeded=succeeded)
