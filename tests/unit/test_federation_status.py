"""What `prefed site status` shows a site's administrator: runs and pseudonyms."""

from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from federating import experiment, site_config
from prefed.core import Privacy, files
from prefed.data import ClientSizes, FederatedDataset
from prefed.networks.federation import site as site_module
from prefed.networks.federation.audit_log import SentLog, prometheus_lines, status_lines
from prefed.networks.federation.experiment import reported_names
from prefed.networks.federation.federate import experiment_for_sites
from prefed.networks.federation.messages import FORMAT, VERSION
from prefed.networks.federation.privacy_ledger import Releases, epsilon_of
from prefed.networks.federation.site import Site
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.networks.federation.vault import Vault, site_secret
from prefed.privacy.secure import Identity, fingerprint
from prefed.ui.cli import app

RUN, OTHER = "3fa9b2c4d5e6f708", "0123456789abcdef"
ADA = "ada\n"
SITE = 'federation = "wards"\nname = "north"\n[data]\ntrain = "pairs.jsonl"\n[model]\nname = "model"\n'


def status(tmp_path, **changes):
    return [*status_lines(site_config(tmp_path, tmp_path, "w0", **changes), 0)]


def test_private_states_are_those_of_clients_alone(tmp_path):
    """A run has its order and, with local noise, answers next to 700 + 300 bytes of two clients' states."""
    folder = tmp_path / "site-w0" / "runs" / RUN
    vault = Vault(folder / "clients", b"secret")
    vault.keep("w0", 1, bytes(700))
    vault.keep("w1", 1, bytes(300))
    files.private_folder(folder / "answers")
    (folder / "answers" / "000001-x").write_bytes(bytes(5000))
    (folder / "order.json").write_bytes(files.dumps_with_digest({"experiment": "x" * 5000}))
    SentLog(tmp_path / "site-w0" / "log").add("train", run=RUN, round=1, client="w0", bytes=2000)
    lines = [line for line in status(tmp_path) if line.startswith("run ")]
    assert lines == [f"run {RUN}: up to round 1; sent 1 message, 2.0 kB; private states: 1.0 kB"]


@pytest.mark.parametrize("name", ["../../../etc", "x" * 5000, 5, ["a"], "\0"])
def test_a_hub_does_not_break_the_status(tmp_path, name):
    """What it calls a run, a round and a client may be anything: the request is refused, and logged."""
    site = Site(site_config(tmp_path, tmp_path, "w0"))
    request = pack(
        kind="visit", format=FORMAT, prefed=VERSION, federation="wards", run=name, round="x", client=[3]
    )
    assert "refused" in unpack(site.answer(request))[0]
    site.close()
    lines = [*status_lines(site_config(tmp_path, tmp_path, "w0"), 9)]
    assert lines[-1].endswith("refused: the request does not name its run")
    assert not any("nothing was sent" in line for line in lines)


def test_an_administrator_sees_whom_the_hub_knows_as_whom(tmp_path, monkeypatch):
    """Two clients of a site that reports pseudonyms, those of ``reported_names``; the ledger of noise has the
    clients' own names."""
    data = FederatedDataset.without_pairs(dict.fromkeys(["w1", ADA], ClientSizes(8, 0, 2)))
    monkeypatch.setattr(site_module, "own_dataset", lambda *arguments: data)
    config = site_config(tmp_path, tmp_path, "w0", disclose={"names": False, "pairs": True})
    site = Site(config)
    text = experiment_for_sites(experiment(Path("x")))
    request = pack(format=FORMAT, prefed=VERSION, federation="wards", run=RUN, kind="join", experiment=text)
    clients = unpack(site.answer(request))[0]["clients"]
    site.close()
    made_up = reported_names(data, config, site_secret(tmp_path / "site-w0"))
    assert {*clients} == {*made_up.values()}
    damaged = tmp_path / "site-w0" / "runs" / OTHER
    files.private_folder(damaged)
    (damaged / "order.json").write_text("{")
    SentLog.of(config).add("refused", run=RUN, refused="[limits] rounds")
    lines = [*status_lines(config, 0)]
    counts = {"1 request refused", "1 run without any upload"}
    assert counts | {"  reported to the hub: pseudonyms and pair counts"} <= {*lines}
    assert [line for line in lines if " as site-w0-" in line] == [
        f"  the hub knows ada\\n as {made_up[ADA]}",
        f"  the hub knows w1 as {made_up['w1']}",
    ]


def test_the_status_in_the_text_format_of_prometheus(tmp_path):
    """Two messages of 812 and 188 bytes in rounds 2 and 3, one of them withheld; a refusal, whose run is no
    label, since a hub may name any. Two releases of ann and one of ``ADA`` with z = 10: the larger loss is
    that of 1/z² = 0.02. The client's name, with its newline, is in no line."""
    config = site_config(tmp_path, tmp_path, "w0", limits={"epsilon": 8.0, "delta": 1e-5})
    log = SentLog(tmp_path / "site-w0" / "log")
    log.add("train", run=RUN, round=2, client=ADA, bytes=812)
    log.add("train", run=RUN, round=3, client=ADA, bytes=188, withheld="too few pairs")
    log.add("refused", run=OTHER, refused="[limits] rounds")
    (last,) = [each["time"] for each in log.entries()][-1:]
    releases = Releases(tmp_path / "site-w0")
    noise = Privacy(kind="local", clip=1.0, noise_multiplier=10.0, delta=1e-5)
    for client in ("ann", "ann", ADA):
        releases.count([client], noise)
    lines = [line for line in prometheus_lines(config) if not line.startswith("#")]
    site = 'federation="wards",site="site-w0"'
    assert lines == [
        f'prefed_site_info{{{site},version="{VERSION}"}} 1',
        f"prefed_site_up{{{site}}} 0",
        f'prefed_site_events_total{{{site},event="refused"}} 1',
        f'prefed_site_events_total{{{site},event="train"}} 1',
        f'prefed_site_events_total{{{site},event="withheld"}} 1',
        f"prefed_site_last_event_timestamp_seconds{{{site}}} {datetime.fromisoformat(last).timestamp():.0f}",
        f'prefed_site_messages_total{{{site},run="{RUN}"}} 2',
        f'prefed_site_sent_bytes_total{{{site},run="{RUN}"}} 1000',
        f'prefed_site_round{{{site},run="{RUN}"}} 3',
        f'prefed_site_private_state_bytes{{{site},run="{RUN}"}} 0',
        f"prefed_site_epsilon{{{site}}} {epsilon_of(0.02, 1e-5):.17g}",
        f"prefed_site_epsilon_limit{{{site}}} 8",
    ]
    with closing(Site(config)):
        assert f"prefed_site_up{{{site}}} 1" in prometheus_lines(config)


def test_the_key_of_a_site_is_made_once_and_its_faults_are_shown(tmp_path, monkeypatch):
    """By keys, doctor and status: without a key, with too few pins, with right ones, with one twice, and with
    another key than the list of sites has for this one."""
    pytest.importorskip("cryptography")
    monkeypatch.setattr("prefed.networks.federation.machine_requirements.check_installed", lambda: None)
    pins = {name: fingerprint(Identity(name.encode() * 8).public) for name in ("east", "west")}
    path = tmp_path / "site.toml"

    def prefed(*words, **sites):
        lines = [f'{name} = "{text}"' for name, text in sites.items()]
        path.write_text(SITE + "\n".join(["[sites]", *lines]))
        return CliRunner().invoke(app, [*words, str(path)]).stdout

    def shown(**sites):
        (doctor,) = [line for line in prefed("doctor", **sites).splitlines() if "secure sums" in line]
        (own,) = [line for line in prefed("site", "status", **sites).splitlines() if "secure sums" in line]
        mark, _, text = doctor.partition("secure sums")
        return mark.split(), text.split(), own.split(": ", 1)[1].split()

    mark, text, own = shown(**pins)
    assert (mark, text) == (["missing"], own)
    assert "run `prefed site keys" in " ".join(text)
    first, *others = prefed("site", "keys", **pins).splitlines()[:3]
    words = fingerprint(Identity.at(tmp_path / "state" / "identity").public)
    assert first == f"north = {words}"
    assert others == [f"  expects {name} = {text}" for name, text in pins.items()]
    assert prefed("site", "keys", **pins).splitlines()[0] == first
    assert shown(**pins) == (["ok"], [f"{words};", "pinned:", "east,", "west"], ["north", "=", words])
    assert shown(north=words, **pins)[0] == ["ok"]
    for wrong, why in (
        ({"east": pins["east"]}, "has 1 other sites, and a sum needs 2"),
        ({"east": pins["east"], "west": pins["east"]}, f"for east and west: {pins['east']}"),
        ({**pins, "north": pins["east"]}, f"this site's key is {words}, and [sites] has {pins['east']}"),
    ):
        mark, text, own = shown(**wrong)
        assert (mark, text) == (["missing"], own)
        assert why in " ".join(text)
    SentLog(tmp_path / "state" / "log").add("refused", refused="site 'east' has another key: … [sites] has …")
    assert "  refused last: site 'east' has another key: … [sites]" in prefed("site", "status", **pins)
