"""Rounds with a server: it draws a cohort, asks clients, merges, evaluates and commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prefed.core import Callback, Download, Exchange, Plain, Round, State, Upload
from prefed.engines.aggregation import aggregate
from prefed.engines.backend import Backend, peak_memory_mb
from prefed.engines.job import Job
from prefed.engines.tasks import Task, TaskResult
from prefed.engines.validation import printable_reason, read_figures, read_upload
from prefed.metrics import (
    MEAN_METRICS,
    FederatedMetric,
    divergence_warning,
    federated_metrics,
    not_finite_counts,
)
from prefed.store import RunWriter
from prefed.wire import decode_state, encode

ROUND_METRICS = ("preference_accuracy", "reward_accuracy")
"""The metrics whose means a round's record holds beside its evaluation."""
NO_ANSWER = "no answer"


class RoundError(RuntimeError):
    """A round cannot be finished, because clients do not answer. The run can be resumed."""


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
    figures: dict[str, Plain] = field(default_factory=dict)

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
        figures: list[tuple[str, Plain]] = [*means, *exchange.figures(merged).items()]
        for name, value in figures:
            if value is not None:
                # Where two exchanges have a figure of one name, the later one carries its exchange's name.
                self.figures[f"{exchange.name}_{name}" if name in self.figures else name] = value


@dataclass(frozen=True)
class ServerRounds:
    """The rounds of a run with a server.

    Attributes:
        writer: of a run that has begun; it goes on after the last committed round.
        callback: is told of every step. What it raises ends the run; committed rounds are kept.

    Raises:
        RoundError: (from :meth:`run`) no client answered in an exchange, or no client's figures can be used
            in the evaluation after the last round.
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
        self.writer.begin_round()
        cohort = job.sample(now)
        for exchange in job.method.exchanges:
            if exchange.due(number):
                clients = cohort if exchange.to == "cohort" else job.members
                server = self._exchange(server, exchange, clients, now, tally)
        if job.evaluates(number):
            evaluation = self._evaluate(partial(job.method.publish, server), number)
        self._commit(server, cohort, evaluation, tally, time.perf_counter() - started)
        return server

    def _ask(
        self, what: str, number: int, clients: Sequence[str], task: Callable[[str], Task]
    ) -> Iterator[TaskResult]:
        """Ask each client once, and give the first result of each that answers.

        A result of a client that is not asked, or that has answered, is ignored.
        """
        waiting, done = set[str](), 0

        def tasks() -> Iterator[Task]:
            for client in clients:
                waiting.add(client)
                yield task(client)

        for result in self.backend.run(tasks()):
            if result.client not in waiting:
                who = printable_reason(repr(result.client))
                self._warn(number, f"ignored a result of {who}, from whom none is awaited in {what!r}")
                continue
            waiting.remove(result.client)
            done += 1
            yield result
            self.callback.on_task_end(what, done, len(clients))

    def _exchange(
        self, server: State, exchange: Exchange, clients: Sequence[str], now: Round, tally: _Tally
    ) -> State:
        uploads, invalid = self._collect(exchange, now, clients, server, tally)
        merged = aggregate(server, uploads, exchange, now)
        # A client whose upload is not merged goes on from the private state that it had.
        self.backend.accept(upload.client for upload in merged.uploads)
        for client, reason in sorted([*invalid, *merged.dropped]):
            text = tally.drop(exchange, client, reason)
            self._warn(now.number, f"dropped an upload of {client!r}: {text}")
        if merged.uploads:
            tally.add(exchange, merged.uploads, merged.server)
        else:
            self._warn(now.number, f"{merged.reason}; the server keeps its state")
        return merged.server

    def _warn(self, number: int, text: str) -> None:
        self.callback.on_warning(f"round {number}: {text}")

    def _collect(
        self,
        exchange: Exchange,
        now: Round,
        clients: Sequence[str],
        server: State,
        tally: _Tally,
    ) -> tuple[list[Upload], list[tuple[str, str]]]:
        """Ask clients to take part in an exchange, and validate what they upload.

        Their next private states stay staged: the backend is to be told which uploads are accepted.

        Returns:
            The valid uploads, sorted by client, so that their order of arrival makes no difference. And
            client and reason of those that are not valid, were withheld or did not come.

        Raises:
            RoundError: no client answered.
        """
        uploads, dropped, silent = [], [], set(clients)

        def task(client: str) -> Task:
            message = encode(exchange.send(server, client, now))
            tally.bytes_down += len(message)
            return Task("visit", client, now.number, exchange.name, message)

        for result in self._ask(exchange.name, now.number, clients, task):
            silent.remove(result.client)
            tally.bytes_up += len(result.message)
            upload, reason = None, result.withheld
            if not reason:
                upload, reason = read_upload(self.job, result.message, result.client, exchange, now)
            if upload is None:
                dropped.append((result.client, reason))
            else:
                uploads.append(upload)
        if len(silent) == len(clients):
            raise RoundError(
                f"round {now.number}: none of {len(clients)} clients answered in {exchange.name!r}; whole "
                "rounds are kept: resume the run once clients can be reached"
            )
        dropped += [(client, NO_ANSWER) for client in silent]
        return sorted(uploads, key=lambda upload: upload.client), dropped

    def _evaluate(self, publish: Callable[[str], Download], number: int) -> dict[str, Any] | None:
        """Evaluate clients on their own pairs, each with the model that it would use.

        Returns:
            The shares that :func:`~prefed.metrics.client_metrics` or
            :func:`~prefed.metrics.choice_metrics` gives, each as an
            :class:`~prefed.metrics.FederatedMetric`, and the means over clients of its other figures. For
            a personal method ``shared_accuracy``, of the published model alone. ``unseen_accuracy``, one for
            each number of local steps, where there are newcomers; ``unseen_selectors``, of each selector and
            of their vote on the newcomers' pairs, where there are several. ``split``. ``clients`` and
            ``left_out``: how many were evaluated, and how many have no pair in the split.
            ``not_evaluated``: client → why no figures of it can be used, where there are such clients.
            ``not_finite``: client → pairs without a finite log-probability, where there are any. Clients
            with fewer pairs than ``[privacy] minimum_pairs`` count in means alone.

            ``None`` if there are no figures of a client that may be listed.

        Raises:
            RoundError: there are none after the last round, which the summary needs.
        """
        job, answers = self.job, dict[str, dict[str, float]]()
        clients = (*job.evaluation_clients, *job.newcomers)
        reasons = dict.fromkeys(clients, NO_ANSWER)

        def task(client: str) -> Task:
            return Task("evaluate", client, number, "", encode(publish(client)))

        for result in self._ask("evaluation", number, clients, task):
            own, reason = read_figures(job, result.message, result.client)
            if result.withheld or reason:
                reasons[result.client] = printable_reason(result.withheld or reason)
            else:
                answers[result.client] = own
                del reasons[result.client]
        for client, reason in reasons.items():
            self._warn(number, f"{client!r} is not evaluated: {reason}")
        pairs = {client: int(getattr(sizes, job.split)) for client, sizes in job.trainers.clients.items()}
        figures, metrics = self._metrics(answers, job.evaluation_clients, pairs)
        _, unseen = self._metrics(answers, job.newcomers, pairs)
        if not metrics:
            text = "no client's figures can be used, and there is no evaluation"
            if number == job.rounds:
                raise RoundError(
                    f"round {number}: {text} after the last round; the others are kept: resume the run"
                )
            self._warn(number, text)
            return None
        evaluation: dict[str, Any] = {name: metrics[name] for name in metrics if name not in MEAN_METRICS}
        evaluation |= {name: metrics[name]["mean"] for name in MEAN_METRICS if name in metrics}
        if unseen:
            steps = {name: unseen[name] for name in job.newcomer_figures}
            evaluation["unseen_accuracy"] = steps
            if job.jury:
                evaluation["unseen_selectors"] = {name: unseen[name] for name in unseen if name not in steps}
        elif job.newcomers:
            self._warn(number, "no newcomer's figures can be used, and there is no unseen_accuracy")
        if reasons:
            evaluation["not_evaluated"] = reasons
        broken = not_finite_counts(figures)
        if broken:
            evaluation["not_finite"] = broken
            self._warn(number, divergence_warning(broken, pairs))
        left_out = sum(not count for count in pairs.values())
        return evaluation | {"split": job.split, "clients": len(figures), "left_out": left_out}

    def _metrics(
        self, answers: Mapping[str, Mapping[str, float]], clients: Sequence[str], pairs: Mapping[str, int]
    ) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, FederatedMetric]]:
        """The figures of ``clients`` that answered, and their metrics if one of them may be listed."""
        figures = {client: answers[client] for client in clients if client in answers}
        if not any(self.job.privacy.may_report(pairs[client]) for client in figures):
            return figures, {}
        return figures, federated_metrics(figures, pairs, self.job.privacy)

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
            record |= {name: evaluation[name]["mean"] for name in ROUND_METRICS}
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
