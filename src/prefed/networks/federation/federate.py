"""A run over the sites of a federation, from the experiment to a finished run directory."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from prefed.config import ConfigError, Experiment, to_toml
from prefed.config.file import parse_toml
from prefed.core import Callback, Download, Exchange, Plain, Round, State, Tensors, Upload, files
from prefed.core.records import Summary
from prefed.core.text import pluralize
from prefed.core.wire import encode
from prefed.data import ClientSizes, FederatedDataset
from prefed.engines import RoundError, ServerRounds
from prefed.engines.aggregation import Aggregation
from prefed.engines.base_rounds import Tally
from prefed.engines.privacy import merge_noised, shared_groups
from prefed.engines.server_rounds import Asked
from prefed.engines.validation import longest_answer, summed_metrics
from prefed.networks.federation.config import Terms
from prefed.networks.federation.experiment import HELD, with_real_clients
from prefed.networks.federation.hub import Attempt, FederationBackend, Sites
from prefed.networks.federation.messages import Joined, Judged
from prefed.networks.federation.transport import FederationError, Transport, UnreachableError
from prefed.networks.federation.versions import compare_versions
from prefed.privacy import Grid
from prefed.privacy.secure import LEAST
from prefed.runs.build import assemble_job, build_trainers, unseen_clients, warn_of_like_selectors
from prefed.runs.data_notices import announce
from prefed.runs.finished_run import read_summary
from prefed.runs.rounds import conclude, round_answers
from prefed.runs.start_or_resume import commit_start, digests_of, open_run, reconcile
from prefed.store import RunWriter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
FILE = "federation.json"
PREPARE = 3600.0
"""Seconds in which a site must read its data or load its model."""
QUIET = 3.0
"""Seconds after which the hub prints which sites it is waiting for."""
PAUSE = 0.5
ATTEMPTS: tuple[Literal[1, 2], ...] = (1, 2)
"""Attempts at a secure sum in a round. Each is another release."""
UNUSED = "there was no sum"


def federate(
    experiment: Experiment,
    out: Path,
    transport: Transport,
    terms: Terms,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    page: Callable[[Path], str] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Run an experiment over the sites of a federation.

    The run directory is that of :func:`prefed.run`, except that ``checkpoint/clients`` contains receipts
    instead of private states, which stay at the sites.

    Args:
        page: see :func:`prefed.run`.
        report: called with lines to print, e.g. how many clients and pairs each site reports.

    Returns:
        The contents of ``summary.json``.

    Raises:
        FederationError: too few sites connect, a site refuses the run or reports too many clients or pairs,
            or two sites have a client of the same name.
        ConfigError, StoreError, OSError, ModelError, RoundError: see :func:`prefed.run`.
    """
    _check(experiment)
    experiment = with_real_clients(experiment)
    with open_run(experiment, out, callbacks, resume=resume, page=page) as (writer, callback):
        known = _known(writer)
        if known is None:
            writer.forget()
        experiment = reconcile(experiment, writer, started=known is not None)
        return _run(experiment, writer, known, transport, terms, callback, report)


def _check(experiment: Experiment) -> None:
    """Reject settings that a federation does not support."""
    if experiment.whole_graph is not None:
        raise ConfigError("[graph] and decdpo are for runs without a server: a federation needs a server")
    if experiment.fleet is not None:
        raise ConfigError("[fleet] simulates devices, and a federation has real ones: remove it")
    if experiment.align is not None:
        raise ConfigError("[align] is not available in a federation: run `prefed align` on the finished run")
    if experiment.stop is not None:
        raise ConfigError("[stop] needs earlier rounds, and a federation stores only the last one: remove it")
    if experiment.checkpoint is not None:
        raise ConfigError("[checkpoint] keeps earlier rounds, and sites store only the last one: remove it")
    if experiment.report is not None and experiment.report.clients is not None:
        raise ConfigError("[report] clients needs personal models, which stay at the sites: remove it")
    if experiment.method.name == "centralized":
        raise ConfigError("centralized pools all pairs in one place: choose another method")


def _run(
    experiment: Experiment,
    writer: RunWriter,
    known: Mapping[str, Any] | None,
    transport: Transport,
    terms: Terms,
    callback: Callback,
    report: Callable[[str], None],
) -> Summary:
    run = known["run"] if known else secrets.token_hex(8)
    code = {name: own.record() for name, own in experiment.code().items()}
    judged = Judged.model_validate(known["judged"]) if known and known.get("judged") else None
    sites = Sites(transport, terms.federation, run, PREPARE, code, judged)
    wanted = tuple(known["sites"]) if known else terms.sites
    if experiment.privacy.kind == "distributed":
        sites.secure, experiment = True, _with_colluders(experiment, len(wanted))
    text = experiment_for_sites(experiment)
    if set(terms.sites) != set(wanted):
        callback.on_warning(
            f"the run continues with the sites it started with ({', '.join(wanted)}): to change them, start "
            "a new run with another --out"
        )
    transport.restrict(wanted)
    least = 1 if known else (terms.at_least or len(wanted))
    present = gather(sites, wanted, terms, report, least)
    without = (
        "the run continues without {} until it returns"
        if known
        else "the run starts without {}: sites that connect later can join the next run"
    )
    if absent := ", ".join(sorted({*wanted} - {*present})):
        callback.on_warning(without.format(absent))
    answers, silent = _each(present, lambda site: sites.join(site, text), least)
    for site, why in silent.items():
        callback.on_warning(f"site {site!r} is away: {why}; {without.format(site)}")
    present = [*answers]
    clients = check_clients(known, answers, terms.most_clients, terms.most_pairs)
    for site in present:
        compare_versions(site, answers[site].versions, callback.on_warning)
    for line in claim_lines(clients):
        report(line)
    homes = {client: site for site, own in clients.items() for client in own}
    if unknown := sorted(experiment.merge.ranks.keys() - homes.keys()):
        callback.on_warning(f"[merge] ranks: no site has a client called {', '.join(map(repr, unknown))}")
    sizes = {client: ClientSizes(*own[client]) for own in clients.values() for client in own}
    dataset = FederatedDataset.without_pairs(dict(sorted(sizes.items())))
    job = assemble_job(experiment, build_trainers(experiment, dataset, None))
    warn_of_like_selectors(experiment, job)
    # A resumed run must have the same sites, clients and pair counts.
    commit_start(experiment, job, writer, digests_of(experiment, job) | {"data": roster_digest(clients)})
    written = round_answers(experiment, job, writer.path, personal=False)
    announce(experiment, job, callback)
    members, unseen = sorted(homes), list(unseen_clients(experiment, dataset))
    model = job.trainers.fingerprint["model"]
    _, lost = _each(present, lambda site: sites.start(site, members, unseen, model), least)
    # Written before the first visit, because sites store states and answers under this run's name.
    about = {"federation": terms.federation, "run": run, "sites": clients}
    about |= {"judged": judged.model_dump()} if judged else {}
    files.write(writer.path / FILE, json.dumps(about, indent=1).encode())
    sites.most = partial(longest_answer, job)
    backend = FederationBackend(sites, writer.states, homes, terms.visit, callback.on_warning)
    backend.away |= set(clients) - set(present)
    for site, why in lost.items():
        backend.silent(site, writer.round + 1, why)
    with backend:
        server = _Rounds(job, writer, backend, callback, answers=written).run()
        held = {site: sorted(own) for site, own in clients.items()}
        conclude(job, writer, server, {}, callback, sites=held)
        backend.publish(writer.round, lambda client: encode(job.method.publish(server, client)))
    for site in {*present} - backend.away:
        sites.leave(site)
    return read_summary(writer.path / "summary.json")


def _with_colluders(experiment: Experiment, sites: int) -> Experiment:
    """The experiment with the number of colluders that the noise of all sums withstands.

    Raises:
        ConfigError: there are too few sites.
    """
    privacy = experiment.privacy
    colluders = privacy.colluding(sites)
    if privacy.sites is not None:
        raise ConfigError("[privacy] sites is for simulations: a federation has its own sites: remove it")
    if sites < (least := _fewest_sites(colluders)):
        raise ConfigError(
            f"[privacy] kind = 'distributed' with colluders = {colluders} needs {least} sites, and the run "
            f"has {sites}: lower colluders, or add sites"
        )
    return experiment.model_copy(update={"privacy": privacy.model_copy(update={"colluders": colluders})})


@dataclass(frozen=True)
class _Rounds(ServerRounds):
    """Rounds that leave out the clients of sites that are set aside."""

    backend: FederationBackend

    def aside(self) -> frozenset[str]:
        return super().aside() | self.backend.set_aside()

    def _summed(
        self, server: State, exchange: Exchange, now: Round, waves: Sequence[Sequence[Asked]], tally: Tally
    ) -> tuple[Aggregation, list[tuple[str, str]]]:
        """Merge a secure sum. Without one after two attempts the round merges nothing."""
        job, backend = self.job, self.backend
        message = encode(exchange.send(server, job.members[0], now))
        groups = shared_groups(job, exchange, now)
        size = sum(layout.size for layout in groups.values())
        clients = backend.sites_of(asked.client for wave in waves for asked in wave)
        grid_of = partial(Grid.of, job.privacy, clients=len(job.members))
        found = self._attempts(exchange.name, now.number, message, size, clients, grid_of, tally)
        if not found.present:
            raise RoundError(f"round {now.number}: no site answered in {exchange.name!r}: {found.reason}")
        tally.figures |= {"sum_attempts": found.attempts, "sum_sites": list[Plain](found.sites)}
        if found.total is None:
            return Aggregation(server, (), (), found.reason), [*found.missing.items()]
        nothing = {name: Tensors.zeros(layout) for name, layout in groups.items()}
        # What the hub may know of each upload: that it is in the sum.
        uploads = [Upload(c, 1.0, nothing, {}, now.number) for site in found.sites for c in clients[site]]
        merged = merge_noised(job, server, uploads, exchange, now, found.total)
        return merged, [*found.missing.items()]

    def sum_metrics(
        self, publish: Callable[[str], Download], number: int
    ) -> tuple[dict[str, float], float, dict[str, str]]:
        job, metrics, tally = self.job, summed_metrics(self.job), Tally()
        everybody = self.backend.sites_of(job.evaluation_clients)
        clients = {s: own for s, own in everybody.items() if s not in self.backend.unevaluated}
        message = encode(publish(job.evaluation_clients[0]))
        grid_of = partial(metrics.grid, job.privacy, clients=len(job.members))
        found = self._attempts("", number, message, metrics.size, clients, grid_of, tally)
        silent = [c for site in everybody.keys() - clients.keys() for c in everybody[site]]
        missing = {**found.missing, **dict.fromkeys(silent, "its site lets no metrics leave")}
        if missing:
            why = found.reason or ", ".join(sorted({*missing.values()}))
            who = pluralize(len(missing), "client", "clients")
            self.warn(number, f"the metrics of {who} are in no sum: {why}")
        count = len(job.evaluation_clients) - len(missing)
        if found.total is None or not count:
            return {}, 0.0, missing
        return metrics.means(found.total, count), grid_of(len(found.sites)).deviation / count, missing

    def _attempts(
        self,
        exchange: str,
        number: int,
        message: bytes,
        size: int,
        clients: Mapping[str, Mapping[str, str | None]],
        grid_of: Callable[[int], Grid],
        tally: Tally,
    ) -> _Found:
        """Try to get a secure sum, twice.

        Args:
            exchange: empty for an evaluation.
            clients: site to ask → its clients → the receipts of their private states.
            grid_of: number of sites → the fixed-point numbers of their sum.
        """
        least, what = _fewest_sites(self.job.privacy.colluding(0)), repr(exchange or "evaluation")
        sites, why, lost = list(clients), dict[str, str](), dict[str, str]()
        for count in ATTEMPTS:
            attempt = Attempt(count, exchange, sites, size, clients)
            if count > 1:
                # Other sites have answered already, with noise that may have reached the hub.
                self.writer.starts.add(number)
                self.warn(number, f"no sum in {what} ({_named(why)}): second attempt")
            sites, words, why = self.backend.sum(number, message, attempt, least)
            lost |= why
            tally.bytes_down += len(message) * (len(sites) + len(why))
            tally.bytes_up += 4 * size * len(sites)
            if words is not None or len(sites) < least:
                break
        present, total, reason = sites, None, ""
        if words is None:
            reason = f"no sum of {least} sites or more in {what}" if sites else _named(lost)
        elif (grid := grid_of(len(sites))).plausible(words):
            total = grid.numbers(words)
        else:
            reason = f"a site sent something else than it should: {', '.join(sites)}"
        sites = sites if total is not None else []
        usual = "its site is away" if sites else UNUSED
        missing = {c: lost.get(s, usual) for s in clients if s not in sites for c in clients[s]}
        return _Found(sites, total, count, present, missing, reason)


@dataclass(frozen=True)
class _Found:
    """What came of the attempts at a secure sum.

    Attributes:
        sites: those in the sum; empty without one.
        total: the sum in the unit of updates; ``None`` without one.
        present: the sites that answered at last.
        missing: client → why it is not in the sum.
        reason: why there is no sum.
    """

    sites: Sequence[str]
    total: NDArray[np.float64] | None
    attempts: int
    present: Sequence[str]
    missing: Mapping[str, str]
    reason: str


def _fewest_sites(colluders: int) -> int:
    """The fewest sites of a sum: two of them are honest, and no site can compute another's numbers."""
    return max(LEAST, colluders + 2)


def _named(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{site}: {why}" for site, why in sorted(reasons.items())) or "too few sites"


def experiment_for_sites(experiment: Experiment) -> str:
    """The experiment as TOML for the sites, without the paths of the hub's data and models."""
    tables = parse_toml(to_toml(experiment), "the experiment")
    tables["data"] |= {"train": HELD, "partition": {"by": "iid", "clients": 1}}
    for key in ("validation", "test"):
        tables["data"].pop(key, None)
    tables["model"]["name"] = "the site's own"
    tables["model"].pop("revision", None)
    tables["method"].pop("reward_model", None)
    tables.pop("track", None)
    tables.pop("report", None)
    import tomli_w

    return tomli_w.dumps(tables)


def check_clients(
    known: Mapping[str, Any] | None, answers: Mapping[str, Joined], most_clients: int, most_pairs: int
) -> dict[str, dict[str, list[int]]]:
    """Check the clients that the sites report: site → client → pair counts.

    The hub cannot verify pair counts, which weight the merge, so they are bounded.

    Args:
        known: contents of ``federation.json`` if the run is resumed.
        answers: site → its answer to the experiment.
        most_clients: maximum per site.
        most_pairs: maximum per client.

    Raises:
        FederationError: a site reports too many clients or pairs, two sites have a client of the same name,
            or a site's clients changed since the run started.
    """
    clients, homes = {site: answer.clients for site, answer in answers.items()}, dict[str, str]()
    for site, reported in clients.items():
        if len(reported) > most_clients:
            raise FederationError(
                f"site {site!r} reports {len(reported):,} clients, more than --most-clients = "
                f"{most_clients:,}: if the number is correct, increase --most-clients"
            )
        for client, counts in reported.items():
            if max(counts) > most_pairs:
                raise FederationError(
                    f"site {site!r} reports more pairs for client {client!r} than --most-pairs = "
                    f"{most_pairs:,}: if the number is correct, increase --most-pairs"
                )
            if known is None and client in homes:
                raise FederationError(
                    f"sites {homes[client]!r} and {site!r} both have a client {client!r}: rename it at one "
                    "site, or set [disclose] names = false"
                )
            homes[client] = site
        if known is not None and reported != known["sites"][site]:
            raise FederationError(
                f"the clients of site {site!r} changed since the run started: restore the site's data, or "
                "start a new run"
            )
    return clients if known is None else dict(known["sites"])


def roster_digest(clients: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """The digest of a run's sites, clients and pair counts."""
    return files.digest(json.dumps(clients, sort_keys=True).encode())


def claim_lines(clients: Mapping[str, Mapping[str, list[int]]]) -> list[str]:
    """Each site's reported clients, training pairs and share of all pairs, as lines to print.

    >>> for line in claim_lines({"north": {"ada": [30, 0, 4]}, "south": {"ben": [5, 0, 1], "cy": [5, 0, 1]}}):
    ...     print(line)
    north reports 1 client, 30 training pairs (75% of all)
    south reports 2 clients, 10 training pairs (25% of all)
    """
    pairs = {site: sum(counts[0] for counts in own.values()) for site, own in clients.items()}
    total = sum(pairs.values()) or 1
    return [
        f"{site} reports {pluralize(len(own), 'client', 'clients')}, "
        f"{pluralize(pairs[site], 'training pair', 'training pairs')} ({pairs[site] / total:.0%} of all)"
        for site, own in clients.items()
    ]


def gather(
    sites: Sites, wanted: Sequence[str], terms: Terms, report: Callable[[str], None], least: int
) -> list[str]:
    """Wait for all sites, or until ``least`` of them are connected after ``terms.wait`` seconds.

    Returns:
        The connected ones of ``wanted``.

    Raises:
        FederationError: too few sites connect.
    """
    started = time.monotonic()
    reported = False
    while True:
        present = sorted(sites.connected() & set(wanted))
        missing = ", ".join(sorted(set(wanted) - set(present)))
        waited = time.monotonic() - started
        if not missing or (waited > terms.wait and len(present) >= least):
            return present
        if waited > terms.wait:
            raise FederationError(
                f"{len(present)} of {len(wanted)} sites connected within {terms.wait:g} seconds; missing: "
                f"{missing}. Run `prefed site CONFIG` at each, increase --wait or lower --at-least"
            )
        if waited >= QUIET and not reported:
            report(f"waiting up to {terms.wait:g} seconds for {missing}")
            reported = True
        time.sleep(PAUSE)


def _each(sites: Sequence[str], act: Callable[[str], T], least: int) -> tuple[dict[str, T], dict[str, str]]:
    """Call ``act`` for all sites in parallel; return site → result, and site → why it does not answer.

    Raises:
        FederationError: ``act`` raises it for a site, or fewer than ``least`` sites answer.
    """
    pool = ThreadPoolExecutor(max(1, len(sites)))
    asked = {pool.submit(act, site): site for site in sites}
    answers, silent = dict[str, T](), dict[str, str]()
    try:
        for future in as_completed(asked):
            site = asked[future]
            try:
                answers[site] = future.result()
            except UnreachableError as error:
                silent[site] = str(error)
                if len(sites) - len(silent) < least:
                    raise FederationError(
                        f"site {site!r} is away: {error}; start again when it is back, or start without it "
                        "(--sites, --at-least)"
                    ) from error
    finally:
        # After a failure the other answers are not awaited: loading a model may take long.
        pool.shutdown(wait=False, cancel_futures=True)
    return {site: answers[site] for site in sites if site in answers}, silent


def _known(writer: RunWriter) -> dict[str, Any] | None:
    """The contents of ``federation.json``; ``None`` if no visit can have taken place yet.

    Raises:
        FederationError: the file is damaged, or missing although rounds are committed.
    """
    path = writer.path / FILE
    if writer.round == 0 and not path.exists():
        return None
    try:
        known: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FederationError(f"{path}: {error}; restore it from a copy") from error
    return known
