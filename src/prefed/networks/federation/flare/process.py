"""NVIDIA FLARE's own processes, as children that end with the process that starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from prefed.core import files

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

The length that a message's first part tells counts, and then what has come: a longer one is refused before it
is there.
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
