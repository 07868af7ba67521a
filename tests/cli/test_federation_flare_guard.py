"""What NVIDIA FLARE's processes take in: attacks by real processes, each with and without prefed's checks."""

import importlib.util
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from prefed.networks.federation.audit_log import status_lines
from waiting import until

pytest.importorskip("nvflare", reason="needs prefed[nvflare]")

from prefed.networks.federation.flare import process as processes
from prefed.networks.federation.flare.guard import (
    FILES,
    MOST,
    app_refusal,
    command_refusal,
    refusal,
    unproven,
)
from prefed.networks.federation.flare.kits import Project, make_kits
from prefed.networks.federation.flare.process import CLIENT, FlareProcess

SPEC = importlib.util.spec_from_file_location(
    "attacked", Path(__file__).parents[2] / "benchmarks" / "attacked.py"
)
attacked = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(attacked)
Attacked, JOB, READ, SECRET = attacked.Attacked, attacked.JOB, attacked.READ, attacked.SECRET
command, signed = attacked.command, attacked.signed
OTHER = "0c6f4d5e-b2e0-4d5e-9a57-3c4f0f6d1a11"


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="unguarded", marks=pytest.mark.rare), pytest.param(True, id="guarded")],
)
def federation(request, tmp_path_factory):
    """Without prefed's checks each attack works: that it could be refused for another reason is out."""
    folder = tmp_path_factory.mktemp("guarded" if request.param else "unguarded")
    with Attacked(folder, request.param) as made:
        yield made


def test_a_member_asks_nothing_of_another_site_or_of_the_network(federation, tmp_path):
    """Neither for files, nor to deploy a job, for which any member's signature would do, nor with the channel
    that also stops processes and sends them elsewhere."""
    app = signed(tmp_path, federation.kits / "south/kit/startup/client")
    read, deployed, *managed = federation.member(
        command("sys.shell", READ),
        command("train.deploy", app, job_id=JOB, job_meta={"job_id": JOB}),
        ["server", "_net_manager", "peers", None],
        ["north", "_net_manager", "peers", None],
    )
    assert (read["came"] == SECRET) is not federation.guarded
    assert (deployed["came"] == "deployed app to north") is not federation.guarded
    assert [each["code"] == "ok" for each in managed] == [not federation.guarded] * 2


def test_a_member_deletes_nothing_of_another_site_in_the_hubs_name(federation):
    """Each reply of the hub carries a token with which its server lets any origin pass."""
    keys = federation.north / "kit" / "keys"
    keys.mkdir(exist_ok=True)
    federation.member(command("train.delete_run", job_id="keys"), origin="server", token=True)
    assert keys.exists() is federation.guarded


def test_the_hub_reads_no_files_of_a_site(federation):
    """And the site's administrator is informed; what sessions need is carried out."""
    key = (federation.north / "kit/startup/client.key").read_text()
    read, allowed = federation.hub(
        command("sys.shell", "cat startup/client.key"), command("train.abort", job_id=JOB)
    )
    assert (read["came"] == key) is not federation.guarded
    assert allowed["came"].startswith("Client app")
    if federation.guarded:
        assert federation.refused("'server'", "sys.shell")
        assert any("sys.shell" in line for line in status_lines(federation.config, last=10))


def test_a_job_of_the_hubs_is_no_path(federation, tmp_path):
    """Deployed, signed as it must be, it would take the place of what the folder holds."""
    keys = federation.north / "kit" / "keys"
    keys.mkdir(exist_ok=True)
    app = signed(tmp_path, federation.kits / "hub/admin/startup/client")
    (got,) = federation.hub(command("train.deploy", app, job_id="keys", job_meta={"job_id": "keys"}))
    assert (got["came"] == "deployed app to north") is not federation.guarded
    assert (keys / "fl_app.txt").exists() is not federation.guarded


def test_a_signed_job_brings_no_code(federation, tmp_path):
    """FLARE's own rights refuse it, but once it is unpacked: a process that starts meanwhile imports it."""
    app = signed(tmp_path, federation.kits / "hub/admin/startup/client", brings="custom/evil.py")
    (got,) = federation.hub(command("train.deploy", app, job_id=JOB, job_meta={"job_id": JOB}))
    assert ("BYOC not permitted" in got["came"]) is not federation.guarded
    if federation.guarded:
        assert federation.refused("custom/")


def test_a_signed_job_brings_no_settings_of_the_sites(federation, tmp_path):
    """FLARE searches the kit for them, jobs included, in the order in which the disk has its folders."""
    app = signed(tmp_path, federation.kits / "hub/admin/startup/client", brings="config/resources.json")
    (got,) = federation.hub(command("train.deploy", app, job_id=JOB, job_meta={"job_id": JOB}))
    assert (got["came"] == "deployed app to north") is not federation.guarded
    assert (federation.north / "kit" / JOB).exists() is not federation.guarded


def test_a_local_user_without_a_certificate_asks_nothing_of_a_site(federation):
    """The folder with the pairs is its owner's alone; only the port is open."""
    assert federation.north.stat().st_mode & 0o777 == 0o700
    (got,) = federation.local(federation.north / "kit", f"north.{JOB}", command("sys.shell", READ))
    assert (got["came"] == SECRET) is not federation.guarded


def test_a_members_certificate_opens_nothing_at_another_sites_port(federation):
    (got,) = federation.local(
        federation.north / "kit",
        f"north.{JOB}",
        command("sys.shell", READ),
        certificate=federation.kits / "south/kit",
    )
    assert (got["came"] == SECRET) is not federation.guarded


def test_a_local_user_asks_nothing_of_the_hub(federation):
    """Nor does one get its token, which takes no certificate there."""
    (got,) = federation.local(
        federation.kits / "hub/server", f"server.{JOB}", ["server", "_net_manager", "peers", None], token=True
    )
    assert (got["came"] is not None and "north" in got["came"]) is not federation.guarded


SITE, SITES_JOB, HUBS_JOB, ACCOUNT = (
    "north",
    f"north.{JOB}",
    f"server.{JOB}",
    "_admin_b2e0c9d40c6f4d5e9a573c4f0f6d1a11",
)


def headers(origin, target, channel, topic, kind="req", **more):
    """What a message says of itself; of a stream, what it is a part of."""
    own = {"origin": origin, "destination": target, "channel": channel, "topic": topic, "msg_type": kind}
    return {f"cn__{key}": value for key, value in {**own, **more}.items()}


def stream(origin, target, channel, topic):
    return {**headers(origin, target, "sm__STREAM", "sm__DATA"), "sm__ch": channel, "sm__tp": topic}


def test_what_a_session_needs_is_taken_in():
    """Who receives, from whom, what: written down from a session of FLARE 2.9's unguarded processes."""
    for me, peer, message in [
        ("north", "server", headers("server", "north", "admin", "admin")),
        ("north", "server", headers("server", "north", "task", "heart_beat", "reply")),
        ("north", SITES_JOB, headers(SITES_JOB, "north", "admin", "train.notify_job_status")),
        ("north", SITES_JOB, headers(SITES_JOB, "north", "cellnet.channel", "bye")),
        (SITES_JOB, "north", headers("north", SITES_JOB, "client_command", "abort")),
        (SITES_JOB, "server", stream(HUBS_JOB, SITES_JOB, "collab", "call")),
        (SITES_JOB, "north", stream(HUBS_JOB, SITES_JOB, "collab", "call")),
        (SITES_JOB, "server", stream(HUBS_JOB, SITES_JOB, "return_only", "server_command:get_task")),
        (SITES_JOB, "server", headers(HUBS_JOB, SITES_JOB, "sm__STREAM", "sm__ACK")),
        ("server", "north", headers("north", "server", "task", "register")),
        ("server", "north", headers("north", "server", "admin", "admin", "reply")),
        ("server", SITES_JOB, stream(SITES_JOB, HUBS_JOB, "server_command", "submit_update")),
        ("server", "north", stream(SITES_JOB, HUBS_JOB, "server_command", "get_task")),
        ("server", HUBS_JOB, stream(HUBS_JOB, SITES_JOB, "collab", "call")),
        ("server", HUBS_JOB, headers(HUBS_JOB, "server", "server_parent_listener", "heartbeat")),
        ("server", ACCOUNT, stream(ACCOUNT, "server", "hci_channel", "command")),
        (HUBS_JOB, "server", stream(SITES_JOB, HUBS_JOB, "aux_communication", "__sync_runner__")),
        (HUBS_JOB, "server", headers("server", HUBS_JOB, "server_command", "abort")),
    ]:
        assert refusal(me, peer, message) is None, (me, peer, message)


def test_what_nobody_needs_is_refused():
    far = f"south.{OTHER}"
    for me, peer, message in [
        # In another's name, which the hub's token of each reply lets pass.
        ("server", "south", headers("server", "north", "admin", "admin")),
        ("server", "south", headers("north", "server", "cellnet.channel", "bye")),
        ("server", "south", headers(SITES_JOB, HUBS_JOB, "server_command", "submit_update", "reply")),
        # From one site to another, through the hub and at the site.
        ("server", "south", headers("south", "north", "admin", "admin")),
        ("server", "south", stream(f"south.{JOB}", SITES_JOB, "collab", "call")),
        ("north", "server", headers("south", "north", "admin", "admin")),
        (SITES_JOB, "server", stream(f"south.{JOB}", SITES_JOB, "collab", "call")),
        ("north", "south", headers("south", "north", "admin", "admin")),
        # Of one session to another.
        (HUBS_JOB, "server", stream(far, HUBS_JOB, "server_command", "get_task")),
        ("server", far, stream(far, HUBS_JOB, "server_command", "get_task")),
        # What the hub's own processes ask each other.
        ("server", "north", headers("north", "server", "server_parent_listener", "update_run_status")),
        ("server", SITES_JOB, headers(SITES_JOB, "server", "server_parent_listener", "heartbeat")),
        (HUBS_JOB, "server", headers(SITES_JOB, HUBS_JOB, "server_command", "abort")),
        ("server", "north", stream("north", "server", "hci_channel", "command")),
        ("server", "north", headers("north", HUBS_JOB, "server_command", "get_task")),
        # FLARE's own doors: who manages the network, messages in messages, addresses to connect to.
        ("north", "server", headers("server", "north", "_net_manager", "stop")),
        ("server", "north", headers("north", "server", "_net_manager", "stop")),
        (SITES_JOB, "server", headers("server", SITES_JOB, "_net_manager", "stop")),
        (HUBS_JOB, "server", headers("server", HUBS_JOB, "_net_manager", "stop")),
        ("server", "north", headers("north", "server", "cellnet.channel", "bulk")),
        ("north", "server", headers("server", "north", "admin", "admin", conn_url="tcp://10.0.0.1:1")),
        ("north", "server", headers("server", "north", "task", "heart_beat", "reply", conn_url="tcp://10.0.0.1:1")),
        ("north", "server", stream("server", "north", "download_service__", "any")),
        # Names that are none, and a message that says nothing of itself.
        ("server", "south", headers("south.startup", "server", "task", "heart_beat")),
        ("server", ACCOUNT, headers(f"{ACCOUNT}.{JOB}", "server", "task", "register")),
        ("north", "server", {}),
    ]:  # fmt: skip
        assert refusal(me, peer, message), (me, peer, message)


def test_commands_name_a_job_and_no_path():
    """Where it is deployed is that of its description, too: FLARE starts what that names."""
    assert command_refusal("server", "train.deploy", {"job_id": JOB, "job_meta": {"job_id": JOB}}) is None
    assert command_refusal(SITES_JOB, "train.notify_job_status", {"job_id": JOB}) is None
    for origin, topic, given in [
        ("server", "train.deploy", {"job_id": "startup"}),
        ("server", "train.deploy", {"job_id": f"{JOB} --set"}),
        ("server", "train.start_job", {"job_id": JOB, "job_meta": {"job_id": "../keys"}}),
        ("server", "train.abort", {}),
        ("server", "sys.shell", {"job_id": JOB}),
        ("server", "train.delete_run", {"job_id": JOB}),
        ("server", "train.notify_job_status", {"job_id": JOB}),
        (SITES_JOB, "train.notify_job_status", {"job_id": OTHER}),
        (SITES_JOB, "train.abort", {"job_id": JOB}),
    ]:
        assert command_refusal(origin, topic, given), (origin, topic, given)


def zipped(files):
    with BytesIO() as stream:
        with ZipFile(stream, "w", ZIP_DEFLATED) as archive:
            for name, content in files:
                archive.writestr(name, content)
        return stream.getvalue()


def test_a_job_is_its_own_few_files():
    job = [(name, b"{}") for name in FILES]
    assert app_refusal(zipped(job)) is None
    assert app_refusal(zipped(job[:1])) is None
    for name in (
        "custom/omegaconf.py",
        "config/comm_config.json",
        "config/config_fed_client.conf",
        "config/./config_fed_client.json",
        "../config_fed_client.json",
        "custom/",
    ):
        assert repr(name) in app_refusal(zipped([*job, (name, b"")]))
    assert f"{MOST + 2:,} bytes" in app_refusal(zipped([(job[0][0], bytes(MOST + 2))]))
    for app in (b"PK", b"", None, "text", {"base64": ""}):
        assert app_refusal(app)


def connection(*, listened, name, security="mtls"):
    """One that FLARE listened for or made, and the name in the certificate at its other end."""
    from nvflare.fuel.f3.sfm.conn_manager import Mode

    params = {"scheme": "grpc", "secure": True, "connection_security": security}
    mode = Mode.PASSIVE if listened else Mode.ACTIVE
    return SimpleNamespace(
        get_conn_properties=lambda: {"peer_cn": name}, connector=SimpleNamespace(mode=mode, params=params)
    )


def test_who_is_at_the_other_end_is_who_must_be(monkeypatch):
    """gRPC does not show a client whose certificate the hub has: FLARE lets the hub call itself anything."""
    monkeypatch.setenv(processes.ACCOUNT, "lead")
    for name in (None, "N/A"):
        assert unproven(connection(listened=False, name=name), "server") is None
        for peer in (SITE, SITES_JOB, HUBS_JOB, ACCOUNT, "south"):
            assert unproven(connection(listened=False, name=name), peer), peer
    assert unproven(connection(listened=False, name="north"), "north") is None
    assert unproven(connection(listened=True, name="lead"), ACCOUNT) is None
    assert unproven(connection(listened=True, name="south"), ACCOUNT)
    assert unproven(connection(listened=True, name=None), "south")
    assert unproven(connection(listened=True, name="south", security="tls"), "south")


@pytest.mark.parametrize(
    ("module", "name", "change"),
    [
        ("nvflare.fuel.f3.cellnet.core_cell", "CoreCell.process_message", "lambda one: None"),
        ("nvflare.private.fed.client.admin", "FedAdminAgent._dispatch_request", "None"),
        ("nvflare.app_common.job_launcher.process_launcher", "spawn_process", "lambda one: None"),
    ],
)
def test_nothing_starts_where_flare_is_not_as_expected(tmp_path, monkeypatch, module, name, change):
    """Another version, with a function of another form or without it: the client ends before it connects."""
    make_kits(Project(name="wards", hub="localhost", port=9, sites=["north"]), tmp_path / "wards")
    kit = tmp_path / "wards/north/kit"
    changed = f"import {module} as changed; changed.{name} = {change}\n"
    monkeypatch.setattr(processes, "START", f"{changed}{processes.START}")
    started = FlareProcess(CLIENT, kit, ["uid=north", "org=north"], {})
    try:
        until(lambda: not started.alive, "the end of the client", every=0.2)
    finally:
        started.stop()
    guarded = name if "." in name else f"{module}.{name}"
    assert (
        f"prefed cannot guard {guarded} in this version of NVIDIA FLARE, so nothing is started: install the "
        "version that prefed[nvflare] requires"
    ) in (kit / "process.log").read_text()
    assert not (kit / "log.txt").exists()
