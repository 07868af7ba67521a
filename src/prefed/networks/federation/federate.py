"""A run over a federation's sites, from its experiment to a finished run directory."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prefed.config import ConfigError, Experiment, to_toml
from prefed.config.file import parse_toml
from prefed.core import Callback, files
from prefed.core.records import Summary
from prefed.core.text import pluralize, printable
from prefed.core.wire import encode
from prefed.data import ClientSizes, FederatedDataset
from prefed.engines import ServerRounds
from prefed.engines.validation import longest_answer
from prefed.networks.federation.experiment import HELD, with_real_clients
from prefed.networks.federation.hub import FederationBackend, Sites
from prefed.networks.federation.messages import PACKAGES, Joined, own_version
from prefed.networks.federation.transport import FederationError, Transport, UnreachableError
from prefed.runs.build import assemble_job, build_trainers, unseen_clients, warn_of_like_selectors
from prefed.runs.data_notices import announce
from prefed.runs.run import conclude
from prefed.runs.start_or_resume import commit_start, digests_of, open_run, reconcile
from prefed.store import RunWriter

T = TypeVar("T")
FILE = "federation.json"
PREPARE = 3600.0
"""Seconds in which a site must have read its data, or loaded its model."""
QUIET = 3.0
"""Seconds for which the hub waits for its sites before it says for whom."""
PAUSE = 0.5


@dataclass(frozen=True)
class Terms:
    """How a hub runs a federation.

    Attributes:
        federation: its name.
        sites: that take part.
        wait: seconds to wait for all of them at the start of a run.
        at_least: so many are enough to begin, once ``wait`` is over; to go on, one is.
        visit: seconds that one visit or evaluation may take before its site counts as away.
        most_clients: that one site may say it has.
        most_pairs: that a site may say one client has.
    """

    federation: str
    sites: tuple[str, ...]
    wait: float = 120.0
    at_least: int | None = None
    visit: float = 600.0
    most_clients: int = 10_000
    most_pairs: int = 10_000_000


def federate(
    experiment: Experiment,
    out: Path,
    transport: Transport,
    terms: Terms,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    page: Callable[[Path], str] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Run an experiment over the sites of a federation, to its end.

    The run directory is that of :func:`prefed.run`, without a private state: ``checkpoint/clients`` holds
    receipts of the states, which lie at the sites.

    Args:
        page: as :func:`prefed.run` takes it.
        tell: is given a line for each site before round 1: how many clients and pairs it says it has.

    Returns:
        What ``summary.json`` holds.

    Raises:
        FederationError: too few sites come, one refuses the run or reports more clients or pairs than it
            may, or two have a client of one name.
        ConfigError, StoreError, OSError, ModelError, RoundError: as :func:`prefed.run`.
    """
    _check(experiment)
    experiment = with_real_clients(experiment)
    with open_run(experiment, out, callbacks, resume=resume, page=page) as (writer, callback):
        known = _known(writer)
        if known is None:
            writer.forget()
        experiment = reconcile(experiment, writer, begun=known is not None)
        return _run(experiment, writer, known, transport, terms, callback, tell)


def _check(experiment: Experiment) -> None:
    """Refuse what a federation has not."""
    if experiment.whole_graph is not None or experiment.fleet is not None:
        table = "graph" if experiment.whole_graph is not None else "fleet"
        raise ConfigError(f"[{table}]: a federation has a server and no virtual clock: remove it")
    if experiment.align is not None:
        raise ConfigError("[align]: remove it, and run `prefed align` on the finished run")
    if experiment.stop is not None:
        raise ConfigError("[stop]: a federation keeps only its last round: remove it")
    if experiment.method.name == "centralized":
        raise ConfigError("centralized pools all pairs in one place: take another method")


def _run(
    experiment: Experiment,
    writer: RunWriter,
    known: Mapping[str, Any] | None,
    transport: Transport,
    terms: Terms,
    callback: Callback,
    tell: Callable[[str], None],
) -> Summary:
    run = known["run"] if known else secrets.token_hex(8)
    sites = Sites(transport, terms.federation, run, PREPARE)
    text = told_experiment(experiment)
    wanted = tuple(known["sites"]) if known else terms.sites
    if set(terms.sites) != set(wanted):
        callback.on_warning(
            f"the run continues with the sites that it started with, {', '.join(wanted)}: others need a "
            "new run, with another --out"
        )
    present = _gather(sites, wanted, terms, tell, resumed=known is not None)
    if absent := ", ".join(sorted(set(wanted) - set(present))):
        callback.on_warning(
            f"the run continues without {absent} until it is back"
            if known
            else f"the run starts without {absent}: who comes later takes part in the next run"
        )
    answers = _each(present, lambda site: sites.join(site, text))
    clients = told_clients(known, answers, terms.most_clients, terms.most_pairs)
    for site in present:
        compare_versions(site, answers[site].versions, callback.on_warning)
    for line in claim_lines(clients):
        tell(line)
    homes = {client: site for site, own in clients.items() for client in own}
    sizes = {client: ClientSizes(*own[client]) for own in clients.values() for client in own}
    dataset = FederatedDataset.without_pairs(dict(sorted(sizes.items())))
    job = assemble_job(experiment, build_trainers(experiment, dataset, None))
    warn_of_like_selectors(experiment, job)
    # A resumed run must have the same sites and clients.
    roster = files.digest(json.dumps(clients, sort_keys=True).encode())
    commit_start(experiment, job, writer, digests_of(experiment, job) | {"data": roster})
    announce(experiment, job, callback)
    members, unseen = sorted(homes), list(unseen_clients(experiment, dataset))
    model = job.trainers.fingerprint["model"]
    _each(present, lambda site: sites.start(site, members, unseen, model))
    # From here on sites may be asked for visits: what they keep and have sent belongs to this run.
    about = {"federation": terms.federation, "run": run, "sites": clients}
    files.write(writer.path / FILE, json.dumps(about, indent=1).encode())
    sites.most = partial(longest_answer, job)
    backend = FederationBackend(sites, writer.states, homes, terms.visit, callback.on_warning)
    backend.away |= set(clients) - set(present)
    with backend:
        server = _Rounds(job, writer, backend, callback).run()
        held = {site: sorted(own) for site, own in clients.items()}
        conclude(job, writer, server, {}, callback, sites=held)
        backend.publish(writer.round, lambda client: encode(job.method.publish(server, client)))
    for site in present:
        sites.leave(site)
    summary: Summary = json.loads((writer.path / "summary.json").read_text("utf-8"))
    return summary


@dataclass(frozen=True)
class _Rounds(ServerRounds):
    """Rounds without the clients of sites that are set aside."""

    backend: FederationBackend

    def aside(self) -> frozenset[str]:
        return super().aside() | self.backend.set_aside()


def told_experiment(experiment: Experiment) -> str:
    """What sites are sent of an experiment: no path of this machine's data or model."""
    tables = parse_toml(to_toml(experiment), "the experiment")
    tables["data"] |= {"train": HELD, "partition": {"by": "iid", "clients": 1}}
    for key in ("validation", "test"):
        tables["data"].pop(key, None)
    tables["model"]["name"] = "the site's own"
    tables["model"].pop("revision", None)
    tables["method"].pop("reward_model", None)
    tables.pop("track", None)
    import tomli_w

    return tomli_w.dumps(tables)


def told_clients(
    known: Mapping[str, Any] | None, answers: Mapping[str, Joined], most_clients: int, most_pairs: int
) -> dict[str, dict[str, list[int]]]:
    """Site → its clients, each with its numbers of pairs.

    Nobody but the site knows whether they are true. A merge weighs by them, so they are bounded.

    Args:
        known: what ``federation.json`` holds, for a run that continues.
        answers: site → its answer when it was sent the experiment.
        most_clients: of one site.
        most_pairs: of one client.

    Raises:
        FederationError: a site has more than it may, two sites have a client of one name, or a site's clients
            are others than at the start.
    """
    clients, homes = {site: answer.clients for site, answer in answers.items()}, dict[str, str]()
    for site, told in clients.items():
        if len(told) > most_clients:
            raise FederationError(
                f"site {site!r} reports {len(told):,} clients, and --most-clients = {most_clients:,}: raise "
                "it if that is right"
            )
        for client, counts in told.items():
            if max(counts) > most_pairs:
                raise FederationError(
                    f"site {site!r} reports more pairs of {client!r} than --most-pairs = {most_pairs:,}: "
                    "raise it if that is right"
                )
            if known is None and client in homes:
                raise FederationError(
                    f"sites {homes[client]!r} and {site!r} both have a client {client!r}: rename it at one "
                    "of them, or set [tell] names = false"
                )
            homes[client] = site
        if known is not None and told != known["sites"][site]:
            raise FederationError(f"the clients of site {site!r} changed since the run started")
    return clients if known is None else dict(known["sites"])


def claim_lines(clients: Mapping[str, Mapping[str, list[int]]]) -> list[str]:
    """What each site claims, and its weight in a merge by pairs, for a person.

    >>> for line in claim_lines({"north": {"ada": [30, 0, 4]}, "south": {"ben": [5, 0, 1], "cy": [5, 0, 1]}}):
    ...     print(line)
    north says: 1 client, 30 training pairs (75% of all)
    south says: 2 clients, 10 training pairs (25% of all)
    """
    pairs = {site: sum(counts[0] for counts in own.values()) for site, own in clients.items()}
    total = sum(pairs.values()) or 1
    return [
        f"{site} says: {pluralize(len(own), 'client', 'clients')}, "
        f"{pluralize(pairs[site], 'training pair', 'training pairs')} ({pairs[site] / total:.0%} of all)"
        for site, own in clients.items()
    ]


def compare_versions(site: str, versions: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Refuse another version of prefed at a site, and warn of other versions of libraries.

    Raises:
        FederationError: it has another version of prefed, or does not say which.
    """
    for name in PACKAGES:
        here, there = own_version(name), versions.get(name)
        if here == there:
            continue
        text = f"site {site!r} has {name} {there and printable(there[:40])}, and the hub has {here}"
        if name == "prefed":
            raise FederationError(f"{text}: install the same version")
        warn(f"{text}: last digits may differ")


def _gather(
    sites: Sites, wanted: Sequence[str], terms: Terms, tell: Callable[[str], None], resumed: bool
) -> list[str]:
    """Wait until all sites can be reached, or enough of them and the time is over.

    Args:
        tell: is given a line with those that are missing, once it takes longer than :data:`QUIET`.

    Raises:
        FederationError: too few come.
    """
    least = 1 if resumed else (terms.at_least or len(wanted))
    begun = time.monotonic()
    told = False
    while True:
        present = sorted(sites.connected() & set(wanted))
        missing = ", ".join(sorted(set(wanted) - set(present)))
        waited = time.monotonic() - begun
        if not missing or (waited > terms.wait and len(present) >= least):
            return present
        if waited > terms.wait:
            raise FederationError(
                f"{len(present)} of {len(wanted)} sites came within {terms.wait:g} seconds; missing: "
                f"{missing} (`prefed site CONFIG` on each; --wait for more time, --at-least for fewer sites)"
            )
        if waited >= QUIET and not told:
            tell(f"waiting for {missing}, {terms.wait:g} seconds in all")
            told = True
        time.sleep(PAUSE)


def _each(sites: Sequence[str], act: Callable[[str], T]) -> dict[str, T]:
    """What ``act`` gives for each site, all at the same time. The first that fails ends it.

    Raises:
        FederationError: a site does not answer, or what ``act`` raises.
    """
    pool = ThreadPoolExecutor(max(1, len(sites)))
    asked = {pool.submit(act, site): site for site in sites}
    answers = dict[str, T]()
    try:
        for future in as_completed(asked):
            site = asked[future]
            try:
                answers[site] = future.result()
            except UnreachableError as error:
                raise FederationError(
                    f"site {site!r} is away: {error}; start again once it is back"
                ) from error
    finally:
        # The others' answers are not awaited: they may take as long as a model takes to load.
        pool.shutdown(wait=False, cancel_futures=True)
    return {site: answers[site] for site in sites}


def _known(writer: RunWriter) -> dict[str, Any] | None:
    """What :data:`FILE` holds of a run whose sites may have been asked for visits; ``None`` before that.

    Raises:
        FederationError: there are rounds, and the file is gone, or it is damaged.
    """
    path = writer.path / FILE
    if writer.round == 0 and not path.exists():
        return None
    try:
        known: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FederationError(f"{path}: {error}; put a copy of it back") from error
    return known
