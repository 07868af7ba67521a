"""Visits of several clients in lockstep: a step of all of them is one pass over the frozen model.

A method's code for a visit does not change. Each visit runs in its own thread, but only one thread runs at
a time. A visit that starts a phase waits until every other one has started a phase or has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from prefed.core import PhaseResult
from prefed.models.pretrained import ModelError
from prefed.models.stacked_lora import why_not_stacked
from prefed.train.loss_trainer import LossTrainer
from prefed.train.packed import PackedForward
from prefed.train.trainers import SHARED_TRAINING, PairTrainer, PhaseStart

T = TypeVar("T")


class _Stop(BaseException):
    """Ends the thread of a visit whose result is not needed."""


class _Turn(Generic[T]):
    """A visit in its own thread, which runs only during :meth:`resume`.

    Attributes:
        start: the phase that the visit waits for; ``None`` after its end.
        result: result of the visit after its end.
    """

    result: T

    def __init__(self, work: Callable[[], T]) -> None:
        self.start: PhaseStart | None = None
        self._work = work
        self._inbox = SimpleQueue[PhaseResult | _Stop | None]()
        self._paused = SimpleQueue[BaseException | None]()
        Thread(target=self._run, daemon=True).start()

    def resume(self, result: PhaseResult | None = None) -> None:
        """Run the visit until it starts its next phase or ends, and raise what it raises."""
        self.start = None
        self._inbox.put(result)
        error = self._paused.get()
        if error is not None:
            raise error

    def stop(self) -> None:
        """End the thread at its next phase."""
        self._inbox.put(_Stop())

    def train(self, start: PhaseStart) -> PhaseResult:
        """Wait for the result of a phase; called in the visit's thread."""
        self.start = start
        self._paused.put(None)
        result = self._received()
        assert result is not None
        return result

    def _received(self) -> PhaseResult | None:
        result = self._inbox.get()
        if isinstance(result, _Stop):
            raise result
        return result

    def _run(self) -> None:
        SHARED_TRAINING.set(self.train)
        try:
            self._received()
            self.result = self._work()
        except BaseException as error:
            self._paused.put(error)
        else:
            self._paused.put(None)


class Lockstep:
    """Runs visits of a trainer's clients in lockstep.

    Phases share passes if they train the same tensors on the same objective and :class:`LossTrainer` allows
    it; others run one after the other.

    Args:
        size: maximum number of visits at a time.

    Raises:
        ModelError: clients cannot share passes over this model.
    """

    def __init__(self, trainer: PairTrainer, size: int) -> None:
        model = trainer.model
        reason = why_not_stacked(model.backbone)
        if not isinstance(model.forward, PackedForward):
            reason = "training uses the plain path"
        if reason:
            raise ModelError(f"[engine] stack = {size} does not support this experiment: {reason}; remove it")
        self.size, self._trainer = size, trainer
        self._together = self._alone = 0

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of ``works``, each a visit of another client; an exception ends all of them."""
        turns = [_Turn(work) for work in works]
        try:
            for turn in turns:
                turn.resume()
            while waiting := [turn for turn in turns if turn.start is not None]:
                starts = [turn.start for turn in waiting if turn.start is not None]
                for turn, result in zip(waiting, self._train(starts), strict=True):
                    turn.resume(result)
        finally:
            for turn in turns:
                turn.stop()
        return [turn.result for turn in turns]

    def figures(self) -> dict[str, dict[str, int]]:
        """Return the number of optimiser steps in shared passes and alone since the last call."""
        counts = {"together": self._together, "alone": self._alone}
        self._together = self._alone = 0
        return {"stacked_steps": counts}

    def _train(self, starts: Sequence[PhaseStart]) -> list[PhaseResult]:
        results: dict[int, PhaseResult] = {}
        for group in self._groups(starts):
            trainer = self._trainer.trainer_of(starts[group[0]].phase.objective.name)
            if group[1:]:
                assert isinstance(trainer, LossTrainer)
                results.update(zip(group, trainer.train_together([starts[n] for n in group]), strict=True))
                self._together += sum(results[number].steps for number in group)
            else:
                results[group[0]] = trainer.train(starts[group[0]])
                self._alone += results[group[0]].steps
        return [results[number] for number in range(len(starts))]

    def _groups(self, starts: Sequence[PhaseStart]) -> Iterator[list[int]]:
        """Yield the numbers of the phases that share passes of at most ``max_tokens`` tokens."""
        open_groups: dict[Any, tuple[list[int], int]] = {}
        for number, start in enumerate(starts):
            tokens = self._trainer.trainer_of(start.phase.objective.name).shared_tokens(start)
            if tokens is None:
                yield [number]
                continue
            kind = start.phase.objective.name, start.phase.train
            group, before = open_groups.pop(kind, ([], 0))
            if group and before + tokens > self._trainer.model.max_tokens:
                yield group
                group, before = [], 0
            open_groups[kind] = [*group, number], before + tokens
        yield from (group for group, _ in open_groups.values())
