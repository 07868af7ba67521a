"""What runs inside NVIDIA FLARE's processes of a job: two relays, and nothing of a method or a model.

A site's process of a job hands each request to ``prefed site`` on its machine, and gives back the answer. The
hub's process hands the requests of ``prefed federate`` to the sites.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from prefed.federation.door import Door, ask, end, when_gone
from prefed.federation.protocol import pack, unpack

# Bytes alone pass here. Without this module of its own FLARE leaves PyTorch out of these processes.
sys.modules.setdefault("nvflare.app_opt.pt.decomposers", None)  # type: ignore[arg-type]

SITE_DOOR, HUB_DOOR = "PREFED_SITE_DOOR", "PREFED_HUB_DOOR"
"""Variables with the sockets of ``prefed site`` and of ``prefed federate``, for the processes below them."""


HUB = "server"
"""What FLARE calls the hub's side of a job. It knows each caller by its certificate."""


class SiteRelay:
    """A site's side of a job."""

    def __init__(self) -> None:
        # From the start: FLARE's process would try for ever to tell of itself to a site that has ended.
        if SITE_DOOR in os.environ:
            when_gone(os.environ[SITE_DOOR], end)

    @collab.publish
    def exchange(self, request: bytes) -> bytes:
        """Hand a request of the hub to ``prefed site``; its answer. Another member's is refused there."""
        if collab.caller != HUB:
            request = pack(kind="foreign", caller=collab.caller)
        return ask(os.environ[SITE_DOOR], request)

    @collab.publish
    def alive(self) -> bool:
        """This process lives, whatever ``prefed site`` does."""
        return True


def hand(sites: Mapping[str, Any], request: bytes) -> bytes:
    """Hand a request to its site; its answer. One without a body asks whether the site's process lives."""
    header, body = unpack(request)
    call = sites[header["site"]](timeout=header["timeout"])
    try:
        return pack(call.exchange(request=body)) if body else pack(alive=call.alive())
    except Exception as error:
        return pack(error=f"{type(error).__name__}: {error}")


class HubRelay:
    """The hub's side of a job."""

    @collab.main
    def relay(self) -> None:
        """Hand requests to the sites until ``prefed federate`` or the job ends."""
        sites = {proxy.name: proxy for proxy in collab.clients}
        context = collab.context
        hub = Path(os.environ[HUB_DOOR])
        with Door(partial(hand, sites), hub.with_name(f"job-{os.getpid()}")) as door:
            when_gone(hub, end)
            ask(hub, pack(door=str(door.path), sites=sorted(sites)))
            while not context.is_aborted():
                time.sleep(0.2)
