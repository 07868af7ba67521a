"""The hub's port, before FLARE's server is started: that would share it with another program in silence."""

from __future__ import annotations

import errno
import socket
import time
from contextlib import suppress
from ipaddress import ip_address

from prefed.networks.federation.transport import FederationError

GRACE = 5.0
"""Seconds in which the server of a hub that was killed has ended, and its port is free."""
PAUSE = 0.2


def check_port(host: str, port: int, grace: float = GRACE) -> None:
    """Wait until nobody listens at a port of this machine.

    Args:
        host: the name by which sites reach the hub. If it is that of this machine's loopback interface,
            FLARE's server listens there alone.
        grace: seconds to wait.

    Raises:
        FederationError: somebody still does.
    """
    end = time.monotonic() + grace
    while _taken(host, port):
        if time.monotonic() >= end:
            raise FederationError(
                f"port {port}, at which sites reach this hub, is in use by {_holder(port)}; end it first"
            )
        time.sleep(PAUSE)


def _taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # Closed connections that the system still remembers are no obstacle; who listens is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1" if _is_loopback(host) else "", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _is_loopback(host: str) -> bool:
    try:
        return all(ip_address(each[4][0]).is_loopback for each in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False  # a name that this machine does not know


def _holder(port: int) -> str:
    """Who listens at a port, as far as this user may know."""
    try:
        import psutil
    except ImportError:
        return "another program"
    with suppress(OSError, psutil.Error):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f"process {each.pid} ({psutil.Process(each.pid).name()})"
    return "another program"
