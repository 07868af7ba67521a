"""What is asked of a client and what it answers, as bytes, and how the client's side does it.

A task and its result hold what a server may know. A client's private state is in neither: it lies in the
client's own store, which :func:`run_task` reads and writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from prefed.core import State
from prefed.core.files import digest
from prefed.core.wire import decode_download, decode_state, encode, stored_dtype
from prefed.engines.evaluation import evaluate_client, evaluate_newcomer, own_pairs
from prefed.engines.job import Job
from prefed.engines.validation import validate_upload, withhold_scalars
from prefed.privacy import privatize


class ClientStates(Protocol):
    """Clients' private states, on the client's side."""

    def read(self, client: str) -> bytes | None:
        """The client's encoded private state; ``None`` if it still has its first."""

    def stage(self, client: str, state: bytes) -> None:
        """Put the client's next private state aside. It does not count before it is accepted."""

    def accept(self, clients: Iterable[str]) -> None:
        """The staged states of ``clients`` count from here on. All other staged states are dropped."""


@dataclass(frozen=True)
class Task:
    """One thing that is asked of one client.

    Attributes:
        kind: ``"visit"`` to take part in an exchange, ``"evaluate"`` to measure its model on its pairs.
        round: the round that takes the result.
        exchange: name of the exchange; empty for ``"evaluate"``.
        message: the encoded download.
        asked: the round in which the client was asked, an earlier one where its upload is late; 0 for
            ``round``.
        split: the pairs of an evaluation; empty for those of the job's.
    """

    kind: Literal["visit", "evaluate"]
    client: str
    round: int
    exchange: str
    message: bytes
    asked: int = 0
    split: Literal["", "validation"] = ""


@dataclass(frozen=True)
class TaskResult:
    """What the server gets for a task.

    Attributes:
        message: the encoded upload, or the figures as JSON; empty if something was withheld.
        withheld: why nothing was sent; empty if all is well.
        broken: something came that is no answer, for the reason in ``withheld``: as bad as a bad upload.
        asked: as of its task.
        report: numbers for the round log that go to nobody else: those of an upload to neighbours.
    """

    client: str
    message: bytes
    withheld: str = ""
    asked: int = 0
    report: Mapping[str, float] = field(default_factory=dict)
    broken: bool = False


def run_task(job: Job, task: Task, states: ClientStates) -> TaskResult:
    """Do what ``task`` asks, on the client's side. A visit stages the next private state, if it changed."""
    try:
        result = _visit(job, task, states) if task.kind == "visit" else _evaluate(job, task, states)
    except Exception as error:
        error.add_note(f"(client {task.client!r}, round {task.round}, {task.exchange or 'evaluation'})")
        raise
    return replace(result, asked=task.asked)


def _visit(job: Job, task: Task, states: ClientStates) -> TaskResult:
    exchange, now = job.exchange(task.exchange), job.round(task.asked or task.round)
    trainer = job.trainer(task.client, now.number, "exchange", exchange.name, merged=task.round)
    stored = states.read(task.client)
    before = _decoded(job, task.client, stored)
    # A private state may be large: what is not needed is not held while the model trains.
    known = digest(encode(before, job.state_dtype) if stored is None else stored)
    del stored
    download = decode_download(task.message)
    upload, after = exchange.work(trainer, before, download)
    del before
    told = exchange.numbers(task.client, now) if exchange.to == "neighbours" else ()
    report = {name: value for name, value in upload.scalars.items() if name in told}
    upload = withhold_scalars(upload, task.client, exchange, now)
    if job.privacy.kind == "local":
        noise = None if job.privacy.draws == "system" else trainer.key.at("noise")
        upload = privatize(upload, download, exchange, job.privacy, noise)
    # Nothing may change the upload between its validation and its bytes.
    reason = validate_upload(upload, task.client, exchange, job.method.ownership, job.trainers.initial, now)
    if reason:
        return TaskResult(task.client, b"", reason)
    broken = _not_finite(after, job.state_dtype)
    if broken is not None:
        reason = f"its private state would hold NaN or infinity in {broken!r}, and stays as it was"
        return TaskResult(task.client, b"", f"{reason}: lower the rate at which its own parts train")
    state = encode(after, job.state_dtype)
    if digest(state) != known:
        states.stage(task.client, state)
    return TaskResult(task.client, encode(upload), report=report)


def _evaluate(job: Job, task: Task, states: ClientStates) -> TaskResult:
    published = decode_download(task.message)
    if task.client in job.unseen:
        figures = evaluate_newcomer(job, task.client, published, task.round)
    else:
        private = _decoded(job, task.client, states.read(task.client))
        score = own_pairs(job, task.client, task.split or job.split)
        figures = evaluate_client(job, task.client, private, published, task.round, score)
    return TaskResult(task.client, json.dumps(figures).encode())


def _decoded(job: Job, client: str, stored: bytes | None) -> State:
    """A client's private state as it is stored, or its first."""
    return job.method.init_client(job.trainers.initial, client) if stored is None else decode_state(stored)


def _not_finite(state: State, dtype: torch.dtype | None) -> str | None:
    """The first group of tensors that would not be finite in the dtype in which it is stored."""
    for name, group in state.tensors.items():
        if not group.to(stored_dtype(name, group.dtype, dtype)).isfinite():
            return name
    return None
