"""What the models of a run write, round by round: ``answers.jsonl``, and the health of their text.

Two kinds of prompts are answered: those of ``[report]``, by the base model, the shared one and the chosen
clients' own, and held-out ones, by the base model, the shared one and that of the client with the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias, cast

import numpy as np

from prefed.config import ConfigError, Experiment, ReportConfig
from prefed.core import Download, State, Tensors, files
from prefed.core.records import TextRecord
from prefed.core.text import timed
from prefed.core.wire import decode_state
from prefed.data import Template
from prefed.data.record import plain_prompt
from prefed.engines import ClientStates, Job
from prefed.models import Backbone
from prefed.runs.build import answered_prompts
from prefed.runs.finished_run import ANSWERS, SITE_TEXT, Answer, no_client, prompt_text, read_answers
from prefed.runs.summary import mean_models
from prefed.train.generation import (
    BATCH,
    Completion,
    Sampling,
    as_prompt,
    padded_batches,
    prompt_form,
    room_for,
    surprises,
    write_answers,
)
from prefed.train.metrics import WrittenAnswer, health_sentence, text_health
from prefed.train.metrics.text import BAND
from prefed.train.pair_trainer import PairTrainerFactory

SHOWN = 2
"""Clients whose models answer where ``[report]`` names none."""
TOKENS = (64, 256)
"""Lowest and highest limit of tokens in an answer, where ``[report]`` sets none."""

_Model: TypeAlias = tuple[Literal["shared", "own"], str | None, Tensors]
"""A trained model that answers: whose it is, and its client."""
_Written: TypeAlias = dict[str, list[tuple[str | None, WrittenAnswer]]]
"""Model → its measured answers, with the client whose own it is."""


@dataclass(frozen=True)
class _Asked:
    """A prompt.

    Attributes:
        prompt: as ``answers.jsonl`` has it.
        turn: text of its last turn.
        clients: those whose own models answer.
        holder: the client that holds it; ``None`` for a prompt of ``[report]``.
        chosen: token ids of the chosen response of a held-out pair.
    """

    prompt: str
    turn: str
    ids: tuple[int, ...]
    clients: tuple[str, ...] = ()
    holder: str | None = None
    chosen: tuple[int, ...] = ()


class _Answers:
    """The held-out prompts of a run, and what its models answer to them.

    Attributes:
        limit: maximum number of tokens in an answer.
    """

    def __init__(self, experiment: Experiment, job: Job, folder: Path, *, own: bool) -> None:
        self._job, self._folder, self._own = job, folder, own and has_own_models(job)
        self._trainers = cast(PairTrainerFactory, job.trainers)
        self.limit = _limit(experiment, job)
        self._how = Sampling(max_tokens=self.limit, temperature=0)
        count = answered_prompts(experiment, self._trainers.backbone.tokenizer)
        self._held_out = held_out_prompts(job, count, self._how, own=self._own)
        self._often = experiment.stop is not None or bool(experiment.evaluate.text)
        self._base = dict[_Asked, WrittenAnswer]()

    def _measures(self, number: int, *, last: bool) -> bool:
        return last or (self._often and self._job.evaluates(number))

    def _kept(self, number: int) -> list[Answer]:
        """The rows of earlier rounds that stay: if rounds are raised, none of the former last one."""
        return [row for row in read_answers(self._folder) if row.round < number and _doubles(row.round)]

    def _answer(
        self,
        number: int,
        due: Sequence[_Asked],
        measured: Collection[_Asked],
        known: Sequence[Answer],
        models: Iterable[_Model],
    ) -> tuple[list[Answer], _Written]:
        """Let the base model and ``models`` answer; return the rows of the file, and the measured answers.

        Args:
            measured: those of ``due`` whose answers are measured.
            known: the rows that stay.
        """
        rows, answers = list[Answer](), _Written()
        shared = list[tuple[Tensors, dict[_Asked, WrittenAnswer]]]()
        with timed("answers", f"round {number}"):
            shown = {(row.prompt, row.holder) for row in known if row.model == "untouched"}
            new = [each for each in due if each in measured or (each.prompt, each.holder) not in shown]
            self._base |= self.write(
                self._trainers.backbone.reference, [each for each in new if each not in self._base]
            )
            first = [_row(0, "untouched", None, each, self._base[each]) for each in new]
            known = [*known, *(row for row in first if (row.prompt, row.holder) not in shown)]
            answers["base"] = [(None, self._base[each]) for each in due if each in measured]
            for model, client, tensors in models:
                asked = [each for each in due if client is None or client in each.clients]
                # A client without personal parts, such as a peer, has the published model.
                same = next((written for each, written in shared if each.equal(tensors)), None)
                written = same or self.write(tensors, asked)
                shared += [(tensors, written)] if model == "shared" else []
                rows += [_row(number, model, client, each, written[each]) for each in asked]
                own = [(client, written[each]) for each in asked if each in measured]
                answers[model] = [*answers.get(model, ()), *own]
        return [*sorted(known, key=lambda row: row.round), *rows], answers

    def _record(self, answers: _Written) -> TextRecord:
        record = _health(answers)
        if self._chosen:
            record["base"]["chosen_surprise"] = float(np.quantile(self._chosen, BAND[1]))
        return record

    @cached_property
    def _chosen(self) -> list[float]:
        """Surprise of the chosen responses to the held-out prompts."""
        known = [each for each in self._held_out if each.chosen]
        chosen = [Completion([*each.chosen[:-1]], each.chosen[-1]) for each in known]
        return surprises(self._trainers.backbone, [each.ids for each in known], chosen)

    def batches(self, asked: Sequence[_Asked]) -> list[list[_Asked]]:
        """Group prompts into those that are answered together."""
        batches = padded_batches(self._trainers.backbone, [each.ids for each in asked], self._how, BATCH)
        return [[asked[number] for number in batch] for batch in batches]

    def write(
        self, tensors: Tensors, asked: Sequence[_Asked], limit: int | None = None
    ) -> dict[_Asked, WrittenAnswer]:
        """Generate the answers of a model, and score them with the base model.

        Args:
            limit: maximum number of tokens (default: the run's).
        """
        how = self._how.model_copy(update={"max_tokens": limit or self.limit})
        prompts = [(each.turn, each.ids) for each in asked]
        written = write_answers(self._trainers.backbone, tensors, prompts, how, BATCH)
        return dict(zip(asked, written, strict=True))


class RoundAnswers(_Answers):
    """Writes the answers of a round before its commit, and measures those to held-out prompts.

    Prompts of ``[report]`` are answered after rounds 1, 2, 4, 8, … and the last. Held-out prompts are
    answered after the last round, and after every evaluation if ``[evaluate] text`` or ``[stop]`` is set. A
    hub, which has none, measures the answers to the prompts of ``[report]``.

    Args:
        folder: the run directory.
        personal: whether the clients' private states are here.

    Raises:
        ConfigError: there is no such client, or a prompt fills the model's window.
    """

    def __init__(self, experiment: Experiment, job: Job, folder: Path, *, personal: bool = True) -> None:
        super().__init__(experiment, job, folder, own=personal)
        self._reported = _of_report(experiment, job, self._how, own=self._own) if experiment.report else []

    def __call__(
        self,
        server: State,
        publish: Callable[[str], Download],
        states: ClientStates | None,
        number: int,
        *,
        last: bool,
    ) -> TextRecord | None:
        """Write the answers that are due after round ``number``; return the health of their text.

        Args:
            server: the server's state after the round.
            publish: client → its download after the round.
            states: the clients' private states after the round, if they are here.
            last: the run ends with this round.

        Returns:
            ``None`` if no answers are measured.
        """
        measures, due = self._measures(number, last=last), self._due(number, last=last)
        if not due:
            return None
        measured = {*(self._held_out or self._reported)} if measures else set[_Asked]()
        models = self._models(server, publish, states, number, due)
        rows, answers = self._answer(number, due, measured, self._kept(number), models)
        _save(self._folder, rows)
        return self._record(answers) if measured else None

    def planned(self, shared: int) -> list[list[_Asked]]:
        """The prompts of each model in each round of a run, and those of the base model.

        Args:
            shared: number of published models.
        """
        calls, known = list[list[_Asked]](), set[_Asked]()
        for number in range(1, self._job.rounds + 1):
            due = self._due(number, last=number == self._job.rounds)
            calls += [[each for each in due if each not in known], *[due] * shared]
            clients = dict.fromkeys(client for each in due for client in each.clients)
            calls += [[each for each in due if client in each.clients] for client in clients]
            known |= {*due}
        return [call for call in calls if call]

    def _due(self, number: int, *, last: bool) -> list[_Asked]:
        reported = self._reported if last or _doubles(number) else ()
        return [*reported, *(self._held_out if self._measures(number, last=last) else ())]

    def _models(
        self,
        server: State,
        publish: Callable[[str], Download],
        states: ClientStates | None,
        number: int,
        due: Sequence[_Asked],
    ) -> Iterator[_Model]:
        """Each trained model that answers."""
        for tensors in mean_models(self._job, server).values():
            yield "shared", None, tensors
        job = self._job
        for client in dict.fromkeys(client for each in due for client in each.clients):
            stored = None if states is None else states.read(client)
            first = job.method.init_client(job.trainers.initial, client) if stored is None else None
            private = decode_state(stored) if stored is not None else cast(State, first)
            yield "own", client, job.client_model(client, private, publish(client), number)


class SiteAnswers(_Answers):
    """Lets the models of a site's clients answer these clients' prompts when they are evaluated.

    It writes ``answers.jsonl``, as a run does, and the health of the answers so far in the round to
    :data:`SITE_TEXT`. Both stay at the site, like the prompts. The rounds are those of :class:`RoundAnswers`.

    Args:
        folder: the run's folder at the site.
    """

    def __init__(self, experiment: Experiment, job: Job, folder: Path) -> None:
        super().__init__(experiment, job, folder, own=True)
        self._number, self._written = 0, dict[str, _Written]()

    def __call__(self, client: str, private: State, published: Download, number: int) -> str:
        """Write the answers to the prompts of ``client``; return their health as a sentence, ``""`` without.

        Args:
            private: the client's private state after round ``number``.
            published: its download after the round.
        """
        job, due = self._job, [each for each in self._held_out if each.holder == client]
        if not due or not self._measures(number, last=number == job.rounds):
            return ""
        if number != self._number:
            self._number, self._written = number, {}
        shared = job.shared_models(published).values() if published.tensors else ()
        models: list[_Model] = [("shared", None, tensors) for tensors in shared]
        if self._own:
            models.append(("own", client, job.client_model(client, private, published, number)))
        # Other clients have answered in this round, too.
        others = [row for row in read_answers(self._folder) if row.round == number and row.holder != client]
        rows, answers = self._answer(number, due, due, [*self._kept(number), *others], models)
        _save(self._folder, rows)
        self._written[client] = answers
        pooled = _Written()
        for _, each in sorted(self._written.items()):
            for model, some in each.items():
                pooled[model] = [*pooled.get(model, ()), *some]
        content = {"round": number, "text": self._record(pooled)}
        files.write(self._folder / SITE_TEXT, json.dumps(content, indent=1).encode(), mode=0o600)
        return health_sentence(self._record(answers))


def has_own_models(job: Job) -> bool:
    """Whether clients' models differ: they have personal parts, or mix with their neighbours' only."""
    return job.method.personal or job.graph is not None


def _save(folder: Path, rows: Sequence[Answer]) -> None:
    lines = (row.model_dump(exclude_none=True) for row in rows)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.write(folder / ANSWERS, text.encode(), mode=0o600)


def _health(answers: _Written) -> TextRecord:
    """The health of each model's answers, given as (client, answer)."""
    record = {name: text_health([own for _, own in some]) for name, some in answers.items() if some}
    if "own" in record:
        by_client: dict[str, list[WrittenAnswer]] = {}
        for client, own in answers["own"]:
            by_client.setdefault(str(client), []).append(own)
        record["own"]["per_client"] = {name: text_health(some) for name, some in sorted(by_client.items())}
    return cast(TextRecord, record)


def _row(
    number: int,
    model: Literal["untouched", "shared", "own"],
    client: str | None,
    asked: _Asked,
    answer: WrittenAnswer,
) -> Answer:
    return Answer(
        round=number,
        model=model,
        client=client,
        holder=asked.holder,
        prompt=asked.prompt,
        text=answer.text,
        ended=answer.ended,
        surprise=round(answer.surprise, 4),
    )


def _doubles(number: int) -> bool:
    """Whether a round is one of 0, 1, 2, 4, 8, …

    >>> [number for number in range(20) if _doubles(number)]
    [0, 1, 2, 4, 8, 16]
    """
    return number & (number - 1) == 0


def _limit(experiment: Experiment, job: Job) -> int:
    """The maximum number of tokens in an answer: twice those of the longest held-out chosen response.

    Whether a longer answer would end does not matter, because no client chose one that long.
    """
    if experiment.report is not None and experiment.report.max_new_tokens is not None:
        return experiment.report.max_new_tokens
    dataset = cast(PairTrainerFactory, job.trainers).dataset
    if not dataset.has_pairs:
        return TOKENS[1]
    held = [
        getattr(dataset.clients[c], job.evaluate.split)
        for c in job.evaluation_clients
        if c in dataset.clients
    ]
    if not (rows := [row for each in held for row in each]):
        return TOKENS[1]
    return int(np.clip(2 * dataset.tokens.lengths[rows][:, 1].max(), *TOKENS))


def held_out_prompts(job: Job, count: int, how: Sampling, *, own: bool) -> list[_Asked]:
    """The first ``count`` different prompts of the pairs that clients are evaluated on.

    Clients take turns, in the order of their names, and each gives its first prompt that no client has given.
    Prompts that fill the model's context are skipped. Clients with fewer pairs than ``[privacy]
    minimum_pairs`` give none.

    Args:
        own: the models of the clients that hold them answer, too.
    """
    trainers = cast(PairTrainerFactory, job.trainers)
    backbone, dataset = trainers.backbone, trainers.dataset
    if not count or not dataset.has_pairs:
        return []
    holders = {
        client: iter(getattr(dataset.clients[client], job.evaluate.split).tolist())
        for client in job.evaluation_clients
        if client in dataset.clients
        and job.privacy.may_report(getattr(job.trainers.clients[client], job.evaluate.split))
    }
    found, seen = list[_Asked](), set[tuple[int, ...]]()
    while holders and len(found) < count:
        for client in list(holders):
            for row in holders[client]:
                pair = dataset.tokens.pair(row)
                ids = tuple(pair.prompt.tolist())
                if ids in seen or not _fits(backbone, len(ids), how):
                    continue
                seen.add(ids)
                prompt = dataset.tokens.record(row).prompt
                turn = prompt if isinstance(prompt, str) else prompt[-1].content
                single = isinstance(prompt, str) or len(prompt) == 1
                whole = turn if single else prompt_text(plain_prompt(prompt))
                chosen = tuple(pair.chosen.tolist()) if len(pair.rejected) else ()
                found.append(_Asked(whole, turn, ids, (client,) if own else (), client, chosen))
                break
            else:
                del holders[client]
    return found[:count]


def _fits(backbone: Backbone, length: int, how: Sampling) -> bool:
    try:
        return room_for(backbone, length, how) > 0
    except ValueError:
        return False


def check_report(experiment: Experiment, job: Job) -> None:
    """Check that the prompts of ``[report]`` can be answered.

    Raises:
        ConfigError: there is no such client, or a prompt fills the model's window.
    """
    _of_report(experiment, job, Sampling(max_tokens=_limit(experiment, job), temperature=0), own=False)


def _of_report(experiment: Experiment, job: Job, how: Sampling, *, own: bool) -> list[_Asked]:
    """The prompts of ``[report]``, in the form of the run's data."""
    assert experiment.report is not None
    trainers = cast(PairTrainerFactory, job.trainers)
    backbone, dataset, clients = trainers.backbone, trainers.dataset, _clients(experiment.report, job)
    template = Template.of(backbone.tokenizer, experiment.data)
    like = dataset.tokens.record(0).prompt if dataset.has_pairs else prompt_form(template)
    found = []
    for text in experiment.report.prompts:
        ids = template.prompt_ids(as_prompt(text, like))
        try:
            room_for(backbone, len(ids), how)
        except ValueError as error:
            raise ConfigError(f"[report] prompts: {text[:40]!r}: {error}") from None
        found.append(_Asked(text, text, tuple(ids), clients if own else ()))
    return found


def _clients(report: ReportConfig, job: Job) -> tuple[str, ...]:
    """The clients whose own models answer; clients with too few pairs to be reported are none of them."""
    known, privacy = job.trainers.clients, job.privacy
    named = None if report.clients is None else [c for c in report.clients if c not in job.absent]
    for client in named or ():
        if client not in known:
            raise ConfigError(f"[report] clients: {no_client(client, sorted(known))}")
    if not has_own_models(job):
        return ()
    reported = [
        client
        for client in (job.members if named is None else named)
        if privacy.may_report(known[client].train)
    ]
    return tuple(reported[:SHOWN] if report.clients is None else reported)
