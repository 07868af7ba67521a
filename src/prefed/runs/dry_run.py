"""Everything that a run checks and needs, without a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from prefed.config import Experiment
from prefed.core import Exchange, Owner, State, files
from prefed.core.text import size
from prefed.core.wire import encode
from prefed.engines import Job, RoundError, Task, check_backend
from prefed.engines.backend import peak_memory_mb
from prefed.engines.diagnostics import DIAGNOSE
from prefed.engines.validation import read_upload
from prefed.merge.mixing import matrix_graph
from prefed.runs.build import build_job
from prefed.runs.data_notices import left_out_table, notices
from prefed.runs.resume import fitted, with_threads
from prefed.runs.summary import mean_models, trainable
from prefed.runs.trial import Trial, first_state
from prefed.train.trainer_factory import PairTrainerFactory


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
