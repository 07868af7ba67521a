"""The tools of ``[track]`` by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from prefed.trackers.base import Tracker, TrackerError

TRACKERS: Mapping[str, str] = MappingProxyType(
    {
        "tensorboard": "TensorBoard",
        "wandb": "WandB",
        "mlflow": "MLflow",
        "trackio": "Trackio",
    }
)
"""Name, which is also that of its file and its extra → the class in that file."""


def trackers(names: Sequence[str]) -> dict[str, type[Tracker]]:
    """The classes of tools, each of which can be used on this machine.

    Raises:
        TrackerError: one cannot; the message says what to install or to set.
    """
    found: dict[str, type[Tracker]] = {}
    for name in names:
        kind: type[Tracker] = getattr(import_module(f"prefed.trackers.{name}"), TRACKERS[name])
        try:
            kind.check()
        except ImportError as error:
            raise TrackerError(
                f"[track] to = {name!r}: its package cannot be imported ({error}); "
                f"pip install 'prefed[{name}]', or leave it out"
            ) from error
        found[name] = kind
    return found
