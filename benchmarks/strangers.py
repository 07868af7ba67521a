"""Strangers, and members who do what they may not, at a federation over NVIDIA FLARE on this machine.

    python benchmarks/strangers.py

Four tables: what was tried, what came of it, what came of the same from who may (or without what stops it),
and the line that a log has. First, a hub and two sites, of which south is patched by its owner: it sends what
it likes. Then a hub that was taken over (``greedy_hub.py``). Then attacks on FLARE's own channels
(``attacked.py``), each seen to work at a second hub and site that run without prefed's checks; last, members
that would end everybody's session (``members.py``), likewise. The model has two small blocks and is made
here.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from attacked import HEAD, JOB, PATIENCE, agreements, channels, connects, free_port, logged, print_row
from greedy_hub import asked
from members import ends

from prefed import Experiment
from prefed.core import Callback, Key
from prefed.core.wire import decode_upload, encode
from prefed.models.tiny import make_tiny
from prefed.networks.federation.config import SiteConfig, Terms
from prefed.networks.federation.federate import federate
from prefed.networks.federation.flare.kits import HEARTBEAT, Kits, Project, make_kits, organisation_of
from prefed.networks.federation.flare.process import (
    CLIENT,
    REGISTERED,
    SITE_DOOR,
    FlareProcess,
    longest,
    write_job,
)
from prefed.networks.federation.flare.transport import FlareTransport
from prefed.networks.federation.messages import FORMAT, VERSION
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import (
    FederationError,
    LongAnswerError,
    TooLongError,
    UnreachableError,
)
from prefed.networks.federation.unix_socket import Door, pack, unpack

SITES = ("north", "south")
HUB_MB, SITE_MB = 4, 2
PATCH = """
import sys
if "client.worker_process" in " ".join(sys.orig_argv):
    from nvflare.collab import collab
    from prefed.networks.federation.flare import relays

    class Patched(relays.SiteRelay):
        @collab.publish
        def exchange(self, request: bytes) -> bytes:
            if b"steal" not in request:
                return super().exchange(request)
            (north,) = [proxy for proxy in collab.clients if proxy.name == "north"]
            return north(timeout=60).exchange(request=request.removeprefix(b"steal"))

    relays.SiteRelay = Patched
"""
"""What the owner of south puts in front of its installed software: it asks north, as if it were the hub."""


EXPERIMENT = {
    "rounds": 6,
    "data": {
        "train": "held by the sites",
        "partition": {"by": "iid", "clients": 1},
        "test_fraction": 0.25,
    },
    "cohort": {"offences": 4},
    "method": {"name": "feddpo", "lr": 0.01, "local_steps": 1, "batch_size": 2},
    "evaluate": {"every": 0},
    "engine": {"threads": 1},
}


class Warnings(Callback):
    """Prints what a run warns of."""

    def on_warning(self, text: str) -> None:
        """A line."""
        print(f"    {text[:160]}", flush=True)


class Place:
    """Kits, data, a model, and both sites in this process behind their own clients of FLARE."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        project = Project(name="wards", hub="localhost", port=self.port, sites=list(SITES), message_mb=HUB_MB)
        make_kits(project, folder / "wards")
        self.kits = folder / "wards"
        texts = []
        for site in SITES:
            rows = [
                {"prompt": f"Question {n}?", "chosen": f" yes {site} {n}", "rejected": f" no {n}"}
                for n in range(8)
            ]
            (self.kits / site / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            texts += [row["prompt"] + row["chosen"] for row in rows]
        make_tiny(folder / "model", texts, Key(0), layers=2, width=32, heads=2, vocabulary=280, steps=2)
        self.sites = {site: Site(self.config(site)) for site in SITES}
        self.forge: Callable[[dict[str, Any], bytes], bytes] = lambda header, answer: answer
        self.requests: list[bytes] = []
        patch = folder / "patch"
        patch.mkdir()
        (patch / "sitecustomize.py").write_text(PATCH)
        path = os.pathsep.join([str(patch), os.environ.get("PYTHONPATH", "")])
        self.doors = {"north": Door(self._north), "south": Door(self._south)}
        self.processes = {
            site: client(self.kits / site / "kit", site, self.doors[site], more)
            for site, more in (("north", longest(SITE_MB)), ("south", {"PYTHONPATH": path}))
        }

    def model(self) -> dict[str, Any]:
        """The model of an experiment."""
        return {"name": str(self.folder / "model"), "lora": {"rank": 2}}

    def config(self, site: str) -> SiteConfig:
        """A site's settings."""
        return SiteConfig.model_validate(
            {
                "federation": "wards",
                "name": site,
                "state": str(self.folder / f"state-{site}"),
                "data": {"train": {site: str(self.kits / site / "pairs.jsonl")}},
                "model": {"name": str(self.folder / "model")},
                "disclose": {"pairs": True},
                "limits": {"minimum_cohort": 1, "message_mb": SITE_MB},
            }
        )

    def _north(self, request: bytes) -> bytes:
        if request == REGISTERED:
            return b""
        self.requests.append(request)
        return self.sites["north"].answer(request)

    def _south(self, request: bytes) -> bytes:
        if request == REGISTERED:
            return b""
        header, _ = unpack(request)
        return self.forge(header, self.sites["south"].answer(request))

    def close(self) -> None:
        """End all processes."""
        for site in SITES:
            self.processes[site].stop()
            self.doors[site].__exit__()
            self.sites[site].close()

    def log(self, site: str, what: str) -> str:
        """What the last line of a site's own log that has some words says."""
        return logged(self.sites[site].log, site, what)

    def line(self, pattern: str, what: str) -> str:
        """The last line with some words in the first file below the kits that has them, of a pattern."""
        for path in sorted(self.kits.rglob(pattern)):
            found = [line for line in path.read_text(errors="replace").splitlines() if what in line]
            if found:
                start = max(0, found[-1].index(what) - 60)
                return f"{path.relative_to(self.kits)}: {found[-1][start : start + 150].strip()}"
        return ""


def client(kit: Path, site: str, door: Door, more: dict[str, str]) -> FlareProcess:
    """FLARE's client of a site."""
    words = [f"uid={site}", f"org={organisation_of(site)}", f"heart_beat_interval={HEARTBEAT}"]
    return FlareProcess(CLIENT, kit, words, {SITE_DOOR: str(door.path), **more})


def outsiders(place: Place, transport: FlareTransport) -> None:
    """Without a certificate, and with one that another authority made."""
    root = str(place.kits / "north/kit/startup/rootCA.pem")
    own = ssl.create_default_context(cafile=root)
    startup = place.kits / "north/kit/startup"
    own.load_cert_chain(startup / "client.crt", startup / "client.key")
    member = f"a member's: {connects(place.port, own)}"
    came = connects(place.port, ssl.create_default_context(cafile=root))
    print_row("no certificate", came, member, place.line("process.log", "PEER_DID_NOT_RETURN"))
    other = place.folder / "other"
    make_kits(Project(name="wards", hub="localhost", port=place.port, sites=["north"]), other)
    context = ssl.create_default_context(cafile=root)
    startup = other / "north/kit/startup"
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    came = connects(place.port, context)
    print_row("a certificate of its own making", came, member, place.line("process.log", "VERIFY_FAILED"))


def frames(place: Place, transport: FlareTransport) -> None:
    """A member's own software sends one frame of 100 MiB to the hub's port."""
    import grpc  # type: ignore[import-untyped]
    from nvflare.fuel.f3.drivers.grpc.streamer_pb2 import Frame
    from nvflare.fuel.f3.drivers.grpc.streamer_pb2_grpc import StreamerStub

    startup = place.kits / "south/kit/startup"
    root, key, own = ((startup / name).read_bytes() for name in ("rootCA.pem", "client.key", "client.crt"))
    most = [("grpc.max_send_message_length", -1)]
    came = []
    for size in (100 << 20, 1 << 20):
        with grpc.secure_channel(
            f"localhost:{place.port}", grpc.ssl_channel_credentials(root, key, own), most
        ) as channel:
            try:
                next(StreamerStub(channel).Stream(iter([Frame(seq=1, data=bytes(size))]), timeout=120))
                came.append("answered")
            except StopIteration:
                came.append("taken in")
            except grpc.RpcError as error:
                came.append(f"{error.code().name}, {error.details()}")
    print_row("a frame of 100 MiB", came[0], f"one of 1 MiB: {came[1]}", "")


def without_role(place: Place, transport: FlareTransport) -> None:
    """A site's own certificate in the place of the hub's account."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    admin = place.folder / "admin"
    shutil.copytree(place.kits / "hub/admin", admin)
    for name in ("client.crt", "client.key"):
        shutil.copy(place.kits / "south/kit/startup" / name, admin / "startup" / name)
    user = json.loads((place.kits / "hub/hub.json").read_text())["user"]
    came = []
    for name, folder in (("south", admin), (user, admin), (user, place.kits / "hub/admin")):
        try:
            session = new_secure_session(name, str(folder), timeout=60.0, auto_login_max_tries=1)
            came.append(f"let in: {session.get_system_info().server_info}"[:60])
            session.close()
        except Exception as error:
            came.append(f"refused: {str(error)[:120]}")
    line, control = place.line("log.txt", "connected as an account"), f"the account's own: {came[2]}"
    print_row("a site's certificate logs in as 'south'", came[0], control, line)
    print_row(f"a site's certificate logs in as {user!r}", came[1], control, line)


def commands(place: Place, transport: FlareTransport) -> None:
    """What the hub's own account may not: commands at a site; jobs with code, settings or other classes."""
    with transport._asking:
        session = transport._admin_session()
        came, listed = (session.api.do_command(words) for words in ("ls north", "list_jobs"))
    what = "; ".join(str(each["data"]) for each in came["data"])
    print_row(
        "the hub's account runs a command at a site",
        what,
        f"`list_jobs`: {listed['status']}",
        place.line("audit.log", "A:ls"),
    )
    mark = place.folder / "it-ran"
    write_job(place.folder / "code", SITES, JOB)
    (place.folder / "code/app/custom").mkdir()
    (place.folder / "code/app/custom/evil.py").write_text(
        f"class Evil:\n    def __init__(self):\n        open({str(mark)!r}, 'w').close()\n"
    )
    write_job(place.folder / "class", SITES, JOB)
    write_job(place.folder / "settings", SITES, JOB)
    (place.folder / "settings/app/config/comm_config.json").write_text(
        json.dumps({"comm_driver_path": str(place.kits)})
    )
    (place.folder / "settings/app/config/evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    transport.call("north", pack(kind="hello", format=FORMAT, prefed=VERSION), PATIENCE, 1 << 24)
    what = outcome_of(transport, place.folder / "settings")
    ran = "IT RAN" if mark.exists() else "nothing ran"
    write_job(place.folder / "plain", SITES, JOB)
    plain = f"prefed's own: {outcome_of(transport, place.folder / 'plain')}"
    print_row(
        "a job with settings that name code", f"{what}; {ran}", plain, place.line("audit.log", "submit_job")
    )
    launcher = "nvflare.app_common.launchers.subprocess_launcher.SubprocessLauncher"
    for job, path, args in (
        ("code", "evil.Evil", {}),
        ("class", launcher, {"script": f"touch {mark}"}),
    ):
        for side in ("server", "client"):
            file = place.folder / job / "app/config" / f"config_fed_{side}.json"
            content = json.loads(file.read_text())
            content["components"].append({"id": "evil", "path": path, "args": args})
            file.write_text(json.dumps(content))
        what = outcome_of(transport, place.folder / job)
        ran = "IT RAN" if mark.exists() else "nothing ran"
        words = "BYOC not permitted" if job == "code" else "is not in allow_list"
        print_row(f"a job with foreign {job}", f"{what}; {ran}", plain, place.line("log.txt", words))


def outcome_of(transport: FlareTransport, job: Path) -> str:
    """The status of a job once it has ended, or has been running for 30 s."""
    with transport._asking:
        session = transport._admin_session()
        try:
            name = session.submit_job(str(job))
        except Exception as error:
            return f"refused: {error}"
        status, ran = "", 0
        while not status.startswith(("FINISHED", "FAILED")) and ran < 30:
            time.sleep(1)
            status = session.get_job_meta(name)["status"]
            ran += status == "RUNNING"
        session.abort_job(name)
        return str(status)


def requests(place: Place, transport: FlareTransport, run: str) -> None:
    """What comes to north: from the hub, or from south."""

    def came(request: bytes) -> str:
        header, body = unpack(transport.call("north", request, PATIENCE, 1 << 24))
        return str(header.get("refused") or f"answered, {len(body):,} bytes")

    def hello(length: int) -> bytes:
        """A request of so many bytes."""
        bare = len(pack(kind="hello", format=FORMAT, prefed=VERSION))
        return pack(bytes(length - bare), kind="hello", format=FORMAT, prefed=VERSION)

    visits = {unpack(r)[0]["round"]: r for r in place.requests if unpack(r)[0].get("kind") == "visit"}
    old, last = visits[min(visits)], visits[max(visits)]
    again = f"round {max(visits)}'s: {came(last)}"
    print_row("a visit of round 1, sent again", came(old), again, place.log("north", "is over"))
    cut = came(last[1:])
    print_row(
        "a visit's request without its first byte",
        cut,
        f"with it: {came(last)}",
        place.log("north", "not a message"),
    )
    about: dict[str, Any] = {"format": FORMAT, "prefed": VERSION, "federation": "wards", "run": run}
    print_row(
        "a request of an unknown kind",
        came(pack(**about, kind="shell")),
        f"with the kind `hello`: {came(pack(**about, kind='hello'))}",
        place.log("north", "unknown kind"),
    )
    most = SITE_MB << 20
    within = f"one of {most:,} bytes: {came(hello(most))}"
    print_row(
        f"a request of {most + 1:,} bytes", came(hello(most + 1)), within, place.log("north", "longer than")
    )
    started, length = time.monotonic(), (SITE_MB + 4) << 20
    try:
        what = f"LET IN: {came(hello(length))}"
    except (TooLongError, UnreachableError) as error:
        what = f"{type(error).__name__} after {time.monotonic() - started:.0f} s: {error}"
    print_row(
        f"a request of {length:,} bytes", what, within, place.line("log.txt", "exceeds configured limit")
    )
    try:
        header, body = unpack(transport.call("south", b"steal" + last, 300, 1 << 24))
        what = f"LET IN: {header}, {len(body):,} bytes" if body else f"nothing: {header}"
    except UnreachableError as error:
        what = f"no answer: {str(error)[:80]}"
    print_row(
        "a site asks another for an upload",
        what,
        f"the hub, with the same request: {came(last)}",
        place.line("hub/server/log.txt", "refused: 'south"),
    )
    header = next(unpack(r)[0] for r in place.requests if unpack(r)[0].get("kind") == "join")
    for who, what, allowed in agreements(
        header, lambda request: transport.call("north", request, PATIENCE, 1 << 24)
    ):
        print_row(who, what, allowed, place.log("north", what[:40]))


def uploads(place: Place, transport: FlareTransport) -> str:
    """A run in which south forges its uploads, from round 2 on in another way each."""
    kept: list[bytes] = []

    def forge(header: dict[str, Any], answer: bytes) -> bytes:
        if header.get("kind") != "visit":
            return answer
        if header["round"] == 1:
            kept.append(answer)
        forged = {2: kept[0], 3: b"\xff" * 40, 4: answer + bytes(1 << 20), 5: bytes(3 << 20)}
        return forged.get(header["round"], answer)

    place.forge = forge
    experiment = Experiment.model_validate({**EXPERIMENT, "model": place.model()})
    out = place.folder / "run"
    summary = federate(
        experiment, out, transport, Terms("wards", SITES, visit=PATIENCE), callbacks=[Warnings()]
    )
    names = ("an old upload, sent again", "a malformed answer", "a longer upload", "a much longer answer")
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for who, record in zip(names, records[1:5], strict=True):
        (drop,) = record["dropped"]
        print_row(
            who,
            "dropped",
            f"round 1's: {len(records[0].get('dropped', ()))} dropped",
            f"rounds.jsonl: {drop['reason']}",
        )
    print_row(
        "and after that",
        f"round 6 asks {records[5]['cohort']}",
        f"round 1: {records[0]['cohort']}",
        f"summary.json: {summary['set_aside']}",
    )
    place.forge = lambda header, answer: answer
    return str(json.loads((out / "federation.json").read_text())["run"])


def claims(place: Place, transport: FlareTransport) -> None:
    """South reports more pairs or clients than it has."""

    def ends(name: str, claim: int = 0, clients: int = 1, weights: str = "samples") -> tuple[str, bytes]:
        """What the hub shows of south, or why it ends; and the server's state after a round."""

        def forge(header: dict[str, Any], answer: bytes) -> bytes:
            if header.get("kind") == "join" and clients > 1:
                got = {f"south-{number}": [1, 0, 1] for number in range(clients)}
                return pack(**{**unpack(answer)[0], "clients": got})
            if header.get("kind") == "join" and claim:
                return pack(**{**unpack(answer)[0], "clients": {"south": [claim, 0, 2]}})
            if header.get("kind") == "visit" and claim:
                about, body = unpack(answer)
                return pack(encode(replace(decode_upload(body), weight=float(claim))), **about)
            return answer

        place.forge, shown = forge, list[str]()
        experiment = Experiment.model_validate(
            {**EXPERIMENT, "rounds": 1, "model": place.model(), "merge": {"weights": weights}}
        )
        out = place.folder / name
        try:
            federate(experiment, out, transport, Terms("wards", SITES, visit=PATIENCE), report=shown.append)
        except FederationError as error:
            return f"the hub ends: {error}", b""
        finally:
            place.forge = lambda header, answer: answer
        record = json.loads((out / "rounds.jsonl").read_text().splitlines()[0])
        (line,) = [text for text in shown if text.startswith("south")]
        dropped = record.get("dropped", [])
        return f"{line}{f'; dropped: {dropped}' if dropped else ''}", state_after(out)

    most = 10_000_000
    honest, fair = ends("honest")
    within, swayed = ends("within", claim=most)
    print_row("a site claims 10,000,001 pairs", ends("more", claim=most + 1)[0], f"10,000,000: {within}", "")
    print_row("a site claims 10,001 clients", ends("clients", clients=10_001)[0], f"one: {honest}", "")
    other = "another model than with its own 6" if swayed != fair else "the same model"
    print_row("a site claims 10,000,000 pairs", f"NOT STOPPED: {within}; {other}", f"its own 6: {honest}", "")
    same = ends("uniform", weights="uniform")[1] == ends("within-uniform", claim=most, weights="uniform")[1]
    print_row(
        'the same with `[merge] weights = "uniform"`',
        f"{'the same model as' if same else 'ANOTHER MODEL than'} with its own 6 pairs",
        f"by pairs: {other}",
        "",
    )


def state_after(out: Path) -> bytes:
    """The server's state after a run of one round."""
    return (out / "checkpoint/server@000001.safetensors").read_bytes()


def too_long(place: Place, transport: FlareTransport) -> None:
    """An answer beyond the hub's message_mb, which its site's process offers in parts."""
    place.forge = lambda header, answer: bytes((HUB_MB + 4) << 20)
    started = time.monotonic()
    try:
        what = f"LET IN: {len(transport.call('south', pack(kind='hello'), PATIENCE, 1 << 24)):,} bytes"
    except (LongAnswerError, UnreachableError) as error:
        what = f"after {time.monotonic() - started:.0f} s: {error}"
    place.forge = lambda header, answer: bytes((HUB_MB - 1) << 20)
    shorter = f"one within: {len(transport.call('south', pack(kind='hello'), PATIENCE, 1 << 24)):,} bytes"
    print_row("an answer beyond the hub's limit", what, shorter, "")


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "greedy").mkdir()
    place = Place(folder)
    try:
        with FlareTransport(Kits.open(place.kits / "hub")) as transport:
            while len(transport.connected()) < len(SITES):
                time.sleep(0.5)
            print(HEAD)
            outsiders(place, transport)
            frames(place, transport)
            without_role(place, transport)
            run = uploads(place, transport)
            requests(place, transport, run)
            too_long(place, transport)
            claims(place, transport)
            commands(place, transport)
        for rows in (asked(folder / "greedy"), channels(folder), ends(folder)):
            print(f"\n{HEAD}")
            for row in rows:
                print_row(*row)
    finally:
        place.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
