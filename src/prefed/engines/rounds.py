"""The steps that every kind of round is made of: ask clients, evaluate them, record, commit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefed.core import Callback, Download, Exchange, Round, State, Upload
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
from prefed.wire import encode

__all__ = ["RoundTally", "Rounds"]


@dataclass
class RoundTally:
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
class Rounds:
    """What every kind of round needs.

    Attributes:
        job: what is run.
        writer: of a run that has begun; it goes on after the last committed round.
        backend: gets the clients' tasks done.
        callback: is told of every step. What it raises ends the run; committed rounds are kept.
    """

    job: Job
    writer: RunWriter
    backend: Backend
    callback: Callback

    def collect(
        self,
        exchange: Exchange,
        now: Round,
        clients: Sequence[str],
        send: Callable[[str], Download],
        tally: RoundTally,
    ) -> tuple[list[Upload], list[tuple[str, str]]]:
        """Ask clients to take part in an exchange, and validate what they upload.

        Their next private states stay staged: the backend is to be told which uploads are accepted.

        Args:
            exchange: one of the method's.
            now: the current round.
            clients: who is asked.
            send: client → what it receives.
            tally: counts the bytes.

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

    def evaluate(self, publish: Callable[[str], Download], number: int) -> dict[str, Any]:
        """Evaluate clients on their own pairs, each with the model that it would use.

        Args:
            publish: client → what it needs to use its model.
            number: the round.

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

    def commit(
        self,
        server: State,
        cohort: Sequence[str],
        evaluation: dict[str, Any] | None,
        tally: RoundTally,
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

    def _totals(self, tally: RoundTally, seconds: float) -> dict[str, float]:
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
