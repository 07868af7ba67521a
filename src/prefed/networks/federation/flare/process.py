"""Processes of NVIDIA FLARE, which end with the process that starts them, and the job that opens a session.

The job consists of three JSON files without code. FLARE's recipe for a Collab job would copy source code into
the job, which sites refuse. These files name classes of installed packages, which the ``class_allow_list`` of
each kit allows.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from prefed.core import files
from prefed.networks.federation.transport import FederationError

GUARDED = """
from prefed.networks.federation.flare.guard import start

start()
"""
"""Source code that runs a module of FLARE with prefed's checks installed."""
START = f"""
import os, threading

def watch():
    os.read(0, 1)  # returns when the parent ends, since it never writes to this pipe
    os._exit(1)

threading.Thread(target=watch, daemon=True).start()
{GUARDED}"""
SERVER = "nvflare.private.fed.app.server.server_train"
CLIENT = "nvflare.private.fed.app.client.client_train"
SITE_DOOR, HUB_DOOR = "PREFED_SITE_DOOR", "PREFED_HUB_DOOR"
"""Environment variables with the paths of the sockets of ``prefed site`` and ``prefed federate``."""
REGISTERED = b"registered"
"""Message of FLARE's client to ``prefed site`` when the hub has accepted it."""
ACCOUNT = "PREFED_HUB_ACCOUNT"
"""Environment variable with the name of the account that opens sessions at the hub."""

LENGTH_VARIABLE = "NVFLARE_STREAMING_MAX_BLOB_SIZE"
"""Environment variable with the maximum bytes of a message that a process of FLARE accepts.

FLARE checks the length that the first part declares and the length received so far, so a longer message is
refused before it is read.
"""
ROOM = 1 << 20
"""Bytes allowed for the data that FLARE adds to a message."""
FRAME = 1 << 26
"""Maximum bytes of a gRPC frame. FLARE sends frames of 1 MiB, and by default accepts 2 GiB."""
WITHIN = {"host": "localhost", "connection_security": "mtls"}
"""FLARE's settings for the connections between the processes of one party. Without mutual TLS, any user of
the machine could claim to be any of them.
"""
SETTINGS = "comm_config.json"
"""FLARE's communication settings. FLARE uses the first file of this name in a kit, searching from the top.
Without one there it would use that of a job, which may name a folder of code to load.
"""


def longest(mebibytes: int) -> dict[str, str]:
    """Environment variables that limit the messages of a FLARE process and its children to this length."""
    return {LENGTH_VARIABLE: str((mebibytes << 20) + ROOM)}


class FlareProcess:
    """A process of FLARE.

    Args:
        module: :data:`SERVER` or :data:`CLIENT`.
        kit: the participant's kit, where FLARE also stores its files.
        settings: arguments like those of FLARE's start script, e.g. ``uid=site-1``.
        environment: environment variables for the process and its children.
    """

    def __init__(self, module: str, kit: Path, settings: list[str], environment: dict[str, str]) -> None:
        config = "fed_server.json" if module == SERVER else "fed_client.json"
        arguments = [module, "-m", str(kit.resolve()), "-s", config, "--set", "secure_train=true", *settings]
        lengths = [[f"grpc.max_{way}_message_length", FRAME] for way in ("send", "receive")]
        content = {"grpc": {"options": lengths}, "internal": {"scheme": "tcp", "resources": WITHIN}}
        files.write(kit / SETTINGS, json.dumps(content).encode())
        # PYTHONSAFEPATH: processes of a job must not import modules from their working folder.
        safe = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **environment}
        with (kit / "process.log").open("ab") as log:
            # In a new session, so that Ctrl-C reaches only the parent.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, *arguments, "config_folder=config"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | safe,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Kill the process and wait for it to exit."""
        with self._process:
            self._process.kill()


CONTROLLER = "prefed.networks.federation.flare.relays.SessionController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
HUB_RELAY = "prefed.networks.federation.flare.relays.HubRelay"
SITE_RELAY = "prefed.networks.federation.flare.relays.SiteRelay"
REGISTRATION = "prefed.networks.federation.flare.relays.Registration"
"""A component of each site's kit."""
ALLOWED = (CONTROLLER, EXECUTOR, HUB_RELAY, SITE_RELAY)
"""The classes that a job may name."""
THREADS = 8
"""Maximum number of concurrent calls per site."""


def write_job(folder: Path, sites: Sequence[str], session: str) -> None:
    """Write the job for these sites into ``folder``.

    Args:
        session: name of the session, which the hub's relay announces.
    """
    filters: dict[str, list[str]] = {"task_data_filters": [], "task_result_filters": []}
    threads = THREADS * len(sites)
    controller = {"server_obj_id": "_server", "max_call_threads": threads}
    server = {
        "workflows": [{"id": "controller", "path": CONTROLLER, "args": controller}],
        "components": [{"id": "_server", "path": HUB_RELAY, "args": {"session": session}}],
    }
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "_client", "max_call_threads": THREADS}}
    client = {
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "_client", "path": SITE_RELAY, "args": {}}],
    }
    meta = {
        "name": "prefed",
        "resource_spec": {},
        "deploy_map": {"app": ["server", *sites]},
        "min_clients": 1,
    }
    (folder / "app" / "config").mkdir(parents=True)
    for name, content in {
        "meta.json": meta,
        "app/config/config_fed_server.json": {"format_version": 2, **server, **filters},
        "app/config/config_fed_client.json": {"format_version": 2, **client, **filters},
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1))


GRACE = 5.0
"""Seconds after which the server of a killed hub has ended and its port is free."""
PAUSE = 0.2


def check_port(host: str, port: int, grace: float = GRACE) -> None:
    """Wait until no process listens at a port of this machine. FLARE's server would share the port with it.

    Args:
        host: the hub's host name. If it is a loopback address, FLARE's server listens only there.
        grace: seconds to wait.

    Raises:
        FederationError: the port is still in use.
    """
    end = time.monotonic() + grace
    while _taken(host, port):
        if time.monotonic() >= end:
            raise FederationError(f"the hub's port {port} is in use by {_holder(port)}: stop it first")
        time.sleep(PAUSE)


def _taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # Ignore closed connections in TIME_WAIT: only a listening process matters.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1" if is_loopback(host) else "", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def is_loopback(host: str) -> bool:
    """Return whether this machine resolves a name, and to loopback addresses only."""
    try:
        return all(ip_address(each[4][0]).is_loopback for each in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False  # this machine cannot resolve the name


def _holder(port: int) -> str:
    """The process that listens at a port, if this user may see it."""
    try:
        import psutil
    except ImportError:
        return "another program"
    with suppress(OSError, psutil.Error):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f"process {each.pid} ({psutil.Process(each.pid).name()})"
    return "another program"
