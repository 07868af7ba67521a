"""What all rounds have in common: clients are asked and evaluated, metrics summed up, the round committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from prefed.core import Callback, Download, Exchange, Plain, Round, State, Upload
from prefed.core.records import RoundRecord
from prefed.core.text import pluralize, timed
from prefed.core.wire import encode
from prefed.engines.backend import Backend, peak_memory_mb
from prefed.engines.diagnostics import DIAGNOSE, Diagnosis
from prefed.engines.job import Job
from prefed.engines.privacy import spent
from prefed.engines.stopping import Standing
from prefed.engines.tasks import Task, TaskResult
from prefed.engines.validation import printable_reason, read_figures, read_upload
from prefed.privacy.accountant import require
from prefed.store import RunWriter
from prefed.train.metrics import (
    MEAN_METRICS,
    FederatedMetric,
    collapse_warning,
    divergence_warning,
    federated_metrics,
    not_finite_counts,
)

ROUND_METRICS = ("preference_accuracy", "reward_accuracy")
"""The metrics whose means a round's record holds next to its evaluation."""
NO_ANSWER = "no answer"


class RoundError(RuntimeError):
    """A round cannot be finished, because clients do not answer. The run can be resumed."""


@dataclass
class Tally:
    """What a round adds up.

    Attributes:
        bytes_up: bytes of all messages from clients.
        bytes_down: bytes of all messages to clients.
        communicated: numbers in the tensors of the largest upload.
        dropped: for each upload that was not merged, its ``client``, ``exchange`` and ``reason``.
        figures: the method's figures.
        bad: the client of each upload that should not have been sent.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    communicated: int = 0
    dropped: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, Plain] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def drop(self, exchange: Exchange, client: str, reason: str) -> str:
        """Keep why an upload was not merged; the reason as it may be printed."""
        text = printable_reason(reason)
        self.dropped.append({"client": client, "exchange": exchange.name, "reason": text})
        return text

    def add(self, exchange: Exchange, uploads: Sequence[Upload], merged: State) -> None:
        """Keep the figures of an exchange: means of the uploads' numbers, and what the method reports."""
        sizes = (sum(group.layout.size for group in upload.tensors.values()) for upload in uploads)
        self.communicated = max(self.communicated, *sizes)
        means = ((name, _weighted_mean(uploads, name)) for name in sorted(exchange.scalars))
        figures: list[tuple[str, Plain]] = [*means, *exchange.figures(merged).items()]
        for name, value in figures:
            if value is not None:
                # Where two exchanges have a figure of one name, the later one carries its exchange's name.
                self.figures[f"{exchange.name}_{name}" if name in self.figures else name] = value


@dataclass(frozen=True)
class Evaluated:
    """What the evaluation after a round gives.

    Attributes:
        record: for the round's record, see :meth:`Course.evaluate`; ``None`` if there are no figures.
        standing: the early-stopping state; ``None`` where nothing is judged.
    """

    record: dict[str, Any] | None
    standing: Standing | None = None


@dataclass(frozen=True)
class Course:
    """The course of a run's rounds, but for what happens within an exchange.

    Attributes:
        writer: of a run that has started; it continues after the last committed round.
        callback: receives every step. What it raises ends the run; committed rounds are kept.
    """

    job: Job
    writer: RunWriter
    backend: Backend
    callback: Callback

    def begin(self, number: int) -> None:
        """Begin a round; before anybody is asked it is counted, where doing it twice costs privacy twice.

        Raises:
            AccountantError: there is noise, and nothing that says what it is worth.
        """
        if self.job.privacy.noise:
            require()
        self.writer.begin_round()
        if self.job.privacy.draws == "system":
            self.writer.begun.add(number)

    def ask(
        self, what: str, number: int, tasks: Iterable[Task], of: int, done: int = 0
    ) -> Iterator[TaskResult]:
        """Give out ``tasks``, and give the first result of each.

        A result of a client that is not asked, or that has answered, is ignored.

        Args:
            what: the exchange by name, or ``"evaluation"``.
            of: how many clients there are to answer, of whom ``done`` have answered.
        """
        waiting = set[tuple[str, int]]()

        def given() -> Iterator[Task]:
            for task in tasks:
                waiting.add((task.client, task.asked))
                yield task

        with timed(what, f"round {number}, {pluralize(of - done, 'client', 'clients')}"):
            for result in self.backend.run(given()):
                if (result.client, result.asked) not in waiting:
                    who = printable_reason(repr(result.client))
                    self.warn(number, f"ignored a result of {who}, from whom none is awaited in {what!r}")
                    continue
                waiting.remove((result.client, result.asked))
                done += 1
                yield result
                self.callback.on_task_end(what, done, of)

    def warn(self, number: int, text: str) -> None:
        """Warn of something that went wrong in a round that continues."""
        self.callback.on_warning(f"round {number}: {text}")

    def diagnose(self, server: State, now: Round, tally: Tally) -> None:
        """Add the diagnostics of the round to its figures, if it has any.

        Clients with fewer pairs than ``[privacy] minimum_pairs`` take no part.

        Args:
            server: whose published models are diagnosed.
        """
        job = self.job
        if job.diagnostics is None or now.number % job.diagnostics.every:
            return
        diagnosis, number = Diagnosis(job.diagnostics), now.number
        clients = [client for client in job.members if job.privacy.may_report(job.weights[client])]

        def task(client: str) -> Task:
            message = encode(job.diagnosis.send(server, client, now))
            return Task("visit", client, number, DIAGNOSE, message)

        waiting, uploads = list(clients), dict[str, Upload]()
        for result in self.ask(DIAGNOSE, number, map(task, clients), len(clients)):
            upload, reason = None, result.withheld
            if not reason:
                upload, reason = read_upload(job, result.message, result.client, job.diagnosis, now)
            if upload is None:
                self.warn(number, f"{result.client!r} is not diagnosed: {printable_reason(reason)}")
                waiting.remove(result.client)
            else:
                uploads[result.client] = upload
            # Sums are made in the order of the clients, and no more is kept than waits for its turn.
            while waiting and waiting[0] in uploads:
                diagnosis.add(uploads.pop(waiting.pop(0)))
        for client in sorted(uploads):
            diagnosis.add(uploads[client])
        tally.figures |= diagnosis.figures()

    def evaluate(self, publish: Callable[[str], Download], number: int) -> Evaluated:
        """Evaluate clients on their own pairs, each with the model that it would use.

        Where the run is judged by validation pairs, and these are not the job's split, they are evaluated
        too.

        Returns:
            The record has the shares that :func:`~prefed.train.metrics.client_metrics` or
            :func:`~prefed.train.metrics.choice_metrics` gives, each as an
            :class:`~prefed.train.metrics.FederatedMetric`, and the means over clients of its other figures.
            For a personal method ``shared_accuracy``, of the published model only. ``unseen_accuracy``, one
            for
            each number of local steps, where there are newcomers; ``unseen_selectors``, of each selector and
            of their vote on the newcomers' pairs, where there are several. ``split``. ``clients`` and
            ``left_out``: how many were evaluated, and how many have no pair in the split.
            ``not_evaluated``: client → why no figures of it can be used, where there are such clients.
            ``not_finite``: client → pairs without a finite log-probability, where there are any. Clients
            with fewer pairs than ``[privacy] minimum_pairs`` count only in means.

            ``None`` if there are no figures of a client that may be listed.

        Raises:
            RoundError: there are none after the last round, which the summary needs.
        """
        job = self.job
        answers, reasons = self._answers(publish, number, (*job.evaluation_clients, *job.newcomers))
        pairs = self._pairs(job.split)
        figures, metrics = self._metrics(answers, job.evaluation_clients, pairs)
        _, unseen = self._metrics(answers, job.newcomers, pairs)
        if not metrics:
            text = "no client's metrics can be used, and there is no evaluation"
            if number == job.rounds:
                raise RoundError(
                    f"round {number}: {text} after the last round; the others are kept: resume the run"
                )
            self.warn(number, text)
            return Evaluated(None)
        evaluation: dict[str, Any] = {name: metrics[name] for name in metrics if name not in MEAN_METRICS}
        evaluation |= {name: metrics[name]["mean"] for name in MEAN_METRICS if name in metrics}
        if unseen:
            steps = {name: unseen[name] for name in job.newcomer_figures}
            evaluation["unseen_accuracy"] = steps
            if job.jury:
                evaluation["unseen_selectors"] = {name: unseen[name] for name in unseen if name not in steps}
        elif job.newcomers:
            self.warn(number, "no newcomer's metrics can be used, and there is no unseen_accuracy")
        if reasons:
            evaluation["not_evaluated"] = reasons
        broken = not_finite_counts(figures)
        if broken:
            evaluation["not_finite"] = broken
            self.warn(number, divergence_warning(broken, pairs))
        left_out = sum(not count for count in pairs.values())
        evaluation |= {"split": job.split, "clients": len(figures), "left_out": left_out}
        return Evaluated(evaluation, self._judge(publish, number, metrics))

    def _judge(
        self, publish: Callable[[str], Download], number: int, metrics: Mapping[str, FederatedMetric]
    ) -> Standing | None:
        """Early-stopping state after a round; ``metrics`` are those of the job's split."""
        job, before = self.job, self.writer.commit.best if self.writer.commit else None
        if job.stop is None:
            return None
        if job.split != "validation":
            answers, _ = self._answers(publish, number, job.validation_clients, "validation")
            _, metrics = self._metrics(answers, job.validation_clients, self._pairs("validation"))
        if not metrics:
            self.warn(number, "no client's validation metrics can be used, and the round is not judged")
            return None if before is None else Standing(**before)
        return job.stop.judge(before, number, metrics)

    def _answers(
        self,
        publish: Callable[[str], Download],
        number: int,
        clients: Sequence[str],
        split: Literal["", "validation"] = "",
    ) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """The figures of ``clients`` that can be used, and for all others why there are none."""
        answers, reasons = dict[str, dict[str, float]](), dict.fromkeys(clients, NO_ANSWER)

        def task(client: str) -> Task:
            return Task("evaluate", client, number, "", encode(publish(client)), split=split)

        for result in self.ask(split or "evaluation", number, map(task, clients), len(clients)):
            own, reason = read_figures(self.job, result.message, result.client, split or None)
            if result.withheld or reason:
                reasons[result.client] = printable_reason(result.withheld or reason)
            else:
                answers[result.client] = own
                del reasons[result.client]
        for client, reason in reasons.items():
            self.warn(number, f"{client!r} is not evaluated: {reason}")
        return answers, reasons

    def _pairs(self, split: str) -> dict[str, int]:
        """Client → its pairs of a split."""
        return {client: int(getattr(sizes, split)) for client, sizes in self.job.trainers.clients.items()}

    def _metrics(
        self, answers: Mapping[str, Mapping[str, float]], clients: Sequence[str], pairs: Mapping[str, int]
    ) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, FederatedMetric]]:
        """The figures of ``clients`` that answered, and their metrics if one of them may be listed."""
        figures = {client: answers[client] for client in clients if client in answers}
        if not any(self.job.privacy.may_report(pairs[client]) for client in figures):
            return figures, {}
        return figures, federated_metrics(figures, pairs, self.job.privacy)

    def commit(
        self,
        server: State,
        cohort: Sequence[str],
        evaluated: Evaluated | None,
        tally: Tally,
        seconds: float,
        keep: int | None = None,
    ) -> None:
        """Commit the next round, with its record and the run's totals.

        Args:
            evaluated: ``None`` in a round without an evaluation.
            keep: as :meth:`prefed.store.RunWriter.finish_round` takes it.
        """
        content: dict[str, Any] = {"round": self.writer.round + 1, "loss": tally.figures.get("loss")}
        evaluation, standing = (evaluated.record, evaluated.standing) if evaluated else (None, None)
        if evaluation is not None:
            content |= {name: evaluation[name]["mean"] for name in ROUND_METRICS}
            content["evaluation"] = evaluation
        if self.job.privacy.kind is not None:
            content["epsilon"] = spent(self.job, content["round"], self.writer.begun.times())
        if standing is not None and standing.last_round == self.writer.round + 1:
            content["validation"] = standing.last
        content |= {"bytes_up": tally.bytes_up, "bytes_down": tally.bytes_down, "seconds": seconds}
        content |= {"cohort": list(cohort), "dropped": tally.dropped}
        figures = {**tally.figures, **self.backend.figures()}
        content |= {name: value for name, value in figures.items() if name not in content}
        record = cast(RoundRecord, content)  # a method or an engine may have its own figures
        if warning := collapse_warning(record, self.job.rounds):
            self.warn(record["round"], warning)
        best = None if standing is None else vars(standing)
        with timed("commit", f"round {record['round']}"):
            self.writer.finish_round(encode(server), record, self._totals(tally, seconds), keep, best)
        self.callback.on_round_end(record)

    def _totals(self, tally: Tally, seconds: float) -> dict[str, float]:
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
