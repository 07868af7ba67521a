"""Checks of the messages that NVIDIA FLARE's processes receive.

FLARE authorises requests for shell commands, files or deletion only if the sender asks for it, trusts the
origin that a message declares, and lets members reach each other through the hub. :func:`start` therefore
installs checks before it runs a module of FLARE: only messages that a federation needs are accepted, and only
from authenticated senders. All others are refused and logged. FLARE also ends a job if one site replies with
an error, or leaves while the job starts; at the hub, such a site is left out instead.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""FLARE's name of the hub's cell. The cell of a job is named ``PARENT.JOB``."""
DEPLOY = "train.deploy"
TOPICS = frozenset(
    (DEPLOY, "train.start_job", "train.abort", "scheduler.check_resource", "scheduler.cancel_resource")
)
"""FLARE's admin commands that the hub may send to a site's client: those that start and end a session."""
_SIGNATURE = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
FILES = frozenset(
    (
        *_SIGNATURE,
        "config/",
        *(f"config/{name}" for name in (*_SIGNATURE, "config_fed_server.json", "config_fed_client.json")),
    )
)
"""Files that a job may contain: those of :func:`.process.write_job`, and FLARE's signatures."""
MOST = 1 << 20
"""Maximum bytes of these files together."""
STATUS = "train.notify_job_status"
"""The admin command that a site's job process may send to its client."""
TASKS = ("server_command:get_task", "server_command:submit_update")
SYNC = tuple(f"aux_communication:__{topic}__" for topic in ("sync_runner", "task_check", "job_heartbeat"))
ALLOWED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("site", "hub"): ("admin:admin",),
    ("site", "site's job"): (f"admin:{STATUS}",),
    ("site's job", "site"): ("client_command:*",),
    ("site's job", "hub's job"): ("collab:call", "aux_communication:__end_run__"),
    ("hub", "site"): tuple(
        # Not `report_job_failure`, with which one site would end the session of all.
        f"task:{topic}"
        for topic in ("challenge", "register", "heart_beat", "quit")
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
"""(receiver, sender) → accepted requests, as patterns of ``channel:topic``."""
EVERY = 1.0
"""Seconds between two reports of refusals."""
REPORTED = 10
"""Maximum number of distinct refusals per report. Senders control their text."""
LONGEST = 200
"""Maximum characters of a refusal."""
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def kind_of(cell: str) -> str:
    """The kind of a cell, by its name.

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
    """The reason to refuse a message, or ``None`` to accept it.

    Args:
        me: name of the receiving cell.
        peer: the other end of the connection, authenticated by its certificate.
        headers: headers of the message, which its sender controls.
    """
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey as Key
    from nvflare.fuel.f3.cellnet.defs import MessageType
    from nvflare.fuel.f3.streaming import stream_const as stream

    origin, target = (str(headers.get(key)) for key in (Key.ORIGIN, Key.DESTINATION))
    kind = kind_of(origin)
    if not _speaks_for(me, peer, origin) or kind == "nobody":
        return f"{peer!r} sent a message as {origin!r}"
    if headers.get(Key.CONN_URL):
        return f"{origin!r} requested a connection"
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
            return None  # an answer: FLARE drops unexpected ones
    asked = f"{channel}:{topic}"
    same = "job" not in kind or "job" not in kind_of(me) or _job(me) == _job(origin)
    if same and any(fnmatchcase(asked, pattern) for pattern in allowed):
        return None
    return f"{origin!r} requested {asked!r}"


def _parent(cell: str) -> str:
    return cell.partition(".")[0]


def _job(cell: str) -> str:
    return cell.partition(".")[2]


def _speaks_for(me: str, peer: str, origin: str) -> bool:
    """Whether ``peer`` may forward messages of ``origin`` to this cell."""
    if kind_of(me) != "hub" and _parent(peer) != _parent(me) and peer != HUB:
        return False
    if origin == peer or _parent(origin) == peer:
        return True
    # The hub forwards sites' answers to its job process, and a site's client forwards the hub's requests.
    return peer == _parent(me) != me and "job" in kind_of(origin) and _job(origin) == _job(me)


def _relays(me: str, origin: str, target: str) -> bool:
    """Whether a cell forwards messages between two cells: only between both sides of one job."""
    ends = {kind_of(origin), kind_of(target)}
    return (
        ends == {"site's job", "hub's job"}
        and _job(origin) == _job(target)
        and (me == HUB or me in (_parent(origin), _parent(target)))
    )


def command_refusal(origin: str, topic: Any, headers: Mapping[str, Any]) -> str | None:
    """The reason for a site's client to refuse an admin command of FLARE, or ``None`` to accept it.

    The client uses the job's ID in a path and a command line, so it must be one that FLARE generates.
    """
    kind, job = kind_of(origin), headers.get("job_id")
    meta = headers.get("job_meta") or {}
    if topic not in (TOPICS if kind == "hub" else (STATUS,)):
        return f"{origin!r} requested {topic!r}"
    if not (isinstance(job, str) and _JOB.fullmatch(job) and meta.get("job_id", job) == job):
        return f"{origin!r} requested {topic!r} with an invalid job ID, {job!r}"
    if kind != "hub" and job != _job(origin):
        return f"{origin!r} requested {topic!r} for another job, {job!r}"
    return None


def app_refusal(app: Any) -> str | None:
    """The reason for a site's client to refuse a deployed job, or ``None`` to accept it.

    FLARE unpacks a job before it checks it. In between, a process of the job could import its files, and
    FLARE uses the first ``resources.json`` that it finds anywhere in a kit.

    Args:
        app: the job's files for the site, a zip archive.
    """
    try:
        with ZipFile(BytesIO(app)) as archive:
            packed = archive.infolist()
    except (BadZipFile, TypeError, ValueError, NotImplementedError) as error:
        return f"a job is not a valid zip archive: {error!r}"
    names = [each.filename for each in packed]
    if foreign := sorted({*names} - FILES):
        return f"a job contains an unexpected file, {foreign[0]!r}"
    size = sum(each.file_size for each in packed)
    if size > MOST or len(names) > len(FILES):
        return f"a job is too large: {len(names):,} files of {size:,} bytes"
    return None


def unproven(connection: Any, peer: str) -> str | None:
    """The reason why a connection does not authenticate ``peer``, or ``None`` if it does.

    FLARE compares the name in a certificate with that of the cell, except for accounts, whose cells have
    random names.
    """
    from nvflare.fuel.f3.cellnet.identity import is_mtls_connection
    from nvflare.fuel.f3.drivers.driver_params import DriverParams
    from nvflare.fuel.f3.sfm.conn_manager import Mode

    name = connection.get_conn_properties().get(DriverParams.PEER_CN.value)
    listened = connection.connector.mode == Mode.PASSIVE
    if not listened and peer != HUB and name in (None, "N/A"):
        # gRPC verifies the hub's host name, but does not report whose certificate it was.
        return f"the hub's connection claims to be {peer!r}"
    if not is_mtls_connection(connection.connector.params) or (listened and not name):
        return f"{peer!r} connected without a certificate"
    if kind_of(peer) == "account" and listened and name != os.environ.get(ACCOUNT):
        return f"{name!r} connected as an account"
    return None


class _Reports:
    """Reports refusals to the log, and to ``prefed site`` if it runs.

    Repeated refusals are counted, because a flood of messages must not fill the disk.
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


def install() -> _Reports:
    """Install the checks in FLARE's modules. This must precede the first connection.

    Returns:
        What reports a refusal.

    Raises:
        RuntimeError: a function that the checks replace differs in the installed version of FLARE.
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
        # Messages of a process to itself have no connection.
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
            raise RuntimeError(f"{cmd_args} does not start a module")
        return spawn([python, "-P", "-c", GUARDED, *rest], env)

    CoreCell.process_message = process_message
    FedAdminAgent._dispatch_request = dispatch_request
    process_launcher.spawn_process = spawn_process
    return report


def invalid_reply(reply: Any, topic: str) -> bool:
    """Whether FLARE's server would fail at a site's reply to a command.

    Args:
        reply: the reply; ``None`` if there was none.
        topic: the topic of the command.
    """
    from nvflare.private.admin_defs import Message, MsgHeader, ReturnCode
    from nvflare.private.defs import TrainingTopic
    from nvflare.private.scheduler_constants import ShareableHeader

    if reply is None:
        return False
    try:
        code, body = reply.get_header(MsgHeader.RETURN_CODE, ReturnCode.OK), reply.body
        if topic == TrainingTopic.CHECK_RESOURCE and code == ReturnCode.OK:
            enough = body.get_header(ShareableHeader.IS_RESOURCE_ENOUGH, False)
            token = body.get_header(ShareableHeader.RESOURCE_RESERVE_TOKEN, "")
            return type(enough) is not bool or not isinstance(token, str)
        return not isinstance(reply, Message) or not isinstance(code, str)
    except Exception:
        return True


def without_start(replies: Iterable[Any], sites: Sequence[str]) -> list[str]:
    """The sites that did not reply to the command to start a job, or replied with an error."""
    from nvflare.private.admin_defs import MsgHeader, ReturnCode
    from nvflare.private.defs import ERROR_MSG_PREFIX

    started = {
        each.client_name
        for each in replies
        if each.reply is not None
        and each.reply.get_header(MsgHeader.RETURN_CODE, ReturnCode.OK) == ReturnCode.OK
        and not str(each.reply.body).startswith(ERROR_MSG_PREFIX)
    }
    return [site for site in sites if site not in started]


def isolate(report: Callable[[str], None]) -> None:
    """Keep one site from ending the session of all, in a process of the hub.

    Raises:
        RuntimeError: as :func:`install`.
    """
    from nvflare.private.fed.server import job_runner
    from nvflare.private.fed.server.admin import FedAdminServer
    from nvflare.private.fed.server.server_engine import ServerEngine
    from nvflare.private.fed.server.server_runner import ServerRunner

    start, deploy = job_runner.JobRunner._start_run, job_runner.JobRunner._deploy_job
    asked = "self requests fl_ctx timeout_secs optional"
    send = _find(FedAdminServer, "send_requests", asked, ServerEngine._send_admin_requests)
    targets = _find(ServerEngine, "validate_targets", "self client_names", deploy)
    _find(job_runner, "check_client_replies", "replies client_sites command strict", start)
    if "ABORT_RETURN_CODES" not in ServerRunner._process_submission.__code__.co_names:
        raise RuntimeError(_unknown("ServerRunner.ABORT_RETURN_CODES"))

    def send_requests(self: Any, requests: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        replies = send(self, requests, *args, **kwargs)
        for each in replies:
            if invalid_reply(each.reply, each.request.topic):
                report(f"{each.client_name!r} sent an invalid reply to {each.request.topic!r}")
                each.reply = None
        return replies

    def check_client_replies(
        replies: Iterable[Any], client_sites: Sequence[str], command: str, strict: bool = False
    ) -> list[str]:
        missing = without_start(replies, client_sites)
        for site in missing:
            report(f"{site!r} did not {command}: the session starts without it")
        return missing

    def validate_targets(self: Any, client_names: Sequence[str]) -> tuple[Any, list[str]]:
        # Sites that have left in the meantime are not an error.
        return targets(self, client_names)[0], []

    FedAdminServer.send_requests = send_requests
    job_runner.check_client_replies = check_client_replies
    ServerEngine.validate_targets = validate_targets
    ServerRunner.ABORT_RETURN_CODES = []


def _find(owner: Any, name: str, parameters: str, caller: Callable[..., Any]) -> Callable[..., Any]:
    """A function of FLARE that has these parameters and is called by ``caller``, as the checks require."""
    found: Callable[..., Any] | None = getattr(owner, name, None)
    called = name in caller.__code__.co_names
    if found is None or not called or [*inspect.signature(found).parameters] != parameters.split():
        raise RuntimeError(_unknown(f"{owner.__name__}.{name}"))
    return found


def _unknown(name: str) -> str:
    return (
        f"prefed cannot guard {name} in this version of NVIDIA FLARE, so nothing is started: install the "
        "version that prefed[nvflare] requires"
    )


def start() -> None:
    """Run a module of FLARE with the checks installed: ``MODULE [ARGUMENT ...]`` on the command line."""
    report = install()
    sys.argv = sys.argv[1:]
    if ".app.server." in sys.argv[0]:
        isolate(report)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
