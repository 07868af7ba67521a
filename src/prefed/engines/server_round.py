"""The engine for one machine: rounds of visits, in this process or spread over worker processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from prefed.core import Callback, Exchange, Round, State, Upload
from prefed.engines.aggregation import merge
from prefed.engines.backend import Backend, peak_memory_mb
from prefed.engines.job import Job
from prefed.engines.tasks import Task, TaskResult
from prefed.engines.validation import expected, refusal, said
from prefed.merge import TooFewUploads
from prefed.metrics import (
    ACCURACY_METRICS,
    MEAN_METRICS,
    divergence_warning,
    federated_metrics,
    not_finite_counts,
)
from prefed.store import RunWriter
from prefed.wire import WireError, decode_state, decode_upload, encode, upload_limits

__all__ = ["ServerRounds"]

Profiles: TypeAlias = dict[str, dict[str, dict[str, float]]]
"""Figure → client → block → number."""


@dataclass
class _Tally:
    """What a round adds up."""

    up: int = 0
    down: int = 0
    sent: int = 0
    dropped: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def note(self, exchange: Exchange, name: str, value: float | None) -> None:
        """Keep a figure; where two exchanges have one of a name, the later carries its exchange's."""
        if value is not None:
            self.figures[f"{exchange.name}_{name}" if name in self.figures else name] = value


@dataclass(frozen=True)
class ServerRounds:
    """The engine.

    Attributes:
        job: what is run.
        store: begun; the run goes on after its last committed round.
        backend: who does the clients' work.
        callback: told of every step.
    """

    job: Job
    store: RunWriter
    backend: Backend
    callback: Callback

    def run(self) -> State:
        """Run the rounds that are left, committing each; the server's state after the last."""
        server = decode_state(self.store.server())
        self.callback.on_run_begin(self.store.round, self.job.rounds)
        try:
            for number in range(self.store.round + 1, self.job.rounds + 1):
                server = self._round(server, number)
        finally:
            self.callback.on_run_end()
        return server

    def _round(self, server: State, number: int) -> State:
        job, started = self.job, time.perf_counter()
        now, tally = job.round(number), _Tally()
        cohort = job.sample(now)
        for exchange in job.method.exchanges:
            if exchange.due(number):
                asked = cohort if exchange.to == "cohort" else job.members
                server = self._exchange(server, exchange, asked, now, tally)
        record: dict[str, Any] = {"round": number, "loss": tally.figures.get("loss")}
        if number == job.rounds or (job.every and number % job.every == 0):
            evaluation = self.evaluate(server, number)
            record |= {name: evaluation[name]["mean"] for name in ACCURACY_METRICS[:2]}
            record["evaluation"] = evaluation
        record |= {"bytes_up": tally.up, "bytes_down": tally.down}
        record["seconds"] = time.perf_counter() - started
        record |= {"cohort": list(cohort), "dropped": tally.dropped}
        record |= {name: value for name, value in tally.figures.items() if name not in record}
        self.store.finish_round(encode(server), record, self._totals(tally, record["seconds"]))
        self.callback.on_round_end(record)
        return server

    def _exchange(
        self, server: State, exchange: Exchange, asked: Sequence[str], now: Round, tally: _Tally
    ) -> State:
        def tasks() -> Iterator[Task]:
            for client in asked:
                message = encode(exchange.send(server, client))
                tally.down += len(message)
                yield Task("visit", client, now.number, exchange.name, message, self.store.client(client))

        uploads, dropped = [], list[tuple[str, str]]()
        for done, answer in enumerate(self.backend.work(tasks()), 1):
            tally.up += len(answer.message)
            upload, reason = self._open(answer, exchange, now)
            if upload is None:
                dropped.append((answer.client, reason))
            else:
                uploads.append(upload)
                if answer.state is not None:
                    self.store.stage(answer.client, answer.state)
            self.callback.on_task_end(exchange.name, done, len(asked))
        uploads.sort(key=lambda upload: upload.client)
        why = f"nothing to merge in {exchange.name!r}"
        try:
            merged, uploads = merge(server, uploads, exchange, now, dropped)
        except TooFewUploads as error:
            merged, uploads, why = server, [], str(error)
        # A client whose upload came to nothing goes on from where it was, as the server does.
        self.store.accept(upload.client for upload in uploads)
        for client, reason in sorted(dropped):
            tally.dropped.append({"client": client, "exchange": exchange.name, "reason": said(reason)})
            self.callback.on_warning(f"round {now.number}: dropped an upload of {client!r}: {said(reason)}")
        if not uploads:
            self.callback.on_warning(f"round {now.number}: {why}; the server keeps its state")
            return server
        tally.sent = max(tally.sent, *(sum(t.layout.size for t in u.tensors.values()) for u in uploads))
        for name in sorted(exchange.scalars):
            tally.note(exchange, name, _weighted_mean(uploads, name))
        for name, value in exchange.figures(merged).items():
            tally.note(exchange, name, value)
        return merged

    def _open(self, answer: TaskResult, exchange: Exchange, now: Round) -> tuple[Upload | None, str]:
        """What arrived, or why it is not merged."""
        if answer.withheld:
            return None, answer.withheld
        ownership, model = self.job.method.ownership, self.job.trainers.initial
        groups = expected(answer.client, exchange, ownership, model.layout, now)
        most = upload_limits(answer.client, groups, model.flat.dtype, exchange.scalars)
        try:
            upload = decode_upload(answer.message, most)
            reason = refusal(upload, answer.client, exchange, ownership, model, now)
        except WireError as error:
            return None, str(error)
        except Exception as error:
            # It comes from outside: whatever is wrong with it is no reason to end everybody's run.
            return None, f"cannot be read: {type(error).__name__}: {error}"
        return (None, reason) if reason else (upload, "")

    def evaluate(self, server: State, number: int) -> dict[str, Any]:
        """Every judged client's figures on its own pairs, with the model it would use.

        Returns:
            Of what :func:`~prefed.metrics.client_metrics` gives the shares, each an
            :class:`~prefed.metrics.FederatedMetric`, and the others' means over clients; for a personal
            method ``shared_accuracy``, of the published model alone; ``unseen_accuracy``, one for each number
            of local steps, where there are newcomers; ``clients`` and ``left_out``: how many were judged, how
            many have no pair in the split; ``not_finite``: client → pairs without a finite log-probability,
            where there are any. Clients with fewer pairs than ``[privacy] minimum_pairs`` count in means
            alone.
        """
        asked = (*self.job.judges, *self.job.newcomers)

        def tasks() -> Iterator[Task]:
            for client in asked:
                message = encode(self.job.method.publish(server, client))
                yield Task("judge", client, number, "", message, self.store.client(client))

        figures: dict[str, dict[str, float]] = {}
        for done, answer in enumerate(self.backend.work(tasks()), 1):
            figures[answer.client] = json.loads(answer.message)
            self.callback.on_task_end("evaluation", done, len(asked))
        unseen = {client: figures.pop(client) for client in self.job.newcomers}
        clients, split, privacy = self.job.trainers.clients, self.job.split, self.job.privacy
        pairs = {client: int(getattr(sizes, split)) for client, sizes in clients.items()}
        measured = federated_metrics(figures, pairs, privacy)
        evaluation: dict[str, Any] = {name: measured[name] for name in ACCURACY_METRICS if name in measured}
        evaluation |= {name: measured[name]["mean"] for name in MEAN_METRICS if name in measured}
        if unseen:
            evaluation["unseen_accuracy"] = federated_metrics(unseen, pairs, privacy)
        broken = not_finite_counts(figures)
        if broken:
            evaluation["not_finite"] = broken
            self.callback.on_warning(f"round {number}: {divergence_warning(broken, pairs)}")
        left_out = sum(not count for count in pairs.values())
        return evaluation | {"split": split, "clients": len(figures), "left_out": left_out}

    def profiles(self) -> Profiles:
        """What private states tell of the model's blocks: figure → client → block → number.

        It is read from the store on this machine, one client at a time; clients that never took part have
        nothing to tell. See :class:`~prefed.core.Method`.
        """
        found: Profiles = {}
        tell = self.job.method.profile
        if tell is None:
            return found
        for client in self.job.members:
            kept = self.store.client(client)
            if kept is None:
                continue
            for name, blocks in tell(decode_state(kept)).items():
                if blocks:
                    found.setdefault(name, {})[client] = {
                        str(block): value for block, value in blocks.items()
                    }
        return found

    def told(self, profiles: Profiles) -> Profiles:
        """What a summary says of :meth:`profiles`: two digits, and nothing of clients with too few pairs.

        With every digit a number such as FedSDG's gate is the private tensor that it comes from.
        """
        sizes, tells = self.job.trainers.clients, self.job.privacy.may_report
        return {
            name: {
                client: {block: round(value, 2) for block, value in blocks.items()}
                for client, blocks in clients.items()
                if tells(sizes[client].train)
            }
            for name, clients in profiles.items()
        }

    def _totals(self, tally: _Tally, seconds: float) -> dict[str, float]:
        before = self.store.commit.totals if self.store.commit else {}
        memory = peak_memory_mb() + self.backend.memory_mb()
        return {
            "bytes_up": before.get("bytes_up", 0) + tally.up,
            "bytes_down": before.get("bytes_down", 0) + tally.down,
            "seconds": before.get("seconds", 0.0) + seconds,
            "communicated": max(before.get("communicated", 0), tally.sent),
            "dropped": before.get("dropped", 0) + len(tally.dropped),
            "peak_memory_mb": max(before.get("peak_memory_mb", 0.0), memory),
        }


def _weighted_mean(uploads: Sequence[Upload], name: str) -> float | None:
    weighed = [(upload.weight, upload.scalars[name]) for upload in uploads if name in upload.scalars]
    total = sum(weight for weight, _ in weighed)
    return sum(weight * value for weight, value in weighed) / total if total else None
