"""What runs inside NVIDIA FLARE's processes of a job: two relays, and nothing of a method or a model.

A site's process of a job hands each request to ``prefed site`` on its machine, and gives back the answer. The
hub's process hands the requests of ``prefed federate`` to the sites.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event

from nvflare.collab import collab

from prefed.federation.relay import Door, ask, end, pack, unpack, when_gone

SITE_DOOR, HUB_DOOR = "PREFED_SITE_DOOR", "PREFED_HUB_DOOR"
"""Variables with the sockets of ``prefed site`` and of ``prefed federate``, for the processes below them."""


class SiteRelay:
    """A site's side of a job."""

    @collab.init
    def begin(self) -> None:
        """End with ``prefed site``."""
        when_gone(os.environ[SITE_DOOR], end)

    @collab.publish
    def exchange(self, request: bytes) -> bytes:
        """Hand a request to ``prefed site``; its answer."""
        return ask(os.environ[SITE_DOOR], request)


class HubRelay:
    """The hub's side of a job."""

    @collab.main
    def relay(self) -> None:
        """Hand requests to the sites until ``prefed federate`` or the job ends."""
        sites = {proxy.name: proxy for proxy in collab.clients}
        context, over = collab.context, Event()

        def answer(request: bytes) -> bytes:
            header, body = unpack(request)
            proxy = sites[header["site"]]
            try:
                reply: bytes = proxy(timeout=header["timeout"]).exchange(request=body)
            except Exception as error:
                return pack(error=f"{type(error).__name__}: {error}")
            return pack(reply)

        hub = Path(os.environ[HUB_DOOR])
        with Door(answer, hub.with_name(f"job-{os.getpid()}")) as door:
            when_gone(hub, over.set)
            ask(hub, pack(door=str(door.path), sites=sorted(sites)))
            while not over.wait(0.5) and not context.is_aborted():
                pass
