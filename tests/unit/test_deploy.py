"""The examples of deployment: what they start exists, with the options that they give."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path

import pytest
import yaml

from prefed.ui.cli.app import complete_command

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
UNITS = sorted(DEPLOY.glob("*.service"))


def lists(target: str, word: str) -> list[str]:
    """The words of an instruction in one target of the Dockerfile."""
    block = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    stage = next(text for text in block if re.match(rf"\S+ AS {target}$", text, re.MULTILINE))
    return [str(each) for each in json.loads(re.findall(rf"^\s*{word} (\[.*\])$", stage, re.MULTILINE)[-1])]


def commands() -> dict[str, list[str]]:
    """Where a command line stands → its words."""
    found = {
        f"{target} image": lists(target, "ENTRYPOINT") + lists(target, "CMD") for target in ("hub", "site")
    }
    found["health"] = json.loads(re.findall(r"^ +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
    found["hub service"] = lists("hub", "ENTRYPOINT") + COMPOSE["services"]["hub"]["command"]
    for unit in UNITS:
        start = re.findall(r"^ExecStart=(.*)$", unit.read_text("utf-8"), re.MULTILINE)
        found[unit.name] = start[0].split()
    return found


@pytest.mark.parametrize("place", sorted(commands()))
def test_commands_exist_with_their_options(place: str) -> None:
    program, name, *words = commands()[place]
    assert Path(program).name == "prefed"
    options = {f"--{word.replace('_', '-')}" for word in signature(complete_command(name)).parameters}
    assert {word for word in words if word.startswith("--")} - options == set()


def test_containers_are_closed() -> None:
    """No root, no capability, nothing writable but the mounted folder and /tmp."""
    users = re.findall(r"^USER (\d+):", DOCKERFILE, re.MULTILINE)
    assert users == ["10001"]
    services = COMPOSE["services"]
    assert set(services) == {"hub", "north", "south", "east"}
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["tmpfs"] == ["/tmp"]
        assert [volume.split(":")[1] for volume in service["volumes"]] == ["/srv/prefed"]
        assert "no-new-privileges:true" in service["security_opt"]


def test_a_party_sees_only_its_own_folder() -> None:
    """Above them is the authority's key. A trial shows what each party's machine would hold."""
    mounted = {name: service["volumes"] for name, service in COMPOSE["services"].items()}
    assert mounted == {name: [f"./wards/{name}:/srv/prefed"] for name in mounted}
