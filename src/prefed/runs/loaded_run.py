"""A finished run with its data and its models, and clients that bring new pairs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefed.config import ConfigError, Experiment
from prefed.core import Download, Method, State, Tensors, files
from prefed.core.text import did_you_mean, listed
from prefed.data import ClientSizes, DataError, FederatedDataset, Source, TokenSet, TokenWriter, make_encoder
from prefed.data.build import client_of
from prefed.data.config import ByColumn, ByFile, Partition
from prefed.data.errors import ErrorCollector
from prefed.data.partition import partition_value
from prefed.data.sources import ReadCounts, read_records
from prefed.engines import Job
from prefed.models import Backbone
from prefed.models.quiet_libraries import silence_transformers
from prefed.runs.build import assemble_job, build_data, build_trainers, selector_settings
from prefed.runs.record import RunError, RunRecord, read_run
from prefed.runs.reference import reference_folder
from prefed.runs.start_or_resume import settings_digest
from prefed.runs.summary import published_models
from prefed.store import RunReader, StoreError
from prefed.train.pair_trainer import PairTrainerFactory


@dataclass(frozen=True)
class LoadedRun:
    """A finished run with its base model loaded and its method built.

    Attributes:
        record: the settings, rounds and figures of the run.
        reader: reads the states that the run left.
        trainers: the model and the run's data.
        job: the run's job, over ``trainers``.
        taste: by whose taste clients judge, as :func:`prefed.runs.tastes.at_taste` takes it; ``None``: each
            by its own, and those that never took part as the run's own evaluations have it.
    """

    record: RunRecord
    experiment: Experiment
    reader: RunReader
    trainers: PairTrainerFactory
    job: Job
    taste: str | None = None

    @cached_property
    def server(self) -> State:
        """The server's state after the last round, or the best one where that was loaded."""
        return self.reader.server()

    @property
    def method(self) -> Method:
        """The method of the run."""
        return self.job.method

    @property
    def backbone(self) -> Backbone:
        """The frozen model; ``backbone.load(run.model(client))`` puts a client's tensors into it."""
        return self.trainers.backbone

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients, sorted."""
        return tuple(sorted(self.trainers.clients))

    def check(self, client: str) -> str:
        """Return ``client``, if the run has it.

        Raises:
            RunError: the run has no such client; the message has the nearest names.
        """
        if client not in self.trainers.clients:
            raise RunError(f"{self.record.path}: {no_client(client, self.clients)}")
        return client

    def check_whole(self, client: str) -> None:
        """Refuse a client whose own model cannot be made here.

        Raises:
            RunError: the run has no such client, or the site of a federation keeps what its model needs.
        """
        site = self.record.sites.get(self.check(client))
        if site is not None and self.method.personal:
            raise RunError(
                f"{self.record.path}: site {site!r} keeps what the model of {client!r} needs; "
                f"{shlex.join(['prefed', 'site', 'export', 'CONFIG', '--client', client])} writes it there"
            )

    def private_state(self, client: str) -> State:
        """The private state of ``client`` after that round; raises as :meth:`check`.

        Raises:
            StoreError: the client's site keeps it.
        """
        if self.record.sites and not self.method.personal:
            return self.first_state(client)
        state = self.reader.client(self.check(client))
        return self.first_state(client) if state is None else state

    def first_state(self, client: str) -> State:
        """The private state with which ``client`` begins; raises as :meth:`check`."""
        return self.method.init_client(self.backbone.initial, self.check(client))

    def model(self, client: str) -> Tensors:
        """The tensors (full layout) with which ``client`` predicts after that round.

        A client that never took part has the tensors that the server publishes, and personal tensors as they
        start.

        Raises:
            RunError: the run has no such client, or its site keeps what its model needs.
            ValueError: the method trains before it predicts, and the run's pairs are not on this machine.
        """
        self.check_whole(client)
        private, published = self.private_state(client), self.published(client)
        return self.job.client_model(client, private, published, self.reader.commit.round)

    def published(self, client: str) -> Download:
        """What ``client`` needs to use its model: of the server's state, or of its own without a server."""
        source = self.server
        # A peer's directory has its own client's model alone, in the place of a server's.
        nodes = self.reader.commit.digests.nodes is not None
        if nodes and client in self.job.members:
            ((name, mean),) = source.tensors.items()
            own = self.reader.node(self.job.members.index(client))
            source = source.update({name: Tensors(mean.layout, own)})
        return self.method.publish(source, client)

    @cached_property
    def published_model(self) -> Tensors:
        """The one model (full layout) that the server publishes to everybody.

        Raises:
            RunError: the method shares no model or several, or publishes different models to different
                clients.
        """
        models = self.published_models
        if not models:
            raise RunError(f"{self.method.name} shares no model: name a client with --client")
        if len(models) > 1:
            raise RunError(
                f"{self.method.name} shares {len(models)} selectors and no single model: name one with "
                "--selector, or a client with --client"
            )
        return next(iter(models.values()))

    def selector(self, name: str) -> Tensors:
        """The selector (full layout) of that name, e.g. ``"selector-0"``.

        Raises:
            RunError: the run has none of that name.
        """
        names = self.job.jury
        if name not in names:
            known = f"its selectors are {', '.join(names)}" if names else "it has one model, named 'shared'"
            raise RunError(f"{self.record.path} has no {name}: {known}")
        return self.published_models[name]

    @cached_property
    def published_models(self) -> Mapping[str, Tensors]:
        """Name → model (full layout) that the server publishes to everybody; empty if the method shares none.

        The one name is ``"shared"``; several models are selectors that vote.

        Raises:
            RunError: the method publishes different models to different clients.
        """
        published = [models for models, _ in published_models(self.job, self.server)]
        first = published[0] if published else {}
        if not all(models[name].equal(first[name]) for models in published for name in first):
            raise RunError(
                f"{self.method.name} gives each client a model of its own: name a client with --client"
            )
        return first


def load_run(path: str | Path, *, data: bool = False, best: bool = False) -> LoadedRun:
    """Load a finished run's base model and states.

    Transformers' progress bars and notices stay off the terminal, as in the commands, unless
    ``TRANSFORMERS_VERBOSITY`` is in the environment.

    Args:
        data: the caller needs the run's pairs. The tokens in the run directory are used; where they were
            deleted, they are made again from the sources. With ``False`` a run without its tokens is loaded
            without pairs.
        best: the states after the best round by validation pairs, and not those after the last.

    Raises:
        RunError: there is no finished run, it keeps no best round, its settings, its model or its data
            changed, or the sites of a federation have its data.
        ModelError, DataError: the base model or the data cannot be loaded.
    """
    record = read_run(path)
    if best and "best" not in record.summary.get("stop", {}):
        raise RunError(
            f"{path} keeps no best round: it was run without a table [stop]; leave out --round best"
        )
    if data and record.sites:
        names = ", ".join(sorted(set(record.sites.values())))
        raise RunError(
            f"{path}: the pairs of this run are at its sites, {names}, and none is here; `prefed evaluate "
            f"{path} --test FILE` judges a model that all clients share on pairs of yours"
        )
    silence_transformers()
    try:
        reader = RunReader(path, best=best)
    except StoreError as error:
        raise RunError(f"{path} has lost its checkpoint/, which holds the model: {error}") from error
    config, digest = record.path / "config.toml", reader.commit.settings
    if digest is not None and settings_digest(record.config) != digest:
        raise RunError(f"{config} is not what its run was begun with; put a copy of it back")
    try:
        experiment = Experiment.from_tables(record.config, str(config))
    except ConfigError as error:
        raise RunError(f"{error}\nput a copy of it back") from error
    cache = record.path / "cache"
    if (cache / "data").is_dir():
        dataset = FederatedDataset.open(cache / "data")
    elif data:
        files.private_folder(cache)
        dataset = build_data(experiment, cache / "data")
    else:
        sizes = {client: ClientSizes(**counts) for client, counts in record.summary["clients"].items()}
        dataset = FederatedDataset.without_pairs(sizes)
    reference = reference_folder(experiment, cache) if dataset.has_pairs else None
    trainers = build_trainers(experiment, dataset, reference)
    _check_fingerprint(record, trainers)
    return LoadedRun(record, experiment, reader, trainers, assemble_job(experiment, trainers))


def _check_fingerprint(record: RunRecord, trainers: PairTrainerFactory) -> None:
    """Refuse a base model or data that changed since the run."""
    source = {"model": f"the base model {record.config['model']['name']}", "data": "the run's data"}
    for name, digest in trainers.fingerprint.items():
        if record.fingerprint.get(name, digest) != digest and (trainers.dataset.has_pairs or name != "data"):
            raise RunError(f"{record.path}: {source[name]} changed since the run; put back what it was")


def no_client(client: str, names: Sequence[str]) -> str:
    """Say that no client has a name, with the nearest names or the first few.

    >>> no_client("ward7", ("ward-7", "ward-8", "clinic"))
    "no client is called 'ward7'; did you mean 'ward-7' or 'ward-8'?"
    >>> no_client("x", ("ward-7", "ward-8"))
    "no client is called 'x'; the clients are 'ward-7', 'ward-8'"
    """
    shown = listed(names)
    hint = did_you_mean(client, names, most=3) or f"; the clients are {shown}"
    return f"no client is called {client!r}{hint}"


EVERYBODY = "everybody"
"""Stands for all clients together, where all pairs belong to each of them."""


@dataclass(frozen=True)
class NewPairs:
    """Pairs, and the clients that are evaluated on them.

    Attributes:
        rows: client → its rows; or :data:`EVERYBODY` → all rows.
        common: whether ``rows`` has one entry for everybody. A client of the run may have that name too.
        notes: sentences on rows that were left out, and on pairs that the run has trained on.
    """

    tokens: TokenSet
    rows: Mapping[str, NDArray[np.int64]]
    common: bool
    notes: tuple[str, ...]


def read_pairs(run: LoadedRun, file: str, folder: Path, *, everyone: bool) -> NewPairs:
    """Read and tokenise the pairs of ``file``, and assign them to clients, as the run did with its own.

    With a partition by file, ``file`` is such a folder too, or the file of one client.

    Args:
        file: a file, a folder of files or a hub name; relative to the working folder.
        folder: the tokens are written there.
        everyone: all pairs belong to everybody, whatever the partition says.

    Raises:
        DataError: a row cannot be used, or no row belongs to a client of the run.
    """
    # [data] rows limits the run's own sources, not this one.
    config, clients = run.experiment.data.model_copy(update={"rows": None}), run.clients
    groups = None if everyone else _groups(config.partition, clients)
    hint = "Repair them, or judge every client on all rows with --everyone." if groups else "Repair them."
    errors, counts = ErrorCollector(hint=hint, count_only=config.invalid == "drop"), ReadCounts()
    encoder = make_encoder(config, run.backbone.tokenizer, selector_settings(run.experiment))
    writer = TokenWriter(folder, encoder, errors=errors, codes=1)
    strangers, by_file = 0, isinstance(config.partition, ByFile)
    try:
        for record, location in read_records(Source(path=file), config, "test", None, errors, counts):
            try:
                named = client_of(Path(location.file), Path(file).expanduser()) if by_file else None
                client = 0 if groups is None else groups.get(partition_value(config.partition, record, named))
            except ValueError as error:
                errors.add(location, str(error))
                continue
            if client is None:
                strangers += 1
                continue
            writer.add(record, location, None, client)
        writer.flush()
        errors.raise_if_any()
        owners = np.array(writer.codes[0], dtype=np.int64)
        if not len(owners):
            raise DataError(f"{file}: {_nobody(strangers, config.partition, clients)}")
        flipped = run.trainers.dataset.flipped if groups else frozenset()
        writer.finish(np.isin(owners, [k for k, name in enumerate(clients) if name in flipped]))
    finally:
        writer.close()
    tokens = TokenSet(folder)
    rows = {EVERYBODY: np.arange(len(owners))}
    if groups is not None:
        rows = {clients[k]: np.flatnonzero(owners == k) for k in np.unique(owners)}
    skipped_pairs = {
        "pairs are of no client of the run": strangers,
        "pairs have two equal responses": counts.identical + writer.identical,
        "pairs are ties": counts.ties,
        "pairs are malformed": errors.count,
        "pairs are too long": writer.too_long,
    }
    notes = [f"left out: {count:,} {why}" for why, count in skipped_pairs.items() if count]
    return NewPairs(tokens, rows, groups is None, (*notes, *_trained_on(run, tokens)))


def _groups(partition: Partition, clients: tuple[str, ...]) -> Mapping[str, int] | None:
    """Value of the partition's column, or name of a file → index of its client.

    It is ``None`` if neither columns nor files name clients.
    """
    if not isinstance(partition, ByColumn | ByFile):
        return None
    index = {name: k for k, name in enumerate(clients)}
    if isinstance(partition, ByFile) or partition.groups is None:
        return index
    return {
        value: index[name] for name, values in partition.groups.items() if name in index for value in values
    }


def _nobody(strangers: int, partition: Partition, clients: tuple[str, ...]) -> str:
    if not strangers or not isinstance(partition, ByColumn | ByFile):
        return "holds no usable pair"
    named = "file is called as" if isinstance(partition, ByFile) else f"row's {partition.column!r} is"
    shown = ", ".join(clients[:8]) + (", …" if len(clients) > 8 else "")
    return f"no {named} a client of the run ({shown}); --everyone judges every client on all rows"


def _trained_on(run: LoadedRun, tokens: TokenSet) -> list[str]:
    """A note if the run has trained on some of the pairs."""
    dataset = run.trainers.dataset
    rows = np.concatenate([data.train for data in dataset.clients.values()])
    count = int(np.isin(tokens.pairs, dataset.tokens.pairs[rows]).sum())
    note = f"the run has trained on {count:,} of these {len(tokens):,} pairs, some client or other"
    return [note] if count else []
