"""What a run calls on its way, for progress, logs and trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefed.core.records import RoundRecord


class Callback:
    """What a run calls on its way. Every method does nothing; subclasses override those that they need.

    A callback is the user's own code: an exception that it raises ends the run. Committed rounds are kept.

    >>> class Losses(Callback):
    ...     def on_round_end(self, record):
    ...         print(record["round"], record["loss"])
    >>> Losses().on_round_end({"round": 1, "loss": 0.6931})
    1 0.6931
    """

    def on_run_begin(self, done: int, rounds: int) -> None:
        """A run of ``rounds`` rounds begins, or goes on after a stop with ``done`` rounds committed."""

    def on_task_end(self, what: str, done: int, of: int) -> None:
        """``done`` of ``of`` clients have answered in ``what``: an exchange by name, or ``"evaluation"``."""

    def on_round_end(self, record: RoundRecord) -> None:
        """A round is committed; ``record`` is its line of ``rounds.jsonl``."""

    def on_note(self, text: str) -> None:
        """What a person should know of the run; nothing went wrong."""

    def on_warning(self, text: str) -> None:
        """Something went wrong, and the run goes on."""

    def on_run_end(self) -> None:
        """The rounds are over, whether they succeeded or failed."""

    def on_stage_begin(self, stage: str, done: int, of: int) -> None:
        """A stage of an alignment begins, or goes on after a stop with ``done`` of ``of`` steps done."""

    def on_stage_step(self, stage: str, done: int, of: int, figures: Mapping[str, float]) -> None:
        """``done`` of ``of`` steps of a stage are on the disk; ``figures`` are e.g. ``tokens_per_second``."""

    def on_stage_end(self, stage: str, figures: dict[str, Any]) -> None:
        """A stage of an alignment is done; ``figures`` are those of ``align/summary.json``."""


class Callbacks(Callback):
    """Several callbacks as one, called in the order given.

    Raises:
        TypeError: they are not a list, or one of them is no instance of :class:`Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
            raise TypeError("callbacks must be a list of prefed.Callback instances, e.g. callbacks=[X()]")
        self._callbacks = tuple(callbacks)

    def on_run_begin(self, done: int, rounds: int) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_run_begin(done, rounds)

    def on_task_end(self, what: str, done: int, of: int) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_task_end(what, done, of)

    def on_round_end(self, record: RoundRecord) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_round_end(record)

    def on_note(self, text: str) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_note(text)

    def on_warning(self, text: str) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_warning(text)

    def on_run_end(self) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_run_end()

    def on_stage_begin(self, stage: str, done: int, of: int) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_stage_begin(stage, done, of)

    def on_stage_step(self, stage: str, done: int, of: int, figures: Mapping[str, float]) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_stage_step(stage, done, of, figures)

    def on_stage_end(self, stage: str, figures: dict[str, Any]) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_stage_end(stage, figures)
