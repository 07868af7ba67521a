"""NVIDIA FLARE's own processes, which end with the process that starts them, and the job of a session.

The job is three JSON files, and no code. NVIDIA FLARE's own recipe for a Collab job copies the source of its
objects into the job. Sites that refuse foreign code refuse such a job. The files here only name classes of
the installed packages, which ``class_allow_list`` of each kit allows.
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
"""What runs a module of FLARE behind prefed's checks."""
START = f"""
import os, threading

def watch():
    os.read(0, 1)  # returns when the parent is gone: nothing is ever written there
    os._exit(1)

threading.Thread(target=watch, daemon=True).start()
{GUARDED}"""
SERVER = "nvflare.private.fed.app.server.server_train"
CLIENT = "nvflare.private.fed.app.client.client_train"
SITE_DOOR, HUB_DOOR = "PREFED_SITE_DOOR", "PREFED_HUB_DOOR"
"""Variables with the sockets of ``prefed site`` and of ``prefed federate``, for the processes below them."""
REGISTERED = b"registered"
"""What FLARE's client sends to ``prefed site`` when the hub has let it in."""
ACCOUNT = "PREFED_HUB_ACCOUNT"
"""Variable with the name of the account that opens sessions at the hub."""

LENGTH_VARIABLE = "NVFLARE_STREAMING_MAX_BLOB_SIZE"
"""Variable with the bytes of the longest message that a process of FLARE takes in.

The length that a message's first part declares counts, and then what has come: a longer one is refused before
it is there.
"""
ROOM = 1 << 20
"""Bytes of what FLARE puts around a message."""
FRAME = 1 << 26
"""Bytes of the longest frame of gRPC. FLARE sends a message in frames of 1 MiB, and would take in 2 GiB."""
WITHIN = {"host": "localhost", "connection_security": "mtls"}
"""FLARE's settings of the port at which its processes of one party meet. It takes any user of the machine as
whom they say they are unless both ends show a certificate.
"""
SETTINGS = "comm_config.json"
"""FLARE's settings of its communication. It takes the first file of this name in a kit, from the top: with
none there it would take that of a job, which may name a folder of code to load.
"""


def longest(mebibytes: int) -> dict[str, str]:
    """What has a process of FLARE, and those that it starts, take in no message beyond so many MiB."""
    return {LENGTH_VARIABLE: str((mebibytes << 20) + ROOM)}


class FlareProcess:
    """One process of FLARE, on the kit of a participant.

    Args:
        module: :data:`SERVER` or :data:`CLIENT`.
        kit: the participant's kit; FLARE keeps its files there too.
        settings: what FLARE's start script passes, e.g. ``uid=site-1``.
        environment: variables for it and for the processes that it starts.
    """

    def __init__(self, module: str, kit: Path, settings: list[str], environment: dict[str, str]) -> None:
        config = "fed_server.json" if module == SERVER else "fed_client.json"
        arguments = [module, "-m", str(kit.resolve()), "-s", config, "--set", "secure_train=true", *settings]
        lengths = [[f"grpc.max_{way}_message_length", FRAME] for way in ("send", "receive")]
        content = {"grpc": {"options": lengths}, "internal": {"scheme": "tcp", "resources": WITHIN}}
        files.write(kit / SETTINGS, json.dumps(content).encode())
        # PYTHONSAFEPATH: no process of a job imports anything from its working folder.
        safe = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **environment}
        with (kit / "process.log").open("ab") as log:
            # A session of its own: Ctrl-C is for the parent to decide on.
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
        """Whether it runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it, and wait for its end."""
        with self._process:
            self._process.kill()


CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
HUB_RELAY = "prefed.networks.federation.flare.apps.HubRelay"
SITE_RELAY = "prefed.networks.federation.flare.apps.SiteRelay"
REGISTRATION = "prefed.networks.federation.flare.apps.Registration"
"""A component of each site's kit."""
ALLOWED = (CONTROLLER, EXECUTOR, HUB_RELAY, SITE_RELAY)
"""All classes that a job may name."""
THREADS = 8
"""Calls that each side may have under way."""


def write_job(folder: Path, sites: Sequence[str], setup: float) -> None:
    """Write the job for these sites into ``folder``.

    Args:
        setup: seconds in which all sites must have started their process of the job.
    """
    filters: dict[str, list[str]] = {"task_data_filters": [], "task_result_filters": []}
    threads = THREADS * len(sites)
    controller = {"server_obj_id": "_server", "sync_task_timeout": setup, "max_call_threads": threads}
    server = {
        "workflows": [{"id": "controller", "path": CONTROLLER, "args": controller}],
        "components": [{"id": "_server", "path": HUB_RELAY, "args": {}}],
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
"""Seconds in which the server of a hub that was killed has ended, and its port is free."""
PAUSE = 0.2


def check_port(host: str, port: int, grace: float = GRACE) -> None:
    """Wait until nobody listens at a port of this machine, which FLARE's server would share with a stranger.

    Args:
        host: the name by which sites reach the hub. If it is that of this machine's loopback interface,
            FLARE's server listens only there.
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
