"""What runs inside NVIDIA FLARE's processes: two relays of a job, and nothing of a method or a model.

A site's process of a job hands each request to ``prefed site`` on its machine, and gives back the answer. The
hub's process hands the requests of ``prefed federate`` to the sites.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.collab import collab

from prefed.networks.federation.flare.process import HUB_DOOR, REGISTERED, SITE_DOOR
from prefed.networks.federation.unix_socket import Door, ask, end, pack, unpack, when_gone

# Only bytes pass here. Without this module FLARE leaves PyTorch out of these processes.
sys.modules.setdefault("nvflare.app_opt.pt.decomposers", None)  # type: ignore[arg-type]

PART = 1 << 24
"""Bytes of an answer that a site's process sends at a time. The hub asks for the rest, as much as may come.
So its processes of FLARE take in no message that is longer.
"""
KEPT = 4
"""Answers that a site's process keeps until the hub has all of them."""

HUB = "server"
"""What FLARE calls the hub's side of a job. It knows each caller by its certificate."""


class Registration(FLComponent):  # type: ignore[misc]
    """Reports to ``prefed site`` that the hub has let its client in: a component of the kit, not of a job."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """FLARE's event for a component of its client."""
        if event_type == EventType.AFTER_CLIENT_REGISTER and fl_ctx.get_prop(FLContextKey.CLIENT_TOKEN):
            with suppress(OSError):  # `prefed site` may have ended
                ask(os.environ[SITE_DOOR], REGISTERED, 10.0)


class SiteRelay:
    """A site's side of a job."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        # From the start: FLARE's process would try for ever to report to a site that has ended.
        if SITE_DOOR in os.environ:
            when_gone(os.environ[SITE_DOOR], end)

    @collab.publish
    def exchange(self, request: bytes) -> bytes:
        """Hand a request of the hub to ``prefed site``; its answer, or the first part of a long one.

        Another member's request is refused there.
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
        """The next part of a long answer to the hub; nothing of one that is not kept."""
        if collab.caller != HUB or name not in self._answers:
            return b""
        answer = self._answers[name]
        if start + PART >= len(answer):
            del self._answers[name]
        return answer[start : start + PART]

    @collab.publish
    def alive(self) -> bool:
        """This process lives, whatever ``prefed site`` does."""
        return True


def hand(sites: Mapping[str, Any], request: bytes) -> bytes | bytearray:
    """Hand a request to its site; its answer. One without a body asks whether the site's process lives."""
    header, body = unpack(request)
    call = sites[header["site"]](timeout=header["timeout"])
    try:
        return _whole_answer(call, call.exchange(request=body), header["most"]) if body else _alive(call)
    except Exception as error:
        return pack(error=f"{type(error).__name__}: {error}")


def _alive(call: Any) -> bytes:
    return pack(alive=call.alive() is True)


def _whole_answer(call: Any, first: object, most: int) -> bytes | bytearray:
    """A site's answer, of which the first part is here; what is none of our sites' counts as empty.

    Args:
        call: FLARE's proxy of the site.
        most: bytes of the longest answer. Of a longer one no other part is asked for.
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
