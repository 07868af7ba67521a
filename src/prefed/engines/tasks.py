"""What is asked of a client and what it answers, as bytes. Every engine calls this one function."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import torch

from prefed.core import ClientTrainer, Download, State
from prefed.engines.job import Job
from prefed.engines.validation import reduced, refusal
from prefed.metrics import client_metrics
from prefed.wire import decode_download, decode_state, encode, stored_dtype

__all__ = ["Task", "TaskResult", "run_task"]


@dataclass(frozen=True)
class Task:
    """One thing asked of one client.

    Attributes:
        kind: ``"visit"`` to take part in an exchange, ``"judge"`` to measure its model on its pairs.
        client: who is asked.
        round: the round's number.
        exchange: name of the exchange; empty for ``"judge"``.
        message: the encoded download.
        state: the client's encoded private state; ``None`` if it still has its first.
    """

    kind: Literal["visit", "judge"]
    client: str
    round: int
    exchange: str
    message: bytes
    state: bytes | None


@dataclass(frozen=True)
class TaskResult:
    """What came of a task.

    Attributes:
        client: who answers.
        message: the encoded upload, or the figures as JSON; empty if something was withheld.
        state: the client's next private state, which goes to its own disk and nowhere else; ``None``
            if it did not change.
        withheld: why nothing was sent; empty if all is well.
    """

    client: str
    message: bytes
    state: bytes | None = None
    withheld: str = ""


def run_task(job: Job, task: Task) -> TaskResult:
    """Do what ``task`` asks, in the client's place."""
    try:
        return _visit(job, task) if task.kind == "visit" else _judge(job, task)
    except Exception as error:
        error.add_note(f"(client {task.client!r}, round {task.round}, {task.exchange or 'evaluation'})")
        raise


def _visit(job: Job, task: Task) -> TaskResult:
    exchange = next(e for e in job.method.exchanges if e.name == task.exchange)
    now = job.round(task.round)
    key = now.key.at("exchange", exchange.name).at("client", task.client)
    trainer = job.trainers.trainer(task.client, now, key, job.method.ownership)
    before = _state(job, task)
    upload, after = exchange.work(trainer, before, decode_download(task.message))
    upload = reduced(upload, task.client, exchange, now)
    # Nothing may follow between this look and the bytes: what it refuses never becomes a message.
    reason = refusal(upload, task.client, exchange, job.method.ownership, job.trainers.initial, now)
    if reason:
        return TaskResult(task.client, b"", None, reason)
    broken = _broken(after, job.keep)
    if broken is not None:
        reason = f"its private state would hold NaN or infinity in {broken!r}, and stays as it was"
        return TaskResult(task.client, b"", None, f"{reason}: lower the rate at which its own parts train")
    state = encode(after, job.keep)
    unchanged = state == (encode(before, job.keep) if task.state is None else task.state)
    return TaskResult(task.client, encode(upload), None if unchanged else state)


def _judge(job: Job, task: Task) -> TaskResult:
    now = job.round(task.round)
    key = now.key.at("predict").at("client", task.client)
    trainer = job.trainers.trainer(task.client, now, key, job.method.ownership)
    published = decode_download(task.message)
    if task.client in job.unseen:
        return TaskResult(task.client, json.dumps(_newcomer(job, task, trainer, published)).encode())
    private = _state(job, task)
    own = job.method.predict(trainer, private, published)
    weight = job.method.reward_weight(private, task.round)
    figures = client_metrics(job.trainers.score(task.client, own, job.split), job.beta, weight)
    if job.method.personal:
        scores = job.trainers.score(task.client, job.shared(published), job.split)
        figures["shared_accuracy"] = client_metrics(scores, job.beta)["preference_accuracy"]
    return TaskResult(task.client, json.dumps(figures).encode())


def _newcomer(job: Job, task: Task, trainer: ClientTrainer, published: Download) -> dict[str, float]:
    """Number of local steps → accuracy of a client that never took part: what was published, and k steps.

    Before its first step, or without a pair to take one on, it has the shared part alone: parts of its own
    that start at random are noise.
    """
    adapt, accuracies = job.method.adapt, {}
    for steps in job.unseen_steps:
        if adapt is not None and steps and trainer.size:
            own = adapt(trainer, published, steps)
        else:
            own = job.shared(published)
        scores = job.trainers.score(task.client, own, job.split)
        accuracies[str(steps)] = client_metrics(scores, job.beta)["preference_accuracy"]
    return accuracies


def _broken(state: State, keep: torch.dtype | None) -> str | None:
    """The first group of tensors that is not finite as it would be kept."""
    for name, group in state.tensors.items():
        if not group.to(stored_dtype(name, group.flat.dtype, keep)).isfinite():
            return name
    return None


def _state(job: Job, task: Task) -> State:
    if task.state is not None:
        return decode_state(task.state)
    return job.method.init_client(job.trainers.initial, task.client)
