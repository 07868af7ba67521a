"""Callbacks of a run, for progress, logs and trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefed.core.records import RoundRecord


class Callback:
    """Base class for callbacks of a run. All methods do nothing by default; override the ones you need.

    An exception in a callback ends the run. Committed rounds are kept.

    >>> class Losses(Callback):
    ...     def on_round_end(self, record):
    ...         print(record["round"], record["loss"])
    >>> Losses().on_round_end({"round": 1, "loss": 0.6931})
    1 0.6931
    """

    def on_run_begin(self, done: int, rounds: int) -> None:
        """Called when a run of ``rounds`` rounds starts, or resumes with ``done`` committed rounds."""

    def on_task_end(self, what: str, done: int, of: int) -> None:
        """Called when ``done`` of ``of`` clients finished ``what``: an exchange or ``"evaluation"``."""

    def on_round_end(self, record: RoundRecord) -> None:
        """Called when a round is committed; ``record`` is its line in ``rounds.jsonl``."""

    def on_note(self, text: str) -> None:
        """Called with information about the run that is not a warning."""

    def on_warning(self, text: str) -> None:
        """Called when something went wrong but the run continues."""

    def on_run_end(self) -> None:
        """Called after the last round, or when the run fails."""

    def on_stage_begin(self, stage: str, done: int, of: int) -> None:
        """Called when an alignment stage starts, or resumes with ``done`` of ``of`` steps completed."""

    def on_stage_step(self, stage: str, done: int, of: int, figures: Mapping[str, float]) -> None:
        """Called when ``done`` of ``of`` steps are saved; ``figures`` are e.g. ``tokens_per_second``."""

    def on_stage_end(self, stage: str, figures: dict[str, Any]) -> None:
        """Called when an alignment stage ends; ``figures`` are its metrics in ``align/summary.json``."""


class Callbacks(Callback):
    """Calls several callbacks in the given order.

    Raises:
        TypeError: ``callbacks`` is not a list of :class:`Callback` instances.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
            raise TypeError("callbacks must be a list of prefed.Callback instances, e.g. callbacks=[X()]")
        self._callbacks = tuple(callbacks)


def _call_each(event: str) -> Callable[..., None]:
    def call(self: Callbacks, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(*args)

    return call


for _event in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Callbacks, _event, _call_each(_event))
