"""What a site's administrator decided, as entries of the site's log: approvals and withdrawals."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from prefed.config import Experiment
from prefed.core.text import did_you_mean, listed
from prefed.data import DataConfig
from prefed.data.build import clients_of_groups, with_named_files
from prefed.data.errors import ErrorCollector
from prefed.data.partition import partition_value
from prefed.data.sources import ReadCounts, read_records
from prefed.networks.federation.audit_log import SentLog
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.site_limits import RefusalError
from prefed.runs.build import code_digests
from prefed.store.directory import lock


def run_digest(text: str, experiment: Experiment) -> str:
    """SHA-256 of a run's settings, as the hub sends them, and of its code from outside prefed."""
    return hashlib.sha256(json.dumps([text, sorted(code_digests(experiment).items())]).encode()).hexdigest()


def approve(config: SiteConfig, digest: str, by: str, reason: str, until: date | None) -> str:
    """Log the approval of a run or of code; return the SHA-256 of the entry.

    Args:
        until: the last day, in UTC, on which it counts.

    Raises:
        ValueError: ``digest`` is not a SHA-256.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is not a SHA-256: copy the digest that the refusal names")
    log = SentLog.of(config)
    last = until.isoformat() if until else None
    return log.add("approved", digest=digest, by=by, reason=reason, until=last)


def check_approved(text: str, experiment: Experiment, config: SiteConfig) -> None:
    """Refuse a run that ``[limits] approval`` covers and nobody approved. The last approval counts.

    Raises:
        RefusalError: it names the digest and the command.
    """
    match config.limits.approval:
        case "runs":
            wanted = {run_digest(text, experiment): "this run"}
        case "code":
            wanted = {digest: f"this version of {name}" for name, digest in code_digests(experiment).items()}
        case None:
            return
    today, valid = datetime.now(UTC).date().isoformat(), dict[str, bool]()
    for entry in SentLog.of(config).entries():
        if entry.get("what") == "approved":
            valid[entry["digest"]] = entry.get("until", today) >= today
    for digest, what in wanted.items():
        if not valid.get(digest, False):
            why = "its approval has expired" if digest in valid else "nobody approved it"
            raise RefusalError(
                f"{what} has to be approved at this site, and {why}: `prefed site approve {config.where} "
                f"{digest} --by NAME --reason TEXT`"
            )


ALL = "*"
"""In the log, the withdrawal of all clients."""


def withdrawn(config: SiteConfig) -> frozenset[str]:
    """The clients that this site withdrew; :data:`ALL` for all."""
    entries = SentLog.of(config).entries()
    return frozenset(entry["client"] for entry in entries if entry.get("what") == "withdrawn")


def check_withdrawn(gone: frozenset[str], names: dict[str, str] | None = None) -> None:
    """Refuse all work after the withdrawal of all clients, and a run that had a client that withdrew.

    Args:
        names: the site's clients in the run → the names that the hub knows.
    """
    if ALL in gone:
        raise RefusalError("this site withdrew: forget all its clients (`prefed forget`)")
    if left := sorted(reported for own, reported in (names or {}).items() if own in gone):
        raise RefusalError(
            f"{listed(left)} withdrew from this site: the hub has to forget them first (`prefed forget`)"
        )


def check_may_forget(
    config: SiteConfig, gone: frozenset[str], names: Mapping[str, str], clients: Collection[str]
) -> None:
    """Refuse to delete a run for clients of this site that did not withdraw.

    Args:
        names: the site's clients in the run → the names that the hub knows.
        clients: those that are to be forgotten, as the hub knows them.
    """
    own = {name for name, reported in names.items() if reported in clients}
    if ALL not in gone and (left := sorted(own - gone)):
        raise RefusalError(
            f"{listed(left)} did not withdraw: stop the site, and `prefed site withdraw {config.where} NAME`"
        )


def delete_run(config: SiteConfig, run: str) -> dict[str, Any]:
    """Delete everything of a run at the site but its order, and log it.

    Returns:
        When, the SHA-256 of the entry, and the paths, with those that withdrawals deleted.
    """
    state, log = Path(config.state), SentLog.of(config)
    found = [path for path in sorted((state / "runs" / run).glob("*")) if path.name != "order.json"]
    names = [str(path.relative_to(state)) for path in found]
    for entry in log.entries():
        if entry.get("what") in ("deleted", "forgotten"):
            names += [path for path in entry.get("paths", ()) if path.startswith(f"runs/{run}/")]
    logged = log.add("forgotten", run=run, paths=sorted({*names}))
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"at": at, "logged": logged, "deleted": sorted({*names})}


def withdraw(config: SiteConfig, client: str, by: str, reason: str) -> tuple[list[str], str]:
    """Withdraw a client, or :data:`ALL`: log it, and delete what the site's state has of it.

    Runs that had the client cannot continue, so everything of them is deleted but their order, and the cache,
    which is made again without the client. The log and the ledger of noise remain. The same call continues a
    killed one.

    Returns:
        The deleted paths in the state folder, and the SHA-256 of the entry that lists them.

    Raises:
        ValueError: neither a run nor the data of the site has the client.
        StoreError: `prefed site` is running.
    """
    state, log = Path(config.state), SentLog.of(config)
    _check_known(config, client)
    (state / "checkpoint").mkdir(parents=True, exist_ok=True)
    handle = lock(state, remedy="stop it first: only one process may use it")
    try:
        log.add("withdrawn", client=client, by=by, reason=reason)
        deleted = []
        for path in (state / "cache", *sorted((state / "runs").glob("*/*"))):
            if path.name != "order.json" and path.exists() and _had(path, client):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                deleted.append(str(path.relative_to(state)))
        return deleted, log.add("deleted", client=client, paths=deleted)
    finally:
        os.close(handle)


def _check_known(config: SiteConfig, client: str) -> None:
    """Refuse a name that no run, no row of the site's data and no earlier withdrawal has."""
    known = {ALL, *withdrawn(config)}
    for order in Path(config.state).glob("runs/*/order.json"):
        with suppress(ValueError, KeyError):
            known |= {*json.loads(order.read_bytes())["names"]}
    if client in known:
        return
    data = with_named_files(DataConfig.model_validate({"partition": {"by": "source"}, **config.data}))
    groups = clients_of_groups(data)
    for role, name, source in data.sources():
        for record, _ in read_records(source, data, role, name, ErrorCollector(), ReadCounts()):
            value = partition_value(data.partition, record, name)
            known.add(groups.get(value, value))
    if client not in known:
        hint = did_you_mean(client, sorted(known - {ALL}))
        raise ValueError(f"no run and no row of this site has a client {client!r}{hint}")


def _had(path: Path, client: str) -> bool:
    """Whether a path in the state folder may have something of a client."""
    order = path.parent / "order.json"
    if client == ALL or not order.exists():
        return True
    try:
        return client in json.loads(order.read_bytes())["names"]
    except (ValueError, KeyError):
        return True  # a damaged order does not say whose the run is
