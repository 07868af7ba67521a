"""What the models of a run write to the prompts of ``[report]``, round by round, in its directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from prefed.config import ConfigError, Experiment, ReportConfig
from prefed.core import Callback, Key, Tensors, files
from prefed.core.records import RoundRecord
from prefed.core.text import timed
from prefed.data import Template
from prefed.data.encoding import continuation_text
from prefed.engines import Job
from prefed.runs.finished_run import ANSWERS, RunRecord, read_answers
from prefed.runs.loaded_run import LoadedRun, no_client
from prefed.runs.summary import mean_models
from prefed.store import RunReader, RunWriter
from prefed.train.generation import (
    Sampling,
    as_prompt,
    complete_batch,
    length_batches,
    prompt_form,
    prompt_ids,
    room_for,
)
from prefed.train.pair_trainer import PairTrainerFactory

BATCH = 16
"""Answers that are generated together."""
SHOWN = 2
"""Clients whose models answer where the experiment names none."""


class RoundAnswers(Callback):
    """Writes the answers after a round, from the states that it committed.

    The base model answers before round 1. Where a run was killed between a round's commit and its
    answers, they are written when it goes on.

    Args:
        personal: whether the clients' private states are here.

    Raises:
        ConfigError: there is no such client, or a prompt fills the model's window.
    """

    def __init__(self, experiment: Experiment, job: Job, writer: RunWriter, *, personal: bool) -> None:
        assert experiment.report is not None
        self._experiment, self._job, self._writer = experiment, job, writer
        self._trainers = cast(PairTrainerFactory, job.trainers)
        self._report, self._how = experiment.report, _greedy(experiment.report)
        self._ids = _prompt_ids(experiment, self._trainers)
        self._clients = _clients(experiment.report, job) if personal else ()

    def on_run_begin(self, done: int, rounds: int) -> None:
        """See that the answers of the last committed round are there."""
        self._write()

    def on_round_end(self, record: RoundRecord) -> None:
        """Write the answers of a round, if it is one of those that are shown."""
        self._write()

    def _write(self) -> None:
        path, number = self._writer.path, self._writer.round
        if not (_doubles(number) or number == self._job.rounds or self._writer.stopped):
            return
        known = read_answers(path) if number else ()
        if any(row.round == number for row in known):
            return
        # A run whose rounds are raised has no answers of what was its last.
        rows = [row.model_dump(exclude_none=True) for row in known if _doubles(row.round)]
        with timed("answers", f"round {number}"):
            for named, tensors in self._models():
                rows += [
                    {"round": number, **named, "prompt": prompt, "text": text}
                    for prompt, text in zip(self._report.prompts, self._texts(tensors), strict=True)
                ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        files.write(path / ANSWERS, text.encode(), mode=0o600)

    def _models(self) -> Iterator[tuple[dict[str, str], Tensors]]:
        """Each model that answers now, and how its rows name it."""
        if not self._writer.round:
            yield {"model": "untouched"}, self._trainers.backbone.reference
            return
        path, reader = self._writer.path, RunReader(self._writer.path)
        for tensors in mean_models(self._job, reader.server()).values():
            yield {"model": "shared"}, tensors
        record = RunRecord(path, self._experiment.tables(), (), cast(Any, {}), {})
        run = LoadedRun(record, self._experiment, reader, self._trainers, self._job)
        for client in self._clients:
            yield {"model": "own", "client": client}, run.model(client)

    def _texts(self, tensors: Tensors) -> list[str]:
        backbone, texts = self._trainers.backbone, dict[int, str]()
        backbone.dropout()
        for batch in length_batches(self._ids, BATCH):
            ids = [self._ids[k] for k in batch]
            responses = complete_batch(backbone, tensors, ids, self._how, [Key(0)] * len(ids))
            for k, own in zip(batch, responses, strict=True):
                texts[k] = continuation_text(backbone.tokenizer, self._ids[k], own.tokens)
        return [texts[k] for k in range(len(texts))]


def check_report(experiment: Experiment, job: Job) -> None:
    """Refuse a table ``[report]`` that cannot be followed, before a run starts.

    Raises:
        ConfigError: there is no such client, or a prompt fills the model's window.
    """
    assert experiment.report is not None
    _clients(experiment.report, job)
    _prompt_ids(experiment, cast(PairTrainerFactory, job.trainers))


def _doubles(number: int) -> bool:
    """Whether a round is one of 0, 1, 2, 4, 8, …

    >>> [number for number in range(20) if _doubles(number)]
    [0, 1, 2, 4, 8, 16]
    """
    return number & (number - 1) == 0


def _greedy(report: ReportConfig) -> Sampling:
    return Sampling(max_tokens=report.max_new_tokens, temperature=0)


def _clients(report: ReportConfig, job: Job) -> tuple[str, ...]:
    """The clients whose own models answer; clients with too few pairs to be reported are none of them."""
    known, privacy = job.trainers.clients, job.privacy
    for client in report.clients or ():
        if client not in known:
            raise ConfigError(f"[report] clients: {no_client(client, sorted(known))}")
    if not job.method.personal:
        return ()
    named = job.members if report.clients is None else report.clients
    told = [client for client in named if privacy.may_report(known[client].train)]
    return tuple(told[:SHOWN] if report.clients is None else told)


def _prompt_ids(experiment: Experiment, trainers: PairTrainerFactory) -> list[list[int]]:
    """The token ids of each prompt, in the form of the run's data."""
    assert experiment.report is not None
    backbone, dataset = trainers.backbone, trainers.dataset
    template = Template(backbone.tokenizer, experiment.data.template)
    like = dataset.tokens.record(0).prompt if dataset.has_pairs else prompt_form(template)
    prompts = (as_prompt(text, like) for text in experiment.report.prompts)
    ids = [prompt_ids(backbone.tokenizer, template, prompt) for prompt in prompts]
    for text, own in zip(experiment.report.prompts, ids, strict=True):
        try:
            room_for(backbone, len(own), _greedy(experiment.report))
        except ValueError as error:
            raise ConfigError(f"[report] prompts: {text[:40]!r}: {error}") from None
    return ids
