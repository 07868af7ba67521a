"""HTTP proxies that the environment names. Servers on this machine are reached without one."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

HERE = ("localhost", "127.0.0.0/8", "127.0.0.1", "::1")
"""This machine in ``NO_PROXY``. Not every library knows networks."""


def is_here(host: str) -> bool:
    """Whether a host name or address is this machine's loopback.

    >>> [is_here(host) for host in ("localhost", "127.8.0.1", "::1", "127.0.0.1.example.org", "10.0.0.1")]
    [True, True, True, False, False]
    """
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def direct_here() -> dict[str, str]:
    """Environment variables that keep requests to this machine from proxies; empty if there is no proxy."""
    if not proxies():
        return {}
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    listed = [name for name in (part.strip() for part in known.split(",")) if name]
    value = ",".join(listed if "*" in listed else dict.fromkeys([*listed, *HERE]))
    return {"no_proxy": value, "NO_PROXY": value}


def proxies() -> dict[str, str]:
    """Scheme (``http``, ``https``, ``all``) → its proxy, without a user name and password."""
    return {
        scheme: _bare(url)
        for scheme, url in getproxies().items()
        if scheme in ("http", "https", "all") and url
    }


def through(url: str) -> str:
    """The proxy of requests to a server; empty if there is none."""
    parts = urlsplit(url)
    host, known = parts.hostname or "", proxies()
    if is_here(host) or proxy_bypass(host):
        return ""
    return known.get(parts.scheme) or known.get("all", "")


def _bare(url: str) -> str:
    start, at, host = url.rpartition("@")
    scheme = f"{start.partition('://')[0]}://" if "://" in start else ""
    return f"{scheme}{host}" if at else url
