"""Forget clients, or single pairs, of a finished run: replay it without them, and replace it.

The replay is the run of the same experiment with the clients in ``[data] exclude``, or the digests of the
pairs in ``exclude_pairs``, so it is bit for bit the run that never had them. It is made next to the run::

    RUN.forgetting/request.json    what is forgotten, from which commit
    RUN.forgetting/run/            the replay; once it has its certificate, the two folders are exchanged

RUN is therefore the old run or the new one at any moment, and the same call continues a killed one. Nothing
is carried over from the old run but what :func:`_prepare` and :func:`_conclude` name, so nothing is missed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from prefed.config import ConfigError, Experiment, to_toml
from prefed.config.file import override, parse_override
from prefed.core import Callback, files
from prefed.data import DataError, FederatedDataset
from prefed.data.build import clients_of_groups
from prefed.data.config import ByColumn, ByFile, BySource
from prefed.data.dataset import read_manifest
from prefed.data.errors import ErrorCollector
from prefed.data.record import pair_digest
from prefed.data.sources import ReadCounts, read_records
from prefed.data.sources.huggingface import looks_like_hub_name
from prefed.methods import METHODS
from prefed.runs.align import FOLDER as ALIGN
from prefed.runs.align import align, read_settings
from prefed.runs.build import build_data
from prefed.runs.export import EXPORTS, read_exports
from prefed.runs.finished_run import RunError, no_client, read_config, read_run
from prefed.runs.loaded_run import recorded_experiment, source_like
from prefed.runs.memory import FOLDER as MEMORY
from prefed.runs.reference import SHARED
from prefed.runs.run import run as run_experiment
from prefed.runs.start_or_resume import is_place, settings_digest
from prefed.runs.summary import describe_origin
from prefed.store import RunReader, StoreError, client_file
from prefed.store.commit import Commit, kept_commits, path_of, read_commit, read_state, write_commit
from prefed.store.directory import lock

FORGOTTEN = "forgotten"
"""Folder of a run with the certificates, ``NAME.json`` for each client."""
STAGING = ".forgetting"
"""Suffix of the folder next to a run in which the replay is made."""
REPLAYED = (
    *("config.toml", "rounds.jsonl", "summary.json", "run.log", "checkpoint", "cache", "data"),
    *("tastes.json", "answers.jsonl", "track.json", "tensorboard", "wandb"),
)
"""Names in a run directory that the replay makes again, where the run has them."""
DELETED = ("merged", "report.html", "judge", "judged-test.json")
"""Names in a run directory that other commands wrote."""

Action = Literal["made again", "deleted", "kept", "not reached"]


@dataclass(frozen=True)
class Descendant:
    """Something that descends from what is forgotten.

    Attributes:
        where: a path in the run directory, or another place.
        action: what happens to it; ``"not reached"``: it must be deleted by hand.
        note: what it is, or what to do.
    """

    where: str
    action: Action
    note: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What forgetting will do.

    Attributes:
        clients: the clients; of ``--rows``, the one whose pairs are forgotten.
        digests: of the pairs, if not all of a client's are forgotten.
        pairs: numbers of training, validation and test pairs that are forgotten.
        after: the kept commit from which rounds are replayed; 0: the start.
        why: why not from a later commit; empty if from the last one that is unaffected.
        rounds: number of rounds to replay.
        similar: names that may denote the same clients.
    """

    run: str
    clients: tuple[str, ...]
    digests: tuple[str, ...]
    pairs: tuple[int, int, int]
    after: int
    why: str
    rounds: int
    guarantee: str
    descendants: tuple[Descendant, ...]
    similar: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)


SAME = "bit-identical to a run of the same experiment that never had them, on the same machine"
NOISED = "differential privacy only: the system drew the noise, so no two runs are equal"


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
    path = Path(path)
    run = path.resolve()
    staging = _staging(run)
    if not run.exists() and (staging / "old").exists():
        (staging / "run").rename(run)  # killed between the two renames of files.exchange
    if not (run / "checkpoint").is_dir():
        read_run(path)  # raises an error with the reason
    handle = lock(run, "wait for it")
    try:
        done = _finish(run, staging, clients) or ([] if rows else _forgotten(run, clients))
        return done or _Forgetting(path, clients, rows, overrides).replace(callbacks)
    finally:
        os.close(handle)


def _forgotten(run: Path, clients: Sequence[str]) -> list[Path]:
    """The certificates of clients that were forgotten by an earlier call; none unless all were."""
    excluded = read_config(run / "config.toml")["data"].get("exclude", ())
    if not clients or not {*clients} <= {*excluded}:
        return []
    return [path for name in clients for path in (run / FORGOTTEN).glob(f"{client_file(name)}.json")]


def _staging(run: Path) -> Path:
    return run.with_name(run.name + STAGING)


def _certificates(run: Path, request: str) -> list[Path]:
    """The certificates of a request in a run directory."""
    found = sorted((run / FORGOTTEN).glob("*.json"))
    return [path for path in found if files.loads_with_digest(path.read_bytes())["request"] == request]


def _finish(run: Path, staging: Path, clients: Sequence[str]) -> list[Path]:
    """Exchange the folders if the replay is complete, and delete the old run; the certificates, if any."""
    try:
        request = files.loads_with_digest((staging / "request.json").read_bytes())
    except FileNotFoundError:
        return []
    if sorted(request["clients"]) != sorted(clients):
        again = shlex.join(word for name in request["clients"] for word in ("--client", name))
        raise StoreError(
            f"{run}: forgetting {', '.join(map(repr, request['clients']))} is not finished; continue it "
            f"({again}), or delete {staging} to give it up"
        )
    name = request["id"]
    if not _certificates(run, name) and _certificates(staging / "run", name):
        _check_same(run, staging, request)
        files.exchange(staging / "run", run, staging / "old")
    if done := _certificates(run, name):
        # The request is removed last, so that a killed removal is continued.
        for folder in (entry for entry in staging.iterdir() if entry.is_dir()):
            shutil.rmtree(folder)
        shutil.rmtree(staging)
        files.sync(staging.parent)
    return done


def _check_same(run: Path, staging: Path, request: Mapping[str, Any]) -> None:
    if files.file_digest(run / "checkpoint/COMMIT.json") != request["commit"]:
        raise StoreError(
            f"{run} changed since forgetting started; delete {staging}, and repeat this command to start "
            "again"
        )


def _elsewhere(path: Path, sites: Mapping[str, str], clients: Sequence[str]) -> str:
    """Why a run over several machines is not replayed, and what to do instead."""
    for client in clients:
        if sites and client not in sites:
            return f"{path}: {no_client(client, sorted(sites))}"
    text = f"{path} ran over several machines, whose pairs and private states are not here. "
    steps = [
        *(f"at site {sites[name]!r}, `prefed site withdraw` for {name!r}" for name in clients if sites),
        f"start it again in another directory with [data] exclude = {json.dumps(list(clients))}",
        "delete this directory"
        + (f", and what {EXPORTS} in it lists" if (path / EXPORTS).exists() else "")
        + (" (at sites: state/runs of this run)" if sites else ""),
    ]
    return text + "; ".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


class _Forgetting:
    """A run, and what is to be forgotten."""

    def __init__(
        self, path: Path, clients: Sequence[str], rows: str | None, overrides: Sequence[str]
    ) -> None:
        self.record = record = read_run(path)
        self.run = path.resolve()
        self.clients = tuple(sorted(set(clients)))
        if record.sites or (self.run / "federation.json").exists() or "peer" in record.summary:
            raise RunError(_elsewhere(path, record.sites, self.clients))
        if self.run.is_mount():
            raise RunError(
                f"{path} is a mounted folder, which cannot be replaced; forget in the folder above"
            )
        recorded_experiment(record)  # checks the code from outside prefed
        self.reader = RunReader(path)
        if self.reader.commit.settings not in (None, settings_digest(record.config)):
            raise RunError(f"{path / 'config.toml'} was edited after the start of the run; restore it")
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
        data = self.experiment.data
        tables = self.experiment.tables()
        tables["data"]["exclude"] = sorted({*data.exclude, *gone})
        tables["data"]["exclude_pairs"] = sorted({*data.exclude_pairs, *self.digests})
        self.without = Experiment.from_tables(tables, "the replay")
        self.staging = _staging(self.run)
        self.new = self.staging / "run"

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
                f"{self.run}: the data changed since the run, and its cache is deleted; restore the data"
            )
        return dataset

    def _digests(self, rows: str) -> tuple[str, ...]:
        """The digests of the pairs in a file.

        Raises:
            DataError: one is not a pair of the client, or cannot be read.
        """
        client = self.clients[0] if self.clients else ""
        config = self.experiment.data.model_copy(update={"rows": None})
        errors, tokens, found = ErrorCollector(), self.dataset.tokens, dict[str, None]()
        known = {
            pair_digest(client, record.swapped() if tokens.flipped[row] else record)
            for row, record in ((row, tokens.record(row)) for row in range(len(tokens)))
        }
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
            rounds=self.reader.commit.round - after,
            guarantee=NOISED if self.experiment.privacy.draws == "system" else SAME,
            descendants=tuple(self._descendants()),
            similar=tuple(sorted(similar - set(self.clients))),
        )

    def _start(self) -> tuple[int, str]:
        """The round after which the replay starts, and why it is no later one."""
        if why := self._everywhere():
            return 0, why
        every, first = self.experiment.evaluate.every, self.reader.commit.round
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
            f"[merge] weights = {one.merge.weights!r} are of all clients": one.merge.weights
            in ("qffl", "afl"),
            "the method is from outside prefed": METHODS.builtin.get(kind.name) is not kind,
            kind.reason("COUNTS_CLIENTS"): bool(kind.reason("COUNTS_CLIENTS")),
            "a client without training pairs had no place in cohorts": not self.digests
            and not all(self._trains(name) for name in self.clients),
        }
        return next((why for why, holds in reasons.items() if holds), "")

    def _trains(self, client: str) -> bool:
        unseen = self.experiment.evaluate.unseen
        return client in self.dataset.clients and not (isinstance(unseen, list) and client in unseen)

    def _descendants(self) -> Iterator[Descendant]:
        run, own = self.run, {f"client-{client_file(name)}" for name in self.clients}
        known = {*REPLAYED, *DELETED, "adapters", ALIGN, FORGOTTEN, EXPORTS}
        for entry in sorted(run.iterdir()):
            name, size = entry.name, files.folder_size(entry) if entry.is_dir() else entry.stat().st_size
            if name not in known:
                raise RunError(
                    f"{entry} is not a file of the run, and may hold its texts: move or delete it first"
                )
            if name == "adapters":
                again = {"shared", *self.record.summary.get("selectors", ())}
                for folder in sorted(entry.iterdir()):
                    kind: Action = "made again" if folder.name in again else "deleted"
                    note = "the client's own model" if folder.name in own else ""
                    note = note or ("" if kind == "made again" else "export it again: prefed export")
                    yield Descendant(f"adapters/{folder.name}", kind, note, files.folder_size(folder))
            elif name == ALIGN:
                yield Descendant(ALIGN, *self._alignment(), size)
            elif name in DELETED:
                yield Descendant(name, "deleted", "repeat the command that wrote it", size)
            else:
                yield Descendant(name, "kept" if name in (FORGOTTEN, EXPORTS) else "made again", "", size)
        for name in self.clients:
            for path in sorted((run / "checkpoint" / "clients").glob(f"{client_file(name)}@*")):
                yield Descendant(
                    str(path.relative_to(run)), "deleted", "its private state", path.stat().st_size
                )
        yield from self._elsewhere()

    def _alignment(self) -> tuple[Action, str]:
        """What happens to the alignment of the run."""
        if not (self.run / ALIGN / "summary.json").exists():
            return "deleted", "it was not finished"
        try:
            config = read_settings(self.record)
        except ValueError as error:
            return "deleted", f"it cannot be repeated: {error}"
        if config.taste in self.clients:
            return "deleted", "it used the client's taste"
        if config.endpoint is not None or (config.judge_name or "").startswith("endpoint:"):
            return "deleted", "a server's answers are not reproducible: repeat it with prefed align"
        return "made again", ""

    def _elsewhere(self) -> Iterator[Descendant]:
        """Copies and descendants outside the run directory, as far as they are known."""
        run = self.run
        for place in dict.fromkeys(source.path for _, _, source in self.experiment.data.sources()):
            if not self._in_memory(place):
                yield Descendant(place, "not reached", "the rows in the source; you may delete them")
        for row in read_exports(run):
            if not Path(row["to"]).is_relative_to(run):
                yield Descendant(row["to"], "not reached", f"{row['what']} of {row['at'][:10]}")
        tracked = run / "track.json"
        for tool, state in json.loads(tracked.read_text("utf-8")).items() if tracked.exists() else ():
            yield Descendant(f"{tool} run {state.get('known')}", "not reached", "logged metrics")
        if shared := os.environ.get(SHARED):
            yield Descendant(shared, "not reached", f"numbers of the base model for its pairs ({SHARED})")
        for near in sorted(run.parent.iterdir()):
            config = near / "config.toml"
            if (
                near not in (run, _staging(run))
                and config.is_file()
                and str(run) in config.read_text("utf-8")
            ):
                yield Descendant(str(near), "not reached", "its settings name this run: start it again")
            if near.name.startswith(f"{run.name}.") and near.is_file():
                yield Descendant(str(near), "not reached", "a file next to the run")
        tables = (run.parent.with_suffix(".json"), *(f / "leaderboard.json" for f in run.parents[:2]))
        for table in tables:
            if table.is_file():
                yield Descendant(str(table), "not reached", "may have a row of this run: repeat prefed sweep")

    def _in_memory(self, place: str) -> bool:
        """Whether a source is a copy in the run directory of pairs that were passed from Python."""
        path = Path(place)
        return (self.run / MEMORY / path.name).exists() and path.parent.name == MEMORY

    # The replay.

    def replace(self, callbacks: Sequence[Callback]) -> list[Path]:
        """Make the replay, and replace the run."""
        started = time.perf_counter()
        planned = self.plan()
        request = self._request()
        if not self.new.exists():
            try:
                self._prepare(planned.after)
            except Exception:
                shutil.rmtree(self.staging)
                raise
        run_experiment(self._placed(self.new), self.new, resume=True, callbacks=callbacks)
        if any(each.where == ALIGN and each.action == "made again" for each in planned.descendants):
            align(self.new, read_settings(self.record), callbacks=callbacks)
        self._conclude(replace(planned, seconds=time.perf_counter() - started), request)
        return _finish(self.run, self.staging, self.clients)

    def _request(self) -> Mapping[str, Any]:
        """Write what is forgotten, or check that an earlier call wrote the same."""
        path = self.staging / "request.json"
        commit = files.file_digest(self.run / "checkpoint/COMMIT.json")
        wish = {"clients": list(self.clients), "pairs": list(self.digests), "commit": commit}
        name = hashlib.sha256(json.dumps(wish).encode()).hexdigest()[:16]
        if path.exists():
            request = files.loads_with_digest(path.read_bytes())
            _check_same(self.run, self.staging, request)
            if request["id"] != name:
                raise StoreError(f"{self.staging} is for other pairs: give the same --rows, or delete it")
            return request
        files.private_folder(self.staging)
        request = {**wish, "id": name, "asked": _now()}
        files.write(path, files.dumps_with_digest(request, indent=1), mode=0o600)
        return request

    def _placed(self, run: Path) -> Experiment:
        """The experiment of the replay: without trackers' and alignment's tables, its copies in ``run``."""
        tables = self.without.tables()
        for role, name, source in self.without.data.sources():
            if self._in_memory(source.path):
                place = str(run / MEMORY / Path(source.path).name)
                table = tables["data"][role] if name is None else tables["data"][role][name]
                table["path"] = place
        tables.pop("align", None)
        tables.pop("track", None)
        return Experiment.from_tables(tables, "the replay")

    def _prepare(self, after: int) -> None:
        """Make the directory of the replay as of round ``after``."""
        for role, name, source in self.without.data.sources():
            there = Path(source.path).expanduser().exists() or looks_like_hub_name(source.path)
            if name not in self.without.data.exclude and not there:
                key = f"data.{role}.path" if name is None else f"data.{role}.{name}.path"
                raise DataError(f"{source.path} is missing; if it has moved, add --set {key}=PATH")
        partial = self.staging / f"run{files.TEMPORARY}"
        shutil.rmtree(partial, ignore_errors=True)
        for folder in (partial / "checkpoint" / "clients", partial / "cache"):
            files.private_folder(folder)
        self._copy_memory(partial)
        dataset = build_data(self._placed(partial), partial / "cache" / "data")
        self._check_others(dataset, partial / "cache" / "data")
        experiment = self._placed(self.new)
        files.write(partial / "config.toml", to_toml(experiment).encode())
        (partial / "checkpoint" / "LOCK").touch()
        if after:
            self._copy_rounds(partial, after, dataset.fingerprint, settings_digest(experiment.tables()))
        if self.experiment.privacy.draws == "system":
            # Rounds that are repeated with new noise cost privacy again.
            starts = self.run / "checkpoint" / "starts.json"
            files.write(partial / "checkpoint" / "starts.json", starts.read_bytes(), mode=0o600)
        files.sync(partial)
        partial.rename(self.new)
        files.sync(self.staging)

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
            if not self._in_memory(source.path) or name in gone:
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

    def _copy_rounds(self, partial: Path, after: int, data: str, settings: str) -> None:
        """Copy what the kept commits up to round ``after`` name."""
        old, new = self.run / "checkpoint", partial / "checkpoint"
        numbers = sorted(number for number in kept_commits(old) if number <= after)
        for number in numbers:
            commit = read_commit(old, number)
            assert commit is not None
            for name, version_, digest in _states(commit):
                folder = "" if name == "server" else "clients"
                state = read_state(path_of(old / folder, name, version_), digest)
                files.write(path_of(new / folder, name, version_), state, mode=0o600)
            past = {key: digest for key, digest in commit.digests.past.items() if int(key) in numbers}
            changed = replace(
                commit,
                fingerprint={**commit.fingerprint, "data": data},
                settings=settings,
                digests=replace(commit.digests, past=past),
            )
            for kept in (number, None) if number == after else (number,):
                write_commit(new, changed, kept)
        with (self.run / "rounds.jsonl").open("rb") as lines:
            files.write(partial / "rounds.jsonl", b"".join(next(lines) for _ in range(after)))

    def _conclude(self, planned: Plan, request: Mapping[str, Any]) -> None:
        """Write what the replay does not: the settings, records of exports, and the certificates."""
        files.write(self.new / "config.toml", to_toml(self.without).encode())
        rows = [row for row in read_exports(self.run) if not Path(row["to"]).is_relative_to(self.run)]
        if rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            files.write(self.new / EXPORTS, text.encode(), mode=0o600)
        folder = self.new / FORGOTTEN
        files.private_folder(folder)
        for path in sorted((self.run / FORGOTTEN).glob("*.json")):
            files.write(folder / path.name, path.read_bytes(), mode=0o600)
        content = {
            "request": request["id"],
            "asked": request["asked"],
            "finished": _now(),
            **{key: value for key, value in asdict(planned).items() if key != "digests"},
            "run": self.run.name,
            "digests": {"before": _digests_of(self.run), "after": _digests_of(self.new)},
            "versions": {"prefed": version("prefed")},
            "origin": describe_origin({}),
        }
        names = self.clients or ("pairs",)
        for name in names:
            stem, number = client_file(name), 1
            while (place := folder / f"{stem}{'' if number == 1 else f'-{number}'}.json").exists():
                if files.loads_with_digest(place.read_bytes())["request"] == request["id"]:
                    break
                number += 1
            own = {"client": name, **content}
            files.write(place, files.dumps_with_digest(own, indent=1), mode=0o600)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _states(commit: Commit) -> Iterator[tuple[str, int, str | None]]:
    """Name, round and digest of each state that a commit names."""
    yield "server", commit.round, commit.digests.server
    for name, number in commit.private.items():
        yield name, number, commit.digests.clients.get(name)


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


def _digests_of(run: Path) -> dict[str, Any]:
    """SHA-256 of the server's state and of the shared adapters, and the digests of data and rounds."""
    commit = RunReader(run).commit
    states = [
        path_of(run / "checkpoint", "server", commit.round),
        *sorted((run / "adapters").glob("*/*.safetensors")),
    ]
    return {
        "round": commit.round,
        "data": commit.fingerprint["data"],
        "rounds": commit.digests.rounds,
        **{str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in states},
    }
