"""A hub's command and its beginning, without NVIDIA FLARE: for whom it waits, what it says when stopped."""

import os
import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from federating import Within, experiment
from prefed.networks.federation import federate as hub
from prefed.networks.federation.federate import Terms, federate
from prefed.networks.federation.flare.process import check_port
from prefed.networks.federation.transport import FederationError
from prefed.networks.federation.unix_socket import pack
from prefed.ui.cli.app import app, complete_command
from prefed.ui.cli.errors_and_interrupts import interruptible
from toy import Warned

OPTIONS = {
    "--hub": "wards/hub",
    "--sites": "north,south",
    "--wait": "7.5",
    "--at-least": "1",
    "--visit": "60.0",
    "--most-clients": "9",
    "--most-pairs": "99",
    "--cell": "a/b",
    "--log": "text",
}


def test_the_command_that_goes_on_has_all_that_was_given(tmp_path, monkeypatch):
    """All options of the command but those that say where and how, which follow; and no other ones."""

    def stopped():
        raise KeyboardInterrupt

    monkeypatch.setattr("prefed.networks.federation.flare.check_installed", stopped)
    sets = ["--set", "rounds=2", "--set", "seed=1"]
    words = ["federate", "e.toml", *(word for pair in OPTIONS.items() for word in pair), *sets]
    command = complete_command("federate")
    taken = {f"--{name.replace('_', '-')}" for name in command.__annotations__}
    others = {"--context", "--file", "--overrides", "--return", "--quiet", "--verbose"}
    assert taken - others == {*OPTIONS, "--out", "--resume", "--auto-resume"}
    for resume in ("--resume", "--auto-resume"):
        shown = CliRunner().invoke(app, [*words, resume, "--out", "o"])
        printed = shown.stderr.strip().splitlines()[-1].split()
        assert printed[:3] == ["prefed", "federate", "e.toml"]
        assert printed[-3:] == ["--out", "o", resume]
        middle = printed[3:-3]
        pairs = [*zip(middle[::2], middle[1::2], strict=True)]
        assert sorted(pairs) == sorted([*OPTIONS.items(), ("--set", "rounds=2"), ("--set", "seed=1")])
    shown = CliRunner().invoke(app, ["federate", "e.toml", "-v"])
    assert shown.stderr.strip().splitlines()[-1].strip() == "prefed federate e.toml --verbose"


@pytest.mark.parametrize(
    ("files", "said", "ends"),
    [
        ((), "the run had not started.", "a --out run"),
        (("checkpoint/LOCK", "config.toml"), "the run had not started.", "a --out run"),
        (("checkpoint/COMMIT.json",), "no round is complete yet.", "run --resume"),
        (("checkpoint/COMMIT.json", "rounds.jsonl"), "complete rounds are kept.", "run --resume"),
    ],
)
def test_what_a_stopped_command_says_is_kept(tmp_path, monkeypatch, capsys, files, said, ends):
    """A run has started with its first commit, and has rounds once one is written."""
    monkeypatch.chdir(tmp_path)
    for name in files:
        Path("run", name).parent.mkdir(parents=True, exist_ok=True)
        Path("run", name).touch()

    def stopped():
        with interruptible(["a"], None, False) as paths:
            paths.append(Path("run"))
            raise KeyboardInterrupt

    with pytest.raises(typer.Exit):
        stopped()
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[0]
    assert lines[-1].endswith(ends)


class Slow(Within):
    """North is there at once, south at the third look, and west never; each refuses what it is asked."""

    def __init__(self):
        self.looks = 0

    def connected(self):
        self.looks += 1
        return {"north", "south"} if self.looks > 2 else {"north"}

    def call(self, site, request, timeout, most):
        return pack(refused="this is a test")


def test_the_hub_says_for_whom_it_waits_and_without_whom_it_begins(tmp_path, monkeypatch):
    """Once, while somebody is missing; and once it begins, on the terminal and in the run's log."""
    monkeypatch.setattr(hub, "QUIET", 0.0)
    monkeypatch.setattr(hub, "PAUSE", 0.01)
    (tmp_path / "run").mkdir()
    got, heard = [], Warned()
    terms = Terms("wards", ("north", "south", "west"), wait=0.3, at_least=2)
    with pytest.raises(FederationError, match="refuses: this is a test"):
        federate(experiment(tmp_path), tmp_path / "run", Slow(), terms, callbacks=[heard], report=got.append)
    assert got == ["waiting up to 0.3 seconds for south, west"]
    line = "the run starts without west: sites that connect later can join the next run"
    assert heard.texts == [line]
    assert f"warning: {line}" in (tmp_path / "run/run.log").read_text()


@pytest.mark.parametrize("host", ["localhost", "hub.invalid"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_port_that_somebody_has_is_not_shared(host, shared):
    """Also one whose owner would share it, as a server of gRPC does. Once nobody listens it is free."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            FederationError, match=f"the hub's port {port} is in use by .*: stop it first"
        ) as caught:
            check_port(host, port, 0.0)
        with socket.create_connection(("127.0.0.1", port)) as caller:
            listener.accept()[0].close()
            assert caller.recv(1) == b""
    check_port(host, port, 0.0)
    if "another program" not in str(caught.value):
        assert f"process {os.getpid()} (" in str(caught.value)
