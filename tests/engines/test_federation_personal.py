"""The models of a site's own clients, as `prefed site export` writes them, beside those of a run in one process."""

import json
import shutil
import stat

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from federating import CLIENTS, Within, experiment, make_place, site_config
from prefed import files, run
from prefed.cli import app
from prefed.federation import published as published_module
from prefed.federation.federate import Terms, federate
from prefed.federation.personal import export_client
from prefed.federation.protocol import pack, unpack
from prefed.federation.published import Published
from prefed.federation.site import Site
from prefed.runs.export import write_model
from prefed.runs.record import RunError

TERMS = Terms("wards", ("one", "two"), wait=0.0)
DATA = {"one": "w0", "two": "w1w2"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("place"))
    (place / "w1w2.jsonl").write_text((place / "w1.jsonl").read_text() + (place / "w2.jsonl").read_text())
    return place


def configs(place, folder, **changes):
    return {name: site_config(place, folder, data, name=name, **changes) for name, data in DATA.items()}


def over_sites(asked, made, out, transport=Within, **options):
    """Run over sites that are opened for it and closed afterwards; gives what the hub was warned of."""
    sites = {name: Site(config) for name, config in made.items()}
    try:
        federate(asked, out, transport(sites), TERMS, **options)
    finally:
        for site in sites.values():
            site.close()


def exported(folder):
    """All tensors of an exported folder: of the adapter, and of the parts that are in none."""
    return {
        f"{path.name} {name}": value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert one
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        assert (value == other[name]).all(), name


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    """FedPDPO over two sites, three rounds, and the same in one process."""
    folder = tmp_path_factory.mktemp("finished")
    asked, made = experiment(place), configs(place, folder)
    run(asked, folder / "alone")
    over_sites(asked, made, folder / "over")
    return folder, made


def site_of(client):
    return "one" if client == "w0" else "two"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_clients_model_is_that_of_the_run_in_one_process(finished, tmp_path, client):
    """FedPDPO's bottleneck, head and reward head are the client's own: to the bit."""
    folder, made = finished
    write_model(folder / "alone", tmp_path / "alone", client=client)
    told = export_client(made[site_of(client)], tmp_path / "here", client=client)
    assert_equal(exported(tmp_path / "here"), exported(tmp_path / "alone"))
    assert "head" in told.more


@pytest.mark.parametrize(
    ("method", "changes"), [("feddpo", {}), ("fedper", {"shared_layers": 1}), ("perfedavg", {}), ("fedvpa", {})]
)
def test_other_methods_models_are_too(place, tmp_path, method, changes):
    """One without personal parts, one with personal layers, and two that work with the client's pairs before
    they predict. Client w1 is at a site that makes up names."""
    asked, made = experiment(place, method, rounds=1, **changes), configs(place, tmp_path)
    run(asked, tmp_path / "alone")
    over_sites(asked, made, tmp_path / "over")
    write_model(tmp_path / "alone", tmp_path / "one", client="w1")
    export_client(made["two"], tmp_path / "here", client="w1")
    assert_equal(exported(tmp_path / "here"), exported(tmp_path / "one"))
