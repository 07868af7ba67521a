"""What is told how a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Callback", "Callbacks"]


class Callback:
    """Is told how a run goes on. Every method does nothing unless a subclass says otherwise.

    >>> class Losses(Callback):
    ...     def on_round_end(self, record):
    ...         print(record["round"], record["loss"])
    >>> Losses().on_round_end({"round": 1, "loss": 0.6931})
    1 0.6931
    """

    def on_run_begin(self, done: int, rounds: int) -> None:
        """A run begins or goes on.

        Args:
            done: rounds that are committed already.
            rounds: rounds that the run has in all.
        """

    def on_task_end(self, what: str, done: int, of: int) -> None:
        """A client has answered.

        Args:
            what: the name of the exchange, or ``"evaluation"``.
            done: clients that have answered.
            of: clients that were asked.
        """

    def on_round_end(self, record: dict[str, Any]) -> None:
        """A round is committed; ``record`` is its line of ``rounds.jsonl``."""

    def on_warning(self, text: str) -> None:
        """Something went wrong that the run survives."""

    def on_run_end(self) -> None:
        """Nothing more follows, whether the run succeeded or failed."""


class Callbacks(Callback):
    """Several callbacks as one.

    Args:
        callbacks: told in this order.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_run_begin(self, done: int, rounds: int) -> None:
        """Tell each."""
        for callback in self._callbacks:
            callback.on_run_begin(done, rounds)

    def on_task_end(self, what: str, done: int, of: int) -> None:
        """Tell each."""
        for callback in self._callbacks:
            callback.on_task_end(what, done, of)

    def on_round_end(self, record: dict[str, Any]) -> None:
        """Tell each."""
        for callback in self._callbacks:
            callback.on_round_end(record)

    def on_warning(self, text: str) -> None:
        """Tell each."""
        for callback in self._callbacks:
            callback.on_warning(text)

    def on_run_end(self) -> None:
        """Tell each."""
        for callback in self._callbacks:
            callback.on_run_end()
