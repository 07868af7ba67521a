"""A cell of NVIDIA FLARE with a party's certificate, or none, that sends what its caller likes.

    python benchmarks/intruder.py '{"name": "south", "url": "grpc://localhost:8002", "kit": "south/kit", …}'

``strangers.py`` and tests start it. It is FLARE's own software, without prefed's checks. The argument, JSON:

``name``
    what it calls itself.
``url``
    the hub's port; or, with ``inside``, that at which the processes of one party meet.
``kit``
    the folder whose ``startup`` has its certificate; left out: none.
``site``
    the site as which it registers at the hub first, as FLARE's client does.
``origin``
    whom it says its requests are of; left out: itself.
``token``
    whether its requests carry the token that all replies of the hub carry.
``requests``
    ``[target, channel, topic, payload]``. With ``{"topic", "headers", "body"}`` as its payload it is a
    command of FLARE's admin channel, whose body is a text or ``{"base64"}``. Any other dictionary is sent as
    it is, which FLARE takes for a serialised object if it has the form of one.

It prints JSON: for each request FLARE's return code, and what came. With :data:`TAKEN_OVER` as the
``sitecustomize.py`` of a hub's FLARE server, that sends what is asked of it: who has taken a hub over.
"""

from __future__ import annotations

import json
import os
import sys
import time
from base64 import b64decode
from pathlib import Path
from threading import Timer
from typing import Any

from nvflare.apis.fl_constant import CellMessageAuthHeaderKey as Auth
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey as Key
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.sec.authn import set_add_auth_headers_filters
from nvflare.private.admin_defs import Message
from nvflare.private.fed.authenticator import Authenticator
from nvflare.private.fed.utils.fed_utils import fobs_initialize

from prefed.core import files

HUB = "server"
SECONDS = 20.0
"""For an answer, and for a connection. Who is refused waits that long."""
TAKEN_OVER = """
import sys
if "server.server_train" in " ".join(sys.orig_argv):
    from pathlib import Path
    from threading import Thread
    sys.path.append({folder!r})
    import intruder
    Thread(target=intruder.take_over, args=[Path({orders!r})], daemon=True).start()
"""


def credentials(kit: Path | None) -> dict[str, str]:
    """What a cell shows and believes, from a kit."""
    if kit is None:
        return {}
    side = "server" if (kit / "startup/server.crt").exists() else "client"
    names = {"ca_cert": "rootCA.pem", f"{side}_cert": f"{side}.crt", f"{side}_key": f"{side}.key"}
    return {key: str(kit / "startup" / name) for key, name in names.items()}


def registered(cell: Cell, kit: Path, site: str, project: str) -> None:
    """Register, and send what was given to it with each message."""
    startup = kit / "startup"
    hub = json.loads((startup / "fed_client.json").read_text())["servers"][0]["identity"]
    files = [str(startup / name) for name in ("rootCA.pem", "client.key", "client.crt")]
    context = FLContext()
    token, signature, ssid, _ = Authenticator(
        cell, project, site, "regular", hub, True, *files, SECONDS, 1.0, timeout=30.0
    ).authenticate(context, Signal())
    set_add_auth_headers_filters(cell, site, token, signature, ssid)


def hubs_token(cell: Cell) -> dict[str, str]:
    """The token and its signature that the hub puts on whatever it sends."""
    reply = cell.core_cell.send_request("task", "challenge", HUB, CellMessage({"nonce": "n"}, None), SECONDS)
    return {key: reply.get_header(key) for key in (Auth.CLIENT_NAME, Auth.TOKEN, Auth.TOKEN_SIGNATURE)}


def asked(cell: Any, target: str, channel: str, topic: str, payload: Any) -> str:
    """What a request got, as JSON."""
    if isinstance(payload, dict) and "topic" in payload:
        body = payload.get("body", "")
        command = Message(payload["topic"], b64decode(body["base64"]) if isinstance(body, dict) else body)
        for name, value in payload.get("headers", {}).items():
            command.set_header(name, value)
        payload = command
    reply = cell.send_request(channel, topic, target, CellMessage({}, as_bytes(payload)), SECONDS)
    came = reply.payload.body if isinstance(reply.payload, Message) else reply.payload
    return json.dumps({"code": reply.get_header(Key.RETURN_CODE), "came": came}, default=str)


def give_up(requests: list[Any]) -> None:
    """End, as one that the hub has not admitted."""
    for _ in requests:
        print(json.dumps({"code": "not admitted", "came": None}), flush=True)
    os._exit(0)


def as_bytes(value: Any) -> Any:
    """A payload with bytes in place of each ``{"base64"}`` in dictionaries."""
    if not isinstance(value, dict):
        return value
    return (
        b64decode(value["base64"]) if [*value] == ["base64"] else {k: as_bytes(v) for k, v in value.items()}
    )


def take_over(orders: Path) -> None:
    """Send what lies in a file as if FLARE's server did, which this process is; what came is next to it."""
    while True:
        time.sleep(0.2)
        cell = CoreCell.ALL_CELLS.get(HUB)
        if cell is not None and orders.exists():
            requests = json.loads(orders.read_text())
            orders.unlink()
            came = [asked(cell, *request) for request in requests]
            files.write(orders.with_suffix(".came"), "\n".join(came).encode())


def main() -> None:
    wanted: dict[str, Any] = json.loads(sys.argv[1])
    kit = Path(wanted["kit"]) if "kit" in wanted else None
    fobs_initialize()
    place = {"parent_url" if wanted.get("inside") else "root_url": wanted["url"]}
    cell = Cell(
        fqcn=wanted["name"],
        secure=kit is not None,
        credentials=credentials(kit),
        **{"root_url": None, **place},
    )
    cell.core_cell.start()
    # What it has a connection to: the hub, or whom it asks.
    peers = {each[0] for each in wanted["requests"]} if wanted.get("inside") else {HUB}
    end = time.monotonic() + SECONDS
    while not peers <= {*cell.core_cell.agents} and time.monotonic() < end:
        time.sleep(0.2)
    if "site" in wanted and kit is not None:
        # FLARE would try forever.
        fuse = Timer(6 * SECONDS, give_up, [wanted["requests"]])
        fuse.start()
        registered(cell, kit, wanted["site"], wanted["project"])
        fuse.cancel()
    forged = hubs_token(cell) if wanted.get("token") else {}
    forged |= {Key.ORIGIN: wanted["origin"]} if "origin" in wanted else {}
    cell.core_cell.add_outgoing_request_filter("*", "*", lambda message: message.add_headers(forged))
    for request in wanted["requests"]:
        print(asked(cell.core_cell, *request), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
