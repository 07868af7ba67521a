"""Versions of packages at the hub and its sites, which must have the same prefed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version

from prefed.core.text import printable
from prefed.networks.federation.transport import FederationError

PACKAGES = ("prefed", "torch", "transformers")
"""Packages whose versions a site reports."""


def own_version(name: str) -> str:
    """The installed version of a package, without its build tag."""
    return version(name).partition("+")[0]


def compare_versions(site: str, versions: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Require the hub's version of prefed at a site, and warn if other package versions differ.

    Raises:
        FederationError: the site reports a different version of prefed, or none.
    """
    for name in PACKAGES:
        here, there = own_version(name), versions.get(name)
        if here == there:
            continue
        text = f"site {site!r} has {name} {there and printable(there[:40])}, the hub has {here}"
        if name == "prefed":
            raise FederationError(f"{text}: install the same version")
        warn(f"{text}: results may differ in the last digits")
