"""Load a finished run with its model, states and data, and read new pairs for its clients."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefed.config import ConfigError, Experiment
from prefed.config.file import allow_code
from prefed.core import Download, Method, State, Tensors, files, plugins
from prefed.core.text import listed
from prefed.data import (
    ClientSizes,
    DataError,
    FederatedDataset,
    Prompt,
    Source,
    Template,
    TokenSet,
    TokenWriter,
    make_encoder,
)
from prefed.data.build import client_of, unread_columns
from prefed.data.config import ByColumn, ByFile, DataConfig, Partition
from prefed.data.errors import ErrorCollector
from prefed.data.partition import partition_value
from prefed.data.sources import ReadCounts, read_records
from prefed.data.sources.unread import unused_text
from prefed.data.tokens import comparable
from prefed.engines import Job
from prefed.models import Backbone
from prefed.runs.build import (
    assemble_job,
    build_data,
    build_trainers,
    example_encoder,
    response_encoder,
    selector_settings,
)
from prefed.runs.finished_run import RunError, RunRecord, no_client, read_run
from prefed.runs.reference_cache import features_folder, reference_folder
from prefed.runs.start_or_resume import CODE, absent_code, changed_code, settings_digest
from prefed.runs.summary import published_models
from prefed.store import RunReader, StoreError
from prefed.train.generation import prompt_form
from prefed.train.pair_trainer import PairTrainerFactory
from prefed.train.trainers import PairTrainer

_log = logging.getLogger("prefed")


@dataclass(frozen=True)
class LoadedRun:
    """A finished run with its base model loaded and its method built.

    Attributes:
        record: the settings, rounds and metrics of the run.
        reader: reads the states of the run.
        trainers: the model and the data of the run.
        job: the job of the run, on ``trainers``.
        taste: the taste set with :func:`prefed.runs.tastes.at_taste`; ``None`` evaluates clients as during
            the run.
    """

    record: RunRecord
    experiment: Experiment
    reader: RunReader
    trainers: PairTrainerFactory
    job: Job
    taste: str | None = None

    @cached_property
    def server(self) -> State:
        """The server's state after the last round, or after the best one if that was loaded."""
        return self.reader.server()

    @property
    def method(self) -> Method:
        """The method of the run."""
        return self.job.method

    @property
    def backbone(self) -> Backbone:
        """The frozen model. ``backbone.load(run.model(client))`` loads the tensors of a client."""
        return self.trainers.backbone

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients, sorted."""
        return tuple(sorted(self.trainers.clients))

    def pair_trainer(self, tokens: TokenSet) -> PairTrainer:
        """Return a trainer of the run's model on other pairs."""
        experiment, backbone = self.experiment, self.backbone
        return PairTrainer(
            backbone,
            tokens,
            max_tokens=experiment.engine.max_tokens,
            fast=experiment.model.fast,
            responses=response_encoder(experiment, backbone),
            examples=example_encoder(experiment, backbone),
            feedback=experiment.method.settings.feedback,
        )

    @cached_property
    def example(self) -> Prompt | None:
        """A prompt of the run's data, whose format typed prompts take; see :func:`as_prompt`.

        It is read from the sources if the tokens were deleted. Without pairs, it is a user turn if the model
        has a chat template, else ``None``, with a warning.
        """
        dataset, config = self.trainers.dataset, self.experiment.data
        if dataset.has_pairs:
            return dataset.tokens.record(0).prompt
        if not self.record.sites:
            (role, name, source), errors = config.sources()[0], ErrorCollector(count_only=True)
            with suppress(DataError):
                for record, _ in read_records(source, config, role, name, errors, ReadCounts()):
                    return record.prompt
        form = prompt_form(Template.of(self.backbone.tokenizer, config))
        how = "become user turns of the chat template" if form else "are used unchanged"
        _log.warning("%s: the pairs of the run are not on this machine: prompts %s", self.record.path, how)
        return form

    def check(self, client: str) -> str:
        """Return ``client``, if the run has it.

        Raises:
            RunError: the run has no such client.
        """
        if client not in self.trainers.clients:
            raise RunError(f"{self.record.path}: {no_client(client, self.clients)}")
        return client

    def check_whole(self, client: str) -> None:
        """Check that the personal model of a client can be assembled here.

        Raises:
            RunError: the run has no such client, or a site of the federation stores its private state.
        """
        site = self.record.sites.get(self.check(client))
        if site is not None and self.method.personal:
            raise RunError(
                f"{self.record.path}: the private state of client {client!r} is stored at site {site!r}; run "
                f"there: {shlex.join(['prefed', 'site', 'export', 'CONFIG', '--client', client])}"
            )

    def private_state(self, client: str) -> State:
        """Return the private state of ``client`` after the loaded round.

        Raises:
            RunError: the run has no such client.
            StoreError: a site stores the state.
        """
        if self.record.sites and not self.method.personal:
            return self.first_state(client)
        state = self.reader.client(self.check(client))
        return self.first_state(client) if state is None else state

    def first_state(self, client: str) -> State:
        """Return the initial private state of ``client``; raises as :meth:`check`."""
        return self.method.init_client(self.backbone.initial, self.check(client))

    def model(self, client: str) -> Tensors:
        """Return the tensors (full layout) of the model of ``client`` after the loaded round.

        For a client that never took part, these are the published tensors and initial personal tensors.

        Raises:
            RunError: the run has no such client, or a site stores its private state.
            ValueError: the method trains before predicting, and the pairs are not on this machine.
        """
        self.check_whole(client)
        private, published = self.private_state(client), self.published(client)
        return self.job.client_model(client, private, published, self.reader.commit.round)

    def published(self, client: str) -> Download:
        """Return the download of ``client``: from the server's state or, without a server, its own model."""
        source = self.server
        # The directory of a peer contains only the model of its own client.
        nodes = self.reader.commit.digests.nodes is not None
        if nodes and client in self.job.members:
            ((name, mean),) = source.tensors.items()
            own = self.reader.node(self.job.members.index(client))
            source = source.update({name: Tensors(mean.layout, own)})
        return self.method.publish(source, client)

    @cached_property
    def published_model(self) -> Tensors:
        """The only shared model (full layout).

        Raises:
            RunError: the method shares no model or several, or publishes different models to clients.
        """
        models = self.published_models
        if not models:
            raise RunError(f"{self.method.name} shares no model: choose a client with --client")
        if len(models) > 1:
            raise RunError(
                f"{self.method.name} shares {len(models)} selectors instead of one model: choose one with "
                "--selector, or a client with --client"
            )
        return next(iter(models.values()))

    def selector(self, name: str) -> Tensors:
        """Return a selector (full layout) by name, e.g. ``"selector-0"``.

        Raises:
            RunError: the run has no such selector.
        """
        names = self.job.jury
        if name not in names:
            known = f"its selectors are {', '.join(names)}" if names else "it has one model, named 'shared'"
            raise RunError(f"{self.record.path} has no {name}: {known}")
        return self.published_models[name]

    @cached_property
    def published_models(self) -> Mapping[str, Tensors]:
        """Name → shared model (full layout): ``"shared"``, or several selectors; empty without any.

        Raises:
            RunError: the method publishes different models to clients.
        """
        published = [models for models, _ in published_models(self.job, self.server)]
        first = published[0] if published else {}
        if not all(models[name].equal(first[name]) for models in published for name in first):
            raise RunError(
                f"{self.method.name} publishes a different model to each client: choose one with --client"
            )
        return first


def load_run(path: str | Path, *, data: bool = False, best: bool = False) -> LoadedRun:
    """Load the base model and the states of a finished run.

    Progress bars and notices of transformers are hidden unless ``TRANSFORMERS_VERBOSITY`` is set.

    Args:
        data: the pairs of the run are needed. If its tokens were deleted, they are made again from the
            sources; with ``False``, the run is then loaded without pairs.
        best: load the states after the best round on validation pairs, instead of the last.

    Raises:
        RunError: there is no finished run, it has no best round, its settings, model or data changed, or the
            sites of a federation store its data.
        ModelError, DataError: the base model or the data cannot be loaded.
    """
    record = read_run(path)
    if best and "best" not in record.summary.get("stop", {}):
        raise RunError(f"{path} has no best round, since it was run without [stop]; leave out --round best")
    if data and record.sites:
        names = ", ".join(sorted(set(record.sites.values())))
        raise RunError(
            f"{path}: the pairs of this run are stored at its sites ({names}); to evaluate a shared model on "
            f"other pairs: prefed evaluate {shlex.quote(str(path))} --test FILE"
        )
    try:
        reader = RunReader(path, best=best)
    except StoreError as error:
        raise RunError(f"{path}: cannot read checkpoint/, which contains the model: {error}") from error
    config, digest = record.path / "config.toml", reader.commit.settings
    if digest is not None and settings_digest(record.config) != digest:
        raise RunError(f"{config} was edited after the start of the run; restore it from a backup")
    experiment = recorded_experiment(record)
    cache = record.path / "cache"
    if (cache / "data").is_dir():
        dataset = FederatedDataset.open(cache / "data")
    elif data:
        files.private_folder(cache)
        dataset = build_data(experiment, cache / "data")
    else:
        sizes = {client: ClientSizes(**counts) for client, counts in record.summary["clients"].items()}
        dataset = FederatedDataset.without_pairs(sizes)
    folders = (reference_folder(experiment, cache), features_folder(experiment, cache))
    trainers = build_trainers(experiment, dataset, *(folders if dataset.has_pairs else (None,)))
    _check_fingerprint(record, trainers)
    return LoadedRun(record, experiment, reader, trainers, assemble_job(experiment, trainers))


def recorded_experiment(record: RunRecord) -> Experiment:
    """Return the experiment of a run, without its kernels, which this machine may not have.

    Raises:
        RunError: its settings are damaged, or it needs code that is not here, changed or was not allowed.
    """
    path, digests = str(record.path), record.fingerprint

    def allow(name: str) -> None:
        plugins.allow_recorded(name, path, digests.get(CODE + name))

    try:
        allow_code(record.config, allow=allow)
    except ConfigError as error:
        raise RunError(str(error)) from error
    try:
        experiment = Experiment.from_tables(record.config, str(record.path / "config.toml"))
    except ConfigError as error:
        if absent := absent_code(record.config, digests, record.summary.get("origin", {}).get("code", {})):
            raise RunError(f"{path}: {absent}") from error
        raise RunError(f"{error}\nrestore config.toml from a backup") from error
    if changed := changed_code(experiment, digests):
        raise RunError(f"{path}: {changed} changed since the run; restore the original")
    return experiment.model_copy(update={"model": experiment.model.model_copy(update={"kernels": None})})


def _check_fingerprint(record: RunRecord, trainers: PairTrainerFactory) -> None:
    source = {"model": f"the base model {record.config['model']['name']}", "data": "the data"}
    for name, digest in trainers.fingerprint.items():
        if record.fingerprint.get(name, digest) != digest and (trainers.dataset.has_pairs or name != "data"):
            raise RunError(f"{record.path}: {source[name]} changed since the run; restore the original")


EVERYBODY = "everybody"
"""Name for all clients together."""


@dataclass(frozen=True)
class NewPairs:
    """Pairs, and the clients that are evaluated on them.

    Attributes:
        rows: client → its rows; or :data:`EVERYBODY` → all rows.
        common: whether ``rows`` has one entry for everybody. A client may also have the name "everybody".
        notes: on rows that were left out, and on pairs that the run has trained on.
    """

    tokens: TokenSet
    rows: Mapping[str, NDArray[np.int64]]
    common: bool
    notes: tuple[str, ...]


def read_pairs(run: LoadedRun, file: str, folder: Path, *, everyone: bool) -> NewPairs:
    """Read and tokenise the pairs of ``file``, and assign them to clients with the partition of the run.

    With a partition by file, ``file`` is a folder of files, or the file of one client.

    Args:
        file: a file, a folder of files or a hub name; relative to the working directory.
        folder: where to write the tokens.
        everyone: ignore the partition, and assign all pairs to everybody.

    Raises:
        DataError: a row cannot be used, or no row belongs to a client of the run.
    """
    # [data] rows limits the sources of the run, not this file.
    config, clients = run.experiment.data.model_copy(update={"rows": None}), run.clients
    groups = None if everyone else _groups(config.partition, clients)
    hint = "Repair them, or use --everyone to evaluate clients on all rows." if groups else "Repair them."
    errors, counts = ErrorCollector(hint=hint, count_only=config.invalid == "drop"), ReadCounts()
    selector = selector_settings(run.experiment)
    encoder = make_encoder(config, run.backbone.tokenizer, selector)
    writer = TokenWriter(folder, encoder, errors=errors, codes=1)
    strangers, by_file, known = 0, isinstance(config.partition, ByFile), frozenset(clients)
    try:
        for record, location in read_records(source_like(config, file), config, "test", None, errors, counts):
            try:
                named = client_of(Path(location.file), Path(file).expanduser(), known) if by_file else None
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
        "pairs belong to no client of the run": strangers,
        "pairs have two equal responses": counts.identical + writer.identical,
        "pairs are ties": counts.ties,
        "pairs are malformed": errors.count,
        "pairs are too long": writer.too_long,
    }
    notes = [f"left out: {count:,} {why}" for why, count in skipped_pairs.items() if count]
    if unused := unread_columns(counts, selector):
        notes.append(unused_text(unused))
    return NewPairs(tokens, rows, groups is None, (*notes, *_trained_on(run, tokens)))


def source_like(config: DataConfig, file: str) -> Source:
    """Return ``file`` with the options of the run's test sources, else training sources, if they agree."""
    sources = config.test or config.train
    place = {"path": file, "subset": None, "split": None, "revision": None}
    given = sources.values() if isinstance(sources, dict) else (sources,)
    first, *rest = (source.model_copy(update=place) for source in given)
    return first if all(source == first for source in rest) else Source(path=file)


def _groups(partition: Partition, clients: tuple[str, ...]) -> Mapping[str, int] | None:
    """Return value of the column, or name of the file → index of its client; ``None`` if neither is used."""
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
        return "no usable pairs"
    named = "file is named after" if isinstance(partition, ByFile) else f"row's {partition.column!r} is"
    return f"no {named} a client of the run ({listed(clients)}); --everyone evaluates clients on all rows"


def _trained_on(run: LoadedRun, tokens: TokenSet) -> list[str]:
    """Return a note if the run has trained on some of the pairs."""
    dataset = run.trainers.dataset
    rows = np.concatenate([data.train for data in dataset.clients.values()])
    tested, trained = comparable(tokens, np.arange(len(tokens)), dataset.tokens, rows)
    count = int(np.isin(tested, trained).any(axis=1).sum())
    note = f"clients of the run have trained on {count:,} of these {len(tokens):,} pairs"
    return [note] if count else []
