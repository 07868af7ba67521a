"""A finished run with its model in place: any client's tensors, ready to be judged, exported or talked to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from pydantic import ValidationError

from prefed import files
from prefed.config import Experiment
from prefed.config.errors import explain
from prefed.core import Download, Method, State, Tensors
from prefed.data import ClientData, FederatedDataset, Report, TokenSet
from prefed.engines import Job
from prefed.runs.build import job_over, build_data, build_trainers
from prefed.models import Backbone
from prefed.runs.record import RunError, RunRecord, nearest_clients, read_run
from prefed.runs.resume import settings_digest
from prefed.store import RunReader, StoreError
from prefed.train.trainer_factory import PairTrainerFactory

__all__ = ["LoadedRun", "load_run"]


@dataclass(frozen=True)
class LoadedRun:
    """A finished run, its base model loaded and its method built.

    Attributes:
        record: what the run directory tells without a model.
        experiment: as it was run.
        checkpoint: the states that the run left.
        backbone: the frozen model; ``backbone.load(run.model(client))`` puts a client's tensors into it.
        place: the bench over the run's own data.
        job: what was run, on ``place``.
        has_data: whether the run's pairs are there; without, nobody has any.
    """

    record: RunRecord
    experiment: Experiment
    checkpoint: RunReader
    backbone: Backbone
    place: PairTrainerFactory
    job: Job
    has_data: bool

    @cached_property
    def server(self) -> State:
        """The server's state after the last round."""
        return self.checkpoint.server()

    @property
    def method(self) -> Method:
        """What was run."""
        return self.job.method

    @property
    def clients(self) -> tuple[str, ...]:
        """Every client of the federation, sorted."""
        return tuple(sorted(self.place.clients))

    @property
    def seen(self) -> tuple[str, ...]:
        """The clients that took part, sorted: all but those set apart as unseen."""
        return tuple(client for client in self.clients if client not in self.job.unseen)

    def check(self, client: str) -> str:
        """``client``, if the run has it.

        Raises:
            RunError: it has not; the message has the nearest names.
        """
        if client not in self.place.clients:
            raise RunError(f"{self.record.path}: {nearest_clients(client, self.clients)}")
        return client

    def private(self, client: str) -> State:
        """What ``client`` keeps to itself after the last round.

        Raises:
            RunError: there is no such client.
        """
        kept = self.checkpoint.client(self.check(client))
        return self.method.init_client(self.backbone.initial, client) if kept is None else kept

    def model(self, client: str, private: State | None = None) -> Tensors:
        """The tensors (full layout) with which ``client`` predicts after the last round.

        A client that never took part has what the server published and parts as they start.

        Args:
            client: whose.
            private: what :meth:`private` gave, if it is at hand.

        Raises:
            RunError: there is no such client.
            ValueError: the method would have to train first, and the run's data are not there.
        """
        # The randomness of the last evaluation, for methods that take steps before they predict.
        now = self.job.round(self.checkpoint.commit.round)
        key = now.key.at("predict").at("client", self.check(client))
        trainer = self.place.trainer(client, now, key, self.method.ownership)
        kept = self.private(client) if private is None else private
        return self.method.predict(trainer, kept, self.method.publish(self.server, client))

    def shared(self, client: str) -> Tensors:
        """What the server published to ``client``, without the client's own parts (full layout)."""
        return self.job.shared(self.method.publish(self.server, self.check(client)))

    @cached_property
    def published(self) -> Tensors:
        """The one model (full layout) that the server publishes to everybody.

        Raises:
            RunError: the method shares no model, or gives each client another.
        """
        first: Download | None = None
        for client in self.clients:
            download = self.method.publish(self.server, client)
            first = first or download
            if not download.tensors:
                raise RunError(f"{self.method.name} shares no model: name a client with --client")
            if not _same(first, download):
                raise RunError(
                    f"{self.method.name} gives each client a model of its own: name a client with --client"
                )
        assert first is not None
        return self.job.shared(first)


def load_run(path: str | Path, *, data: bool = False) -> LoadedRun:
    """Load a finished run's base model and states.

    Args:
        path: the run directory.
        data: the run's pairs are needed. Tokens that the run has kept are used; where they were deleted they
            are made again from the sources. Without, what is missing is done without.

    Raises:
        RunError: there is no finished run, or its model or its data are not what they were.
        ModelError, DataError: the base model or the data cannot be loaded.
    """
    record = read_run(path)
    try:
        checkpoint = RunReader(path)
    except StoreError as error:
        raise RunError(f"{path} has lost its checkpoint/, which holds the model: {error}") from error
    begun = checkpoint.commit.settings
    if begun is not None and settings_digest(record.config) != begun:
        where = f"{record.path / 'config.toml'} is not what its run was begun with"
        raise RunError(f"{where}; put a copy of it back")
    experiment = _experiment(record)
    cache = Path(path) / "cache"
    kept = (cache / "data").is_dir()
    has_data = kept or data
    if has_data and not kept:
        files.private(cache)
    if has_data:
        federation = FederatedDataset.open(cache / "data") if kept else build_data(experiment, cache / "data")
        place = build_trainers(experiment, federation, cache / "reference")
    else:
        kind = partial(_Empty, record.summary["clients"])
        place = build_trainers(experiment, _without_data(record), None, kind)
    _unchanged(record, place, has_data)
    job = job_over(experiment, place)
    return LoadedRun(record, experiment, checkpoint, place.backbone, place, job, has_data)


def _experiment(record: RunRecord) -> Experiment:
    held = dict(record.config)
    try:
        return Experiment.model_validate(held)
    except ValidationError as error:
        wrong = explain(error, Experiment, held, str(record.path / "config.toml"), {})
        raise RunError(f"{wrong}\nput a copy of it back") from error


def _unchanged(record: RunRecord, place: PairTrainerFactory, data: bool) -> None:
    now = place.fingerprint
    source = {"model": f"the base model {record.config['model']['name']}", "data": "the run's data"}
    for name, before in record.fingerprint.items():
        if name in now and now[name] != before and (data or name != "data"):
            raise RunError(
                f"{record.path}: {source.get(name, name)} changed since the run; put back what it was"
            )


def _same(one: Download, other: Download) -> bool:
    pairs = ((group, other.tensors.get(name)) for name, group in one.tensors.items())
    return len(one.tensors) == len(other.tensors) and all(
        mine is theirs or (theirs is not None and mine.equal(theirs)) for mine, theirs in pairs
    )


class _Empty(PairTrainerFactory):
    """A place whose clients are as large as a run's summary says, and have no pair here."""

    def __init__(self, sizes: Mapping[str, Mapping[str, int]], *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._held = {client: SimpleNamespace(**held) for client, held in sizes.items()}

    @property
    def clients(self) -> Mapping[str, Any]:
        """What the run's clients held."""
        return self._held


class _NoPairs:
    """The token set of a run whose data are elsewhere."""

    fingerprint = ""
    lengths = np.zeros((0, 3), np.int32)
    margins = np.zeros(0, np.float32)

    def __len__(self) -> int:
        return 0

    def pair(self, row: int) -> Any:
        """There is none."""
        raise IndexError(f"no row {row}: the run's data are not here")


def _without_data(record: RunRecord) -> FederatedDataset:
    """The run's clients, each without its pairs."""
    nothing = np.zeros(0, np.int64)
    clients = {name: ClientData(name, nothing, nothing, nothing) for name in record.summary["clients"]}
    return FederatedDataset(clients, cast(TokenSet, _NoPairs()), frozenset(), Report(), "")
