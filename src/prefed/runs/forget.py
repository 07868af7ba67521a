"""Forget clients, or single pairs, of a finished run: replay it without them, and replace it.

The replay is the run of the same experiment with the clients in ``[data] exclude``, or the digests of the
pairs in ``exclude_pairs``, so it is bit for bit the run that never had them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefed.config import ConfigError, Experiment, to_toml
from prefed.config.file import override, parse_override
from prefed.core import Callback, files
from prefed.data import DataError, FederatedDataset
from prefed.data.build import clients_of_groups
from prefed.data.config import ByColumn, ByFile, BySource
from prefed.data.dataset import read_manifest
from prefed.data.errors import ErrorCollector
from prefed.data.record import Record, pair_digest
from prefed.data.sources import ReadCounts, read_records
from prefed.data.sources.huggingface import looks_like_hub_name
from prefed.methods import METHODS
from prefed.runs.align import align, read_settings
from prefed.runs.build import build_data
from prefed.runs.copy_commits import copy_commits
from prefed.runs.descendants import NOISED, Plan, elsewhere, in_the_run, in_the_sources, is_in_memory
from prefed.runs.disclosure import disclosure
from prefed.runs.exports_log import whole_run
from prefed.runs.finished_run import RunError, RunRecord, no_client, read_run
from prefed.runs.loaded_run import recorded_experiment, source_like
from prefed.runs.pairs_from_memory import FOLDER as MEMORY
from prefed.runs.replacement import Replacement, replacing
from prefed.runs.run import run as run_experiment
from prefed.runs.start_or_resume import is_place, settings_digest
from prefed.store import RunReader
from prefed.store.commit import Commit, kept_commits, read_commit

SAME = "bit-identical to a run of the same experiment that never had them, on the same machine"


def plan(
    path: str | Path, clients: Sequence[str], rows: str | None = None, overrides: Sequence[str] = ()
) -> Plan:
    """List everything in and known to a run that descends from clients or pairs; nothing is changed.

    Args:
        clients: the names of the clients; with ``rows``, one, or none if the partition draws clients.
        rows: file with the pairs to forget, in the format of the run's sources.
        overrides: ``KEY=VALUE`` for paths of data and models that moved.

    Raises:
        RunError: there is no finished run, it has no such client, or it ran in a federation or among peers.
        DataError: a row of ``rows`` is no pair of the client, or the data changed.
        ConfigError: an override is not a path.
    """
    return _Forgetting(Path(path), clients, rows, overrides).plan()


def forget(
    path: str | Path,
    clients: Sequence[str],
    rows: str | None = None,
    *,
    overrides: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
) -> list[Path]:
    """Replace a run by its replay without clients or pairs; the same call continues a killed one.

    Args:
        clients, rows, overrides: as for :func:`plan`.
        callbacks: receive the events of the replay.

    Returns:
        The certificates.

    Raises:
        StoreError: another process uses the run, or it changed since an earlier call.
        RunError, DataError, ConfigError: as :func:`plan`; also as :func:`prefed.run`.
    """
    with replacing(Path(path)) as place:
        done = place.finish(clients) or ([] if rows else place.done(clients))
        return done or _Forgetting(Path(path), clients, rows, overrides).replace(place, callbacks)


def read_unedited(path: Path) -> tuple[RunRecord, Commit]:
    """The record of a finished run, and its last commit.

    Raises:
        RunError: there is no finished run, or its settings or its code changed.
    """
    record = read_run(path)
    recorded_experiment(record)  # checks the code from outside prefed
    commit = RunReader(path).commit
    if commit.settings not in (None, settings_digest(record.config)):
        raise RunError(f"{path / 'config.toml'} was edited after the start of the run; restore it")
    return record, commit


def never_had(experiment: Experiment, clients: Sequence[str], digests: Sequence[str] = ()) -> Experiment:
    """The experiment without clients, or without the pairs with these digests."""
    tables, data = experiment.tables(), experiment.data
    tables["data"]["exclude"] = sorted({*data.exclude, *clients})
    tables["data"]["exclude_pairs"] = sorted({*data.exclude_pairs, *digests})
    return Experiment.from_tables(tables, "the replay")


def untracked(experiment: Experiment) -> Experiment:
    """The experiment without trackers, and without the alignment, which is repeated afterwards."""
    tables = experiment.tables()
    tables.pop("align", None)
    tables.pop("track", None)
    return Experiment.from_tables(tables, "the replay")


class _Forgetting:
    """A run, and what is to be forgotten."""

    def __init__(
        self, path: Path, clients: Sequence[str], rows: str | None, overrides: Sequence[str]
    ) -> None:
        self.record, self.commit = read_unedited(path)
        self.run = path.resolve()
        self.clients = tuple(sorted(set(clients)))
        if (whole := whole_run(path)) != self.run:
            raise RunError(f"{path} continues the rounds of {whole}: forget there")
        if self.record.sites or (self.run / "federation.json").exists():
            raise RunError(f"{path} ran over sites, which have to take part: use `prefed forget` with --hub")
        if "peer" in self.record.summary:
            raise RunError(
                f"{path} ran among peers, whose pairs are not here: start them again in other directories "
                f"with [data] exclude = {json.dumps(list(self.clients))}, and delete the old ones"
            )
        self.experiment = self._moved(overrides)
        named = isinstance(self.experiment.data.partition, ByColumn | BySource | ByFile)
        if not named and self.clients:
            raise RunError(
                f"{path}: its partition by {self.experiment.data.partition.by!r} draws clients from the "
                "rows, so they are nobody in particular; name the pairs to forget with --rows FILE"
            )
        if len(self.clients) != 1 and rows is not None and named:
            raise RunError("--rows takes the pairs of one client: name it with --client")
        if not self.clients and rows is None:
            raise RunError("nothing to forget: name a client with --client")
        self.dataset = self._dataset()
        known = {*self.dataset.clients, *self.dataset.findings.gone, *self.dataset.findings.lost}
        for client in self.clients:
            if client not in known:
                raise RunError(f"{path}: {no_client(client, sorted(self.dataset.clients))}")
        self.digests = () if rows is None else self._digests(rows)
        gone = () if self.digests else self.clients
        self.without = never_had(self.experiment, gone, self.digests)

    def _moved(self, overrides: Sequence[str]) -> Experiment:
        """The recorded experiment, with new paths."""
        for text in overrides:
            keys, _ = parse_override(text)
            if not is_place(".".join(keys)):
                raise ConfigError(f"--set {text}: only paths of data and models that moved may change")
        tables = json.loads(json.dumps(dict(self.record.config), default=str))
        override(tables, overrides, Path())
        return Experiment.from_tables(tables, str(self.run / "config.toml"))

    def _dataset(self) -> FederatedDataset:
        """The data of the run, from its cache or made again."""
        folder = self.run / "cache" / "data"
        if folder.is_dir():
            return FederatedDataset.open(folder)
        files.private_folder(folder.parent)
        dataset = build_data(self.experiment, folder)
        if dataset.fingerprint != self.record.fingerprint["data"]:
            shutil.rmtree(folder)
            raise DataError(
                f"{self.run}: the data changed since the run, and its cache is deleted; restore the data, or "
                f"start a new run with [data] exclude = {json.dumps([*self.clients])} and delete this one"
            )
        return dataset

    def _digests(self, rows: str) -> tuple[str, ...]:
        """The digests of the pairs in a file.

        Raises:
            DataError: one is not a pair of the client, or cannot be read.
        """
        client = self.clients[0] if self.clients else ""
        config = self.experiment.data.model_copy(update={"rows": None})
        errors, found = ErrorCollector(), dict[str, None]()
        known = {pair_digest(client, self._record(row)) for row in range(len(self.dataset.tokens))}
        for record, location in read_records(
            source_like(config, rows), config, "train", client or None, errors, ReadCounts()
        ):
            digest = pair_digest(client, record)
            if digest not in known:
                errors.add(
                    location, f"not a pair of {client!r} in the run" if client else "no pair of the run"
                )
            found[digest] = None
        errors.raise_if_any()
        if not found:
            raise DataError(f"{rows}: there are no pairs")
        return tuple(found)

    def plan(self) -> Plan:
        """See :func:`plan`."""
        after, why = self._start()
        counts = [self.dataset.sizes[name] for name in self.clients if name in self.dataset.sizes]
        train, validation, test = (sum(each) for each in zip((0, 0, 0), *counts, strict=True))
        similar = {
            name
            for group in self.dataset.findings.similar
            if set(group) & set(self.clients)
            for name in group
        }
        return Plan(
            run=str(self.record.path),
            clients=self.clients,
            digests=self.digests,
            pairs=(len(self.digests), 0, 0) if self.digests else (train, validation, test),
            after=after,
            why=why,
            rounds=self.commit.round - after,
            guarantee=NOISED if self.experiment.privacy.draws == "system" else SAME,
            descendants=(
                *in_the_run(self.record, self.clients),
                *in_the_sources(self.run, self.experiment),
                *elsewhere(self.run),
            ),
            similar=tuple(sorted(similar - set(self.clients))),
        )

    def _start(self) -> tuple[int, str]:
        """The round after which the replay starts, and why it is no later one."""
        if why := self._everywhere():
            return 0, why
        every, first = self.experiment.evaluate.every, self.commit.round
        diagnosed = self.experiment.evaluate.diagnose
        for record in self.record.rounds:
            number = record["round"]
            if set(record["cohort"]) & set(self.clients):
                what = "visits"
            elif (every and number % every == 0) or (diagnosed and number % diagnosed == 0):
                what = "is evaluated"
            elif record.get("set_aside"):
                what = "could replace a client that is set aside"
            else:
                continue
            first, why = number, f"the client first {what} in round {number}"
            break
        kept = [number for number in kept_commits(self.run / "checkpoint") if number < first]
        return max(kept, default=0), why

    def _everywhere(self) -> str:
        """Why the first round depends on the clients; empty if it does not."""
        one, kind = self.experiment, self.experiment.method.kind
        reasons = {
            "the partition draws clients from all rows": not self.clients,
            "[data] duplicates = 'drop_tested' compares pairs of all clients": one.data.duplicates
            == "drop_tested",
            "every client takes part in every round": one.cohort.of(1) is None or one.whole_graph is not None,
            "[fleet] times all clients": one.fleet is not None,
            "[evaluate] unseen is drawn from all clients": isinstance(one.evaluate.unseen, int)
            and one.evaluate.unseen > 0,
            "the system drew the noise": one.privacy.draws == "system",
            "[report] asks all models after the first round": one.report is not None,
            f"[merge] weights = {one.merge.weights!r} are of all clients": one.merge.counts_clients,
            "[privacy] kind = 'distributed' rounds and adds noise for all clients": one.privacy.kind
            == "distributed",
            "the method is from outside prefed": METHODS.builtin.get(kind.name) is not kind,
            kind.reason("COUNTS_CLIENTS"): bool(kind.reason("COUNTS_CLIENTS")),
            "a client without training pairs had no place in cohorts": not self.digests
            and not all(self._trains(name) for name in self.clients),
        }
        return next((why for why, holds in reasons.items() if holds), "")

    def _trains(self, client: str) -> bool:
        unseen = self.experiment.evaluate.unseen
        return client in self.dataset.clients and not (isinstance(unseen, list) and client in unseen)

    # The replay.

    def replace(self, place: Replacement, callbacks: Sequence[Callback]) -> list[Path]:
        """Make the replay, and replace the run."""
        started = time.perf_counter()
        planned = self.plan()
        request = place.request(self.clients, self.digests)
        if not place.new.exists():
            with place.preparing() as partial:
                self._prepare(place, partial, planned.after)
        run_experiment(self._placed(place.new), place.new, resume=True, callbacks=callbacks)
        if planned.aligns:
            align(place.new, read_settings(self.record), callbacks=callbacks)
        # A replay takes long, and somebody may have exported the old run meanwhile.
        planned = replace(self.plan(), seconds=time.perf_counter() - started)
        disclosed = disclosure(self.run, place.new, *self._removed())
        return place.conclude(planned, request, self.without, disclosed=disclosed)

    def _removed(self) -> tuple[list[int], list[int]]:
        """The rows of the training pairs that are forgotten, and of held-out pairs of the same clients."""
        gone = {*self.digests}
        own = [self.dataset.clients[name] for name in self.clients if name in self.dataset.clients]
        held_out = [row for data in own for row in (*data.validation.tolist(), *data.test.tolist())]
        training = [row for data in own for row in data.train.tolist()]
        if gone:
            (client,) = self.clients or ("",)
            training = [r for r in training if pair_digest(client, self._record(r)) in gone]
        return training, held_out

    def _record(self, row: int) -> Record:
        """A pair as its source has it."""
        tokens = self.dataset.tokens
        record = tokens.record(row)
        return record.swapped() if tokens.flipped[row] else record

    def _placed(self, run: Path) -> Experiment:
        """The experiment of the replay in ``run``, with the paths of its copies of pairs from memory."""
        tables = untracked(self.without).tables()
        for role, name, source in self.without.data.sources():
            if is_in_memory(self.run, source.path):
                place = str(run / MEMORY / Path(source.path).name)
                table = tables["data"][role] if name is None else tables["data"][role][name]
                table["path"] = place
        return Experiment.from_tables(tables, "the replay")

    def _prepare(self, place: Replacement, partial: Path, after: int) -> None:
        """Write into ``partial`` the directory of the replay as of round ``after``."""
        for role, name, source in self.without.data.sources():
            there = Path(source.path).expanduser().exists() or looks_like_hub_name(source.path)
            if name not in self.without.data.exclude and not there:
                key = f"data.{role}.path" if name is None else f"data.{role}.{name}.path"
                raise DataError(f"{source.path} is missing; if it has moved, add --set {key}=PATH")
        self._copy_memory(partial)
        dataset = build_data(self._placed(partial), partial / "cache" / "data")
        self._check_others(dataset, partial / "cache" / "data")
        experiment = self._placed(place.new)
        files.write(partial / "config.toml", to_toml(experiment).encode())
        if after:
            numbers = sorted(each for each in kept_commits(self.run / "checkpoint") if each <= after)
            commits = {number: read_commit(self.run / "checkpoint", number) for number in numbers}
            kept = {number: commit for number, commit in commits.items() if commit is not None}
            settings = settings_digest(experiment.tables())
            copy_commits(self.run, partial, kept, dataset.fingerprint, settings)
        if self.experiment.privacy.draws == "system":
            place.copy_starts(partial)

    def _copy_memory(self, partial: Path) -> None:
        """Copy the pairs from memory, without those that are forgotten."""
        config = self.without.data
        gone, pairs, groups = set(config.exclude), set(config.exclude_pairs), clients_of_groups(config)
        column = getattr(config.partition, "column", None)

        def client_of(value: Any, name: str | None) -> str:
            if name is not None or column is None:
                return name or ""
            return groups.get(str(value), str(value))

        for role, name, source in config.sources():
            if not is_in_memory(self.run, source.path) or name in gone:
                continue
            place = self.run / MEMORY / Path(source.path).name
            own = source.model_copy(update={"path": str(place)})
            lines = place.read_bytes().splitlines(keepends=True)
            # Rows that are no pairs, too.
            left_out = {
                number
                for number, line in enumerate(lines, 1)
                if client_of(json.loads(line).get(column), name) in gone
            }
            counted = config.model_copy(update={"rows": None})
            for record, location in read_records(own, counted, role, name, ErrorCollector(), ReadCounts()):
                client = client_of(record.column(column) if column else None, name)
                if client in gone or pair_digest(client, record) in pairs:
                    left_out.add(location.row)
            files.private_folder(partial / MEMORY)
            kept = [line for number, line in enumerate(lines, 1) if number not in left_out]
            files.write(partial / MEMORY / place.name, b"".join(kept), mode=0o600)

    def _check_others(self, dataset: FederatedDataset, folder: Path) -> None:
        """Check that the pairs of all other clients are those of the run.

        Raises:
            DataError: they are not, or a client has no training pair left.
        """
        if self.digests and (lost := sorted(set(self.clients) - set(dataset.clients))):
            raise DataError(f"no training pair of {lost[0]!r} is left: forget the client, without --rows")
        config = self.experiment.data
        if config.duplicates == "drop_tested" or not self.clients:
            # The others' pairs may change, so the sources must not.
            before = read_manifest(self.run / "cache" / "data")["inputs"]["source files"]
            if any(each not in before for each in read_manifest(folder)["inputs"]["source files"]):
                raise DataError(f"{self.run}: the data changed since the run; restore the original")
            return
        others = sorted((set(self.dataset.clients) | set(dataset.clients)) - set(self.clients))
        for client in others:
            if _pairs_of(self.dataset, client) != _pairs_of(dataset, client):
                raise DataError(
                    f"{self.run}: the pairs of {client!r} changed since the run; restore the data"
                )


def _pairs_of(dataset: FederatedDataset, client: str) -> str:
    """A digest of a client's pairs in their order; empty if it has none."""
    if client not in dataset.clients:
        return ""
    data, hasher = dataset.clients[client], files.Hasher()
    for split in (data.train, data.validation, data.test):
        hasher.update(b"%d;" % len(split))
        for row in split.tolist():
            hasher.update(dataset.tokens.record(row).to_json().encode())
    return hasher.hexdigest()
