"""A package with a method, an objective, a merge rule, a metric, a judge and a format, in every engine.

Each command is its own process. Hub and sites have their own copies of the package, which write where
they lie whenever the objective is computed.
"""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest
import tomli_w

import outside
from commands import prefed_
from prefed.core import plugins
from waiting import WATCHDOG
from workers import CLIENTS, make_place

INHERITED = os.environ.get("PYTHONPATH", "")

PARTS = '''
import os
from pathlib import Path

import torch

from prefed.align.judge import Verdict
from prefed.data.sources.formats import FORMATS, Format
from prefed.merge.config import MergeRule
from prefed.merge.means_distances import weighted_mean
from prefed.train.losses import PairLoss
from prefed.train.metrics import Metric


def loss(batch, *, beta, power):
    with Path(os.environ["MARK"]).open("a") as mark:
        mark.write(f"{Path(__file__).parents[1].name}\\n")
    return torch.relu(1 - beta * batch.delta) ** power, {}


def convert(row):
    return FORMATS["pairs"].convert({**row, "chosen": row["good"], "rejected": row["bad"]})


class Longer:
    """It prefers the longer response."""

    def __init__(self, argument, options):
        self.identity = {"judge": "longer"}

    def compare(self, questions):
        for each in questions:
            yield Verdict(float(len(each.first) > len(each.second)), "")


OBJECTIVE = PairLoss("powers", "nowhere", {"beta": 0.2, "power": 2.0}, function=loss)
MERGE_RULE = MergeRule(lambda values, weights, share: weighted_mean(values, weights) * share, {"share": 0.5})
METRIC = Metric("sure", lambda scores: scores.policy[:, 0] > scores.policy[:, 1])
FORMAT = Format("good_bad", convert)
'''
POINTS = {
    "methods": "upper = outpack.method:METHOD",
    "objectives": "powers = outpack.parts:OBJECTIVE",
    "merge_rules": "shrunk = outpack.parts:MERGE_RULE",
    "metrics": "sure = outpack.parts:METRIC",
    "judges": "longer = outpack.parts:Longer",
    "formats": "good_bad = outpack.parts:FORMAT",
}
CODE = ["upper", "powers", "shrunk", "sure", "good_bad"]
DATA = {"format": "good_bad", "partition": {"by": "column", "column": "worker"}}


def install(folder):
    """The package in a folder that is to be on Python's path."""
    method = outside.LG_FEDAVG.replace('"lgfedavg"', '"upper"')
    return outside.install(folder, "outpack", {"method.py": method, "parts.py": PARTS}, POINTS)


def path_with(package):
    """``PYTHONPATH`` on a machine where the package lies in this folder."""
    return os.pathsep.join([str(package), *filter(None, [INHERITED])])


def marks(package):
    """The folders of the copies that computed the objective."""
    path = package / "mark"
    return set(path.read_text().split()) if path.exists() else set()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pairs whose columns only the package's format reads, an experiment, and the hub's copy, on the path of
    this process and its children."""
    folder = make_place(tmp_path_factory.mktemp("place"))
    for name in ("pairs", *CLIENTS):
        text = (folder / f"{name}.jsonl").read_text()
        (folder / f"{name}.jsonl").write_text(
            text.replace('"chosen"', '"good"').replace('"rejected"', '"bad"')
        )
    tables = {
        "seed": 3,
        "rounds": 2,
        "data": {"train": "pairs.jsonl", "test_fraction": 0.3, **DATA},
        "model": {"name": "./model", "lora": {"rank": 2}},
        "method": {"name": "upper", "objective": "powers", "lr": 0.01, "local_steps": 2, "batch_size": 4},
        "merge": {"rule": "shrunk", "rule_settings": {"share": 0.75}},
        "evaluate": {"metrics": ["sure"]},
        "engine": {"threads": 1},
    }
    (folder / "experiment.toml").write_text(tomli_w.dumps(tables))
    package = install(folder / "hub-packages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path_with(package))
        patch.setenv("MARK", str(package / "mark"))
        patch.syspath_prepend(package)
        forget()
        yield folder
    forget()


def forget():
    """Look for packages anew."""
    plugins._package.cache_clear()
    plugins.entry_points.cache_clear()
    for known in plugins.REGISTRIES.values():
        known._loaded.clear()
    for name in ("outpack", "outpack.method", "outpack.parts"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def whole(place):
    """The run of one process."""
    prefed_("run", place / "experiment.toml", "--out", place / "whole")
    assert marks(place / "hub-packages") == {"hub-packages"}
    return numbers(place / "whole")


def numbers(out):
    """What must not depend on where a run was carried out."""
    summary = json.loads((out / "summary.json").read_text())
    (server,) = (out / "checkpoint").glob("server@*")
    names = ("loss", "preference_accuracy", "sure", "bytes", "origin")
    code = {name: each["sha256"] for name, each in summary["origin"]["code"].items()}
    return {**{name: summary[name] for name in names}, "origin": code, "server": server.read_bytes()}


@pytest.mark.parametrize("engine", [pytest.param("workers", marks=pytest.mark.rare), "ray"])
def test_a_package_runs_resumes_and_is_exported(engine, place, whole, tmp_path):
    """Law: a run that was stopped and resumed equals the run of one process, bit for bit, whatever carries it
    out. A metric that is the preference accuracy under another name has its values."""
    if engine == "ray" and find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'prefed[ray]'")
    out = tmp_path / "run"
    words = ["run", place / "experiment.toml", "--out", out, "--set", "engine.workers=2"]
    words += ["--set", "engine.name=ray"] if engine == "ray" else []
    prefed_(*words, "--set", "rounds=1")
    prefed_(*words, "--resume")
    assert numbers(out) == whole
    assert sorted(whole["origin"]) == sorted(CODE)
    assert whole["sure"] == whole["preference_accuracy"]
    shown = json.loads(prefed_("evaluate", out, "--json"))
    assert (shown["sure"], shown["preference_accuracy"]) == (whole["sure"], whole["preference_accuracy"])
    prefed_("export", out, "--client", "w1", "--out", tmp_path / "w1")
    assert (tmp_path / "w1/adapter_model.safetensors").exists()


def test_the_packages_judge_judges(place, whole, tmp_path):
    """It prefers the longer response, and that of the file has hundreds of words: the run's always loses."""
    row = {"prompt": "Question 1?", "it": "word " * 200}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    words = ("judge", place / "whole", "--judge", "longer", "--against", tmp_path / "prompts.jsonl")
    words += ("--prompts", tmp_path / "prompts.jsonl", "--column", "it", "--max-new-tokens", 4, "--json")
    assert json.loads(prefed_(*words))["win_rate"]["mean"] == 0


@pytest.fixture
def wards(place, tmp_path):
    """Kits of a hub and two sites, each with a copy of the package; and how to start a site, which allows
    some code."""
    pytest.importorskip("nvflare", reason="needs prefed[nvflare]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    project = {"name": "wards", "hub": "localhost", "port": port, "sites": ["north", "south"]}
    (tmp_path / "wards.toml").write_text(tomli_w.dumps(project))
    prefed_("federation", "init", tmp_path / "wards.toml", "--out", tmp_path / "wards")
    started = {}
    for site, clients in {"north": ("w0", "w1"), "south": ("w2",)}.items():
        home = tmp_path / "wards" / site
        rows = "".join((place / f"{client}.jsonl").read_text() for client in clients)
        (home / "pairs.jsonl").write_text(rows)
        install(home / f"{site}-packages")

    def start(site, code):
        home = tmp_path / "wards" / site
        own = path_with(home / f"{site}-packages")
        if site in started:
            stop(started.pop(site))
        tables = {
            "federation": "wards",
            "name": site,
            "data": {"train": "pairs.jsonl", **DATA},
            "model": {"name": str(place / "model")},
            "disclose": {"pairs": True},
            "limits": {"code": code},
        }
        (home / "site.toml").write_text(tomli_w.dumps(tables))
        with (home / "log").open("ab") as log:
            started[site] = subprocess.Popen(
                [sys.executable, "-m", "prefed", "site", str(home / "site.toml")],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": own, "MARK": str(home / f"{site}-packages/mark")},
            )

    yield start
    for process in started.values():
        stop(process)


def stop(process):
    process.terminate()
    process.wait(WATCHDOG)


def test_a_package_runs_over_flare_where_each_site_has_installed_and_allowed_it(
    place, wards, whole, tmp_path
):
    """The sites' own copies compute their losses. Law: bit for bit the run of one process."""
    out, package = tmp_path / "over", place / "hub-packages"
    (package / "mark").unlink(missing_ok=True)
    words = ("federate", place / "experiment.toml", "--hub", tmp_path / "wards/hub", "--out", out)

    def change(comment):
        (package / "outpack/parts.py").write_text(PARTS + comment)
        plugins._package.cache_clear()

    wards("north", CODE)
    wards("south", [name for name in CODE if name != "upper"])
    refused = " ".join(prefed_(*words, "--set", "rounds=1", code=1).split())
    assert "south" in refused
    assert "'upper'" in refused
    assert "[limits] code" in refused
    wards("south", CODE)
    change("# newer than at the sites\n")
    differing = " ".join(prefed_(*words, "--set", "rounds=1", code=1).split())
    assert "from outpack: the hub has 1.5 (SHA-256 " in differing
    assert "install the same version at hub and site, and restart the site" in differing
    assert marks(tmp_path / "wards/north/north-packages") == set()
    change("")
    prefed_(*words, "--set", "rounds=1")
    prefed_(*words, "--resume")
    for site in ("north", "south"):
        assert marks(tmp_path / "wards" / site / f"{site}-packages") == {f"{site}-packages"}
    assert marks(package) == set()
    over = numbers(out)
    assert over["server"] == whole["server"]
    assert (over["loss"], over["sure"]) == (whole["loss"], whole["sure"])
    kept = prefed_("evaluate", out, "--test", place / "w0.jsonl", code=1)
    assert "the private state of client 'w0' is stored at site 'north'" in " ".join(kept.split())
    prefed_("export", out, "--out", tmp_path / "shared")
    home = tmp_path / "wards/north"
    words_there = ["site", "export", home / "site.toml", "--client", "w0", "--out", tmp_path / "w0"]
    ended = subprocess.run(
        [sys.executable, "-m", "prefed", *map(str, words_there)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path_with(home / "north-packages"), "MARK": str(home / "mark")},
    )
    assert ended.returncode == 0, ended.stderr
    for name in ("shared", "w0"):
        assert (tmp_path / name / "adapter_model.safetensors").exists()
    change("# changed\n")
    changed = prefed_(*words, "--set", "rounds=3", "--resume", code=1)
    assert "upper changed since it started; restore it" in " ".join(changed.split())
