"""Forget clients in a run over the sites of a federation, which replay it and confirm that they deleted it.

A client withdraws at its site. The hub then runs the same experiment again over all sites that have other
clients of the run, which is bit for bit the run that never had the client, and each site deletes everything
that it has of the old one.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefed.config import Experiment, to_toml
from prefed.core import Callback, files
from prefed.networks.federation.config import Terms
from prefed.networks.federation.experiment import HELD, NAMED
from prefed.networks.federation.federate import FILE, PREPARE, federate, gather
from prefed.networks.federation.hub import Sites
from prefed.networks.federation.transport import FederationError, Transport, UnreachableError
from prefed.runs.align import align, read_settings
from prefed.runs.descendants import NOISED, Descendant, Plan, elsewhere, in_the_run
from prefed.runs.disclosure import unknown
from prefed.runs.finished_run import RunError, no_client
from prefed.runs.forget import never_had, read_unedited, untracked
from prefed.runs.loaded_run import recorded_experiment
from prefed.runs.replacement import Replacement, replacing

SAME = (
    "a run of the same experiment that never had them, bit-identical to any other on the same machines in "
    "which the same visits are missed"
)


def plan(path: str | Path, clients: Sequence[str]) -> Plan:
    """List what descends from clients of a federation's run; no site is asked.

    Raises:
        RunError: there is no finished run, or it has no such client.
    """
    return _Forgetting(Path(path), clients).plan()


def forget(
    path: str | Path,
    clients: Sequence[str],
    transport: Transport,
    terms: Terms,
    *,
    callbacks: Sequence[Callback] = (),
    report: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Replace a run by its replay over the sites; the same call continues a killed one.

    After the end, it asks the sites again that have not yet confirmed.

    Args:
        terms: the sites are those of the run, whatever it says.
        report: see :func:`federate`.

    Returns:
        The certificates.

    Raises:
        SiteError: a client did not withdraw at its site.
        FederationError, StoreError, RunError, ConfigError: as :func:`federate` and :func:`plan`.
    """
    with replacing(Path(path)) as place:
        done = place.finish(clients) or place.done(clients)
        if done:
            for certificate in done:
                _ask_again(certificate, transport, terms, report)
            return done
        return _Forgetting(Path(path), clients).replace(place, transport, terms, callbacks, report)


class _Forgetting:
    """A run over sites, and the clients that are to be forgotten."""

    def __init__(self, path: Path, clients: Sequence[str]) -> None:
        self.record, self.commit = read_unedited(path)
        self.run, self.clients = path.resolve(), sorted(set(clients))
        self.known: dict[str, Any] = json.loads((path / FILE).read_bytes())
        homes = self.record.sites
        for client in self.clients:
            if client not in homes:
                raise RunError(f"{path}: {no_client(client, sorted(homes))}")
        if not self.clients:
            raise RunError("nothing to forget: name a client with --client")
        self.homes = sorted({homes[client] for client in self.clients})
        left = {
            site: {client: counts for client, counts in own.items() if client not in self.clients}
            for site, own in self.known["sites"].items()
        }
        self.left = {site: own for site, own in left.items() if own}
        if not self.left:
            raise RunError(f"{path}: no other client is left: delete the run")
        self.experiment = recorded_experiment(self.record)
        tables = self.experiment.tables()
        if tables["data"]["train"] == {"path": HELD}:
            tables["data"]["partition"] = NAMED
        self.without = never_had(Experiment.from_tables(tables, "the replay"), self.clients)

    def plan(self) -> Plan:
        """See :func:`plan`."""
        own = {client: counts for each in self.known["sites"].values() for client, counts in each.items()}
        train, validation, test = (sum(each) for each in zip(*(own[c] for c in self.clients), strict=True))
        sites = [
            Descendant(
                f"site {site}",
                "deleted",
                "private states and models of the run"
                + (", once the client withdrew there: `prefed site withdraw`" if site in self.homes else ""),
            )
            for site in self.known["sites"]
        ]
        return Plan(
            run=str(self.record.path),
            clients=tuple(self.clients),
            digests=(),
            pairs=(train, validation, test),
            after=0,
            why="sites keep only their last private states",
            rounds=self.commit.round,
            guarantee=NOISED if self.experiment.privacy.draws == "system" else SAME,
            descendants=(*in_the_run(self.record, self.clients), *sites, *elsewhere(self.run)),
        )

    def replace(
        self,
        place: Replacement,
        transport: Transport,
        terms: Terms,
        callbacks: Sequence[Callback],
        report: Callable[[str], None],
    ) -> list[Path]:
        """Make the replay over the sites, let them delete the old run, and replace it here."""
        started = time.perf_counter()
        planned = self.plan()
        request = place.request(self.clients)
        old = _Confirming(self.known, self.clients, transport)
        # First those that have to let their clients withdraw. Their states are of no use any more.
        confirmed = old.ask(self.homes, terms, report, required=True)
        # federate() resumes with one site. Whoever is away misses the replay.
        gather(old.sites, [*self.left], terms, report, terms.at_least or len(self.left))
        if not place.new.exists():
            with place.preparing() as partial:
                self._prepare(place, partial)
        experiment = untracked(self.without)
        federate(experiment, place.new, transport, terms, resume=True, callbacks=callbacks, report=report)
        if planned.aligns:
            align(place.new, read_settings(self.record), callbacks=callbacks)
        confirmed |= old.ask([site for site in self.known["sites"] if site not in confirmed], terms, report)
        rounds = [json.loads(line) for line in (place.new / "rounds.jsonl").read_bytes().splitlines()]
        more = {
            "disclosed": unknown("the pairs are at the sites"),
            "missed": sum(len(each["dropped"]) for each in rounds),
            "federation": self.known["federation"],
            "federation_run": self.known["run"],
            "sites": confirmed,
        }
        planned = replace(self.plan(), seconds=time.perf_counter() - started)
        return place.conclude(planned, request, self.without, **more)

    def _prepare(self, place: Replacement, partial: Path) -> None:
        """Write the directory of a run that has started with the other clients, and has no round."""
        files.write(partial / "config.toml", to_toml(untracked(self.without)).encode())
        about = {"federation": self.known["federation"], "run": secrets.token_hex(8), "sites": self.left}
        files.write(partial / FILE, json.dumps(about, indent=1).encode())
        if self.experiment.privacy.draws == "system":
            place.copy_starts(partial)


class _Confirming:
    """Asks the sites of a run to delete it.

    Args:
        known: the contents of ``federation.json``.
    """

    def __init__(self, known: dict[str, Any], clients: Sequence[str], transport: Transport) -> None:
        self.sites = Sites(transport, known["federation"], known["run"], PREPARE)
        self._all, self._clients, self._transport = [*known["sites"]], clients, transport

    def ask(
        self, names: Sequence[str], terms: Terms, report: Callable[[str], None], *, required: bool = False
    ) -> dict[str, dict[str, str]]:
        """Site → its statement and signature, or under ``"missing"`` why there is none.

        Raises:
            SiteError: a site refuses, and ``required``.
        """
        self._transport.restrict(self._all)
        gather(self.sites, names, terms, report, 0)
        answers = dict[str, dict[str, str]]()
        for site in names:
            try:
                answers[site] = self.sites.forget(site, self._clients)
            except UnreachableError as error:
                answers[site] = {"missing": str(error)}
            except FederationError as error:
                if required:
                    raise
                answers[site] = {"missing": str(error)}
            if why := answers[site].get("missing"):
                report(f"site {site!r} has not confirmed that it deleted the run: {why}")
        return answers


def _ask_again(certificate: Path, transport: Transport, terms: Terms, report: Callable[[str], None]) -> None:
    """Ask the sites again that did not confirm, and add their statements to a certificate."""
    content = files.loads_with_digest(certificate.read_bytes())
    if missing := [site for site, said in content["sites"].items() if "missing" in said]:
        known = {**content, "run": content["federation_run"]}
        content["sites"] |= _Confirming(known, content["clients"], transport).ask(missing, terms, report)
        files.write(certificate, files.dumps_with_digest(content, indent=1), mode=0o600)
