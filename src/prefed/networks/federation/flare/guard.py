"""What NVIDIA FLARE's processes take in: messages of whom they come from, and those that a federation needs.

FLARE authorises a request for shell commands, files or deletion only if its sender asks for that, believes
what a message says of its origin, and lets members reach each other through the hub. So its modules run
behind :func:`start`, which puts checks where messages come in. Everything else is refused and logged.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from io import BytesIO
from threading import Condition, Thread
from typing import Any
from zipfile import BadZipFile, ZipFile

from prefed.networks.federation.flare.process import ACCOUNT, GUARDED, SITE_DOOR
from prefed.networks.federation.unix_socket import ask, pack

_log = logging.getLogger("prefed.guard")

HUB = "server"
"""What FLARE calls the hub. A cell of a job is its parent's name, a dot, and the job's."""
DEPLOY = "train.deploy"
TOPICS = frozenset(
    (
        DEPLOY,
        "train.start_job",
        "train.abort",
        "scheduler.check_resource",
        "scheduler.cancel_resource",
    )
)
"""What the hub may ask of a site's client, of FLARE's admin commands: a session's start and its end."""
_SIGNATURE = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
FILES = frozenset(
    (
        *_SIGNATURE,
        "config/",
        *(f"config/{name}" for name in (*_SIGNATURE, "config_fed_server.json", "config_fed_client.json")),
    )
)
"""Files of a job: those of :func:`.process.write_job`, and of FLARE's signing."""
MOST = 1 << 20
"""Bytes that they have at most, together."""
STATUS = "train.notify_job_status"
"""What a site's process of a job may ask of its client."""
TASKS = ("server_command:get_task", "server_command:submit_update")
SYNC = tuple(f"aux_communication:__{topic}__" for topic in ("sync_runner", "task_check", "job_heartbeat"))
ALLOWED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("site", "hub"): ("admin:admin",),
    ("site", "site's job"): (f"admin:{STATUS}",),
    ("site's job", "site"): ("client_command:*",),
    ("site's job", "hub's job"): ("collab:call", "aux_communication:__end_run__"),
    ("hub", "site"): tuple(
        f"task:{topic}" for topic in ("challenge", "register", "heart_beat", "report_job_failure", "quit")
    ),
    ("hub", "hub's job"): ("server_parent_listener:*",),
    ("hub", "account"): (
        "task:challenge",
        "task:register",
        "hci_channel:*",
        "aux_communication:ObjectStreamer.*",
    ),
    ("hub's job", "hub"): ("server_command:*",),
    ("hub's job", "site's job"): (*TASKS, *SYNC),
}
"""Requests, as channel and topic, that a cell of the first kind takes of one of the second."""
EVERY = 1.0
"""Seconds between two reports of refusals."""
REPORTED = 10
"""Kinds of refusals in one report. A sender makes up their words."""
LONGEST = 200
"""Characters of a refusal."""
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def kind_of(cell: str) -> str:
    """What a cell is, by its name.

    >>> job = "b2e0c9d4-0c6f-4d5e-9a57-3c4f0f6d1a11"
    >>> kind_of("server"), kind_of("north"), kind_of(f"north.{job}"), kind_of("north.startup")
    ('hub', 'site', "site's job", 'nobody')
    """
    parent, _, job = cell.partition(".")
    if parent.startswith("_admin_"):
        return "nobody" if job else "account"
    kind = "hub" if parent == HUB else "site"
    return (f"{kind}'s job" if _JOB.fullmatch(job) else "nobody") if job else kind


def refusal(me: str, peer: str, headers: Mapping[str, Any]) -> str | None:
    """Why a cell does not take in a message, or nothing if it does.

    Args:
        me: the cell's name.
        peer: who is at the other end of the connection, as a certificate has it.
        headers: what the message says of itself.
    """
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey as Key
    from nvflare.fuel.f3.cellnet.defs import MessageType
    from nvflare.fuel.f3.streaming import stream_const as stream

    origin, target = (str(headers.get(key)) for key in (Key.ORIGIN, Key.DESTINATION))
    kind = kind_of(origin)
    if not _speaks_for(me, peer, origin) or kind == "nobody":
        return f"a message of {origin!r} came from {peer!r}"
    if headers.get(Key.CONN_URL):
        return f"{origin!r} asked to be connected to"
    if target != me:
        return None if _relays(me, origin, target) else f"{origin!r} sent a message to {target!r}"
    if headers.get(Key.MSG_TYPE) in (MessageType.REPLY, MessageType.RETURN):
        return None
    channel, topic = headers.get(Key.CHANNEL), headers.get(Key.TOPIC)
    if (channel, topic) == ("cellnet.channel", "bye") and origin == peer:
        return None
    allowed = ALLOWED.get((kind_of(me), kind), ())
    if channel == stream.STREAM_CHANNEL:
        if topic in (stream.STREAM_ACK_TOPIC, stream.STREAM_ERROR_TOPIC) and allowed:
            return None
        channel, topic = (
            headers.get(key) for key in (stream.StreamHeaderKey.CHANNEL, stream.StreamHeaderKey.TOPIC)
        )
        if channel == "return_only" and allowed:
            return None  # an answer: what was not asked for is dropped
    asked = f"{channel}:{topic}"
    same = "job" not in kind or "job" not in kind_of(me) or _job(me) == _job(origin)
    if same and any(fnmatchcase(asked, pattern) for pattern in allowed):
        return None
    return f"{origin!r} asked for {asked!r}"


def _parent(cell: str) -> str:
    return cell.partition(".")[0]


def _job(cell: str) -> str:
    return cell.partition(".")[2]


def _speaks_for(me: str, peer: str, origin: str) -> bool:
    """Whether a connection's other end may hand on what ``origin`` sent."""
    if kind_of(me) != "hub" and _parent(peer) != _parent(me) and peer != HUB:
        return False
    if origin == peer or _parent(origin) == peer:
        return True
    # The hub hands sites' answers to its process of the job, and a site's client the hub's requests.
    return peer == _parent(me) != me and "job" in kind_of(origin) and _job(origin) == _job(me)


def _relays(me: str, origin: str, target: str) -> bool:
    """Whether a cell hands on messages of one cell to another: of both sides of one job, to each other."""
    ends = {kind_of(origin), kind_of(target)}
    return (
        ends == {"site's job", "hub's job"}
        and _job(origin) == _job(target)
        and (me == HUB or me in (_parent(origin), _parent(target)))
    )


def command_refusal(origin: str, topic: Any, headers: Mapping[str, Any]) -> str | None:
    """Why a site's client does not carry out one of FLARE's admin commands, or nothing if it does.

    A job's name becomes a path and a part of a command line there, so it must be one that FLARE gives.
    """
    kind, job = kind_of(origin), headers.get("job_id")
    meta = headers.get("job_meta") or {}
    if topic not in (TOPICS if kind == "hub" else (STATUS,)):
        return f"{origin!r} asked for {topic!r}"
    if not (isinstance(job, str) and _JOB.fullmatch(job) and meta.get("job_id", job) == job):
        return f"{origin!r} asked for {topic!r} with the job {job!r}"
    if kind != "hub" and job != _job(origin):
        return f"{origin!r} asked for {topic!r} of the job {job!r}"
    return None


def app_refusal(app: Any) -> str | None:
    """Why a site's client does not unpack what is deployed, or nothing if it does.

    FLARE unpacks first and judges then. Meanwhile a process of the job, started in time, imports what came;
    and the first ``resources.json`` of a kit counts, wherever it lies.

    Args:
        app: the job's part for the site, a zip.
    """
    try:
        with ZipFile(BytesIO(app)) as archive:
            packed = archive.infolist()
    except (BadZipFile, TypeError, ValueError, NotImplementedError) as error:
        return f"a job came that is no zip: {error!r}"
    names = [each.filename for each in packed]
    if foreign := sorted({*names} - FILES):
        return f"a job came with {foreign[0]!r}"
    size = sum(each.file_size for each in packed)
    if size > MOST or len(names) > len(FILES):
        return f"a job came with {len(names):,} files of {size:,} bytes"
    return None


def unproven(connection: Any, peer: str) -> str | None:
    """Why a connection does not prove who is at its other end, or nothing if it does.

    FLARE compares a certificate's name with the cell's, but for accounts, whose cells have random names.
    """
    from nvflare.fuel.f3.cellnet.identity import is_mtls_connection
    from nvflare.fuel.f3.drivers.driver_params import DriverParams
    from nvflare.fuel.f3.sfm.conn_manager import Mode

    name = connection.get_conn_properties().get(DriverParams.PEER_CN.value)
    listened = connection.connector.mode == Mode.PASSIVE
    if not listened and peer != HUB and name in (None, "N/A"):
        # gRPC checks that it is the hub's host, and does not say whose certificate that has.
        return f"a connection to the hub as {peer!r}"
    if not is_mtls_connection(connection.connector.params) or (listened and not name):
        return f"a connection as {peer!r} without a certificate"
    if kind_of(peer) == "account" and listened and name != os.environ.get(ACCOUNT):
        return f"a connection as an account with the certificate of {name!r}"
    return None


class _Reports:
    """Tells the log, and the site if there is one, of refusals; of many at once only how many.

    What is refused may come as fast as its sender likes, and must fill no disk.
    """

    def __init__(self) -> None:
        self._counts, self._changed = Counter[str](), Condition()
        Thread(target=self._run, daemon=True).start()

    def __call__(self, why: str) -> None:
        why = why[:LONGEST]
        with self._changed:
            if why in self._counts or len(self._counts) < REPORTED:
                self._counts[why] += 1
            else:
                self._counts["others"] += 1
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._counts)
                counts, self._counts = self._counts, Counter()
            for why, times in counts.items():
                text = f"{why}, {times} times" if times > 1 else why
                _log.warning("refused: %s", text)
                with suppress(OSError, KeyError):
                    ask(os.environ[SITE_DOOR], pack(kind="foreign", asked=text), 10.0)
            time.sleep(EVERY)


def install() -> None:
    """Put the checks into FLARE's modules, before any of its processes has a connection.

    Raises:
        RuntimeError: FLARE is not as the checks expect it.
    """
    from nvflare.app_common.job_launcher import process_launcher
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.sfm.conn_manager import ConnManager, NullConnection
    from nvflare.private.admin_defs import error_reply
    from nvflare.private.defs import new_cell_message
    from nvflare.private.fed.client.admin import FedAdminAgent

    report, launcher = _Reports(), process_launcher.ProcessJobLauncher
    passed = "self endpoint connection app_id message"
    receive = _find(CoreCell, "process_message", passed, ConnManager.process_frame_task)
    dispatch = _find(FedAdminAgent, "_dispatch_request", "self request", FedAdminAgent.register_cell_cb)
    spawn = _find(process_launcher, "spawn_process", "cmd_args env", launcher.launch_job)

    def process_message(self: Any, endpoint: Any, connection: Any, app_id: int, message: Any) -> None:
        # What a process sends to itself has no connection.
        why = None
        if not isinstance(connection, NullConnection):
            why = unproven(connection, endpoint.name)
            why = why or refusal(self.my_info.fqcn, endpoint.name, message.headers or {})
        if why is None:
            receive(self, endpoint, connection, app_id, message)
        else:
            report(why)

    def dispatch_request(self: Any, request: Any) -> Any:
        command, origin = request.payload, str(request.get_header(MessageHeaderKey.ORIGIN))
        why = command_refusal(origin, command.topic, command.headers)
        if why is None and command.topic == DEPLOY:
            why = app_refusal(command.body)
        if why is None:
            return dispatch(self, request)
        report(why)
        return new_cell_message({}, error_reply("refused"))

    def spawn_process(cmd_args: list[str], env: dict[str, str]) -> Any:
        python, option, *rest = cmd_args
        if option != "-m":
            raise RuntimeError(f"{cmd_args} starts no module")
        return spawn([python, "-P", "-c", GUARDED, *rest], env)

    CoreCell.process_message = process_message
    FedAdminAgent._dispatch_request = dispatch_request
    process_launcher.spawn_process = spawn_process


def _find(owner: Any, name: str, parameters: str, caller: Callable[..., Any]) -> Callable[..., Any]:
    """A function of FLARE, which has these parameters and is called where the checks count on it."""
    found: Callable[..., Any] | None = getattr(owner, name, None)
    called = name in caller.__code__.co_names
    if found is None or not called or [*inspect.signature(found).parameters] != parameters.split():
        raise RuntimeError(
            f"this version of NVIDIA FLARE has no {owner.__name__}.{name} as prefed guards it: nothing is "
            "started. Install the version that prefed[nvflare] asks for"
        )
    return found


def start() -> None:
    """Run a module of FLARE behind the guard: the first argument names it, and the others are its own."""
    install()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
