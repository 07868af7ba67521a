"""What a run on another engine shares with one on this machine: its digest, its files, its job."""

import shutil

import pytest

from finished import small_experiment, small_place
from prefed import Experiment
from prefed.engines import WorkerError, check_engine
from prefed.runs.build import build_job, build_worker_job, job_factory
from prefed.runs.start_or_resume import settings_digest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return small_place(tmp_path_factory.mktemp("place"))


def test_a_digest_knows_no_engine(place):
    """A run may continue with another engine, and with no other learning rate."""
    tree = small_experiment(place)
    local = settings_digest(Experiment.model_validate(tree).tables())
    tree["engine"] |= {"name": "ray", "workers": 3, "ray": {"address": "head:6379", "num_gpus": 0.5}}
    assert settings_digest(Experiment.model_validate(tree).tables()) == local
    tree["method"]["lr"] *= 2
    assert settings_digest(Experiment.model_validate(tree).tables()) != local


def test_a_machine_without_the_runs_files_builds_the_same_job(place, tmp_path):
    """Data, model and the run's folder are gone; what was shipped is enough."""
    shutil.copytree(place, tmp_path / "away")
    experiment = Experiment.model_validate(small_experiment(tmp_path / "away"))
    here = build_job(experiment, tmp_path / "cache")
    factory = job_factory(experiment, tmp_path / "cache")
    assert set(factory.shipped) == {"data", "model.name"}
    for name, path in factory.shipped.items():
        shutil.copytree(path, tmp_path / "node" / name)
    shutil.rmtree(tmp_path / "away")
    shutil.rmtree(tmp_path / "cache")
    there = build_worker_job(factory.text, tmp_path / "node")
    assert there.trainers.fingerprint == here.trainers.fingerprint
    assert there.weights == here.weights
    assert (tmp_path / "node/reference").is_dir()


def test_what_is_shipped_follows_the_settings(place, tmp_path):
    """A hub name is not a folder. A shared folder stays where it is; a graph's file is always sent."""
    tree = small_experiment(place, method={"name": "decdpo"})
    (tmp_path / "edges.csv").write_text("left,right\n")
    tree["graph"] = {"name": "edges", "file": str(tmp_path / "edges.csv")}
    tree["engine"] |= {"name": "ray", "ray": {"ship_model": False}}
    factory = job_factory(Experiment.model_validate(tree), tmp_path)
    assert factory.shipped == {"data": tmp_path / "data", "graph.file": tmp_path / "edges.csv"}
    tree = small_experiment(place, model={"name": "distilbert/distilgpt2"})
    assert set(job_factory(Experiment.model_validate(tree), tmp_path).shipped) == {"data"}


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("prefed.engines.backends.find_spec", lambda name: None)
    with pytest.raises(WorkerError, match=r"needs the package ray: install it with pip install 'prefed\[ray"):
        check_engine("ray", ())
    check_engine("local", ())
