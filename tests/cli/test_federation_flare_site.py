"""What `prefed site` checks before it waits for its hub, and what it tells of NVIDIA FLARE's client."""

import socket

import pytest

from prefed.config.errors import ConfigError
from prefed.federation.config import SiteConfig
from prefed.federation.door import ask
from prefed.federation.protocol import FORMAT, pack

pytest.importorskip("nvflare", reason="needs prefed[nvflare]")

from prefed.federation.flare import site as over_site
from prefed.federation.flare.apps import SITE_DOOR
from prefed.federation.flare.kits import Project, make_kits
from prefed.federation.flare.site import take_part


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
            r"name = 'nroth': the kit in .*/north/kit is that of 'north'; write name = ",
        ),
        (
            {"federation": "ward"},
            "federation = 'ward': the kit in .* is of the federation 'wards'; write",
        ),
        ({"kit": "nowhere"}, r"kit = 'nowhere' is no kit of a site \(.*fed_client.json"),
    ],
)
def test_a_site_does_not_wait_with_a_kit_of_another(kits, changes, message):
    """FLARE would try for ever to log in under a name that is not the certificate's."""
    config = written(kits, "north", **changes)
    with pytest.raises(ConfigError, match=f"{kits}/north/site.toml: {message}"):
        take_part(config, print)


def test_a_kits_site_file_as_it_is_lacks_data_and_model(kits):
    """Nothing was put beside the file: the first missing place is told in the place of waiting."""
    config = SiteConfig.load(kits / "south" / "site.toml")
    with pytest.raises(ConfigError, match=r"site\.toml: data.train.south = 'pairs.jsonl': no such file"):
        take_part(config, print)
    (kits / "south" / "pairs.jsonl").touch()
    with pytest.raises(ConfigError, match=r"site.toml: model.name = '\./model': no such folder"):
        take_part(SiteConfig.load(kits / "south" / "site.toml"), print)


@pytest.mark.parametrize(
    ("hub_is_there", "asks", "told"), [(True, (), 1), (False, (), 0), (True, (1, 2, 3), 0)]
)
def test_a_client_of_flare_that_ends_again_and_again_is_told_of_once(
    kits, tmp_path, monkeypatch, hub_is_there, asks, told
):
    """It ends four times, and after the ends in ``asks`` it starts and brings a request of the hub. Where the
    hub is away, or asks something between two ends, nothing is wrong."""
    lines, begun = [], []

    class Ends:
        alive = False

        def __init__(self, module, kit, settings, environment):
            begun.append(environment)
            if len(begun) == 5:
                raise KeyboardInterrupt
            if len(begun) - 1 in asks:
                ask(environment[SITE_DOOR], pack(kind="hello", format=FORMAT))

        def stop(self):
            pass

    with socket.create_server(("127.0.0.1", 0)) as hub:
        address = f"127.0.0.1:{hub.getsockname()[1]}"
        if not hub_is_there:
            hub.close()
        monkeypatch.setattr(over_site, "FlareProcess", Ends)
        monkeypatch.setattr(over_site.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(over_site, "_check_kit", lambda kit, config: address)
        config = written(kits, "north", state=str(tmp_path / "state"))
        with pytest.raises(KeyboardInterrupt):
            take_part(config, lines.append)
    assert sum(f"{kits}/north/kit/error_log.txt says why" in line for line in lines) == told


def test_a_kit_says_what_uses_it(kits):
    """FLARE's own text tells to run its scripts, which are not for prefed. No signature covers it."""
    for kit, command in (
        ("north/kit", "prefed site"),
        ("hub/server", "prefed federate"),
        ("hub/admin", "prefed"),
    ):
        assert command in (kits / kit / "readme.txt").read_text()
        assert not any("start.sh" in path.read_text() for path in (kits / kit).rglob("readme.txt"))
        assert not [*(kits / kit).rglob("signature.json")]
