"""What a run would take: its data and settings checked, and a client's work tried."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar, cast

import torch

from prefed.config import Experiment
from prefed.core import (
    ClientTrainer,
    Exchange,
    Key,
    Objective,
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
from prefed.engines import InProcess, Job, RoundError, Task, TaskResult, TrainerFactory, check_backend
from prefed.engines.backend import peak_memory_mb
from prefed.engines.diagnostics import DIAGNOSE
from prefed.engines.validation import read_upload
from prefed.merge.mixing import matrix_graph
from prefed.runs.build import build_job
from prefed.runs.data_notices import left_out_table, notices
from prefed.runs.start_or_resume import fitted, with_threads
from prefed.runs.summary import mean_models, trainable
from prefed.train.pair_trainer import PairTrainerFactory

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
    """How many steps a phase takes on a client with so many pairs; see
    :func:`prefed.train.optimizer_steps.batches`.

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


@dataclass(frozen=True)
class DryRun:
    """What a run would be. Bytes and seconds are estimates, counts are what a run has.

    Attributes:
        clients: ``train``, ``cohort``, ``evaluated`` and ``unseen``: how many of each.
        pairs: ``train``, ``validation``, ``test``: of all clients.
        parameters: ``trainable``, ``communicated``: numbers that train, and numbers in the largest upload.
        bytes_per_round: ``up``, ``down``: the mean over the rounds.
        bytes: ``up``, ``down``: of the whole run.
        disk: bytes of ``cache``, ``checkpoint`` and ``adapters``, and how many are ``free``.
        seconds_per_round: of ``training`` and ``evaluation``, the mean over the rounds.
        seconds: of all rounds.
        timed: what the seconds are estimated from: ``client``, whose visit was tried, and how many
            ``steps`` and evaluated ``pairs`` were timed.
        peak_memory_mb: resident memory of this process so far, in MiB.
        data: what became of the rows, as ``summary.json`` has it.
        warnings: of the data, and of settings that do not fit them.
        notes: what else a person should know of the data.
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
    peak_memory_mb: float
    data: dict[str, Any]
    warnings: list[str]
    notes: list[str]


def dry_run(experiment: Experiment, out: Path) -> DryRun:
    """Read and partition the data, open the model, check the settings on them, and try a client's work.

    What a run keeps in its directory is written into a temporary folder, which is removed.

    Args:
        out: where the run directory would be. Nothing is written there.

    Raises:
        WriteError: the run directory cannot be written, or its disk has no room for it.
        RoundError: an upload of the client that was tried would not be merged, e.g. since it is not finite.
        DataError, ModelError, ConfigError, AlignError, TrackerError, WorkerError, ValueError: as
            :func:`prefed.run`.
    """
    check_backend(experiment.engine.name)
    if experiment.align is not None:
        from prefed.runs.align import check_alignment

        check_alignment(experiment.align, experiment.data)
    if experiment.track is not None:
        from prefed.runs.track import usable

        usable(experiment.track)
    experiment = with_threads(fitted(experiment), None)
    place = _place(out)
    with TemporaryDirectory(prefix="prefed-dry-run-") as name:
        cache = Path(name) / "cache"
        job = build_job(experiment, cache)
        if experiment.align is not None:
            from prefed.runs.align import check_named_tastes

            check_named_tastes(experiment, job)
        return _tried(experiment, job, cache, place)


def _place(out: Path) -> Path:
    """The folder that is there already, in which a run directory would be made."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "no folder" if not place.is_dir() else "not yours to write to"
        raise files.WriteError(f"cannot write into {out}: {place} is {why}; choose another --out")
    return place


@dataclass
class _Exchanged:
    """What an exchange takes.

    Attributes:
        visits: how many there are in all rounds.
        seconds: of a visit.
        up, down: bytes of all its messages.
        communicated: numbers in the tensors of an upload.
    """

    visits: int
    seconds: float = 0.0
    up: int = 0
    down: int = 0
    communicated: int = 0


def _tried(experiment: Experiment, job: Job, cache: Path, place: Path) -> DryRun:
    server = first_state(job)
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
    # Workers share the clients' work as far as there are clients.
    parallel = max(1, min(experiment.engine.workers, job.cohort_size))
    training = sum(each.visits * each.seconds for each in exchanged) / parallel
    evaluation = evaluations * _evaluation(job, trial, server) / parallel
    up, down = sum(each.up for each in exchanged), sum(each.down for each in exchanged)
    disk = _disk(job, trial, server, cache, max(plan.number - plan.keep for plan in plans))
    if (needed := sum(disk.values())) > (free := shutil.disk_usage(place).free):
        raise files.WriteError(
            f"the run needs {size(needed)}, and the disk of {place} has {size(free)} free: make room, or "
            "choose another --out"
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
        seconds_per_round={"training": training / job.rounds, "evaluation": evaluation / job.rounds},
        seconds=training + evaluation,
        timed={"client": client, "steps": trial.meter.steps, "pairs": trial.meter.pairs},
        peak_memory_mb=peak_memory_mb(),
        data=left_out_table(cast("PairTrainerFactory", job.trainers).dataset.row_counts),
        warnings=warnings,
        notes=notes,
    )


def _typical(job: Job) -> str:
    """The member whose number of training pairs is nearest to the mean; of several, the first by name."""
    mean = sum(job.weights.values()) / len(job.weights)
    return min(job.members, key=lambda client: abs(job.weights[client] - mean))


def _exchange(
    job: Job, trial: Trial, exchange: Exchange, client: str, server: State, visits: Sequence[int]
) -> _Exchanged:
    """What an exchange takes in all rounds, if each client's visit is as that of ``client``.

    Args:
        visits: how many clients of the cohort each round has.
    """
    due = [number for number in range(1, job.rounds + 1) if exchange.due(number)]
    if not due:
        return _Exchanged(0)
    count = len(due) * len(job.members)
    if exchange.to == "cohort":
        count = sum(visits[number - 1] for number in due)
    seconds, down, up, communicated = _visit(job, trial, exchange, client, server, due[0])
    if exchange.to == "neighbours":
        # A message goes to each neighbour in a copy of its own; a client's own model is no message.
        copies = int(matrix_graph(job.topology.matrix(due[0])).degrees.sum())
        return _Exchanged(count, seconds, up * copies * len(due), 0, communicated)
    return _Exchanged(count, seconds, up * count, down * count, communicated)


def _visit(
    job: Job, trial: Trial, exchange: Exchange, client: str, server: State, number: int
) -> tuple[float, int, int, int]:
    """Seconds of a visit, bytes of its download and of its upload, and numbers in the upload's tensors."""
    now = job.round(number)
    message = encode(exchange.send(server, client, now))
    seconds, result = trial.task(Task("visit", client, number, exchange.name, message))
    upload, reason = None, result.withheld
    if not reason:
        upload, reason = read_upload(job, result.message, client, exchange, now)
    if upload is None:
        raise RoundError(f"an upload of {client!r} in {exchange.name!r} would not be merged: {reason}")
    numbers = sum(group.layout.size for group in upload.tensors.values())
    return seconds, len(message), len(result.message), numbers


def _evaluation(job: Job, trial: Trial, server: State) -> float:
    """Seconds of one evaluation of all clients, from that of one of them and of one newcomer."""
    seconds = 0.0
    for clients in (job.evaluation_clients, job.newcomers):
        if not clients:
            continue
        pairs = {client: getattr(job.trainers.clients[client], job.split) for client in clients}
        mean = sum(pairs.values()) / len(pairs)
        client = min(clients, key=lambda name: abs(pairs[name] - mean))
        message = encode(job.method.publish(server, client))
        each, _ = trial.task(Task("evaluate", client, 1, "", message))
        seconds += each * sum(pairs.values()) / pairs[client]
    return seconds


def _disk(job: Job, trial: Trial, server: State, cache: Path, oldest: int) -> dict[str, int]:
    """Bytes of what a run directory holds at the most.

    Args:
        oldest: how many rounds back the oldest state lies that an upload of the fleet starts from.
    """
    state, first = len(encode(server)), job.trainers.initial
    private = trial.private_bytes
    # While a round is committed there are two versions of the server's state, and of the cohort's own.
    checkpoint = state * (oldest + 2) + private * (len(job.members) + job.cohort_size)
    if job.graph is not None:
        # The clients' models before a round, as they are sent, and after it.
        checkpoint += 3 * len(job.members) * sum(g.flat.nbytes for g in server.tensors.values())
    shared = sum(first.layout[name].size for name in job.method.ownership.names(Owner.SHARED))
    adapters = len(mean_models(job, server)) * shared * first.flat.element_size()
    return {"cache": files.folder_size(cache), "checkpoint": checkpoint, "adapters": adapters}
