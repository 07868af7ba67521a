"""Clients of a finished run that judge completions, and further rounds of its method on what they judged."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefed.align import AlignError, Selectors
from prefed.align.judge.names import ALIKE, split_name
from prefed.align.refresh import HELD_OUT, pair_row
from prefed.align.stages import dumps
from prefed.config import AlignConfig, Experiment, to_toml
from prefed.core import Key, files
from prefed.core.text import listed
from prefed.data import Record
from prefed.engines.privacy import simulated_sites, simulated_votes
from prefed.privacy import noised_votes, vote_noise
from prefed.runs.build import build_data, build_job
from prefed.runs.copy_commits import copy_commits, prepared_run
from prefed.runs.finished_run import read_run
from prefed.runs.labels import ClientVotes, JudgeLabels, make_judge, selectors_of
from prefed.runs.loaded_run import LoadedRun, recorded_experiment
from prefed.runs.rounds import finish_rounds
from prefed.runs.start_or_resume import open_run, settings_digest
from prefed.store import RunReader

_KEPT = {"template", "today", "max_length", "too_long"}
"""Settings of a run's data that also apply to judged pairs."""
ENDED = ("align", "track", "report", "stop", "checkpoint")
"""Tables of a run that its refreshes do not have."""
BY_CLIENT = {"by": "column", "column": "client"}
"""The partition of judged pairs."""


def refreshed_experiment(
    run: Experiment,
    done: int,
    more: int,
    judging: Collection[str],
    clients: Sequence[str],
    data: Mapping[str, Any],
) -> Experiment:
    """Return a run's experiment for further rounds on judged pairs.

    Args:
        done, more: rounds before and in the refresh.
        judging: the clients with such pairs; who judged only ties sits the refresh out.
        clients: those that train in the run.
        data: the sources and the partition of the pairs.

    Raises:
        AlignError: the method cannot do without a client.
    """
    missing = [client for client in clients if client not in judging]
    if missing and getattr(run.method.settings, "prior", "standard") != "standard":
        raise AlignError(
            f"{run.method.name}: a client's prior has the posteriors of all clients, but {listed(missing)} "
            "judged only ties: raise refresh.pairs or temperature"
        )
    tables = run.tables()
    for table in ENDED:
        tables.pop(table, None)
    kept = {name: value for name, value in tables["data"].items() if name in _KEPT}
    if (size := run.cohort.of(len(clients))) is not None:
        tables["cohort"] |= {"size": min(size, len(judging)), "fraction": None}
    ranks = {client: rank for client, rank in run.merge.ranks.items() if client in judging}
    tables |= {
        "rounds": done + more,
        "data": {**kept, **data},
        "merge": {**tables["merge"], "ranks": ranks},
        "evaluate": {"every": 0, "text": 0},
    }
    return Experiment.from_tables(tables, "the refresh")


@dataclass
class RunClients:
    """The clients of a run on this machine.

    Attributes:
        run: loaded with its data.
    """

    run: LoadedRun
    config: AlignConfig

    @cached_property
    def names(self) -> Sequence[str]:
        """The clients that train."""
        return self.run.job.members

    @cached_property
    def scorers(self) -> Mapping[str, JudgeLabels]:
        """Client → its judge, with the client's taste; the same one for all if judges have no taste."""
        name, options = self.config.client_judge, self.config.judge_options
        assert name is not None
        if split_name(name)[0] in ALIKE:
            return dict.fromkeys(self.names, JudgeLabels(make_judge(name, options, self.run)))
        tastes = {client: options.model_copy(update={"taste": client}) for client in self.names}
        return {client: JudgeLabels(make_judge(name, own, self.run)) for client, own in tastes.items()}

    @property
    def votes(self) -> ClientVotes:
        """See :class:`prefed.align.Clients`."""
        return ClientVotes([*self.scorers.values()])

    def noised(self, pairs: Sequence[Record], request: str, number: int) -> NDArray[np.int64]:
        """See :class:`prefed.align.Clients`; noise of other votes is another one."""
        privacy, (_, votes) = self.run.job.privacy, self.votes.scores(pairs)
        named = Key(self.run.experiment.seed).at("align").at("votes", request)
        key = None if privacy.draws == "system" else named
        if privacy.kind == "distributed":
            return simulated_votes(self.run.job, votes, key)
        return noised_votes(votes, privacy, key)

    def noise(self, pairs: int) -> float:
        """See :class:`prefed.align.Clients`."""
        job = self.run.job
        return vote_noise(job.privacy, len(self.names), pairs, simulated_sites(job))

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """See :class:`prefed.align.Clients`."""
        return {client: scorer.judge.identity for client, scorer in self.scorers.items()}

    @property
    def judge(self) -> None:
        """See :class:`prefed.align.Clients`."""

    def train(self, pairs: Path, before: Sequence[Path], folder: Path) -> str:
        """Continue the run, or the last refresh, on judged pairs; see :class:`prefed.align.Clients`.

        ``folder`` is then a run directory, with the states and rounds of the continued run.

        Raises:
            RoundError: no client answered.
        """
        record = read_run(before[-1] if before else self.run.record.path)
        commit = replace(RunReader(record.path).commit, best=None)
        if not folder.exists():
            files.write(pairs.with_name(HELD_OUT), dumps(self._held_out()), mode=0o600)
        experiment = self._experiment(commit.round, pairs)
        if not folder.exists():
            with prepared_run(folder) as partial:
                data = build_data(experiment, partial / "cache" / "data").fingerprint
                files.write(partial / "config.toml", to_toml(experiment).encode())
                settings = settings_digest(experiment.tables())
                copy_commits(record.path, partial, {commit.round: commit}, data, settings)
        with open_run(experiment, folder, [], resume=True) as (writer, callback):
            finish_rounds(experiment, writer, callback, build_job)
        return RunReader(folder).commit.digests.server or ""

    def _held_out(self) -> Iterator[Mapping[str, Any]]:
        """Yield the clients' pairs that the run evaluates on."""
        job, dataset = self.run.job, self.run.trainers.dataset
        for client in self.names:
            for row in getattr(dataset.clients[client], job.evaluate.split):
                yield pair_row(client, dataset.tokens.record(row))

    def _experiment(self, done: int, pairs: Path) -> Experiment:
        judging = {json.loads(line)["client"] for line in pairs.read_bytes().splitlines()}
        data: dict[str, Any] = {"train": str(pairs.resolve()), "partition": BY_CLIENT}
        if (held_out := pairs.with_name(HELD_OUT)).stat().st_size:
            data["test"] = str(held_out.resolve())
        assert self.config.refresh is not None
        old, rounds = recorded_experiment(self.run.record), self.config.refresh.rounds
        return refreshed_experiment(old, done, rounds, judging, self.names, data)

    def selectors(self, folder: Path) -> Selectors:
        """Return the selectors of a refresh."""
        return selectors_of(replace(self.run, reader=RunReader(folder)), self.config.taste)
