"""A few steps of a job's real work, for the time that all of it would take."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

import torch

from prefed.core import ClientTrainer, Key, Objective, Ownership, Phase, PhaseResult, Round, State, Tensors
from prefed.engines import InProcess, Job, Task, TaskResult, TrainerFactory
from prefed.train import PairTrainerFactory

STEPS = 3
"""Steps of a phase that are timed."""
PAIRS = 16
"""Pairs of an evaluation that are timed."""

Result = TypeVar("Result")


@dataclass
class Meter:
    """The time of calls, each kind of which is really made only once.

    Attributes:
        spent: seconds that the calls took here.
        whole: seconds that they would take in a run, as far as the timed ones tell.
        steps: training steps that were timed.
        pairs: evaluated pairs that were timed.
    """

    spent: float = 0.0
    whole: float = 0.0
    steps: int = 0
    pairs: int = 0
    _known: dict[Hashable, tuple[float, Any]] = field(default_factory=dict)

    def call(self, kind: Hashable, measure: Callable[[], tuple[float, Result]]) -> Result:
        """The result of ``measure``, which tells a call's seconds in a run; of a known kind, the first."""
        if kind not in self._known:
            started = time.perf_counter()
            self._known[kind] = measure()
            self.spent += time.perf_counter() - started
        seconds, result = self._known[kind]
        self.whole += seconds
        return cast("Result", result)


def clocked(call: Callable[[], Result]) -> tuple[float, Result]:
    """The seconds that a call takes, and its result."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


class _TrialTrainer:
    """A client's trainer that takes a few steps of each phase."""

    def __init__(self, trainer: ClientTrainer, meter: Meter) -> None:
        self._trainer, self._meter = trainer, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        wanted = steps_of(phase, self._trainer.size)
        few = min(wanted, STEPS)

        def take(steps: int) -> tuple[float, PhaseResult]:
            return clocked(lambda: self._trainer.train(tensors, replace(phase, steps=steps, epochs=None)))

        def measure() -> tuple[float, PhaseResult]:
            take(few)  # what is computed once for each pair is computed here
            one, _ = take(1)
            seconds, result = take(few)
            self._meter.steps += few
            # What a phase does but once, such as a rollout of PPO, is in both.
            step = max(0.0, seconds - one) / max(1, few - 1)
            return seconds + (wanted - few) * step, result

        about = (phase.train, phase.objective.name, phase.batch_size, phase.accumulate)
        return self._meter.call(("train", *about, wanted, phase.moments is None), measure)

    def gradient(
        self, tensors: Tensors, objective: Objective, *, batch_size: int, name: str
    ) -> tuple[Tensors, float]:
        return self._again(
            ("gradient", objective.name, batch_size),
            lambda: self._trainer.gradient(tensors, objective, batch_size=batch_size, name=name),
        )

    def loss(self, tensors: Tensors, objective: Objective, split: Literal["train", "validation"]) -> float:
        return self._again(
            ("loss", objective.name, split), lambda: self._trainer.loss(tensors, objective, split)
        )

    def posteriors(
        self, tensors: Tensors, objective: Objective, *, pairs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._again(
            ("posteriors", pairs), lambda: self._trainer.posteriors(tensors, objective, pairs=pairs)
        )

    def _again(self, kind: Hashable, call: Callable[[], Result]) -> Result:
        """The second call of two: what is computed once for each pair is in the first."""

        def measure() -> tuple[float, Result]:
            call()
            return clocked(call)

        return self._meter.call(kind, measure)


class _TrialTrainers:
    """The trainers of a job, whose clients take a few steps and score a few pairs."""

    def __init__(self, trainers: PairTrainerFactory, meter: Meter) -> None:
        self._trainers, self._meter = trainers, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainers, name)

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientTrainer:
        trainer = self._trainers.trainer(client, now, key, ownership)
        return cast("ClientTrainer", _TrialTrainer(trainer, self._meter))

    def score(self, client: str, tensors: Tensors, split: Literal["validation", "test"]) -> Any:
        rows = getattr(self._trainers.dataset.clients[client], split)
        few = rows[:PAIRS]

        def measure() -> tuple[float, Any]:
            score = self._trainers.pair_trainer.score
            score(tensors, few)  # the untouched model's numbers are computed here
            seconds, scores = clocked(lambda: score(tensors, few))
            self._meter.pairs += len(few)
            return seconds * len(rows) / len(few), scores

        return self._meter.call(("score", client), measure)


class _StatesInMemory:
    """Private states of the clients that were tried, in memory."""

    def __init__(self) -> None:
        self.states: dict[str, bytes] = {}

    def read(self, client: str) -> bytes | None:
        return self.states.get(client)

    def stage(self, client: str, state: bytes) -> None:
        self.states[client] = state

    def accept(self, clients: Iterable[str]) -> None:
        pass


class Trial:
    """A job that is tried.

    Attributes:
        meter: over all tasks.
    """

    def __init__(self, job: Job, threads: int) -> None:
        self.meter, self._threads = Meter(), threads
        trainers = _TrialTrainers(cast("PairTrainerFactory", job.trainers), self.meter)
        self._job = replace(job, trainers=cast("TrainerFactory", trainers))
        self._stored = _StatesInMemory()

    @property
    def private_bytes(self) -> int:
        """The size of the largest private state."""
        return max(map(len, self._stored.states.values()), default=0)

    def task(self, task: Task) -> tuple[float, TaskResult]:
        """The seconds that a task would take, and its result."""
        spent, whole = self.meter.spent, self.meter.whole
        with InProcess(self._job, self._stored, self._threads) as backend:
            seconds, (result,) = clocked(lambda: list(backend.run([task])))
        return seconds - (self.meter.spent - spent) + (self.meter.whole - whole), result


def steps_of(phase: Phase, pairs: int) -> int:
    """How many steps a phase takes on a client with so many pairs; see :func:`prefed.train.steps.batches`.

    >>> from prefed.core import Optimizer
    >>> phase = Phase("train", ("a",), Objective("dpo"), Optimizer(), batch_size=4, epochs=2)
    >>> steps_of(phase, 9), steps_of(phase, 3)
    (6, 2)
    """
    if phase.steps is not None:
        return phase.steps
    size = min(phase.batch_size * phase.accumulate, pairs)
    return (phase.epochs or 0) * -(-pairs // size)


def first_state(job: Job) -> State:
    """The server's first state; among neighbours, that of each client."""
    return job.method.init_server(job.trainers.initial)
