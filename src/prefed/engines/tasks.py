"""Tasks for clients, their results, and :func:`run_task`, which runs a visit or an evaluation at the client.

Tasks and results contain only what a server may know. A client's private state stays in the client's store,
which :func:`run_task` reads and writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias, cast

import torch

from prefed.core import Download, State, Tensors
from prefed.core.files import digest
from prefed.core.wire import decode_download, decode_state, encode, stored_dtype
from prefed.engines.job import PAIRS, Job
from prefed.engines.validation import validate_upload, withhold_scalars
from prefed.train import metrics
from prefed.train.feedback.kind import Scores

Score: TypeAlias = Callable[[Tensors], Scores]
"""Model (full layout) → its scores of the pairs of an evaluation."""


class ClientStates(Protocol):
    """Store of clients' private states."""

    def read(self, client: str) -> bytes | None:
        """The client's encoded private state; ``None`` for the initial state."""

    def stage(self, client: str, state: bytes) -> None:
        """Store the client's next private state until it is accepted."""

    def accept(self, clients: Iterable[str]) -> None:
        """Make the staged states of ``clients`` current, and drop all other staged states."""


@dataclass
class MemoryStates:
    """Clients' private states in memory, and those that are staged."""

    states: dict[str, bytes] = field(default_factory=dict)
    staged: dict[str, bytes] = field(default_factory=dict)

    def read(self, client: str) -> bytes | None:
        """Return a client's current state."""
        return self.states.get(client)

    def stage(self, client: str, state: bytes) -> None:
        """Keep a client's next state."""
        self.staged[client] = state

    def accept(self, clients: Iterable[str]) -> None:
        """Make the staged states of ``clients`` current, and drop the others."""
        self.states |= {client: self.staged[client] for client in clients if client in self.staged}
        self.staged = {}


@dataclass(frozen=True)
class Task:
    """A request to a client.

    Attributes:
        kind: ``"visit"`` (take part in an exchange), ``"evaluate"`` or ``"judge"``.
        round: the round that uses the result; for ``"judge"`` the last one of the run.
        exchange: name of the exchange; empty for other tasks.
        message: the encoded download; for ``"judge"`` what :attr:`Job.judges` reads.
        asked: the earlier round in which the client was asked, if its upload is late; else 0.
        split: split of an evaluation; empty for that of the job.
    """

    kind: Literal["visit", "evaluate", "judge"]
    client: str
    round: int
    exchange: str
    message: bytes
    asked: int = 0
    split: Literal["", "validation"] = ""


@dataclass(frozen=True)
class TaskResult:
    """The answer to a task.

    Attributes:
        message: the encoded upload, the metrics as JSON, or the votes; empty if withheld.
        withheld: why nothing was sent; empty on success.
        broken: the answer was malformed, which counts as a bad upload; ``withheld`` says why.
        asked: ``asked`` of the task.
        report: numbers of an upload to neighbours for the round log, which are not sent to them.
        note: a line for the log on the client's side, which is not sent.
    """

    client: str
    message: bytes
    withheld: str = ""
    asked: int = 0
    report: Mapping[str, float] = field(default_factory=dict)
    broken: bool = False
    note: str = ""


def run_task(job: Job, task: Task, states: ClientStates) -> TaskResult:
    """Run a task on the client's side. A visit stages the next private state if it changed."""
    try:
        work = {"visit": _visit, "evaluate": _evaluate, "judge": _judge}[task.kind]
        result = work(job, task, states)
    except Exception as error:
        error.add_note(f"(client {task.client!r}, round {task.round}, {task.exchange or task.kind})")
        raise
    return replace(result, asked=task.asked)


def _visit(job: Job, task: Task, states: ClientStates) -> TaskResult:
    exchange, asked = job.exchange(task.exchange), task.asked or task.round
    trainer = job.trainer(task.client, asked, "exchange", exchange.name, merged=task.round)
    now, stored = trainer.round, states.read(task.client)
    before = _decoded(job, task.client, stored)
    # A private state may be large, so its encoded form is freed before training.
    known = digest(encode(before, job.state_dtype) if stored is None else stored)
    del stored
    download = decode_download(task.message)
    upload, after = exchange.work(trainer, before, download)
    del before
    logged = exchange.numbers(task.client, now) if exchange.to == "neighbours" else ()
    report = {name: value for name, value in upload.scalars.items() if name in logged}
    upload = withhold_scalars(upload, task.client, exchange, now)
    if job.privacy.kind == "local":
        from prefed.privacy import privatize

        noise = None if job.privacy.draws == "system" else trainer.key.at("noise")
        upload = privatize(upload, download, exchange, job.privacy, noise)
    elif job.privacy.kind == "distributed":
        from prefed.privacy import clipped_steps

        upload = clipped_steps(upload, download, exchange, job.privacy.clip)
    # The upload must not change between validation and encoding.
    reason = validate_upload(upload, task.client, exchange, job.method.ownership, job.trainers.initial, now)
    if reason:
        return TaskResult(task.client, b"", reason)
    broken = _not_finite(after, job.state_dtype)
    if broken is not None:
        reason = f"its new private state is NaN or infinite in {broken!r} and was discarded"
        return TaskResult(task.client, b"", f"{reason}: lower the learning rate of its personal tensors")
    state = encode(after, job.state_dtype)
    if digest(state) != known:
        states.stage(task.client, state)
    return TaskResult(task.client, encode(upload), report=report)


def _evaluate(job: Job, task: Task, states: ClientStates) -> TaskResult:
    published, note = decode_download(task.message), ""
    if task.client in job.unseen:
        figures = evaluate_newcomer(job, task.client, published, task.round)
    else:
        private = _decoded(job, task.client, states.read(task.client))
        score = own_pairs(job, task.client, task.split or job.evaluate.split)
        figures = evaluate_client(job, task.client, private, published, task.round, score)
        if job.answers is not None:
            note = job.answers(task.client, private, published, task.round)
    return TaskResult(task.client, json.dumps(figures).encode(), note=note)


def _judge(job: Job, task: Task, states: ClientStates) -> TaskResult:
    assert job.judges is not None
    return TaskResult(task.client, *job.judges(task.client, task.message))


def _decoded(job: Job, client: str, stored: bytes | None) -> State:
    return job.method.init_client(job.trainers.initial, client) if stored is None else decode_state(stored)


def _not_finite(state: State, dtype: torch.dtype | None) -> str | None:
    """The first group of tensors that is not finite in its dtype on disk."""
    for name, group in state.tensors.items():
        if not group.to(stored_dtype(name, group.dtype, dtype)).isfinite():
            return name
    return None


def pair_figures(
    job: Job, scores: Scores, weight: float = 1.0, jury: Sequence[Scores] = ()
) -> dict[str, float]:
    """The metrics of a model, depending on the client's kind of feedback.

    Args:
        weight: weight of a reward head's margin, as for ``metrics`` of scores.
        jury: scores of the voting models.
    """
    own = {metric.name: float(metric.function(scores).mean()) for metric in job.metrics}
    return own | scores.metrics(job.beta, weight, jury)


def evaluate_client(
    job: Job, client: str, private: State, published: Download, number: int, score: Score | None = None
) -> dict[str, float]:
    """The metrics of a client's model.

    They are those of the scores of its feedback, such as :class:`~prefed.train.metrics.PairScores`, plus
    ``shared_accuracy`` for a personal method: the preference accuracy of the published model. If the method
    publishes several models, these are the jury.

    Args:
        number: the round after which the client is evaluated.
        score: scores the pairs (default: the client's pairs in the job's split).
    """
    score = score or own_pairs(job, client, job.evaluate.split)
    model = job.client_model(client, private, published, number)
    if job.jury:
        models = job.shared_models(published).values()
        jury = [(each, score(each)) for each in models]
        # The client's own model is usually one of them.
        own = next((scores for each, scores in jury if each.equal(model)), None)
        return pair_figures(job, own or score(model), jury=[scores for _, scores in jury])
    figures = pair_figures(job, score(model), job.method.reward_weight(private, number))
    if job.method.personal:
        shared = pair_figures(job, score(job.shared(published)))
        figures["shared_accuracy"] = shared["preference_accuracy"]
    return figures


def evaluate_newcomer(job: Job, client: str, published: Download, number: int) -> dict[str, float]:
    """Preference accuracy of an unseen client by number of local steps or of context pairs.

    If several models are published, the :func:`~prefed.train.metrics.jury_metrics` of these are added.

    Before the first local step, or without training pairs, the client uses the published model, because
    randomly initialised personal tensors would only add noise. Of several published models the method chooses
    one.
    """
    method, score = job.method, own_pairs(job, client, job.evaluate.split)
    accuracies: dict[str, float] = {}
    trainer = job.trainer(client, number, "predict")
    for name, count in job.newcomer_figures.items():
        if method.infer is not None and name.startswith(PAIRS):
            model = method.infer(trainer, published, count)
        elif method.adapt is not None and count and trainer.size:
            model = method.adapt(trainer, published, count)
        elif method.newcomer is not None:
            model = method.newcomer(trainer, published)
        else:
            model = job.shared(published)
        accuracies[name] = pair_figures(job, score(model))["preference_accuracy"]
    if job.jury:
        jury = [cast("metrics.ChoiceScores", score(each)) for each in job.shared_models(published).values()]
        accuracies |= metrics.jury_metrics(jury)
    return accuracies


def own_pairs(job: Job, client: str, split: Literal["validation", "test"]) -> Score:
    """A function that scores a client's pairs of a split."""
    return lambda tensors: job.trainers.score(client, tensors, split)
