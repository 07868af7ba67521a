"""NVIDIA FLARE as the transport: a hub's server, two sites' clients; what is killed, and strangers.

The sites answer with what they are asked and their name: no model is needed here.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from peering import free_port
from prefed.config import ConfigError
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.transport import (
    FederationError,
    LongAnswerError,
    TooLongError,
    UnreachableError,
)
from prefed.networks.federation.unix_socket import Door, pack, unpack
from prefed.store import StoreError
from waiting import WATCHDOG, until

pytest.importorskip("nvflare", reason="needs prefed[nvflare]")

from prefed.networks.federation.flare import relays
from prefed.networks.federation.flare import transport as over_flare
from prefed.networks.federation.flare.kits import (
    HEARTBEAT,
    Kits,
    Project,
    address,
    make_kits,
    organisation_of,
)
from prefed.networks.federation.flare.process import (
    ALLOWED,
    CLIENT,
    CONTROLLER,
    REGISTERED,
    SITE_DOOR,
    FlareProcess,
    longest,
    write_job,
)
from prefed.networks.federation.flare.relays import hand
from prefed.networks.federation.flare.transport import FlareTransport

SITES = ("north", "south")
MOST = 1 << 24


def client(kit, site, door):
    words = [f"uid={site}", f"org={organisation_of(site)}", f"heart_beat_interval={HEARTBEAT}"]
    return FlareProcess(CLIENT, kit, words, {SITE_DOOR: str(door.path), **longest(8)})


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    make_kits(Project(name="wards", hub="localhost", port=free_port(), sites=list(SITES)), folder / "wards")
    return folder / "wards"


def reply(site, request):
    """What a site answers: the request and its name; or, asked for a long answer, so many bytes."""
    word, _, size = request.partition(b" ")
    return random.Random(site).randbytes(int(size)) if word == b"long" else request + site.encode()


@pytest.fixture(scope="module")
def heard():
    """Site → the first bytes of each request of its client."""
    return {site: [] for site in SITES}


@pytest.fixture(scope="module")
def transport(kits, heard):
    def answers(site, request):
        heard[site].append(request[:20])
        return reply(site, request)

    doors = {site: Door(partial(answers, site)) for site in SITES}
    processes = {site: client(kits / site / "kit", site, doors[site]) for site in SITES}
    with FlareTransport(Kits.open(kits / "hub")) as made:
        until(lambda: len(made.connected()) == len(SITES), "all sites", every=0.5)
        yield made
    for site in SITES:
        processes[site].stop()
        doors[site].__exit__()


def running(*parts):
    """The ids of processes whose command has all these parts."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
            found += [int(folder.name)] if all(part in words for part in parts) else []
    return found


def test_a_server_that_ends_at_once_is_reported(kits, monkeypatch):
    """Its process ends before the first look at it, so nothing was asked of it."""

    class Ended:
        alive = False

        def __init__(self, *words):
            pass

        def stop(self):
            pass

    monkeypatch.setattr(over_flare, "FlareProcess", Ended)
    with pytest.raises(FederationError, match=r"does not start \(its process ended\): see .*process.log"):
        FlareTransport(Kits.open(kits / "hub")).__enter__()


def test_kits_allow_our_classes_alone_and_no_code(kits):
    for kit in (kits / "hub" / "server", *(kits / site / "kit" for site in SITES)):
        resources = json.loads((kit / "local" / "resources.json").read_text())
        assert tuple(resources["class_allow_list"]) == ALLOWED
        assert resources["class_list_enforcement_mode"] == "enforce"
        rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
        assert all(right["byoc"] == right["shell_commands"] == "none" for right in rights.values())
        assert [role for role, right in rights.items() if right.get("submit_job") == "any"] == ["lead"]
        assert kit.stat().st_mode & 0o777 == 0o700
        (key,) = (kit / "startup").glob("*.key")
        assert key.stat().st_mode & 0o777 == 0o600


def test_a_kits_site_file_can_be_read_as_it_is(kits):
    """It has the site's one client, and reports its pairs, which the key's default does not."""
    config = SiteConfig.load(kits / "north" / "site.toml")
    assert (config.federation, config.name, config.disclose.pairs) == ("wards", "north", True)
    assert list(config.data["train"]) == ["north"]


@pytest.mark.parametrize("name", ["hub", "server", "authority"])
def test_no_site_has_the_name_of_another_party(name):
    """FLARE calls the hub's side of a session "server"."""
    with pytest.raises(ValueError, match="sites must have different names, other than 'hub', 'server'"):
        Project(name="wards", hub="localhost", sites=["north", name])


def test_a_site_that_joins_later_leaves_the_others_kits_alone(kits):
    before = (kits / "north" / "kit" / "startup" / "client.crt").read_bytes()
    about = kits / "hub" / "hub.json"
    _, _, port = address(kits / "hub/server/startup")
    make_kits(Project(name="wards", hub="localhost", port=port, sites=[*SITES, "west"]), kits)
    assert (kits / "north" / "kit" / "startup" / "client.crt").read_bytes() == before
    assert (kits / "west" / "kit" / "startup" / "client.key").exists()
    roots = {(kits / site / "kit" / "startup" / "rootCA.pem").read_bytes() for site in (*SITES, "west")}
    assert len(roots) == 1
    about.write_text(json.dumps({**json.loads(about.read_text()), "sites": list(SITES)}))


@pytest.mark.parametrize("kept", ["hub", "north"])
@pytest.mark.parametrize(
    "changed", [{"name": "other"}, {"hub": "example.org"}, {"port": 9}, {"valid_days": 500}]
)
def test_what_is_in_the_kits_is_not_changed_under_them(kits, tmp_path, changed, kept):
    """Kits that are there stay: sites would look for the hub at two places. The authority stays too. Whatever
    `hub.json` says or lacks, each kit knows what it was made with, and one is enough."""
    shutil.copytree(kits / kept, tmp_path / kept)
    shutil.copytree(kits / "authority", tmp_path / "authority")
    _, _, port = address(kits / "hub/server/startup")
    terms = {"name": "wards", "hub": "localhost", "port": port, "valid_days": 360, "sites": [*SITES, "far"]}
    ((key, value),) = changed.items()
    message = f"{key} = {value!r}: the kits in .* were created with {terms[key]!r}"
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=message):
        make_kits(Project(**{**terms, **changed}), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_kits_say_what_they_were_made_with(tmp_path):
    """At the hub and at a site, of a hub elsewhere."""
    make_kits(
        Project(name="wards-2", hub="fed.example.org", port=9, sites=["north"], valid_days=500),
        tmp_path / "made",
    )
    for kit in ("hub/server", "north/kit"):
        assert address(tmp_path / "made" / kit / "startup") == ("wards-2", "fed.example.org", 9)
    path = tmp_path / "made/north/kit/startup/fed_client.json"
    path.write_text('{"servers": []}')
    with pytest.raises(ValueError, match=r"fed_client.json is damaged: .*restore it from a copy"):
        address(path.parent)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no fed_server\.json or fed_client\.json"):
        address(path.parent)


def test_a_site_that_left_the_project_is_in_no_session(tmp_path):
    """Its certificate is still valid, so FLARE's server has it among the connected clients."""
    transport = FlareTransport(Kits("wards", ("north",), tmp_path, tmp_path, "hub@federation.local", "hub"))
    heard = [SimpleNamespace(name=name, last_connect_time=time.time()) for name in ("north", "gone")]
    transport._admin = SimpleNamespace(get_connected_client_list=lambda: heard)
    assert transport.connected() == {"north"}


def parts(path):
    """The classes that a side of a job names, each with its arguments."""
    content = json.loads(path.read_text())
    named = [*content["components"], *content.get("workflows", [])]
    named += [each["executor"] for each in content.get("executors", [])]
    return [(each["path"], each["args"]) for each in named]


OURS = {CONTROLLER: "nvflare.collab.runtime.controller.CollabController"}
"""Our subclass → the class of FLARE's recipe."""


def test_the_job_is_that_of_flares_own_recipe(tmp_path):
    """The components that FLARE's recipe writes for the same two objects, without the code that it adds."""
    from nvflare.collab import CollabRecipe

    from prefed.networks.federation.flare.relays import HubRelay, SiteRelay

    threads = {"max_call_threads_for_server": 16, "max_call_threads_for_client": 8}
    recipe = CollabRecipe("prefed", HubRelay("s"), SiteRelay(), **threads)
    recipe.finalize().export_job(str(tmp_path / "recipe"))
    write_job(tmp_path / "ours", SITES, "s")
    for side in ("server", "client"):
        (theirs,) = (tmp_path / "recipe").rglob(f"config_fed_{side}.json")
        ours = tmp_path / "ours/app/config" / theirs.name
        left, right = (dict(parts(path)) for path in (theirs, ours))
        right = {OURS.get(name, name): args for name, args in right.items()}
        assert right.keys() <= left.keys()
        assert all(args.items() <= left[name].items() for name, args in right.items())
    assert not [path for path in (tmp_path / "ours").rglob("*") if path.suffix == ".py"]


class SlowSite:
    """FLARE's proxy of a site whose visits take long; its process answers meanwhile that it lives."""

    def __init__(self):
        self.visits = 0

    def __call__(self, timeout):
        return self

    def exchange(self, request):
        self.visits += 1
        time.sleep(0.5)
        return pack(request + b" done", length=len(request) + 5, name="")

    def alive(self):
        return True


@pytest.fixture
def unopened(tmp_path):
    """A transport whose server is never started."""
    made = FlareTransport(Kits("wards", ("north",), tmp_path, tmp_path, "hub@federation.local", "hub"))
    yield made
    made.__exit__()


def test_a_visit_may_take_longer_than_a_site_may_be_gone(unopened, monkeypatch):
    """A site that says that it lives is asked once, and its answer is awaited."""
    monkeypatch.setattr(over_flare, "LOOK", 0.05)
    monkeypatch.setattr(over_flare, "PATIENCE", 0.1)
    site = SlowSite()
    with Door(partial(hand, {"north": site})) as door:
        unopened._name = "s"
        unopened._opened(pack(session="s", door=str(door.path), joined="north"))
        assert unopened.call("north", b"visit", WATCHDOG, MOST) == b"visit done"
    assert site.visits == 1


def test_a_site_whose_process_ends_in_each_session_is_away(unopened, monkeypatch):
    """It joins, and is silent. Its request is repeated in five sessions, which interrupt all sites."""
    monkeypatch.setattr(over_flare, "LOOK", 0.02)
    monkeypatch.setattr(over_flare, "PATIENCE", 0.1)
    monkeypatch.setattr(unopened, "_present", lambda: {"north"})
    opened, ended = [], Event()
    dead = SimpleNamespace(exchange=lambda request: ended.wait(WATCHDOG), alive=lambda: False)
    with Door(partial(hand, {"north": lambda timeout: dead})) as door:

        def begin(sites):
            opened.append(sites)
            unopened._name = "s"
            unopened._opened(pack(session="s", door=str(door.path), joined="north"))

        monkeypatch.setattr(unopened, "_open", begin)
        with pytest.raises(UnreachableError, match="5 sessions failed before it answered: its process has"):
            unopened.call("north", b"visit", WATCHDOG, MOST)
        ended.set()
    assert opened == [{"north"}] * 5


def test_a_transport_that_stops_opens_nothing_again(unopened):
    """A request that is under way in another thread when the hub stops."""
    unopened.__exit__()
    with pytest.raises(UnreachableError, match="stopping"):
        unopened.call("north", b"visit", WATCHDOG, MOST)
    with pytest.raises(FederationError, match="stopping"):
        unopened._start_server()


def test_a_process_of_a_job_ends_with_its_site_from_its_start(tmp_path, monkeypatch):
    """FLARE makes the relay before it sends the job to the site's client, which it would try for ever."""
    ended = Event()
    monkeypatch.setattr(relays, "end", ended.set)
    monkeypatch.setenv(SITE_DOOR, str(tmp_path / "door"))
    with Listener(str(tmp_path / "door"), family="AF_UNIX") as site:
        relays.SiteRelay()
        with site.accept():
            assert not ended.is_set()
    assert ended.wait(WATCHDOG)


def test_a_hubs_folder_serves_one_process_and_its_port_one_program(transport, kits, tmp_path):
    """A second hub learns at once who has the folder, and one with a copy of it who has the port."""
    with pytest.raises(StoreError, match=f"hub is in use by process {os.getpid()} on .*one run at a time"):
        FlareTransport(Kits.open(kits / "hub")).__enter__()
    shutil.copytree(kits / "hub", tmp_path / "hub", ignore=shutil.ignore_patterns("storage", "checkpoint"))
    _, _, port = address(kits / "hub/server/startup")
    with pytest.raises(
        FederationError, match=rf"the hub's port {port} is in use by process \d+ \(python.*\): stop it first"
    ):
        FlareTransport(Kits.open(tmp_path / "hub")).__enter__()
    assert transport.connected() == {*SITES}


def test_messages_arrive_as_they_are(transport):
    for site in SITES:
        request = random.Random(site).randbytes(3_000_000)
        assert transport.call(site, request, WATCHDOG, MOST) == request + site.encode()


def test_a_message_that_is_too_long_is_refused_at_once(transport):
    """The sites take in 8 MiB and a little more. The session continues."""
    session = transport._session
    with pytest.raises(TooLongError, match=f"{10 << 20:,} bytes is longer than"):
        transport.call("north", bytes(10 << 20), WATCHDOG, MOST)
    assert transport.call("north", bytes(8 << 20), WATCHDOG, MOST) == bytes(8 << 20) + b"north"
    assert transport._session == session


def memory_of_hub(kits):
    """The peak resident memory of the hub's process of the session, in MiB."""
    (pid,) = running("server.runner_process", str((kits / "hub").resolve()))
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def test_a_long_answer_comes_in_parts_and_a_longer_one_not_at_all(transport, kits):
    """Of 160 MiB where 10,000 bytes are due the hub takes in the first part alone: two parts' room is enough
    for that, with the copies that are made of it. Then the same is due, and arrives; so does less than a part
    more. The session continues all the while."""
    assert transport.call("north", b"visit ", WATCHDOG, MOST) == b"visit north"
    session, before, size = transport._session, memory_of_hub(kits), 160 << 20
    with pytest.raises(LongAnswerError, match=f"{size:,} bytes, at most 10,000 are allowed"):
        transport.call("north", f"long {size}".encode(), 120, 10_000)
    assert memory_of_hub(kits) - before < 5 * (relays.PART >> 20)
    for length in (size, relays.PART, relays.PART + 1):
        answer = transport.call("north", f"long {length}".encode(), 120, length)
        assert answer == reply("north", f"long {length}".encode())
    assert memory_of_hub(kits) - before > 5 * (relays.PART >> 20)
    assert transport._session == session


def test_a_client_that_is_let_in_says_so(transport, heard):
    """By that a site knows whether it waits for its hub, or for ever."""
    for site in SITES:
        assert heard[site].count(REGISTERED) >= 1


@pytest.mark.parametrize(("caller", "arrives"), [("server", b"visit"), ("south", None)])
def test_a_site_takes_requests_of_the_hub_alone(monkeypatch, caller, arrives):
    """The others of a session could call it too. What its own log is to have is sent in their place."""
    asked = []
    monkeypatch.setenv(SITE_DOOR, "/door")
    monkeypatch.setattr(relays, "when_gone", lambda door, end: None)
    monkeypatch.setattr(relays, "ask", lambda door, request: asked.append(request) or b"answer")
    monkeypatch.setattr(relays, "collab", type("Collab", (), {"caller": caller}))
    header, answer = unpack(relays.SiteRelay().exchange(b"visit"))
    assert (header["length"], answer) == (6, b"answer")
    header = unpack(asked[0])[0] if arrives is None else {}
    assert asked == [arrives] if arrives else header["kind"] == "foreign" and "south" in header["asked"]


def test_a_job_brings_no_settings_of_communication(transport, kits, tmp_path):
    """They could name a folder of code, such as the job's own next to them. With the settings that lie at the
    top of each kit, a job's are not read. A site unpacks no such job: here the hub's process has them."""
    mark, job = tmp_path / "it-ran", tmp_path / "job"
    write_job(job, SITES, "s")
    shutil.copytree(job / "app", job / "plain")
    meta = json.loads((job / "meta.json").read_text())
    (job / "meta.json").write_text(json.dumps({**meta, "deploy_map": {"app": ["server"], "plain": SITES}}))
    (job / "app/config/comm_config.json").write_text(json.dumps({"comm_driver_path": str(kits)}))
    (job / "app/config/evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    with transport._asking:
        name = transport._admin_session().submit_job(str(job))
        log = kits / "hub/server" / name / "log.txt"
        # Once its process has a connection, it has loaded what carries connections.
        until(lambda: log.exists() and "conn_manager" in log.read_text(), "the hub's process", every=0.5)
        transport._admin_session().abort_job(name)
    assert (log.parent / "app_server/config/evil.py").exists()
    assert not mark.exists()


def test_a_killed_process_of_flare_costs_a_session(transport, kits):
    kit = str((kits / "north" / "kit").resolve())
    for pid in running("client.worker_process", kit):
        os.kill(pid, signal.SIGKILL)
    assert transport.call("north", b"again ", WATCHDOG, MOST) == b"again north"
    for pid in running("server.runner_process", str((kits / "hub").resolve())):
        os.kill(pid, signal.SIGKILL)
    assert transport.call("south", b"again ", WATCHDOG, MOST) == b"again south"


def outcome_of(transport, job):
    """The status of a job that is not expected to run; the reason of a refusal."""
    with transport._asking:
        session = transport._admin_session()
        try:
            name = session.submit_job(str(job))
        except Exception as error:
            return f"refused: {error}"
        for _ in range(90):
            status = session.get_job_meta(name)["status"]
            if status.startswith("FINISHED"):
                return status
            time.sleep(1)
        session.abort_job(name)
        return status


def test_a_job_with_code_of_its_own_is_refused(transport, kits, tmp_path):
    """The code would write a file where it runs. The refusal is in the audit log."""
    mark = tmp_path / "it-ran"
    write_job(tmp_path / "job", SITES, "s")
    (tmp_path / "job/app/custom").mkdir()
    (tmp_path / "job/app/custom/evil.py").write_text(
        f"class Evil:\n    def __init__(self):\n        open({str(mark)!r}, 'w').close()\n"
    )
    for side in ("server", "client"):
        path = tmp_path / "job/app/config" / f"config_fed_{side}.json"
        content = json.loads(path.read_text())
        content["components"].append({"id": "evil", "path": "evil.Evil", "args": {}})
        path.write_text(json.dumps(content))
    got = outcome_of(transport, tmp_path / "job")
    assert got != "FINISHED:COMPLETED"
    assert not mark.exists()
    assert "submit_job" in (kits / "hub/server/audit.log").read_text()
    assert "BYOC not permitted" in (kits / "hub/server/log.txt").read_text()


def test_a_job_that_names_another_class_is_refused(transport, kits, tmp_path):
    """The class is FLARE's own: it would run a command."""
    write_job(tmp_path / "job", SITES, "s")
    path = tmp_path / "job/app/config/config_fed_client.json"
    content = json.loads(path.read_text())
    path_of_class = "nvflare.app_common.launchers.subprocess_launcher.SubprocessLauncher"
    mark = tmp_path / "it-ran"
    content["components"].append({"id": "evil", "path": path_of_class, "args": {"script": f"touch {mark}"}})
    path.write_text(json.dumps(content))
    assert outcome_of(transport, tmp_path / "job") != "FINISHED:COMPLETED"
    assert not mark.exists()
    logs = [path.read_text() for path in (kits / "north" / "kit").glob("*/log.txt")]
    assert any(f"{path_of_class!r}" in log and "is not in allow_list" in log for log in logs)


def test_strangers_are_not_let_in(transport, kits, tmp_path):
    """With a kit of another authority FLARE's client gets nowhere; with one of the federation's it is in."""
    about = (kits / "hub" / "hub.json").read_text()
    _, _, port = address(kits / "hub/server/startup")
    make_kits(Project(name="wards", hub="localhost", port=port, sites=["west"]), tmp_path / "wards")
    make_kits(Project(name="wards", hub="localhost", port=port, sites=[*SITES, "west"]), kits)
    (kits / "hub" / "hub.json").write_text(about)

    def has_west(folder, seconds):
        with Door(lambda request: b"stranger") as door:
            process, end = client(folder / "west/kit", "west", door), time.monotonic() + seconds
            while time.monotonic() < end:
                with transport._asking:
                    inside = {each.name for each in transport._admin_session().get_connected_client_list()}
                if "west" in inside:
                    break
                time.sleep(0.5)
            process.stop()
            return "west" in inside

    assert not has_west(tmp_path / "wards", 20)
    assert has_west(kits, WATCHDOG)


@pytest.mark.parametrize("kit", ["member", "other", None])
def test_the_port_takes_a_certificate_of_the_federation(transport, kits, tmp_path, kit):
    """One of another authority, or none, ends the connection where a member's gets the server's settings."""
    root = kits / "north/kit/startup"
    _, _, port = address(root)
    context = ssl.create_default_context(cafile=str(root / "rootCA.pem"))
    context.set_alpn_protocols(["h2"])
    if kit == "other":
        make_kits(Project(name="wards", hub="localhost", port=port, sites=["north"]), tmp_path / "wards")
        root = tmp_path / "wards/north/kit/startup"
    if kit is not None:
        context.load_cert_chain(root / "client.crt", root / "client.key")
    if kit == "member":
        assert speak(context, port)[3] == SETTINGS_FRAME[3]
    else:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            speak(context, port)


SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def speak(context, port):
    """Begin HTTP/2, as gRPC does. With TLS 1.3 the server's refusal comes in place of an answer."""
    with (
        socket.create_connection(("localhost", port), timeout=WATCHDOG) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        wrapped.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS_FRAME)
        if not (came := wrapped.recv(100)):
            raise ConnectionError("closed")
        return came
