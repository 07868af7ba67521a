"""``prefed doctor``: what is missing for an experiment, in one screen, and whether anything is."""

import json
import os
import re
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefed.networks.federation import machine_requirements as federation
from prefed.networks.federation.transport import FederationError
from prefed.runs import machine_requirements as environment
from prefed.ui.cli import app

FILE = """
[data]
train = "pairs.jsonl"
partition = {by = "column", column = "worker"}
[model]
name = "model"
[method]
name = "feddpo"
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An experiment with its pairs and a model of 3,000 bytes; nothing of them is ever read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.toml").write_text(FILE)
    (tmp_path / "pairs.jsonl").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_bytes(bytes(3000))
    (tmp_path / "model/model.safetensors").touch()
    (tmp_path / "model/tokenizer.json").touch()
    return tmp_path


def seen(*words):
    """The exit code, and each check → whether something is missing, and the text."""
    result = CliRunner().invoke(app, ["doctor", *words, "--json"])
    assert isinstance(result.exception, SystemExit) or result.exception is None, repr(result.exception)
    return result.exit_code, {f["what"]: (f["missing"], f["text"]) for f in json.loads(result.stdout)}


def test_nothing_is_missing(place):
    code, found = seen("exp.toml")
    assert code == 0
    assert found["model.name"] == (False, f"{place / 'model'}, 3.0 kB")
    assert found["data.train.path"] == (False, str(place / "pairs.jsonl"))
    assert list(found)[:6] == ["packages", "extras", "devices", "proxy", "disk", "clock"]
    assert seen()[0] == 0
    assert not (place / "runs").exists()


def test_everything_that_is_missing_is_named_at_once(place, monkeypatch):
    """The same messages as of the run, which would stop at the first one; the last line counts them."""
    monkeypatch.setattr("prefed.engines.backends.find_spec", lambda name: None)
    (place / "pairs.jsonl").unlink()
    words = ["exp.toml", "--set", "engine.name=ray", "--set", "model.name=nobody/none"]
    words += ["--set", "model.dtype=float16", "--set", "model.device=cpu"]
    words += ["--set", "method.objective=ppo", "--set", "method.reward_model=no/judge"]
    code, found = seen(*words)
    assert code == 1
    expected = {
        "[engine]": "pip install 'prefed[ray]'",
        "[model] device": "dtype = 'float16' requires a GPU",
        "model.name": "hf download nobody/none",
        "method.reward_model": "hf download no/judge",
        "data.train.path": "pairs.jsonl: no such file",
    }
    assert {what for what, (missing, _) in found.items() if missing} == expected.keys()
    assert all(text in found[what][1] for what, text in expected.items())
    lines = CliRunner().invoke(app, ["doctor", *words]).stdout.splitlines()
    assert lines[-1] == f"5 of {len(found)} checks failed"
    assert sum(line.startswith("missing") for line in lines) == 5


def test_a_name_in_the_file_forges_no_line(place):
    """Also of a path that cannot be a name on the hub: line breaks become spaces, other control characters
    escapes, so the screen has a line for each check."""
    name = "./x\x1b[2J\nok  model.name"
    words = ["exp.toml", "--set", f"model.name={json.dumps(name)}"]
    absent = "./x\x1b[2J ok  model.name: no such folder; correct the path"
    assert seen(*words)[1]["model.name"] == (True, absent)
    out = CliRunner().invoke(app, ["doctor", *words]).stdout
    assert "./x\\x1b[2J ok  model.name: no such folder" in out
    assert "\x1b" not in out
    assert len(out.splitlines()) == len(seen(*words)[1]) + 1


def test_a_full_disk_and_a_slow_clock(place, monkeypatch):
    """2,999 bytes are free, one too few for a copy of the model; the file is of tomorrow."""
    usage = environment.shutil.disk_usage(place)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage._replace(free=2999))
    tomorrow = time.time() + 86400
    os.utime(place / "exp.toml", (tomorrow, tomorrow))
    code, found = seen("exp.toml")
    assert code == 1
    assert {what for what, (missing, _) in found.items() if missing} == {"model.name", "clock"}
    assert "free some space" in found["model.name"][1]
    assert "exp.toml was written: set the clock" in found["clock"][1]


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        (["tokenizer.json"], "no tokenizer"),
        (["model.safetensors"], "no weights"),
        (["config.json", "tokenizer.json"], "no config.json, no tokenizer"),
    ],
)
def test_a_models_folder_lacks_files(place, monkeypatch, files, lacks):
    """The run, which would find this once it has read the data, names them with the same words."""
    for name in files:
        (place / "model" / name).unlink()
    text = f"the folder has {lacks}; give one with config.json, weights and tokenizer"
    assert seen("exp.toml")[1]["model.name"] == (True, f"{place / 'model'}: {text}")
    (place / "site.toml").write_text(
        'federation = "wards"\nname = "north"\n[data]\ntrain = "pairs.jsonl"\n[model]\nname = "model"\n'
    )
    monkeypatch.setattr(federation, "check_installed", lambda: None)
    missing, found = seen("site.toml")[1]["data and model"]
    assert missing
    assert found.endswith(text)


def test_data_need_the_package_that_reads_them(place, monkeypatch):
    """A Parquet file and a data set on the hub; neither is read."""
    (place / "pairs.parquet").touch()
    for source, package in (("pairs.parquet", "pyarrow"), ("someone/pairs", "datasets")):
        words = ["exp.toml", "--set", f"data.train={source}"]
        assert not seen(*words)[1]["data.train.path"][0]
        monkeypatch.setattr("prefed.data.errors.find_spec", lambda name: None)
        missing, text = seen(*words)[1]["data.train.path"]
        assert missing
        assert f"needs the package {package}: pip install 'prefed[datasets]'" in text
        monkeypatch.undo()
        monkeypatch.chdir(place)


def test_extras_are_those_of_the_metadata(monkeypatch):
    """``both`` joins two extras, of which one needs a package that is not here, or another version."""
    lines = ['numpy; extra == "a"', 'nothing-of-this-name; extra == "b"', 'numpy<1; extra == "c"']
    monkeypatch.setattr(
        environment, "requires", lambda name: ["torch", *lines, 'prefed[a,b]; extra == "both"']
    )
    assert [environment._is_here(name) for name in ("a", "b", "c", "both")] == [True, False, False, False]
    monkeypatch.setattr(environment, "_is_here", lambda name: False)
    assert seen()[1]["extras"][1].startswith("none; not installed: ")


def test_every_listed_extra_is_documented():
    """Extras that doctor names, installed or not, are those of the page on installation."""
    page = (Path(__file__).parents[2] / "docs/install.md").read_text()
    listed = set(re.findall(r"[a-z]+", seen()[1]["extras"][1])) - {"not", "installed"}
    rows = re.findall(r"^\| ((?:`[a-z]+`(?:, )?)+) \|", page, flags=re.MULTILINE)
    assert listed == {name for row in rows for name in re.findall(r"[a-z]+", row)}


def test_a_site_needs_its_kit_and_its_model(place, monkeypatch):
    """Its pairs are here, its kit is not; so has no hub's folder. Without FLARE, that is all."""
    (place / "site.toml").write_text(
        'federation = "wards"\nname = "north"\n[data]\ntrain = "pairs.jsonl"\n[model]\nname = "./none"\n'
    )
    monkeypatch.setattr(federation, "check_installed", lambda: None)
    code, found = seen("site.toml")
    assert code == 1
    assert found["localhost"][0] is False
    assert {what for what, (missing, _) in found.items() if missing} == {"kit", "data and model"}
    assert "is not a valid site kit" in found["kit"][1]
    assert "no such folder" in found["data and model"][1]
    assert "does not contain the hub's kit" in seen("--hub", "wards/hub")[1]["kit"][1]

    def absent():
        raise FederationError("a federation needs the package nvflare")

    monkeypatch.setattr(federation, "check_installed", absent)
    assert list(seen("site.toml")[1])[-1] == "nvflare"


def test_a_hub_needs_its_port(place):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(FederationError, match=f"{port} cannot be used .Address already in use.: stop"):
            federation._free(port)
        assert federation._reached("localhost", port) == f"localhost:{port} is open"
    assert federation._free(port) == f"{port} is free"
    closed = f"localhost is reachable; port {port} is closed until the hub starts a run"
    assert federation._reached("localhost", port) == closed


@pytest.mark.parametrize("answer", [None, "192.0.2.1"])
def test_processes_of_one_machine_need_localhost(place, monkeypatch, answer):
    """A machine without /etc/hosts has no such name; a name server may answer with another machine's address.
    Both stop FLARE, which only says that it cannot open a session."""
    (place / "site.toml").write_text(
        'federation = "wards"\nname = "north"\n[data]\ntrain = "pairs.jsonl"\n[model]\nname = "model"\n'
    )
    monkeypatch.setattr(federation, "check_installed", lambda: None)

    def resolve(host, port):
        if answer is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for words in (["site.toml"], ["--hub", "wards/hub"]):
        missing, text = seen(*words)[1]["localhost"]
        assert missing
        assert (answer or "no address") in text
        assert "127.0.0.1 localhost" in text


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [(1, 2, "set this machine's clock"), (-2, -1, "expired on .*federation init"), (-1, 1, None)],
)
def test_certificates_have_dates(place, first, last, words):
    """Days from now between which one is valid."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    key, name, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now + timedelta(first)).not_valid_after(now + timedelta(last))
    pem = made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    (place / "client.crt").write_bytes(pem)
    if words is None:
        assert federation._dates(place / "client.crt") == f"valid until {now + timedelta(last):%Y-%m-%d}"
        return
    with pytest.raises(FederationError, match=words):
        federation._dates(place / "client.crt")


OWN = """
from pathlib import Path
from prefed.methods import METHODS
METHOD = METHODS["feddpo"]

Path("ran").touch()
"""


def test_code_that_a_file_names_is_not_run(place, monkeypatch):
    """The control: `prefed init` loads and allows it, and then doctor checks all of it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    (place / "own.py").write_text(OWN)
    (place / "exp.toml").write_text(FILE.replace('"feddpo"', '"./own.py"'))
    result = CliRunner().invoke(app, ["doctor", "exp.toml"])
    assert result.exit_code != 0
    assert "own.py is code from outside prefed that you have not used" in " ".join(result.stderr.split())
    assert not (place / "ran").exists()
    assert CliRunner().invoke(app, ["init", "./own.py", "--out", "own.toml"]).exit_code == 0
    assert (place / "ran").exists()
    assert seen("exp.toml")[0] == 0
