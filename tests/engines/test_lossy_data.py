"""A run that loses pairs says so: on the terminal, in run.log, in summary.json, on its page, in a dry run.

So does a site, and nothing of it reaches a hub.
"""

import json
from dataclasses import asdict

import pytest
import tomli_w

from commands import prefed_
from federating import experiment as federated
from federating import site_config
from finished import small_experiment, small_place
from prefed import Experiment
from prefed.networks.federation.audit_log import status_lines
from prefed.networks.federation.federate import experiment_for_sites
from prefed.networks.federation.messages import FORMAT, VERSION
from prefed.networks.federation.site import Site
from prefed.networks.federation.unix_socket import pack, unpack
from prefed.runs.dry_run import dry_run
from workers import make_place


def said(*words):
    result = prefed_(*list(map(str, words)))
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A file for each of two clients: left has 8 pairs, right 8, of which 5 have a response of 90 words. The
    test files have 4 each."""
    folder = small_place(tmp_path_factory.mktemp("place"))
    for role in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"{role}.jsonl").read_text().splitlines()]
        (folder / role).mkdir()
        for worker in ("left", "right"):
            own = [{**row, "worker": None} for row in rows if row["worker"] == worker]
            if (role, worker) == ("train", "right"):
                own = [{**row, "chosen": " go" * 90} if k < 5 else row for k, row in enumerate(own)]
            text = "".join(json.dumps(row) + "\n" for row in own)
            (folder / role / f"{worker}.jsonl").write_text(text)
    tree = small_experiment(folder)
    tree["data"] = {
        "train": str(folder / "train"),
        "test": str(folder / "test"),
        "partition": {"by": "file"},
        "max_length": 60,
    }
    (folder / "exp.toml").write_text(tomli_w.dumps(tree))
    return folder


@pytest.fixture(scope="module")
def finished(place):
    return said("run", place / "exp.toml", "--out", place / "run")


def test_it_is_on_the_terminal_and_in_the_log(place, finished):
    """Of 24 rows 5 are left out, more than a tenth, all of right's 12."""
    (line,) = [line for line in finished.splitlines() if line.startswith("warning: ") and "24" in line]
    assert "19 of 24 rows are used" in line
    assert "5 longer than max_length" in line
    assert "'right' (5 of 12)" in line
    assert "'left'" not in line
    assert "[data] max_length" in line
    assert line in (place / "run/run.log").read_text()


def test_a_dry_run_and_the_data_say_the_same(place, finished):
    (line,) = [line for line in finished.splitlines() if "19 of 24" in line]
    for words in (["run", place / "exp.toml", "--dry-run"], ["data", place / "exp.toml"]):
        shown = said(*words).splitlines()
        assert line in shown
    assert shown[0] != "no problems found; nothing was written"
    found = asdict(dry_run(Experiment.load(place / "exp.toml"), place / "other"))
    assert found["data"]["dropped"] == {"too_long": 5}
    assert f"warning: {found['warnings'][0]}" == line
    content = json.loads(said("data", place / "exp.toml", "--json"))
    assert content["warnings"] == found["warnings"]


def test_new_files_are_their_clients(place, finished, tmp_path):
    """The run's own test folder gives the run's own figures. The file of one client is that client's, and no
    other file is anybody's."""
    summary = json.loads((place / "run/summary.json").read_text())
    figures = json.loads(said("evaluate", place / "run", "--test", place / "test", "--json"))
    assert figures["preference_accuracy"] == summary["preference_accuracy"]
    assert not any("columns not used" in note for note in figures["notes"])
    rows = map(json.loads, (place / "test/left.jsonl").read_text().splitlines())
    file = tmp_path / "left.jsonl"
    file.write_text("".join(json.dumps({**row, "mood": "glad"}) + "\n" for row in rows))
    own = json.loads(said("evaluate", place / "run", "--test", file, "--json"))
    assert own["clients"] == {"left": {"pairs": 4}}
    assert "columns not used: mood" in own["notes"]
    words = ["evaluate", str(place / "run"), "--test", str(place / "test.jsonl")]
    result = prefed_(*words, code=1)
    assert "no file is named after a client of the run ('left', 'right')" in result
    shown = json.loads(said(*words, "--everyone", "--json"))
    assert shown["clients"] == {"everybody": {"pairs": 8}}


def test_a_site_warns_only_its_own_people(tmp_path):
    """10 pairs of one worker, a file in a folder; with 3 of them too long the site says so, and the hub hears
    of 7 pairs and nothing else. The experiment that the run starts from is the hub's."""
    place = make_place(tmp_path)
    rows = [json.loads(line) for line in (place / "w0.jsonl").read_text().splitlines()]
    (place / "pairs").mkdir()
    rows = [{**row, "chosen": " yes" * 90} if k < 3 else row for k, row in enumerate(rows)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "pairs/w0.jsonl").write_text(text)
    lines: list[str] = []
    data = {"train": str(place / "pairs"), "partition": {"by": "file"}}
    config = site_config(place, tmp_path, "w0", data=data)
    site = Site(config, lines.append)
    experiment = federated(place)
    experiment = experiment.model_copy(
        update={"data": experiment.data.model_copy(update={"max_length": 60, "test_fraction": 0.0})}
    )
    request = {"format": FORMAT, "prefed": VERSION, "federation": "wards", "run": "0" * 16, "kind": "join"}
    text = experiment_for_sites(experiment)
    header, body = unpack(site.answer(pack(**request, experiment=text)))
    site.close()
    order = json.loads((tmp_path / "site-w0/runs" / request["run"] / "order.json").read_bytes())
    assert order["experiment"] == text
    unused, line = lines
    assert unused == "columns not used: worker"
    assert "7 of 10 rows are used; left out: 3 longer than max_length" in line
    assert "'w0' (3 of 10)" in line
    assert any(line in shown for shown in status_lines(config, 5))
    assert set(header) == {"clients", "versions", "format"} & set(header)
    assert header["clients"] == {"w0": [7, 0, 0]}
    assert not body
    assert "max_length" not in json.dumps(header)
