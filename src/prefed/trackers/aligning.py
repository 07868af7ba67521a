"""A callback that tells tools of an alignment, as a run of its own: an epoch is its round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from prefed.core.records import RoundRecord
from prefed.trackers.base import Told
from prefed.trackers.figures import alignment_figures, epoch_figures
from prefed.trackers.tracking import Tracking


@dataclass
class AlignmentTracking(Tracking):
    """Tells tools of an alignment, from its first epoch on. Epochs are counted over all generations.

    Its figures are those of :func:`~prefed.trackers.figures.epoch_figures`, and at the end those of
    :func:`~prefed.trackers.figures.alignment_figures`: never a text, and nothing of a client.
    """

    figures: Callable[[Mapping[str, Any]], Mapping[str, float]] = epoch_figures

    def on_stage_begin(self, stage: str, done: int, of: int) -> None:
        """Training that is done again is a new run in the tools."""
        epoch, _ = _place(stage, done, of)
        for listener in self._listeners.values():
            if epoch is not None and epoch < listener.told:
                listener.known, listener.told, listener.finished = None, 0, 0

    def on_stage_step(self, stage: str, done: int, of: int, figures: Mapping[str, float]) -> None:
        """Tell the epoch's figures."""
        epoch, generation = _place(stage, done, of)
        if epoch is not None:
            self.on_round_end(cast(RoundRecord, {"round": epoch, **generation, **figures}))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell what came of the alignment, unless it was told before.

        Args:
            summary: what ``align/summary.json`` holds.
        """
        epochs = len(summary["train"]["epochs"])
        self.finish_once(epochs, lambda: Told(epochs, alignment_figures(summary), (), (), None))


def _place(stage: str, done: int, of: int) -> tuple[int | None, dict[str, int]]:
    """The number of an epoch over all generations, and that of its generation; none of another stage.

    >>> _place("train-3", 1, 2), _place("train", 1, 2), _place("labels-3", 1, 2)
    ((5, {'generation': 3}), (1, {}), (None, {}))
    """
    name, _, number = stage.partition("-")
    if name != "train":
        return None, {}
    return (int(number or 1) - 1) * of + done, {"generation": int(number)} if number else {}
