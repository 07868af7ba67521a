"""Sites with ordinary certificates that would end everybody's session, over NVIDIA FLARE on this machine.

    python benchmarks/members.py
    python benchmarks/members.py exits slow      # some of them

``strangers.py`` and tests start them, with prefed's checks or without: then FLARE's own controller opens the
session, and one such site ends it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attacked import BARE, HEAD, PATIENCE, free_port, print_row

from prefed.networks.federation.flare import kits as made
from prefed.networks.federation.flare import process as processes
from prefed.networks.federation.flare import transport as over_flare
from prefed.networks.federation.flare.kits import HEARTBEAT, Kits, Project, make_kits
from prefed.networks.federation.flare.process import CLIENT, REGISTERED, SITE_DOOR, FlareProcess
from prefed.networks.federation.flare.transport import FlareTransport
from prefed.networks.federation.transport import FederationError, UnreachableError
from prefed.networks.federation.unix_socket import Door

DOES = {
    "reports": "reports that the session's job failed",
    "exits": "has a job process that exits with 101",
    "hangs": "has a job process that hangs",
    "slow": "is innocent, and needs 75 s to start its job process",
    "errors": "answers the start of the job with an error",
    "garbles": "answers the check of its resources with a text",
    "leaves": "says that it has the resources, and quits",
    "aborts": "returns a task with a code that aborts a run",
}
"""What a member does, by its name, which is that of its site."""
MEMBER = """
import os, sys, time
does, words = os.environ.get("MEMBER", ""), " ".join(sys.orig_argv)
if "client.worker_process" in words:
    if does == "exits":
        os._exit(101)
    if does in ("hangs", "slow"):
        time.sleep(float(os.environ["MEMBER_SLEEPS"]))
    if does == "aborts":
        from nvflare.apis.shareable import ReturnCode, make_reply
        from nvflare.collab.runtime.executor import CollabExecutor
        CollabExecutor.execute = lambda self, *rest: make_reply(ReturnCode.TASK_UNKNOWN)
if "client.client_train" in words and does in ("reports", "errors", "garbles", "leaves"):
    from threading import Thread
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import CellChannel, CellChannelTopic, JobFailureMsgKey, new_cell_message
    from nvflare.private.fed.client import client_executor, communicator, scheduler_cmds

    def answers(kind, text):
        kind.process = lambda self, request, context: Message("reply_" + request.topic, text)

    def report(self, job):
        about = {JobFailureMsgKey.JOB_ID: job, JobFailureMsgKey.CODE: 101, JobFailureMsgKey.REASON: "none"}
        while True:
            self.client.send_request_before_shutdown(
                target="server", channel=CellChannel.SERVER_MAIN, timeout=5.0, optional=True,
                topic=CellChannelTopic.REPORT_JOB_FAILURE, request=new_cell_message({}, dict(about)),
            )
            time.sleep(2.0)

    if does == "reports":
        start = client_executor.JobExecutor.start_app
        def start_app(self, client, job_id, *rest, **more):
            start(self, client, job_id, *rest, **more)
            Thread(target=report, args=[self, job_id], daemon=True).start()
        client_executor.JobExecutor.start_app = start_app
    if does == "errors":
        answers(scheduler_cmds.StartJobProcessor, scheduler_cmds.ERROR_MSG_PREFIX + ": no")
    if does == "garbles":
        answers(scheduler_cmds.CheckResourceProcessor, "no")
    if does == "leaves":
        check = scheduler_cmds.CheckResourceProcessor.process
        def process(self, request, engine):
            reply = check(self, request, engine)
            def leave():
                time.sleep(0.05)
                with engine.new_context() as context:
                    engine.client.quit_remote(engine.client._get_project_name(), context)
                os._exit(1)
            Thread(target=leave, daemon=True).start()
            return reply
        scheduler_cmds.CheckResourceProcessor.process = process
"""
"""The ``sitecustomize.py`` of a site whose owner changed its software."""


class Members:
    """A hub, north, and sites that do what :data:`DOES` says.

    Args:
        answer: a site's answer to a request of the hub.
        guarded: whether the hub's processes run behind prefed's checks.
        sleeps: seconds that ``slow`` sleeps.
    """

    def __init__(
        self,
        folder: Path,
        does: Sequence[str],
        answer: Callable[[str, bytes], bytes],
        *,
        guarded: bool = True,
        sleeps: float = 75.0,
    ) -> None:
        self.sites, self.guarded, self.answer = ("north", *does), guarded, answer
        self.kits, self.patch, self.sleeps = folder / "wards", folder / "patch", sleeps
        make_kits(Project(name="wards", hub="localhost", port=free_port(), sites=list(self.sites)), self.kits)
        self.patch.mkdir()
        (self.patch / "sitecustomize.py").write_text(MEMBER)

    def __enter__(self) -> Members:
        here = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
        self.changes: list[Any] = [patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(here)})]
        if not self.guarded:
            start = processes.START.replace(processes.GUARDED, BARE)
            bare: dict[str, Any] = {"START": start, "WITHIN": {"host": "localhost"}}
            bare["CONTROLLER"] = "barrier.Barrier"
            allowed = ("barrier.Barrier", *processes.ALLOWED)
            self.changes += [patch.multiple(processes, **bare), patch.object(made, "ALLOWED", allowed)]
        for change in self.changes:
            change.start()
        self.doors = {site: Door(partial(self._answer, site)) for site in self.sites}
        self.clients: dict[str, FlareProcess] = {}
        for site in self.sites:
            self.start(site)
        self.transport = FlareTransport(Kits.open(self.kits / "hub")).__enter__()
        while not {*self.sites} <= self.transport.connected():
            time.sleep(0.5)
        if not self.guarded:  # a little longer than FLARE itself waits for sites, once
            self.changes.append(patch.multiple(over_flare, LAUNCH=90.0, STARTS=1, TRIES=1))
            self.changes[-1].start()
        return self

    def start(self, site: str) -> None:
        """Start a site's client."""
        path = os.pathsep.join([str(self.patch), os.environ["PYTHONPATH"]])
        sleeps = str(self.sleeps if site == "slow" else 1e6)
        more = {"PYTHONPATH": path, "MEMBER": site, "MEMBER_SLEEPS": sleeps}
        words = [f"uid={site}", f"org={site}", f"heart_beat_interval={HEARTBEAT}"]
        self.clients[site] = FlareProcess(
            CLIENT, self.kits / site / "kit", words, {SITE_DOOR: str(self.doors[site].path), **more}
        )

    def _answer(self, site: str, request: bytes) -> bytes:
        return b"" if request == REGISTERED else self.answer(site, request)

    def __exit__(self, *exception: object) -> None:
        self.transport.__exit__()
        for site in self.sites:
            self.clients[site].stop()
            self.doors[site].__exit__()
        for change in reversed(self.changes):
            change.stop()


def echo(site: str, request: bytes) -> bytes:
    """The request and the site's name."""
    return request + site.encode()


def came(place: Members, site: str) -> str:
    """What requests to another member and to north get, after one to north alone in a session of its own."""
    place.transport.restrict(["north"])
    place.transport.call("north", b"", PATIENCE, 99)
    place.transport.restrict(place.sites)
    place.transport._close()
    names, whys = [site, *["north"] * 3] if place.guarded else ["north"], []
    for name in names:
        try:
            place.transport.call(name, b"", PATIENCE, 99)
        except (FederationError, UnreachableError) as error:
            whys.append(f"{name}: {str(error).partition(': see')[0]}")
    asked, missed = names.count("north"), sum(why.startswith("north:") for why in whys)
    said = next((why for why in whys if why.startswith(f"{site}:")), f"{site} answers")
    return f"{asked - missed} of {asked} to north answered; {said if place.guarded else ''.join(whys)}"


def ends(folder: Path, only: Collection[str] = ()) -> Iterator[tuple[str, str, str, str]]:
    """Each member: what came of it, and what without prefed's checks and its controller of a session."""
    for does, what in DOES.items():
        if only and does not in only:
            continue
        found = []
        for guarded in (True, False):
            (inside := folder / f"{does}-{guarded}").mkdir()
            with Members(inside, [does], echo, guarded=guarded) as place:
                found.append(came(place, does))
                if guarded:
                    time.sleep(2)  # refusals are logged once a second
                    log = (place.kits / "hub/server/log.txt").read_text().splitlines()
                    line = next((line for line in log if f"refused: {does!r}" in line), "")
        bare = f"without prefed's checks: {found[1]}"
        yield f"a member {what}", found[0], bare, line.partition("WARNING - ")[2]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(HEAD)
        for row in ends(Path(folder), only=sys.argv[1:]):
            print_row(*row)


if __name__ == "__main__":
    main()
