"""What a site says of itself when a run begins: its clients, their numbers of pairs, its versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prefed.core.text import control_character, pluralize
from prefed.networks.federation.protocol import PACKAGES, own_version
from prefed.networks.federation.transport import FederationError

LONGEST_NAME = 255
"""Characters of a client's name."""


def told_clients(
    known: Mapping[str, Any] | None,
    answers: Mapping[str, Mapping[str, Any]],
    most_clients: int,
    most_pairs: int,
) -> dict[str, dict[str, list[int]]]:
    """Site → its clients, each with its numbers of pairs.

    Nobody but the site knows whether they are true. A merge weighs by them, so they are bounded.

    Args:
        known: what ``federation.json`` holds, for a run that goes on.
        answers: site → its answer when it was told of the run.
        most_clients: of one site.
        most_pairs: of one client.

    Raises:
        FederationError: an answer has another form or more than it may, two sites have a client of one name,
            or a site's are others than at the start.
    """
    clients = {
        site: _checked(site, answer.get("clients"), most_clients, most_pairs)
        for site, answer in answers.items()
    }
    if known is not None:
        for site, told in clients.items():
            if told != known["sites"][site]:
                raise FederationError(f"the clients of site {site!r} changed since the run began")
        return dict(known["sites"])
    homes = dict[str, str]()
    for site, told in clients.items():
        for client in told:
            if client in homes:
                raise FederationError(
                    f"sites {homes[client]!r} and {site!r} both have a client {client!r}: rename it at one "
                    "of them, or set [tell] names = false"
                )
            homes[client] = site
    return clients


def _checked(site: str, told: object, most_clients: int, most_pairs: int) -> dict[str, list[int]]:
    """The clients that a site tells of, once their form is checked."""
    if not isinstance(told, dict):
        raise FederationError(f"site {site!r} does not tell its clients: install the same prefed there")
    if len(told) > most_clients:
        raise FederationError(
            f"site {site!r} tells of {len(told):,} clients, and --most-clients = {most_clients:,}: raise it "
            "if that is right"
        )
    for client, counts in told.items():
        if not 0 < len(client) <= LONGEST_NAME or control_character(client):
            raise FederationError(
                f"site {site!r} has a client of the name {client[:LONGEST_NAME]!r}: a name has 1 to "
                f"{LONGEST_NAME} characters, and no control characters"
            )
        # True is an int, but no number of pairs.
        whole = isinstance(counts, list) and [type(count) for count in counts] == [int] * 3
        if not whole or min(counts) < 0:
            raise FederationError(f"site {site!r} tells no numbers of pairs of {client!r}")
        if counts[0] == 0:
            # A split leaves each client a training pair. Hub and sites would count such a one differently.
            raise FederationError(f"site {site!r} tells of a client {client!r} without training pairs")
        if max(counts) > most_pairs:
            raise FederationError(
                f"site {site!r} tells of more pairs of {client!r} than --most-pairs = {most_pairs:,}: raise "
                "it if that is right"
            )
    return told


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


def compare_versions(site: str, answer: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    """Refuse another version of prefed, and tell of other versions of libraries.

    Raises:
        FederationError: it has another version of prefed, or does not say which.
    """
    versions = answer.get("versions")
    if not isinstance(versions, dict):
        raise FederationError(f"site {site!r} does not tell its versions: install the same prefed there")
    for name in PACKAGES:
        here, there = own_version(name), versions.get(name)
        if here == there:
            continue
        text = f"site {site!r} has {name} {str(there)[:40] if isinstance(there, str) else None}"
        text += f", and the hub has {here}"
        if name == "prefed":
            raise FederationError(f"{text}: install the same version")
        warn(f"{text}: last digits may differ")
