"""A hub that was taken over and one site, over NVIDIA FLARE on this machine, with prefed's checks or without.

``strangers.py`` and tests attack it, each time in both forms: without the checks an attack works.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zipfile import ZipFile

from nvflare.lighter.utils import load_private_key_file, sign_folders

from prefed.networks.federation.audit_log import SentLog, line_of
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.flare import process as processes
from prefed.networks.federation.flare.kits import HEARTBEAT, Kits, Project, make_kits
from prefed.networks.federation.flare.process import CLIENT, SITE_DOOR, FlareProcess
from prefed.networks.federation.flare.transport import FlareTransport
from prefed.networks.federation.site import Site
from prefed.networks.federation.unix_socket import Door, pack, unpack

PATIENCE = 3600.0
"""Seconds to wait for what must come, however busy the machine is."""
INTRUDER = Path(__file__).resolve().with_name("intruder.py")
SECRET = '{"prompt": "a secret"}\n'
JOB = "b2e0c9d4-0c6f-4d5e-9a57-3c4f0f6d1a11"
"""A name as FLARE gives one to a job."""
READ = "head -n 2 ../pairs.jsonl"
SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""HTTP/2's first frame, from either side: no settings."""
BARE = """
import runpy, sys

sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""What runs FLARE's modules as they are."""


HEAD = "| attempt | result | control: from an allowed party | log line |\n|---|---|---|---|"
"""Of the tables in docs/federation.md."""


def print_row(attempt: str, result: str, control: str, line: str) -> None:
    """A row of a table: what was tried, what came of it, what came of what may be, and a line of a log."""
    shown = f"`{line[:200]}`" if line else "none"
    print(f"| {attempt} | {result} | {control} | {shown} |", flush=True)


def logged(log: SentLog, whose: str, what: str) -> str:
    """What the last line of a site's own log that has some words says; or nothing."""
    found = [entry for entry in log.entries() if what in json.dumps(entry)]
    if not found:
        return ""
    said = [found[-1][key] for key in ("refused", "failed", "withheld", "reported") if key in found[-1]]
    return f"{whose}: {(said or [line_of(found[-1])[21:]])[0]}"


class Attacked:
    """The hub, of which each order is obeyed, north, whose folder is its owner's alone, and south's kit.

    Args:
        guarded: whether FLARE's processes run behind prefed's checks.
    """

    def __init__(self, folder: Path, guarded: bool) -> None:
        self.guarded = guarded
        self.port = free_port()
        project = Project(name="wards", hub="localhost", port=self.port, sites=["north", "south"])
        make_kits(project, folder / "wards")
        self.folder, self.kits, self.orders = folder, folder / "wards", folder / "orders"
        self.north = self.kits / "north"
        (self.north / "pairs.jsonl").write_text(SECRET)
        words = re.search(r'TAKEN_OVER = """(.*?)"""', INTRUDER.read_text(), re.DOTALL)
        assert words is not None
        (folder / "sitecustomize.py").write_text(
            words[1].format(folder=str(INTRUDER.parent), orders=str(self.orders))
        )
        self.config = SiteConfig.model_validate(
            {
                "federation": "wards",
                "name": "north",
                "state": str(folder / "state"),
                "data": {"train": {"north": str(self.north / "pairs.jsonl")}},
                "model": {"name": "model"},
            }
        )
        self.site = Site(self.config)

    def __enter__(self) -> Attacked:
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        self._changes: list[Any] = [patch.dict(os.environ, {"PYTHONPATH": path})]
        if not self.guarded:
            start = processes.START.replace(processes.GUARDED, BARE)
            self._changes.append(patch.multiple(processes, START=start, WITHIN={"host": "localhost"}))
        for change in self._changes:
            change.start()
        self.door = Door(self.site.answer)
        words = ["uid=north", "org=north", f"heart_beat_interval={HEARTBEAT}"]
        self.client = FlareProcess(CLIENT, self.north / "kit", words, {SITE_DOOR: str(self.door.path)})
        self.transport = FlareTransport(Kits.open(self.kits / "hub")).__enter__()
        while not self.transport.connected():
            time.sleep(0.5)
        return self

    def __exit__(self, *exception: object) -> None:
        for change in self._changes:
            change.stop()
        self.transport.__exit__()
        self.client.stop()
        self.door.__exit__()
        self.site.close()

    def member(self, *requests: Any, **changes: Any) -> list[dict[str, Any]]:
        """What south's certificate gets through the hub."""
        how = {"name": "south", "url": f"grpc://localhost:{self.port}", "kit": str(self.kits / "south/kit")}
        return intrude([], **{**how, "site": "south", "project": "wards", "requests": requests, **changes})

    def local(
        self, kit: Path, name: str, *requests: Any, certificate: Path | None = None, **changes: Any
    ) -> list[dict[str, Any]]:
        """What a local user gets at the port at which a party's processes meet; as nobody, without a kit."""
        url = re.findall(r"backbone internal listener for (\S+)", (kit / "log.txt").read_text())[-1]
        changes |= {"name": name, "inside": True, "requests": requests}
        if certificate is not None:
            return intrude([], url=url, kit=str(certificate), **changes)
        root = os.getuid() == 0 and shutil.which("setpriv")
        other = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if root else []
        return intrude(other, url=url.replace("stcp", "tcp"), **changes)

    def hub(self, *requests: Any) -> list[dict[str, Any]]:
        """What the hub's own process gets."""
        came = self.orders.with_suffix(".came")
        came.unlink(missing_ok=True)
        whole = self.orders.with_suffix(".new")
        whole.write_text(json.dumps(requests))
        whole.rename(self.orders)
        end = time.monotonic() + PATIENCE
        while not came.exists() and time.monotonic() < end:
            time.sleep(0.2)
        return [json.loads(line) for line in came.read_text().splitlines()]

    def refused(self, *words: str) -> str:
        """The refusal with these words in the site's log, or nothing after two minutes."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            for entry in self.site.log.entries():
                if all(word in entry.get("refused", "") for word in words):
                    return str(entry["refused"])
            time.sleep(0.2)
        return ""


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def connects(port: int, context: ssl.SSLContext) -> str:
    """Begin HTTP/2, as gRPC does, and await the server's settings. With TLS 1.3 a refusal comes instead."""
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(("localhost", port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as wrapped,
        ):
            wrapped.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS_FRAME)
            if wrapped.recv(100)[3:4] != SETTINGS_FRAME[3:4]:
                return "refused: closed"
    except (ssl.SSLError, ConnectionError) as error:
        return f"refused: {error}"
    return "let in"


def intrude(before: list[str], **wanted: Any) -> list[dict[str, Any]]:
    """What a cell of the intruder's got, by request."""
    done = subprocess.run(
        [*before, sys.executable, "-P", str(INTRUDER), json.dumps(wanted)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def signed(folder: Path, key: Path, brings: str = "") -> dict[str, str]:
    """An app with nothing in it, or one more file, signed with a key and the certificate next to it."""
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "config_fed_client.json").write_text("{}")
    if brings:
        (folder / brings).parent.mkdir(exist_ok=True)
        (folder / brings).write_text("{}")
    sign_folders(str(folder), load_private_key_file(f"{key}.key"), f"{key}.crt")
    with BytesIO() as stream:
        with ZipFile(stream, "w") as archive:
            for path in filter(Path.is_file, folder.rglob("*")):
                archive.write(path, path.relative_to(folder))
        return {"base64": base64.b64encode(stream.getvalue()).decode()}


def command(topic: str, body: Any = "", **headers: Any) -> list[Any]:
    """A request to north's client, of FLARE's admin channel."""
    headers = {"app_name": "app", **headers}
    return ["north", "admin", "admin", {"topic": topic, "body": body, "headers": headers}]


def attacks(place: Attacked) -> list[tuple[str, str]]:
    """What was tried on FLARE's own channels, and what came of it."""
    north, keys, peers = place.north / "kit", place.north / "kit/keys", ["_net_manager", "peers", None]
    keys.mkdir()
    account = place.kits / "hub/admin/startup/client"
    app = signed(place.folder / "member", place.kits / "south/kit/startup/client")
    read, deployed, *managed = place.member(
        command("sys.shell", READ),
        command("train.deploy", app, job_id=JOB, job_meta={"job_id": JOB}),
        ["server", *peers],
        ["north", *peers],
    )
    rows = [
        ("a member reads another site's pairs", read),
        ("a member deploys a job, signed with its own key, to another site", deployed),
        ("a member asks the hub's network manager", managed[0]),
        ("a member asks another site's network manager", managed[1]),
    ]
    place.member(command("train.delete_run", job_id="keys"), origin="server", token=True)
    gone = {"came": f"the folder is {'there' if keys.exists() else 'gone'}"}
    rows.append(("a member deletes another site's folder in the hub's name", gone))
    keys.mkdir(exist_ok=True)
    app = signed(place.folder / "account", account)
    code = signed(place.folder / "code", account, "custom/evil.py")
    settings = signed(place.folder / "settings", account, "config/resources.json")
    read, deployed, *brought, needed = place.hub(
        command("sys.shell", "cat startup/client.key"),
        command("train.deploy", app, job_id="keys", job_meta={"job_id": "keys"}),
        command("train.deploy", code, job_id=JOB, job_meta={"job_id": JOB}),
        command("train.deploy", settings, job_id=JOB, job_meta={"job_id": JOB}),
        command("train.abort", job_id=JOB),
    )
    rows += [
        ("the hub reads a site's key", {"came": str(read["came"]).splitlines()[0]}),
        ("the hub deploys a job over a folder of the kit", deployed),
        ("the hub deploys a job with code, signed by its account", brought[0]),
        ("the hub deploys a job with settings of the site's, signed by its account", brought[1]),
        ("the hub ends a job", needed),
    ]
    ask = command("sys.shell", READ)
    rows += [
        ("a local user of a site, as `nobody`, reads its pairs", place.local(north, f"north.{JOB}", ask)[0]),
        (
            "a local user with another site's certificate",
            place.local(north, f"north.{JOB}", ask, certificate=place.kits / "south/kit")[0],
        ),
        (
            "a local user of the hub asks its network manager",
            place.local(place.kits / "hub/server", f"server.{JOB}", ["server", *peers], token=True)[0],
        ),
    ]
    return [(who, str(came.get("came") or came["code"]).strip()[:90]) for who, came in rows]


def agreements(join: dict[str, Any], call: Callable[[bytes], bytes]) -> Iterator[tuple[str, str, str]]:
    """What a hub may not agree on with a site, next to what it may.

    Args:
        join: the header with which a run of six rounds was agreed on.
        call: sends a request to the site.
    """

    def came(run: str, before: str, after: str) -> str:
        assert before in join["experiment"]
        changed = {"run": run, "experiment": join["experiment"].replace(before, after)}
        header, _ = unpack(call(pack(**{**join, **changed})))
        return str(header.get("refused") or f"agreed, with clients {[*header['clients']]}")

    own, new, more = join["run"], "1" * 16, ("rounds = 6", "rounds = 7")
    yield "the hub asks for 2000 rounds", came(new, more[0], "rounds = 2000"), f"7 rounds: {came(new, *more)}"
    changed = came(own, "lr = 0.01", "lr = 0.02")
    yield "the hub gives a run another experiment", changed, f"one more round: {came(own, *more)}"


def channels(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Each attack: what came of it, what came of it without prefed's checks; then what the logs have."""
    found, lines = [], list[str]()
    for guarded in (True, False):
        (folder / f"attacked-{guarded}").mkdir()
        with Attacked(folder / f"attacked-{guarded}", guarded) as place:
            found.append(attacks(place))
            time.sleep(2)  # refusals are logged once a second
            if guarded:
                lines += [entry["refused"] for entry in place.site.log.entries() if "refused" in entry]
                hub = (place.kits / "hub/server/log.txt").read_text().splitlines()
                lines += [line.partition("WARNING - ")[2] for line in hub if "refused: " in line]
    for (who, what), (_, bare) in zip(*found, strict=True):
        yield who, what, f"without prefed's checks: {bare}", ""
    yield from (("what the logs have of these", "", "", line) for line in lines)
