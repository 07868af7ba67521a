"""Rounds with a server: it draws a cohort, asks clients, merges, evaluates and commits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prefed.core import Callback, Download, Exchange, Round, State, Upload
from prefed.engines.aggregation import aggregate
from prefed.engines.backend import Backend, peak_memory_mb
from prefed.engines.job import Job
from prefed.engines.tasks import Task
from prefed.engines.validation import printable_reason, read_upload
from prefed.metrics import (
    ACCURACY_METRICS,
    MEAN_METRICS,
    divergence_warning,
    federated_metrics,
    not_finite_counts,
)
from prefed.store import RunWriter
from prefed.wire import decode_state, encode


@dataclass
class _Tally:
    """What a round adds up.

    Attributes:
        bytes_up: bytes of all messages from clients.
        bytes_down: bytes of all messages to clients.
        communicated: numbers in the tensors of the largest upload.
        dropped: for each upload that was not merged, its ``client``, ``exchange`` and ``reason``.
        figures: the method's figures.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    communicated: int = 0
    dropped: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def drop(self, exchange: Exchange, client: str, reason: str) -> str:
        """Keep why an upload was not merged; the reason as it may be printed."""
        text = printable_reason(reason)
        self.dropped.append({"client": client, "exchange": exchange.name, "reason": text})
        return text

    def add(self, exchange: Exchange, uploads: Sequence[Upload], merged: State) -> None:
        """Keep the figures of an exchange: means of the uploads' numbers, and what the method tells."""
        sizes = (sum(group.layout.size for group in upload.tensors.values()) for upload in uploads)
        self.communicated = max(self.communicated, *sizes)
        means = ((name, _weighted_mean(uploads, name)) for name in sorted(exchange.scalars))
        for name, value in [*means, *exchange.figures(merged).items()]:
            if value is not None:
                # Where two exchanges have a figure of one name, the later one carries its exchange's name.
                self.figures[f"{exchange.name}_{name}" if name in self.figures else name] = value


@dataclass(frozen=True)
class ServerRounds:
    """The rounds of a run with a server.

    Attributes:
        writer: of a run that has begun; it goes on after the last committed round.
        callback: is told of every step. What it raises ends the run; committed rounds are kept.
    """

    job: Job
    writer: RunWriter
    backend: Backend
    callback: Callback

    def run(self) -> State:
        """Run the rounds that are left and commit each. Gives the server's state after the last."""
        server = decode_state(self.writer.server())
        self.callback.on_run_begin(self.writer.round, self.job.rounds)
        try:
            for number in range(self.writer.round + 1, self.job.rounds + 1):
                server = self._round(server, number)
        finally:
            self.callback.on_run_end()
        return server

    def _round(self, server: State, number: int) -> State:
        started, job = time.perf_counter(), self.job
        now, tally, evaluation = job.round(number), _Tally(), None
        cohort = job.sample(now)
        for exchange in job.method.exchanges:
            if exchange.due(number):
                clients = cohort if exchange.to == "cohort" else job.members
                server = self._exchange(server, exchange, clients, now, tally)
        if job.evaluates(number):
            evaluation = self._evaluate(partial(job.method.publish, server), number)
        self._commit(server, cohort, evaluation, tally, time.perf_counter() - started)
        return server

    def _exchange(
        self, server: State, exchange: Exchange, clients: Sequence[str], now: Round, tally: _Tally
    ) -> State:
        uploads, invalid = self._collect(exchange, now, clients, partial(exchange.send, server), tally)
        merged = aggregate(server, uploads, exchange, now)
        # A client whose upload is not merged goes on from the private state that it had.
        self.backend.accept(upload.client for upload in merged.uploads)
        for client, reason in sorted([*invalid, *merged.dropped]):
            text = tally.drop(exchange, client, reason)
            self._warn(now, f"dropped an upload of {client!r}: {text}")
        if merged.uploads:
            tally.add(exchange, merged.uploads, merged.server)
        else:
            self._warn(now, f"{merged.reason}; the server keeps its state")
        return merged.server

    def _warn(self, now: Round, text: str) -> None:
        self.callback.on_warning(f"round {now.number}: {text}")

    def _collect(
        self,
        exchange: Exchange,
        now: Round,
        clients: Sequence[str],
        send: Callable[[str], Download],
        tally: _Tally,
    ) -> tuple[list[Upload], list[tuple[str, str]]]:
        """Ask clients to take part in an exchange, and validate what they upload.

        Their next private states stay staged: the backend is to be told which uploads are accepted.

        Returns:
            The valid uploads, sorted by client, so that their order of arrival makes no difference. And
            client and reason of those that are not valid or were withheld.
        """
        uploads, dropped = [], []

        def tasks() -> Iterator[Task]:
            for client in clients:
                message = encode(send(client))
                tally.bytes_down += len(message)
                yield Task("visit", client, now.number, exchange.name, message)

        for done, result in enumerate(self.backend.run(tasks()), 1):
            tally.bytes_up += len(result.message)
            upload, reason = None, result.withheld
            if not reason:
                upload, reason = read_upload(self.job, result.message, result.client, exchange, now)
            if upload is None:
                dropped.append((result.client, reason))
            else:
                uploads.append(upload)
            self.callback.on_task_end(exchange.name, done, len(clients))
        return sorted(uploads, key=lambda upload: upload.client), dropped

    def _evaluate(self, publish: Callable[[str], Download], number: int) -> dict[str, Any]:
        """Evaluate clients on their own pairs, each with the model that it would use.

        Returns:
            The shares that :func:`~prefed.metrics.client_metrics` gives, each as an
            :class:`~prefed.metrics.FederatedMetric`, and the means over clients of its other figures. For
            a personal method ``shared_accuracy``, of the published model alone. ``unseen_accuracy``, one for
            each number of local steps, where there are newcomers. ``split``. ``clients`` and ``left_out``:
            how many were evaluated, and how many have no pair in the split. ``not_finite``: client → pairs
            without a finite log-probability, where there are any. Clients with fewer pairs than ``[privacy]
            minimum_pairs`` count in means alone.
        """
        job, figures = self.job, dict[str, dict[str, float]]()
        clients = (*job.evaluation_clients, *job.newcomers)
        tasks = (Task("evaluate", client, number, "", encode(publish(client))) for client in clients)
        for done, result in enumerate(self.backend.run(tasks), 1):
            figures[result.client] = json.loads(result.message)
            self.callback.on_task_end("evaluation", done, len(clients))
        unseen = {client: figures.pop(client) for client in job.newcomers}
        pairs = {client: int(getattr(sizes, job.split)) for client, sizes in job.trainers.clients.items()}
        metrics = federated_metrics(figures, pairs, job.privacy)
        evaluation: dict[str, Any] = {name: metrics[name] for name in ACCURACY_METRICS if name in metrics}
        evaluation |= {name: metrics[name]["mean"] for name in MEAN_METRICS if name in metrics}
        if unseen:
            evaluation["unseen_accuracy"] = federated_metrics(unseen, pairs, job.privacy)
        broken = not_finite_counts(figures)
        if broken:
            evaluation["not_finite"] = broken
            self.callback.on_warning(f"round {number}: {divergence_warning(broken, pairs)}")
        left_out = sum(not count for count in pairs.values())
        return evaluation | {"split": job.split, "clients": len(figures), "left_out": left_out}

    def _commit(
        self,
        server: State,
        cohort: Sequence[str],
        evaluation: dict[str, Any] | None,
        tally: _Tally,
        seconds: float,
    ) -> None:
        """Commit the next round, with its record and the run's totals."""
        record: dict[str, Any] = {"round": self.writer.round + 1, "loss": tally.figures.get("loss")}
        if evaluation is not None:
            record |= {name: evaluation[name]["mean"] for name in ACCURACY_METRICS[:2]}
            record["evaluation"] = evaluation
        record |= {"bytes_up": tally.bytes_up, "bytes_down": tally.bytes_down, "seconds": seconds}
        record |= {"cohort": list(cohort), "dropped": tally.dropped}
        record |= {name: value for name, value in tally.figures.items() if name not in record}
        self.writer.finish_round(encode(server), record, self._totals(tally, seconds))
        self.callback.on_round_end(record)

    def _totals(self, tally: _Tally, seconds: float) -> dict[str, float]:
        before = self.writer.commit.totals if self.writer.commit else {}
        memory = peak_memory_mb() + self.backend.memory_mb()
        return {
            "bytes_up": before.get("bytes_up", 0) + tally.bytes_up,
            "bytes_down": before.get("bytes_down", 0) + tally.bytes_down,
            "seconds": before.get("seconds", 0.0) + seconds,
            "communicated": max(before.get("communicated", 0), tally.communicated),
            "dropped": before.get("dropped", 0) + len(tally.dropped),
            "peak_memory_mb": max(before.get("peak_memory_mb", 0.0), memory),
        }


def _weighted_mean(uploads: Sequence[Upload], name: str) -> float | None:
    weighed = [(upload.weight, upload.scalars[name]) for upload in uploads if name in upload.scalars]
    total = sum(weight for weight, _ in weighed)
    return sum(weight * value for weight, value in weighed) / total if total else None
