"""Forgetting and votes over NVIDIA FLARE, by the commands of a hub and two sites with their own processes."""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from alignments import content
from commands import prefed_
from finished import WORDY, found, rows_of, wordy_place
from peering import free_port
from prefed import Experiment, run
from prefed.core import files
from prefed.privacy.secure import fingerprint
from toy import outcome
from waiting import until

pytest.importorskip("nvflare", reason="needs prefed[nvflare]")

from prefed.networks.federation.flare.kits import Project, make_kits

HOMES = {"north": WORDY[:2], "south": WORDY[2:]}
PREFED = [sys.executable, "-m", "prefed"]


@pytest.fixture
def place(tmp_path):
    """The kits of a federation, with the pairs and the model of each site."""
    folder = wordy_place(tmp_path)
    ports = {"hub": "localhost", "port": free_port()}
    make_kits(Project(name="wards", sites=[*HOMES], **ports), folder / "wards")
    for site, clients in HOMES.items():
        own = folder / "wards" / site
        for name in ("train", "test"):
            rows = [row for client in clients for row in rows_of(folder, name, client)]
            (own / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        shutil.copytree(folder / "model", own / "model")
        lines = (own / "site.toml").read_text().splitlines(keepends=True)
        text = "".join(line for line in lines if "pairs.jsonl" not in line)
        data = 'train = "train.jsonl"\ntest = "test.jsonl"\npartition = {by = "column", column = "worker"}\n'
        (own / "site.toml").write_text(text.replace("[data]\n", f"[data]\n{data}"))
    return folder


@contextmanager
def running(wards):
    """``prefed site`` of each site, until the block ends."""
    sites = [subprocess.Popen([*PREFED, "site", str(wards / site / "site.toml")]) for site in HOMES]
    try:
        yield
    finally:
        for process in sites:
            process.terminate()
        for process in sites:
            process.wait()


def numbers(path):
    """What the replay and the run in one process both leave."""
    content = outcome(path)
    names = ("rounds.jsonl", "checkpoint/server@000004.safetensors")
    adapters = [name for name in content if name.startswith("adapters/")]
    assert adapters
    return {name: content[name] for name in (*names, *adapters)}


@pytest.mark.rare
def test_forget_over_flare_is_never_had(place):
    """A client withdraws at its stopped site. The hub is killed in the replay; the same command continues.
    The result is the run that never had the client, and each site signs that it deleted the other one."""
    wards, old, never = place / "wards", place / "old", place / "never"
    config = {site: wards / site / "site.toml" for site in HOMES}
    keys = dict(prefed_("site", "keys", config[site]).splitlines()[0].split(" = ") for site in HOMES)
    method = {"name": "fedamp", "lr": 0.01, "local_steps": 2, "batch_size": 4}
    tables = {"seed": 3, "rounds": 4, "method": method, "engine": {"threads": 1}}
    tables["model"] = {"name": str(place / "model"), "lora": {"rank": 2}}
    (place / "experiment.toml").write_text(tomli_w.dumps(tables))
    with running(wards):
        prefed_("federate", place / "experiment.toml", "--hub", wards / "hub", "--out", old)
    before, name = outcome(old), json.loads((old / "federation.json").read_text())["run"]
    texts = {who: [row for each in ("train", "test") for row in rows_of(place, each, who)] for who in WORDY}
    assert found(wards / "south/state", texts["cyd"])
    prefed_("site", "withdraw", config["south"], "cyd", "--by", "Dr Ada", "--reason", "asked for it")
    forget = ["forget", str(old), "--client", "cyd", "--yes", "--hub", str(wards / "hub")]
    with running(wards):
        with subprocess.Popen([*PREFED, *forget]) as hub:
            rounds = place / "old.forgetting/run/rounds.jsonl"
            until(lambda: rounds.exists() or hub.poll() is not None, "a round of the replay")
            hub.send_signal(signal.SIGKILL)
        assert hub.returncode == -signal.SIGKILL
        assert outcome(old) == before
        prefed_(*forget)
    data = {each: str(place / f"{each}.jsonl") for each in ("train", "test")}
    data |= {"partition": {"by": "column", "column": "worker"}, "exclude": ["cyd"]}
    run(Experiment.model_validate({**tables, "data": data}), never)
    assert numbers(old) == numbers(never)
    assert not [path for path in found(wards, texts["cyd"]) if path.parent != wards / "south"]
    assert not found(old, texts["cyd"])
    assert found(wards / "south/state", texts["dee"])
    content = files.loads_with_digest((old / "forgotten/cyd.json").read_bytes())
    assert {*content["sites"]} == {*HOMES}
    for site, said in content["sites"].items():
        stated, public = json.loads(said["statement"]), bytes.fromhex(said["identity"])
        assert (stated["run"], stated["site"], stated["clients"]) == (name, site, ["cyd"])
        Ed25519PublicKey.from_public_bytes(public).verify(
            bytes.fromhex(said["signature"]), said["statement"].encode()
        )
        assert said["key"] == keys[site] == fingerprint(public)
        prefed_("site", "log", config[site], "--known", stated["logged"])
        assert [path.name for path in (wards / site / "state/runs" / name).iterdir()] == ["order.json"]


def assert_aligned_alike(*runs):
    kept = ("scores.jsonl", "labels.jsonl", "completions.jsonl", ".safetensors")
    one, other = (
        {name: files.digest(data) for name, data in content(path / "align").items() if name.endswith(kept)}
        for path in runs
    )
    assert one == other


@pytest.mark.rare
def test_sites_judge_over_flare(place):
    """Each site judges with selectors on its own disk. The hub is killed after votes were given, and
    continues. Then clients refresh the selectors. The results are those of the run in one process, whose
    clients judge with the same selectors."""
    wards, over, alone = place / "wards", place / "over", place / "alone"
    tables = {"seed": 3, "rounds": 1, "engine": {"threads": 1}}
    tables["method"] = {"name": "fedbis", "lr": 0.05, "local_steps": 2, "batch_size": 4}
    tables["model"] = {"name": str(place / "model"), "lora": {"rank": 2}}
    (place / "experiment.toml").write_text(tomli_w.dumps(tables))
    data = {each: str(place / f"{each}.jsonl") for each in ("train", "test")}
    data["partition"] = {"by": "column", "column": "worker"}
    run(Experiment.model_validate({**tables, "data": data}), alone)
    for site in HOMES:
        shutil.copytree(alone, wards / site / "selectors")
        with (wards / site / "site.toml").open("a") as file:
            file.write('[judge]\nname = "selector:./selectors"\n')
        path = wards / site / "site.toml"
        path.write_text(path.read_text().replace("[limits]\n", "[limits]\njudgements = 1000\n"))
    keys = {"labels": "clients", "completions": 3, "max_new_tokens": 6, "generations": 2, "epochs": 1}
    keys |= {"temperature": 1.0, "held_out": 0.25}
    words = ["--prompts", str(place / "prompts.jsonl")]
    words += [word for key, value in keys.items() for word in ("--set", f"align.{key}={value}")]
    with running(wards):
        prefed_("federate", place / "experiment.toml", "--hub", wards / "hub", "--out", over)
        align = ["align", str(over), "--hub", str(wards / "hub"), "--set", "align.client_judge=site"]
        with subprocess.Popen([*PREFED, *align, *words]) as hub:
            given = wards / "north/state/runs"
            until(lambda: [*given.glob("*/votes/*")] or hub.poll() is not None, "a client's votes")
            hub.send_signal(signal.SIGKILL)
        assert hub.returncode == -signal.SIGKILL
        prefed_("align", over, "--hub", wards / "hub", "--resume")
        prefed_("align", alone, "--set", f"align.client_judge=selector:{alone}", *words)
        assert_aligned_alike(over, alone)
        again = ["--stage", "completions-1", "--set", "align.labels=majority"]
        again += ["--set", "align.refresh.every=1", "--set", "align.refresh.pairs=4"]
        prefed_("align", over, "--hub", wards / "hub", *again)
        prefed_("align", alone, *again)
        assert_aligned_alike(over, alone)
    shown = prefed_("site", "status", wards / "north/site.toml", "--last", 500)
    assert all(f"{what}  ann" in shown for what in ("judge", "refresh"))
    assert "require each other" in prefed_("align", over, "--resume", code=2)
