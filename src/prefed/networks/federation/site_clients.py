"""The clients of a federation's run, who judge completions of the hub at their sites, and train on them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prefed.align import AlignError, Selectors
from prefed.config import AlignConfig, ConfigError, Experiment, to_toml
from prefed.config.file import read_toml
from prefed.core import Callback, Privacy, files
from prefed.core.text import listed
from prefed.data import ClientSizes, FederatedDataset, Record
from prefed.engines import Task
from prefed.engines.tasks import MemoryStates
from prefed.networks.federation.config import Terms
from prefed.networks.federation.experiment import HELD, with_real_clients
from prefed.networks.federation.federate import (
    FILE,
    PREPARE,
    check_clients,
    experiment_for_sites,
    federate,
    gather,
    roster_digest,
)
from prefed.networks.federation.hub import Attempt, FederationBackend, Sites
from prefed.networks.federation.judging import read_votes, write_pairs
from prefed.networks.federation.messages import Judged
from prefed.networks.federation.transport import Transport
from prefed.privacy import VoteSum, vote_noise
from prefed.runs.build import unseen_clients
from prefed.runs.copy_commits import copy_commits, prepared_run
from prefed.runs.finished_run import read_run
from prefed.runs.labels import selectors_of
from prefed.runs.loaded_run import LoadedRun, load_run, recorded_experiment
from prefed.runs.refresh import refreshed_experiment
from prefed.runs.start_or_resume import settings_digest
from prefed.store import RunReader

if TYPE_CHECKING:
    import torch


_REMEDY = (
    "continue with prefed align --resume when all sites are back, or label without them (--sites, --stage)"
)


@dataclass
class SiteClients:
    """Clients that judge at their sites; see :class:`prefed.align.Clients`.

    Attributes:
        path: the run.
        config: the alignment's.
        known: contents of its ``federation.json``.
        homes: client that judges → its site.
        round: the last round of the run.
        privacy: of the run.
        members: number of clients that train in the run, of all sites.
        backend: sends tasks to the sites.
        terms: for further rounds; their sites are those of ``homes``.
        warn: called with warnings of further rounds.
    """

    path: Path
    config: AlignConfig
    known: Mapping[str, Any]
    homes: Mapping[str, str]
    round: int
    privacy: Privacy
    members: int
    backend: FederationBackend
    transport: Transport
    terms: Terms
    warn: Callable[[str], None]
    _kept: dict[str, int] = field(default_factory=dict, init=False)

    @property
    def identity(self) -> Mapping[str, Any]:
        """See :class:`prefed.align.Clients`: the run and its clients."""
        return {"run": self.known["run"], "clients": list(self.homes)}

    @property
    def names(self) -> Sequence[str]:
        """The clients that judge."""
        return list(self.homes)

    @property
    def scorers(self) -> Mapping[str, Any]:
        """None, as clients keep their verdicts."""
        return {}

    @property
    def votes(self) -> SiteClients:
        """See :class:`prefed.align.Clients`."""
        return self

    def judge(self, refreshes: Sequence[int], pairs: Mapping[str, Sequence[Record]]) -> int:
        """See :class:`prefed.align.Clients`.

        Raises:
            AlignError: a site refuses or is away, or an answer is no number of pairs.
        """
        name = "-".join(["refresh", *map(str, refreshes)])
        assert self.config.refresh is not None
        most = self.config.refresh.pairs * len(refreshes)
        answers = self._ask(name, {client: write_pairs(own) for client, own in pairs.items()})
        self._kept = {client: self._count(client, message, most) for client, message in answers.items()}
        return sum(self._kept.values())

    def _count(self, client: str, message: bytes, most: int) -> int:
        """Read the number of pairs that a client keeps."""
        try:
            count = json.loads(message)
        except (ValueError, RecursionError):
            count = None
        if type(count) is not int or not 0 <= count <= most:
            raise AlignError(f"{self._who(client)}: its answer is no number of pairs up to {most}")
        return count

    def train(self, pairs: Path, before: Sequence[Path], folder: Path) -> str:
        """Take further rounds over the sites; see :class:`prefed.align.Clients`.

        Raises:
            AlignError: a site reports other pairs than its clients have judged.
            FederationError, RoundError: as :func:`prefed.networks.federation.federate.federate`.
        """
        refreshes = [int(each.parent.name) for each in (*before, folder)]
        if not folder.exists():
            self._prepare(refreshes, before[-1] if before else self.path, folder)
        file = folder / "config.toml"
        experiment = Experiment.from_tables(read_toml(file), str(file))
        heard = _Warnings(self.warn)
        federate(experiment, folder, self.transport, self.terms, resume=True, callbacks=[heard])
        return RunReader(folder).commit.digests.server or ""

    def _prepare(self, refreshes: Sequence[int], last: Path, folder: Path) -> None:
        """Write a run that continues ``last`` at the sites whose clients have pairs."""
        assert self.config.refresh is not None
        commit = replace(RunReader(last).commit, best=None)
        counts = {client: count for client, count in self._kept.items() if count}
        experiment = refreshed_experiment(
            recorded_experiment(read_run(self.path)),
            commit.round,
            self.config.refresh.rounds,
            counts,
            self.names,
            {"train": HELD, "partition": {"by": "iid", "clients": 1}},
        )
        after = json.loads((last / FILE).read_bytes())["run"]
        judged = Judged(run=self.known["run"], after=after, refreshes=list(refreshes))
        run, code = secrets.token_hex(8), {name: own.record() for name, own in experiment.code().items()}
        sites = Sites(self.transport, self.known["federation"], run, PREPARE, code, judged)
        wanted = sorted({self.homes[client] for client in counts})
        text = experiment_for_sites(experiment)
        answers = {site: sites.join(site, text) for site in wanted}
        clients = check_clients(None, answers, self.terms.most_clients, self.terms.most_pairs)
        for site, own in clients.items():
            # Equal pairs count once, and those that are too long not at all.
            most = {client: count for client, count in counts.items() if self.homes[client] == site}
            if any(sizes[0] > most.get(client, 0) for client, sizes in own.items()):
                raise AlignError(f"site {site!r} reports more pairs than its clients have judged")
        with prepared_run(folder) as partial:
            files.write(partial / "config.toml", to_toml(experiment).encode())
            about = {"federation": self.known["federation"], "run": run, "sites": clients}
            about["judged"] = judged.model_dump()
            files.write(partial / FILE, json.dumps(about, indent=1).encode())
            roster = roster_digest(clients)
            copy_commits(last, partial, {commit.round: commit}, roster, settings_digest(experiment.tables()))

    def selectors(self, folder: Path) -> Selectors:
        """Return the selectors of a refresh."""
        return selectors_of(replace(self._run, reader=RunReader(folder)), self.config.taste)

    @cached_property
    def _run(self) -> LoadedRun:
        return load_run(self.path, data=False)

    def _who(self, client: str) -> str:
        return f"site {self.homes[client]!r}, client {client!r}"

    def _ask(self, exchange: str, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return each client's answer.

        Raises:
            AlignError: a site refuses or is away.
        """
        self.transport.restrict(self.terms.sites)
        found = dict[str, bytes]()
        tasks = (Task("judge", client, self.round, exchange, message) for client, message in messages.items())
        for result in self.backend.run(tasks):
            if result.withheld:
                raise AlignError(f"{self._who(result.client)}: no votes: {result.withheld}")
            found[result.client] = result.message
        if away := sorted({self.homes[client] for client in messages.keys() - found.keys()}):
            raise AlignError(f"{listed(away)} did not vote: {_REMEDY}")
        return found

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the votes ``[U, n]`` of all clients on all pairs.

        Raises:
            AlignError: a site refuses or is away, or a client's answer is no vote on each pair.
        """
        if not pairs:
            return np.arange(0), np.zeros((len(self.homes), 0), np.float32)
        answers, votes = self._ask("", dict.fromkeys(self.homes, write_pairs(pairs))), []
        for client in self.homes:
            try:
                votes.append(read_votes(answers[client], len(pairs)))
            except ValueError as error:
                raise AlignError(f"{self._who(client)}: no valid votes: {error}") from error
        return np.arange(len(pairs)), np.stack(votes)

    def noised(self, pairs: Sequence[Record], request: str, number: int) -> NDArray[np.int64] | None:
        """Return the sites' masked sum; see :class:`prefed.align.Clients`.

        Raises:
            AlignError: a site refuses, fails or is away.
        """
        summed, sites = VoteSum(len(pairs)), sorted({*self.homes.values()})
        attempt = Attempt(1, f"votes-{number}", sites, summed.size, self.backend.sites_of(self.homes))
        self.transport.restrict(self.terms.sites)
        present, words, why = self.backend.sum(self.round, write_pairs(pairs), attempt, len(sites))
        if away := [site for site in sites if site not in present]:
            reasons = "; ".join(f"site {site!r}: {why.get(site, 'it is away')}" for site in away)
            raise AlignError(f"no sum of votes ({reasons}): {_REMEDY}")
        grid = summed.grid(self.privacy, len(sites), self.members)
        if words is None or not grid.plausible(words):
            reasons = "; ".join(f"site {site!r}: {reason}" for site, reason in sorted(why.items()))
            self.warn(
                f"no sum of votes-{number}, which is spent all the same: "
                + (reasons or f"what {listed(sites)} sent is no sum; leave one out with --sites")
            )
            return None
        return summed.votes(grid.numbers(words))

    def noise(self, pairs: int) -> float:
        """See :class:`prefed.align.Clients`."""
        return vote_noise(self.privacy, len(self.homes), pairs, len({*self.homes.values()}))


@dataclass
class _Warnings(Callback):
    warn: Callable[[str], None]

    def on_warning(self, text: str) -> None:
        self.warn(text)


@contextmanager
def site_clients(
    path: Path,
    config: AlignConfig,
    transport: Transport,
    terms: Terms,
    warn: Callable[[str], None],
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[SiteClients]:
    """Open the sites of a finished run, whose clients then judge.

    Args:
        terms: ``sites`` are those that vote; empty: all of the run.
        warn, report: called with warnings, and with lines to print.

    Raises:
        ConfigError: the run has noise, or has no such site.
        FederationError: a site is not connected.
        RunError: there is no finished run.
    """
    record = read_run(path)
    experiment = with_real_clients(recorded_experiment(record))
    kind = experiment.privacy.kind
    if kind is not None and (kind != "distributed" or config.refresh is not None):
        raise ConfigError(
            f"{path}: [privacy] kind = {kind!r}: sites add noise only to sums of votes, with "
            "kind = 'distributed' and align.labels = 'clients'; use other labels"
        )
    known: dict[str, Any] = json.loads((path / FILE).read_bytes())
    clients: dict[str, dict[str, list[int]]] = known["sites"]
    wanted = terms.sites or tuple(clients)
    if strangers := sorted({*wanted} - clients.keys()):
        raise ConfigError(f"{path}: no site {strangers[0]!r}: the run's are {', '.join(clients)}")
    sizes = {client: ClientSizes(*own[client]) for own in clients.values() for client in own}
    members = sorted(sizes)
    unseen = list(unseen_clients(experiment, FederatedDataset.without_pairs({c: sizes[c] for c in members})))
    commit = RunReader(path).commit
    code = {name: own.record() for name, own in experiment.code().items()}
    sites = Sites(transport, known["federation"], known["run"], PREPARE, code)
    sites.know(experiment_for_sites(experiment), members, unseen, commit.fingerprint["model"])
    sites.most = lambda client, exchange, number: 0
    transport.restrict(wanted)
    gather(sites, wanted, terms, report, len(wanted))
    if kind is not None:
        sites.secure = True
        for site in wanted:
            sites.start(site, members, unseen, commit.fingerprint["model"])
    at_sites = {client: site for site in wanted for client in clients[site]}
    homes = {client: at_sites[client] for client in members if client in at_sites and client not in unseen}
    backend = FederationBackend(sites, MemoryStates(), homes, terms.visit, warn)
    about = known, homes, commit.round, experiment.privacy, len({*members} - {*unseen})
    with backend:
        terms = replace(terms, sites=wanted)
        yield SiteClients(path, config, *about, backend, transport, terms, warn)
    for site in wanted:
        sites.leave(site)
