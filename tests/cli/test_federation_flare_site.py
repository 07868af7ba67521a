"""What `prefed site` checks before it waits for its hub, and what it says of NVIDIA FLARE's client."""

import shutil
import socket

import pytest
from typer.testing import CliRunner

from prefed.config import ConfigError
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.messages import FORMAT, VERSION
from prefed.networks.federation.unix_socket import ask, pack
from prefed.ui.cli import app

pytest.importorskip("nvflare", reason="needs prefed[nvflare]")

from prefed.networks.federation.flare import site as over_site
from prefed.networks.federation.flare import transport as over_hub
from prefed.networks.federation.flare.kits import Project, make_kits
from prefed.networks.federation.flare.process import REGISTERED, SITE_DOOR
from prefed.networks.federation.flare.site import take_part


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits") / "wards"
    make_kits(Project(name="wards", hub="localhost", port=9310, sites=["north", "south"]), folder)
    return folder


def written(kits, site, **changes):
    """A site's file as its kit has it, with its data and its model there, and with ``changes``."""
    folder = kits / site
    (folder / "pairs.jsonl").touch()
    (folder / "model").mkdir(exist_ok=True)
    return SiteConfig.load(folder / "site.toml").model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "nroth"},
            r"name = 'nroth': the kit in .*/north/kit belongs to site 'north': "
            'set name = "north", or put this site\'s kit there$',
        ),
        ({"federation": "ward"}, "federation = 'ward': the kit in .* belongs to federation 'wards': set"),
        ({"kit": "nowhere"}, r"kit = 'nowhere' is not a valid site kit \(.*fed_client.json"),
    ],
)
def test_a_site_does_not_wait_with_a_kit_of_another(kits, changes, message):
    """FLARE would try for ever to log in under a name that is not the certificate's."""
    config = written(kits, "north", **changes)
    with pytest.raises(ConfigError, match=f"{kits}/north/site.toml: {message}"):
        take_part(config, print)


def without(folder, name):
    """Take a file or a folder away from a copy of a party's folder."""
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


@pytest.mark.parametrize(
    "name", ["startup", "startup/client.key", "startup/rootCA.pem", "local/resources.json"]
)
def test_a_site_with_a_part_of_its_kit_starts_nothing(kits, tmp_path, monkeypatch, name):
    """FLARE would say so in a log alone; or, without our resources.json, take its own defaults."""
    monkeypatch.setattr(over_site, "FlareProcess", None)
    kit = without(shutil.copytree(kits / "north" / "kit", tmp_path / "kit"), name)
    with pytest.raises(ConfigError, match=rf"kit is incomplete: missing .*{name}"):
        take_part(written(kits, "north", kit=str(kit)), print)


@pytest.mark.parametrize(
    "name",
    ["server/startup", "admin/startup", "server/startup/server.key", "server/local/authorization.json"],
)
def test_a_hub_with_a_part_of_its_kits_starts_nothing(kits, tmp_path, monkeypatch, name):
    """Said on the terminal, before a server is started."""
    experiment = tmp_path / "experiment.toml"
    experiment.write_text('rounds = 1\n[model]\nname = "m"\n[method]\nname = "feddpo"\n')
    hub = without(shutil.copytree(kits / "hub", tmp_path / "hub"), name)
    monkeypatch.setattr(over_hub, "FlareProcess", None)
    out = str(tmp_path / "run")
    shown = CliRunner().invoke(app, ["federate", str(experiment), "--hub", str(hub), "--out", out])
    kit, _, rest = name.partition("/")
    assert shown.exit_code == 1, shown.output
    assert f"{hub / kit} is incomplete: missing {rest}" in " ".join(shown.stderr.split())
    assert not (hub / "server" / "process.log").exists()


def test_a_kits_site_file_as_it_is_lacks_data_and_model(kits):
    """Nothing is next to the file: it names the first missing place instead of waiting."""
    config = SiteConfig.load(kits / "south" / "site.toml")
    with pytest.raises(ConfigError, match=r"site\.toml: data.train.south = 'pairs.jsonl': no such file"):
        take_part(config, print)
    (kits / "south" / "pairs.jsonl").touch()
    with pytest.raises(ConfigError, match=r"site.toml: model.name = '\./model': no such folder"):
        take_part(SiteConfig.load(kits / "south" / "site.toml"), print)


class Clock:
    """A clock that continues where somebody sleeps, and ends the command after five minutes."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.now > 300:
            raise KeyboardInterrupt


def nothing(environment):
    """FLARE is not let in."""


def registers(environment):
    assert ask(environment[SITE_DOOR], REGISTERED) == b""


def is_asked(environment):
    ask(environment[SITE_DOOR], pack(kind="hello", format=FORMAT, prefed=VERSION))


@pytest.mark.parametrize("lives", [5, 1000])
@pytest.mark.parametrize(
    ("hub_is_there", "does", "got"),
    [(True, nothing, 1), (False, nothing, 0), (True, registers, 0), (True, is_asked, 0)],
)
def test_a_site_that_is_not_let_in_says_so_once(kits, tmp_path, monkeypatch, lives, hub_is_there, does, got):
    """FLARE's client tries on, or ends every five seconds. Where the hub is away, or has let the site in,
    which FLARE's event or a request says, nothing is wrong."""
    lines, clock = [], Clock()

    class Client:
        def __init__(self, module, kit, settings, environment):
            self.end = clock.now + lives
            does(environment)

        @property
        def alive(self):
            return clock.now < self.end

        def stop(self):
            pass

    with socket.create_server(("127.0.0.1", 0), backlog=64) as hub:
        address = f"127.0.0.1:{hub.getsockname()[1]}"
        if not hub_is_there:
            hub.close()
        monkeypatch.setattr(over_site, "FlareProcess", Client)
        monkeypatch.setattr(over_site, "time", clock)
        monkeypatch.setattr(over_site, "check_kit", lambda kit, config: address)
        config = written(kits, "north", state=str(tmp_path / "state"))
        with pytest.raises(KeyboardInterrupt):
            take_part(config, lines.append)
    assert (
        sum(
            "is online but has not accepted this site; still trying. See log.txt and error_log.txt in" in line
            for line in lines
        )
        == got
    )


def test_a_kit_says_what_uses_it(kits):
    """FLARE's own text asks users to run its scripts, which are not for prefed. No signature covers it."""
    for kit, command in (
        ("north/kit", "prefed site"),
        ("hub/server", "prefed federate"),
        ("hub/admin", "prefed"),
    ):
        assert command in (kits / kit / "readme.txt").read_text()
        assert not any("start.sh" in path.read_text() for path in (kits / kit).rglob("readme.txt"))
        assert not [*(kits / kit).rglob("signature.json")]
