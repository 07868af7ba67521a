"""The clients of a federation's run, who vote at their sites on completions of the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prefed.align import AlignError
from prefed.config import ConfigError
from prefed.core.text import listed
from prefed.data import ClientSizes, FederatedDataset, Record
from prefed.engines import Task
from prefed.engines.tasks import MemoryStates
from prefed.networks.federation.experiment import with_real_clients
from prefed.networks.federation.federate import FILE, PREPARE, Terms, experiment_for_sites, gather
from prefed.networks.federation.hub import FederationBackend, Sites
from prefed.networks.federation.judging import read_votes, write_pairs
from prefed.networks.federation.transport import Transport
from prefed.runs.build import unseen_clients
from prefed.runs.finished_run import read_run
from prefed.runs.loaded_run import recorded_experiment
from prefed.store import RunReader

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SiteVoters:
    """Clients that vote; see :class:`prefed.align.Voters`.

    Attributes:
        identity: the run and its clients.
        homes: client that votes → its site.
        round: the last round of the run.
    """

    identity: Mapping[str, Any]
    homes: Mapping[str, str]
    round: int
    backend: FederationBackend

    @property
    def votes(self) -> SiteVoters:
        """See :class:`prefed.align.Voters`."""
        return self

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the votes ``[U, n]`` of all clients on all pairs.

        Raises:
            AlignError: a site refuses or is away, or a client's answer is no vote on each pair.
        """
        if not pairs:
            return np.arange(0), np.zeros((len(self.homes), 0), np.float32)
        body, found = write_pairs(pairs), dict[str, NDArray[np.float32]]()
        tasks = (Task("judge", client, self.round, "", body) for client in self.homes)
        for result in self.backend.run(tasks):
            who = f"site {self.homes[result.client]!r}, client {result.client!r}"
            if result.withheld:
                raise AlignError(f"{who}: no votes: {result.withheld}")
            try:
                found[result.client] = read_votes(result.message, len(pairs))
            except ValueError as error:
                raise AlignError(f"{who}: no valid votes: {error}") from error
        if away := sorted({self.homes[client] for client in self.homes.keys() - found.keys()}):
            raise AlignError(
                f"{listed(away)} did not vote: continue with prefed align --resume when all sites are back, "
                "or label without them (--sites, --stage)"
            )
        return np.arange(len(pairs)), np.stack([found[client] for client in self.homes])


@contextmanager
def site_voters(
    path: Path,
    transport: Transport,
    terms: Terms,
    warn: Callable[[str], None],
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[SiteVoters]:
    """Open the sites of a finished run, whose clients then vote.

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
    if experiment.privacy.kind is not None:
        raise ConfigError(f"{path}: [privacy]: votes of single clients have no noise; use other labels")
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
    at_sites = {client: site for site in wanted for client in clients[site]}
    homes = {client: at_sites[client] for client in members if client in at_sites and client not in unseen}
    backend = FederationBackend(sites, MemoryStates(), homes, terms.visit, warn)
    with backend:
        yield SiteVoters({"run": known["run"], "clients": list(homes)}, homes, commit.round, backend)
    for site in wanted:
        sites.leave(site)
