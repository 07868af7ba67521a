"""The relays that run inside the job processes of NVIDIA FLARE.

The hub's relay sends the requests of ``prefed federate`` to the sites. A site's relay passes each request to
``prefed site`` on its machine and returns the answer.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReturnCode, Shareable
from nvflare.apis.signal import Signal
from nvflare.collab import collab
from nvflare.collab.api.app import ClientApp
from nvflare.collab.runtime.controller import CollabController
from nvflare.collab.runtime.defs import SETUP_TASK_NAME, SyncKey
from nvflare.collab.runtime.dispatch import make_participant_map, prepare_for_remote_call
from nvflare.collab.runtime.lifecycle import run_server

from prefed.networks.federation.flare.process import HUB_DOOR, REGISTERED, SITE_DOOR
from prefed.networks.federation.unix_socket import Door, ask, end, pack, unpack, when_gone

# Only bytes are relayed. Without this module FLARE does not import PyTorch in these processes.
sys.modules.setdefault("nvflare.app_opt.pt.decomposers", None)  # type: ignore[arg-type]

PART = 1 << 24
"""Maximum bytes of one part of an answer. The hub requests further parts only up to the allowed length, so
its FLARE processes never accept a longer message.
"""
KEPT = 4
"""Maximum number of partly transferred answers that a site's relay keeps."""

HUB = "server"
"""FLARE's name of the hub. FLARE authenticates callers by certificate."""


class Registration(FLComponent):  # type: ignore[misc]
    """Notifies ``prefed site`` that the hub has accepted its FLARE client. A component of the site's kit."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Handle an event of FLARE's client."""
        if event_type == EventType.AFTER_CLIENT_REGISTER and fl_ctx.get_prop(FLContextKey.CLIENT_TOKEN):
            with suppress(OSError):  # `prefed site` may have ended
                ask(os.environ[SITE_DOOR], REGISTERED, 10.0)


class SiteRelay:
    """A site's side of a job."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        # Otherwise FLARE's process would try forever to report to a site that has ended.
        if SITE_DOOR in os.environ:
            when_gone(os.environ[SITE_DOOR], end)

    @collab.publish
    def exchange(self, request: bytes) -> bytes:
        """Pass a request of the hub to ``prefed site``; return the answer, or the first part of a long one.

        Requests of other members are passed on as foreign ones, which ``prefed site`` refuses and logs.
        """
        if collab.caller != HUB:
            request = pack(kind="foreign", asked=f"{collab.caller!r} asked for an exchange")
        answer = ask(os.environ[SITE_DOOR], request)
        name = secrets.token_hex(16)
        if len(answer) > PART:
            self._answers[name] = answer
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        return pack(answer[:PART], length=len(answer), name=name)

    @collab.publish
    def rest(self, name: str, start: int) -> bytes:
        """The part of a long answer at ``start``; empty if it is unknown or the caller is not the hub."""
        if collab.caller != HUB or name not in self._answers:
            return b""
        answer = self._answers[name]
        if start + PART >= len(answer):
            del self._answers[name]
        return answer[start : start + PART]

    @collab.publish
    def alive(self) -> bool:
        """Return whether this process lives, whatever ``prefed site`` does."""
        return True


def hand(sites: Mapping[str, Any], request: bytes) -> bytes | bytearray:
    """Send a request to its site and return the answer. Without a body, check that the site's relay lives."""
    header, body = unpack(request)
    call = sites[header["site"]](timeout=header["timeout"])
    try:
        if not body:
            return pack(alive=call.alive() is True)
        return _whole_answer(call, call.exchange(request=body), header["most"])
    except Exception as error:
        return pack(error=f"{type(error).__name__}: {error}")


def _whole_answer(call: Any, first: object, most: int) -> bytes | bytearray:
    """Fetch the rest of a site's answer. A malformed answer counts as empty.

    Args:
        call: FLARE's proxy of the site.
        first: the first part of the answer.
        most: maximum bytes of the answer. No further part of a longer one is requested.
    """
    try:
        header, part = unpack(first)  # type: ignore[arg-type]
        length, name = header["length"], header["name"]
        if type(length) is not int or not 0 <= len(part) <= length:
            raise ValueError
    except (ValueError, TypeError, AttributeError, LookupError):
        return pack()
    if length > most:
        return pack(long=length)
    whole, head = bytearray(pack(part)), len(pack())
    while (come := len(whole) - head) < length:
        part = call.rest(name=name, start=come)
        if not isinstance(part, bytes) or not 0 < len(part) <= length - come:
            return pack()
        whole += part
    return whole


class HubRelay:
    """The hub's side of a job.

    Args:
        session: name of the session, which ``prefed federate`` chose.
    """

    def __init__(self, session: str) -> None:
        self._session = session
        self._joined = Queue[str]()

    def join(self, site: str) -> None:
        """Announce to ``prefed federate`` that a site's process is ready."""
        self._joined.put(site)

    @collab.main
    def relay(self) -> None:
        """Relay requests to the sites until ``prefed federate`` or the job ends."""
        sites = {proxy.name: proxy for proxy in collab.clients}
        context = collab.context
        hub = Path(os.environ[HUB_DOOR])
        with Door(partial(hand, sites), hub.with_name(f"job-{os.getpid()}")) as door:
            say = partial(pack, session=self._session, door=str(door.path))
            when_gone(hub, end)
            ask(hub, say())
            while not context.is_aborted():
                with suppress(Empty):
                    ask(hub, say(joined=self._joined.get(timeout=0.2)))


class SessionController(CollabController):  # type: ignore[misc]
    """Runs the hub's relay at once, and lets each site join when its process is ready.

    FLARE's own controller waits until all sites are ready, and ends the job of all if one of them is late.
    """

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the job. All sites have the same relay, so its interface need not be requested from them."""
        engine, job, app = fl_ctx.get_engine(), fl_ctx.get_job_id(), self.server_app
        self.cell, clients = engine.get_cell(), engine.get_clients()
        hub, site = app.get_collab_interface(), ClientApp(SiteRelay()).get_collab_interface()
        participants = make_participant_map(self.cell.get_fqcn(), job, clients)
        prepare_for_remote_call(self.cell, app, self.logger, self.inbound_executor, participants)
        proxies = [self._prepare_client_proxy(job, each, site, abort_signal, fl_ctx) for each in clients]
        own = self._prepare_server_proxy(job, abort_signal, hub, fl_ctx)
        app.setup(fl_ctx.get_workspace(), own, proxies, abort_signal)
        about = {
            SyncKey.COLLAB_INTERFACE: hub,
            SyncKey.CLIENT_INTERFACES: {each.name: site for each in clients},
            SyncKey.SERVER_FQCN: self.cell.get_fqcn(),
        }
        task = Task(SETUP_TASK_NAME, data=Shareable(about), result_received_cb=self._ready)
        # Without a minimum and a time-out, the task stays open for late sites.
        self.broadcast(task, fl_ctx, min_responses=0)
        run_server(app, self.logger)

    def _ready(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        if client_task.result.get_return_code() == ReturnCode.OK:
            self.server_app.obj.join(client_task.client.name)
