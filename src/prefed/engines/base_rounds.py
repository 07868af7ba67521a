"""The common parts of all kinds of rounds: tasks, evaluation, diagnostics and commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from prefed.core import Callback, Download, Exchange, Plain, Round, State, Upload
from prefed.core.text import pluralize, timed
from prefed.core.wire import decode_state, encode
from prefed.engines.backends import Backend, peak_memory_mb
from prefed.engines.cohorts import ScheduledRound
from prefed.engines.config import DIAGNOSE
from prefed.engines.job import Job, RoundError
from prefed.engines.tasks import ClientStates, Task, TaskResult
from prefed.engines.validation import printable_reason, read_figures, read_upload
from prefed.store import RunWriter
from prefed.train.metrics import (
    LEADING_METRICS,
    MEAN_METRICS,
    SHIFT_ERROR,
    SHIFT_METRICS,
    error_of_mean,
    federated_metrics,
    not_finite_counts,
)
from prefed.train.metrics.run_warnings import collapse_warning, divergence_warning, shift_warning

if TYPE_CHECKING:
    from prefed.core.records import RoundRecord, TextRecord
    from prefed.engines.stopping import Standing
    from prefed.train.metrics import FederatedMetric

NO_ANSWER = "no answer"


@dataclass
class Tally:
    """Totals of a round.

    Attributes:
        communicated: number of tensor elements in the largest upload.
        dropped: ``client``, ``exchange`` and ``reason`` of each upload that was not merged.
        figures: metrics and other fields for the round's record.
        bad: the client of each invalid upload.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    communicated: int = 0
    dropped: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, Plain] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def drop(self, exchange: Exchange, client: str, reason: str) -> str:
        """Record why an upload was not merged; return the reason in printable form."""
        text = printable_reason(reason)
        self.dropped.append({"client": client, "exchange": exchange.name, "reason": text})
        return text

    def add(self, exchange: Exchange, uploads: Sequence[Upload], report: Mapping[str, Plain]) -> None:
        """Record the metrics of an exchange: weighted means of the uploads' scalars, and the method's."""
        sizes = (sum(group.layout.size for group in upload.tensors.values()) for upload in uploads)
        self.communicated = max(self.communicated, *sizes)
        means: dict[str, Plain] = {name: _weighted_mean(uploads, name) for name in sorted(exchange.scalars)}
        for name, value in [*means.items(), *report.items()]:
            if value is not None:
                # If two exchanges have a metric of the same name, the later one is prefixed.
                self.figures[f"{exchange.name}_{name}" if name in self.figures else name] = value


@dataclass(frozen=True)
class Evaluated:
    """The result of the evaluation after a round.

    Attributes:
        record: fields for the round's record, see :meth:`Course.evaluate`; ``None`` if there are no metrics.
        standing: early-stopping state; ``None`` without early stopping.
    """

    record: dict[str, Any] | None
    standing: Standing | None = None


class Answers(Protocol):
    """Lets models answer prompts after a round, as :class:`prefed.runs.answers.RoundAnswers`."""

    def __call__(
        self,
        server: State,
        publish: Callable[[str], Download],
        states: ClientStates | None,
        number: int,
        *,
        last: bool,
    ) -> TextRecord | None:
        """Write the answers that are due after round ``number``; return the health of their text, if any."""


@dataclass(frozen=True)
class Course(ABC):
    """Base class of the rounds of a run. Subclasses define a round.

    Attributes:
        answers: writes what the models answer after a round; ``None``: nothing.
        writer: writer of a started run, which continues after the last committed round.
        callback: receives every event. An exception that it raises ends the run; committed rounds are kept.
    """

    job: Job
    writer: RunWriter
    backend: Backend
    callback: Callback
    answers: Answers | None = field(default=None, kw_only=True)

    def run(self) -> State:
        """Run and commit the remaining rounds; return the final server state."""
        server = decode_state(self.writer.server())
        self.callback.on_run_begin(self.writer.round, self.job.rounds)
        try:
            for plan in self.job.schedule(self.writer.round):
                if self.writer.stopped:
                    break
                server = self._round(server, plan)
        finally:
            self.callback.on_run_end()
        return server

    @abstractmethod
    def _round(self, server: State, plan: ScheduledRound) -> State:
        """Run and commit a round; return the next server state."""

    def begin(self, number: int) -> None:
        """Start a round. If repeating it would cost privacy again, the start is recorded on disk first.

        Raises:
            AccountantError: there is noise, and the accountant is not installed.
        """
        if self.job.privacy.noise:
            from prefed.privacy.accountant import require

            require()
        self.writer.begin_round()
        if self.job.privacy.draws == "system":
            self.writer.starts.add(number)

    def ask(
        self, what: str, number: int, tasks: Iterable[Task], of: int, done: int = 0
    ) -> Iterator[TaskResult]:
        """Run ``tasks`` and yield the first result of each. Unexpected results are ignored.

        Args:
            what: name of the exchange, or ``"evaluation"``.
            of: number of expected answers for progress, of which ``done`` have arrived.
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
                    self.warn(number, f"ignored an unexpected result of {who} in {what!r}")
                    continue
                waiting.remove((result.client, result.asked))
                done += 1
                yield result
                self.callback.on_task_end(what, done, of)

    def upload_of(self, result: TaskResult, exchange: Exchange, now: Round) -> tuple[Upload | None, str]:
        """Decode and validate the upload of a visit; return it, or ``None`` and the reason.

        Args:
            now: the round in which the client was asked.
        """
        if result.withheld:
            return None, result.withheld
        return read_upload(self.job, result.message, result.client, exchange, now)

    def warn(self, number: int, text: str) -> None:
        """Issue a warning about a round."""
        self.callback.on_warning(f"round {number}: {text}")

    def diagnose(self, server: State, now: Round, tally: Tally) -> None:
        """Add the diagnostics of the round, if it has any, to its metrics.

        Clients with fewer pairs than ``[privacy] minimum_pairs`` are left out.

        Args:
            server: the server's state, whose published models are diagnosed.
        """
        job = self.job
        if job.diagnostics is None or now.number % job.diagnostics.every:
            return
        from prefed.engines.diagnostics import Diagnosis

        diagnosis, number = Diagnosis(job.diagnostics), now.number
        clients = [client for client in job.members if job.privacy.may_report(job.weights[client])]

        def task(client: str) -> Task:
            message = encode(job.diagnosis.send(server, client, now))
            return Task("visit", client, number, DIAGNOSE, message)

        waiting, uploads = list(clients), dict[str, Upload]()
        for result in self.ask(DIAGNOSE, number, map(task, clients), len(clients)):
            upload, reason = self.upload_of(result, job.diagnosis, now)
            if upload is None:
                self.warn(number, f"{result.client!r} is not diagnosed: {printable_reason(reason)}")
                waiting.remove(result.client)
            else:
                uploads[result.client] = upload
            # Add in the order of the clients, and keep only uploads that arrived early.
            while waiting and waiting[0] in uploads:
                diagnosis.add(uploads.pop(waiting.pop(0)))
        for client in sorted(uploads):
            diagnosis.add(uploads[client])
        tally.figures |= diagnosis.figures()

    def evaluate(self, server: State, publish: Callable[[str], Download], number: int) -> Evaluated | None:
        """Evaluate each client's model on its own pairs, and also for early stopping if that is configured.

        Models also answer the prompts that are due. Clients with fewer pairs than ``[privacy] minimum_pairs``
        count only in means.

        Args:
            server: the server's state after the round.
            publish: client → its download.

        Returns:
            ``None`` if the round ends without an evaluation. The record is ``None`` if no client's metrics
            may be listed. Its fields are:

            - the metrics of the clients' scores: accuracies as a
              :class:`~prefed.train.metrics.FederatedMetric`, others as means over clients;
            - ``shared_accuracy`` of the published model, for personal methods;
            - ``text``, the health of the models' answers, if they are measured;
            - under distributed noise instead the means of some metrics, see :meth:`measure`;
            - with newcomers, ``unseen_accuracy`` for each number of local steps, and for several selectors
              ``unseen_selectors``: the accuracy of each and of their vote;
            - ``split``, ``clients`` (number evaluated) and ``left_out`` (number without pairs in the split);
            - ``not_evaluated``: client → why it has no valid metrics, if there is any such client;
            - ``not_finite``: client → pairs without a finite log-probability, if there are any.

        Raises:
            RoundError: there are no metrics after the last round, and the summary needs them.
        """
        job = self.job
        text = self._text(server, publish, number, last=number == job.rounds)
        if not job.evaluates(number):
            return None
        evaluation, metrics = self.measure(publish, number)
        if not metrics:
            problem = "no client has valid metrics"
            if number == job.rounds:
                raise RoundError(
                    f"round {number}: {problem} after the last round. Earlier rounds are kept: resume the run"
                )
            self.warn(number, f"{problem}; the evaluation is skipped")
            return Evaluated(None)
        standing = self._judge(publish, number, metrics, text)
        if text is None and standing is not None and standing.stopped:
            text = self._text(server, publish, number, last=True)
        last: Mapping[str, Any] = self.writer.last or {}
        before = last.get("evaluation", {})
        if warning := shift_warning(evaluation, before):
            self.warn(number, warning)
        if text is not None:
            evaluation["text"] = text
            from prefed.train.metrics import text_warning

            if warning := text_warning(text, before.get("text")):
                self.warn(number, warning)
        return Evaluated(evaluation, standing)

    def measure(
        self, publish: Callable[[str], Download], number: int
    ) -> tuple[dict[str, Any], Mapping[str, FederatedMetric]]:
        """The record of an evaluation without ``text``, and the metrics over clients; both may be empty."""
        job = self.job
        answers, reasons = self.ask_metrics(publish, number, (*job.evaluation_clients, *job.newcomers))
        pairs = self._pairs(job.evaluate.split)
        figures, metrics = self._metrics(answers, job.evaluation_clients, pairs)
        _, unseen = self._metrics(answers, job.newcomers, pairs)
        if not metrics:
            return {}, {}
        evaluation: dict[str, Any] = {name: metrics[name] for name in metrics if name not in MEAN_METRICS}
        evaluation |= {name: metrics[name]["mean"] for name in MEAN_METRICS if name in metrics}
        if SHIFT_ERROR in metrics:
            evaluation[SHIFT_ERROR] = error_of_mean(metrics[SHIFT_ERROR]["per_client"])
        if unseen:
            steps = {name: unseen[name] for name in job.newcomer_figures}
            evaluation["unseen_accuracy"] = steps
            if job.jury:
                evaluation["unseen_selectors"] = {name: unseen[name] for name in unseen if name not in steps}
        elif job.newcomers:
            self.warn(number, "no newcomer has valid metrics; unseen_accuracy is missing")
        if reasons:
            evaluation["not_evaluated"] = reasons
        broken = not_finite_counts(figures)
        if broken:
            evaluation["not_finite"] = broken
            self.warn(number, divergence_warning(broken, pairs))
        left_out = sum(not count for count in pairs.values())
        return evaluation | {
            "split": job.evaluate.split,
            "clients": len(figures),
            "left_out": left_out,
        }, metrics

    def _text(
        self, server: State, publish: Callable[[str], Download], number: int, *, last: bool
    ) -> TextRecord | None:
        if self.answers is None:
            return None
        return self.answers(server, publish, self.backend.states, number, last=last)

    def _judge(
        self,
        publish: Callable[[str], Download],
        number: int,
        metrics: Mapping[str, FederatedMetric],
        text: TextRecord | None,
    ) -> Standing | None:
        """The early-stopping state after a round.

        Args:
            metrics: metrics over clients on the job's split.
            text: health of the models' text; a round of worse text than the base model's is not the best.
        """
        job, before = self.job, self.writer.commit.best if self.writer.commit else None
        if job.stop is None:
            return None
        from prefed.engines.stopping import Standing, judge
        from prefed.train.metrics import broken_text

        if job.evaluate.split != "validation":
            answers, _ = self.ask_metrics(publish, number, job.validation_clients, "validation")
            _, metrics = self._metrics(answers, job.validation_clients, self._pairs("validation"))
        if not metrics:
            self.warn(number, "no client has valid validation metrics; early stopping ignores this round")
            return None if before is None else Standing(**before)
        return judge(job.stop, before, number, metrics, healthy=not broken_text(text))

    def ask_metrics(
        self,
        publish: Callable[[str], Download],
        number: int,
        clients: Sequence[str],
        split: Literal["", "validation"] = "",
    ) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """Valid metrics by client, and for each client without them the reason."""
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
        return {client: int(getattr(sizes, split)) for client, sizes in self.job.trainers.clients.items()}

    def _metrics(
        self, answers: Mapping[str, Mapping[str, float]], clients: Sequence[str], pairs: Mapping[str, int]
    ) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, FederatedMetric]]:
        """Each client's metrics, and the metrics over clients if at least one client may be listed."""
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
        """Commit the next round with its record and the run's totals.

        Args:
            evaluated: ``None`` in a round without an evaluation.
            keep: as for :meth:`prefed.store.RunWriter.finish_round`.
        """
        content: dict[str, Any] = {"round": self.writer.round + 1, "loss": tally.figures.get("loss")}
        evaluation, standing = (evaluated.record, evaluated.standing) if evaluated else (None, None)
        if evaluation is not None:
            content |= {name: evaluation[name]["mean"] for name in LEADING_METRICS}
            content |= {name: evaluation[name] for name in SHIFT_METRICS if name in evaluation}
            content["evaluation"] = evaluation
        if self.job.privacy.kind is not None:
            from prefed.engines.privacy import spent

            content["epsilon"] = spent(self.job, content["round"], self.writer.starts.times())
        if standing is not None and standing.last_round == self.writer.round + 1:
            content["validation"] = standing.last
        content |= {"bytes_up": tally.bytes_up, "bytes_down": tally.bytes_down, "seconds": seconds}
        content |= {"cohort": list(cohort), "dropped": tally.dropped}
        figures = {**tally.figures, **self.backend.figures()}
        content |= {name: value for name, value in figures.items() if name not in content}
        record = cast("RoundRecord", content)  # methods and engines may add fields
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
