"""Dry runs: check data and settings, and estimate costs from the work of one client."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar, cast

from prefed.config import Experiment
from prefed.core import (
    ClientTrainer,
    Exchange,
    Key,
    Owner,
    Ownership,
    Phase,
    PhaseResult,
    Round,
    State,
    Tensors,
    files,
)
from prefed.core.text import size
from prefed.core.wire import encode
from prefed.engines import InProcess, Job, RoundError, Task, TaskResult, TrainerFactory
from prefed.engines.backends import peak_memory_mb
from prefed.engines.config import DIAGNOSE
from prefed.engines.tasks import MemoryStates
from prefed.engines.validation import read_upload
from prefed.merge.mixing_matrices import matrix_graph
from prefed.runs.data_notices import left_out_table, notices
from prefed.runs.preflight import check_start, checked_job, existing_parent
from prefed.runs.rounds import round_answers
from prefed.runs.start_or_resume import fitted, with_threads
from prefed.runs.summary import mean_models, trainable
from prefed.train.pair_trainer import PairTrainerFactory

STEPS = 3
"""Training steps to time per phase."""
PAIRS = 16
"""Pairs to time per evaluation."""
TOKENS = 8
"""Tokens to time per answer."""

Result = TypeVar("Result")


@dataclass
class Meter:
    """Times calls; a call of a known kind is not repeated.

    Attributes:
        spent: seconds that the calls took here.
        whole: seconds that they would take in a run, extrapolated.
        steps: timed training steps.
        pairs: timed evaluation pairs.
    """

    spent: float = 0.0
    whole: float = 0.0
    steps: int = 0
    pairs: int = 0
    _known: dict[Hashable, tuple[float, Any]] = field(default_factory=dict)

    def call(self, kind: Hashable, measure: Callable[[], tuple[float, Result]]) -> Result:
        """Return the result of ``measure``, or the stored one of the same kind, and add its seconds.

        Args:
            measure: returns the seconds that the call takes in a run, and its result.
        """
        if kind not in self._known:
            started = time.perf_counter()
            self._known[kind] = measure()
            self.spent += time.perf_counter() - started
        seconds, result = self._known[kind]
        self.whole += seconds
        return cast("Result", result)


def clocked(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds that a call takes, and its result."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


class _TrialTrainer:
    """A client's trainer that takes a few steps of each phase."""

    def __init__(self, trainer: ClientTrainer, meter: Meter) -> None:
        self._trainer, self._meter = trainer, meter

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._trainer, name)
        return partial(self._again, name, found) if name in ("gradient", "loss", "posteriors") else found

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        wanted = steps_of(phase, self._trainer.size)
        few = min(wanted, STEPS)

        def take(steps: int) -> tuple[float, PhaseResult]:
            return clocked(lambda: self._trainer.train(tensors, replace(phase, steps=steps, epochs=None)))

        def measure() -> tuple[float, PhaseResult]:
            take(few)  # not timed: fills the caches of each pair
            one, _ = take(1)
            seconds, result = take(few)
            self._meter.steps += few
            # Work done once per phase, such as a rollout of PPO, is in both and cancels.
            step = max(0.0, seconds - one) / max(1, few - 1)
            return seconds + (wanted - few) * step, result

        about = (phase.train, phase.objective.name, phase.batch_size, phase.accumulate)
        return self._meter.call(("train", *about, wanted, phase.moments is None), measure)

    def _again(self, what: str, call: Callable[..., Any], /, *given: Any, **options: Any) -> Any:
        """Time the second of two calls; the first fills the caches of each pair."""

        def measure() -> tuple[float, Any]:
            call(*given, **options)
            return clocked(partial(call, *given, **options))

        _, objective, *rest = given
        # The name of a batch's random draws does not affect the time.
        sizes = [value for key, value in sorted(options.items()) if key != "name"]
        return self._meter.call((what, objective.name, *rest, *sizes), measure)


class _TrialTrainers:
    """Trainers whose clients take a few steps and score a few pairs."""

    def __init__(self, trainers: PairTrainerFactory, meter: Meter) -> None:
        self._trainers, self._meter = trainers, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainers, name)

    def trainer(self, client: str, now: Round, key: Key, ownership: Ownership) -> ClientTrainer:
        trainer = self._trainers.trainer(client, now, key, ownership)
        return cast("ClientTrainer", _TrialTrainer(trainer, self._meter))

    def score(self, client: str, tensors: Tensors, split: Literal["validation", "test"]) -> Any:
        rows = getattr(self._trainers.dataset.clients[client], split)
        few, examples = rows[:PAIRS], self._trainers.examples(client, tensors)

        def measure() -> tuple[float, Any]:
            score = partial(self._trainers.pair_trainer.score, tensors, few, examples)
            score()  # not timed: computes the reference log-probabilities
            seconds, scores = clocked(score)
            self._meter.pairs += len(few)
            return seconds * len(rows) / len(few), scores

        return self._meter.call(("score", client, len(examples)), measure)


class Trial:
    """Runs single tasks of a job on a few steps and pairs, to time them."""

    def __init__(self, job: Job, threads: int) -> None:
        self.meter, self._threads = Meter(), threads
        trainers = _TrialTrainers(cast("PairTrainerFactory", job.trainers), self.meter)
        self._job = replace(job, trainers=cast("TrainerFactory", trainers))
        self._stored = MemoryStates()

    @property
    def private_bytes(self) -> int:
        """Size of the largest private state."""
        return max(map(len, self._stored.states.values()), default=0)

    def task(self, task: Task) -> tuple[float, TaskResult]:
        """Return the seconds that a task takes in a run (extrapolated), and its result."""
        spent, whole = self.meter.spent, self.meter.whole
        with InProcess(self._job, self._stored, self._threads) as backend:
            seconds, (result,) = clocked(lambda: list(backend.run([task])))
            backend.accept([task.client])
        return seconds - (self.meter.spent - spent) + (self.meter.whole - whole), result


def steps_of(phase: Phase, pairs: int) -> int:
    """Return the number of optimiser steps in a phase for a client with ``pairs`` training pairs.

    >>> from prefed.core import Objective, Optimizer
    >>> phase = Phase("train", ("a",), Objective("dpo"), Optimizer(), batch_size=4, epochs=2)
    >>> steps_of(phase, 9), steps_of(phase, 3)
    (6, 2)
    """
    if phase.steps is not None:
        return phase.steps
    size = min(phase.batch_size * phase.accumulate, pairs)
    return (phase.epochs or 0) * -(-pairs // size)


@dataclass(frozen=True)
class DryRun:
    """The estimated costs of a run. Bytes and seconds are estimates, counts are exact.

    Attributes:
        clients: number of clients: ``train``, ``cohort``, ``evaluated`` and ``unseen``.
        pairs: pairs of all clients: ``train``, ``validation`` and ``test``.
        parameters: ``trainable`` parameters, and ``communicated`` numbers in the largest upload.
        bytes_per_round: ``up`` and ``down``, mean over the rounds.
        bytes: ``up`` and ``down`` of the whole run.
        disk: bytes of ``cache``, ``checkpoint`` and ``adapters``, and the ``free`` bytes on the disk.
        seconds_per_round: of ``training``, ``evaluation`` and ``answers``, mean over the rounds. Answers are
            assumed to have the maximum length.
        seconds: of all rounds.
        timed: basis of the estimated seconds: the ``client`` that was tried, and the number of timed training
            ``steps`` and evaluation ``pairs``.
        answers: ``number`` of answers to prompts in the whole run, and their maximum number of ``tokens``.
        peak_memory_mb: resident memory of this process so far, in MiB.
        data: used and left-out rows, as in ``summary.json``.
        warnings: about the data, and about settings that do not fit them.
        notes: further notes on the data.
    """

    method: str
    rounds: int
    clients: dict[str, int]
    pairs: dict[str, int]
    parameters: dict[str, int]
    bytes_per_round: dict[str, int]
    bytes: dict[str, int]
    disk: dict[str, int]
    seconds_per_round: dict[str, float]
    seconds: float
    timed: dict[str, str | int]
    answers: dict[str, int]
    peak_memory_mb: float
    data: dict[str, Any]
    warnings: list[str]
    notes: list[str]


def dry_run(experiment: Experiment, out: Path) -> DryRun:
    """Read the data, load the model, check the settings, and estimate costs from the work of one client.

    Files are written to a temporary folder and removed.

    Args:
        out: the planned run directory. Nothing is written there.

    Raises:
        WriteError: the run directory cannot be written, or the disk is too full.
        RoundError: the upload of the tried client cannot be merged, e.g. because it is not finite.
        DataError, ModelError, ConfigError, AlignError, TrackerError, WorkerError, ValueError: as
            :func:`prefed.run`.
    """
    check_start(experiment)
    place = existing_parent(out)
    experiment = with_threads(fitted(experiment), None)
    with TemporaryDirectory(prefix="prefed-dry-run-") as name:
        cache = Path(name) / "cache"
        return _tried(experiment, checked_job(experiment, cache), cache, place)


@dataclass
class _Exchanged:
    """The costs of an exchange.

    Attributes:
        visits: in all rounds.
        seconds: of one visit.
        up, down: bytes of all messages.
        communicated: numbers in the tensors of one upload.
    """

    visits: int
    seconds: float = 0.0
    up: int = 0
    down: int = 0
    communicated: int = 0


def _tried(experiment: Experiment, job: Job, cache: Path, place: Path) -> DryRun:
    server = job.method.init_server(job.trainers.initial)
    trial = Trial(job, experiment.engine.threads or 1)
    client = _typical(job)
    plans = list(job.schedule(0))
    visits = [len(plan.visits) for plan in plans]
    exchanged = [_exchange(job, trial, exchange, client, server, visits) for exchange in job.method.exchanges]
    if job.diagnostics is not None:
        count = sum(number % job.diagnostics.every == 0 for number in range(1, job.rounds + 1))
        seconds = _visit(job, trial, job.exchange(DIAGNOSE), client, server, job.diagnostics.every)[0]
        exchanged.append(_Exchanged(count * len(job.members), seconds))
    evaluations = sum(map(job.evaluates, range(1, job.rounds + 1)))
    # No more workers are busy than clients take part.
    parallel = max(1, min(experiment.engine.workers, job.cohort_size))
    training = sum(each.visits * each.seconds for each in exchanged) / parallel
    evaluation = evaluations * _evaluation(job, trial, server) / parallel
    number, tokens, answering = _answers(experiment, job, trial, server, place)
    up, down = sum(each.up for each in exchanged), sum(each.down for each in exchanged)
    kept = experiment.checkpoint
    spaced = (kept and sum(kept.keeps(number, job.rounds) for number in range(1, job.rounds))) or 0
    disk = _disk(job, trial, server, cache, max(plan.number - plan.keep for plan in plans), spaced)
    if (needed := sum(disk.values())) > (free := shutil.disk_usage(place).free):
        raise files.WriteError(
            f"not enough disk space in {place}: the run needs {size(needed)}, and {size(free)} is free; free "
            "some space, or choose another --out"
        )
    sizes = job.trainers.clients.values()
    notes, warnings = notices(experiment, job)
    return DryRun(
        method=experiment.method.name,
        rounds=job.rounds,
        clients={
            "train": len(job.members),
            "cohort": job.cohort_size,
            "evaluated": len(job.evaluation_clients),
            "unseen": len(job.newcomers),
        },
        pairs={
            split: sum(getattr(each, split) for each in sizes) for split in ("train", "validation", "test")
        },
        parameters={
            "trainable": trainable(job),
            "communicated": max(each.communicated for each in exchanged),
        },
        bytes_per_round={"up": round(up / job.rounds), "down": round(down / job.rounds)},
        bytes={"up": up, "down": down},
        disk={**disk, "free": free},
        seconds_per_round={
            "training": training / job.rounds,
            "evaluation": evaluation / job.rounds,
            "answers": answering / job.rounds,
        },
        seconds=training + evaluation + answering,
        timed={"client": client, "steps": trial.meter.steps, "pairs": trial.meter.pairs},
        answers={"number": number, "tokens": tokens},
        peak_memory_mb=peak_memory_mb(),
        data=left_out_table(cast("PairTrainerFactory", job.trainers).dataset),
        warnings=warnings,
        notes=notes,
    )


def _typical(job: Job) -> str:
    mean = sum(job.weights.values()) / len(job.weights)
    return min(job.members, key=lambda client: abs(job.weights[client] - mean))


def _exchange(
    job: Job, trial: Trial, exchange: Exchange, client: str, server: State, visits: Sequence[int]
) -> _Exchanged:
    """Estimate the costs of an exchange in all rounds from one visit of ``client``.

    Args:
        visits: number of cohort visits in each round.
    """
    due = [number for number in range(1, job.rounds + 1) if exchange.due(number)]
    if not due:
        return _Exchanged(0)
    count = len(due) * len(job.members)
    if exchange.to == "cohort":
        count = sum(visits[number - 1] for number in due)
    seconds, down, up, communicated = _visit(job, trial, exchange, client, server, due[0])
    if exchange.to == "neighbours":
        # Each neighbour receives a copy; a client's model is not sent to itself.
        copies = int(matrix_graph(job.topology.matrix(due[0])).degrees.sum())
        return _Exchanged(count, seconds, up * copies * len(due), 0, communicated)
    return _Exchanged(count, seconds, up * count, down * count, communicated)


def _visit(
    job: Job, trial: Trial, exchange: Exchange, client: str, server: State, number: int
) -> tuple[float, int, int, int]:
    """Return the seconds of a visit, the bytes of its download and upload, and the numbers in the upload."""
    now = job.round(number)
    message = encode(exchange.send(server, client, now))
    seconds, result = trial.task(Task("visit", client, number, exchange.name, message))
    upload, reason = None, result.withheld
    if not reason:
        upload, reason = read_upload(job, result.message, client, exchange, now)
    if upload is None:
        raise RoundError(f"the upload of client {client!r} in {exchange.name!r} cannot be merged: {reason}")
    numbers = sum(group.layout.size for group in upload.tensors.values())
    return seconds, len(message), len(result.message), numbers


def _evaluation(job: Job, trial: Trial, server: State) -> float:
    """Estimate the seconds of one evaluation of all clients from one client and one newcomer."""
    seconds = 0.0
    for clients in (job.evaluation_clients, job.newcomers):
        if not clients:
            continue
        pairs = {client: getattr(job.trainers.clients[client], job.evaluate.split) for client in clients}
        mean = sum(pairs.values()) / len(pairs)
        client = min(clients, key=lambda name: abs(pairs[name] - mean))
        message = encode(job.method.publish(server, client))
        each, _ = trial.task(Task("evaluate", client, 1, "", message))
        seconds += each * sum(pairs.values()) / pairs[client]
    return seconds


def _answers(
    experiment: Experiment, job: Job, trial: Trial, server: State, place: Path
) -> tuple[int, int, float]:
    """Return the number of answers to prompts in a run, their maximum length, and the seconds they take.

    A few tokens for each number and size of batches are timed. Their models do not share the work of workers.
    """
    answers = round_answers(experiment, job, place)
    if answers is None:
        return 0, 0, 0.0
    number, before = 0, trial.meter.whole
    for asked in answers.planned(len(mean_models(job, server))):
        number += len(asked)

        batches = answers.batches(asked)

        def measure(batches: Sequence[Any] = batches) -> tuple[float, None]:
            def take(tokens: int) -> float:
                initial = job.trainers.initial
                return clocked(lambda: [answers.write(initial, batch, tokens) for batch in batches])[0]

            take(1)  # not timed: the first use of kernels
            one = take(1)
            return one + (answers.limit - 1) * max(0.0, take(1 + TOKENS) - one) / TOKENS, None

        trial.meter.call(("answers", *map(len, batches)), measure)
    return number, answers.limit, trial.meter.whole - before


def _disk(job: Job, trial: Trial, server: State, cache: Path, oldest: int, kept: int) -> dict[str, int]:
    """Return the maximal sizes in bytes of the parts of a run directory.

    Args:
        oldest: age in rounds of the oldest server state that an upload of the fleet starts from.
        kept: number of earlier commits that the run keeps.
    """
    state, first = len(encode(server)), job.trainers.initial
    private = trial.private_bytes
    # A commit briefly keeps two versions of the server state and of the cohort's private states.
    checkpoint = state * (oldest + 2 + kept) + private * (len(job.members) + job.cohort_size * (1 + kept))
    if job.graph is not None:
        # The models of the clients before a round, as sent, and after it.
        checkpoint += (3 + kept) * len(job.members) * sum(g.flat.nbytes for g in server.tensors.values())
    shared = sum(first.layout[name].size for name in job.method.ownership.names(Owner.SHARED))
    adapters = len(mean_models(job, server)) * shared * first.flat.element_size()
    return {"cache": files.folder_size(cache), "checkpoint": checkpoint, "adapters": adapters}
