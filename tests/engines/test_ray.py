"""Runs on a Ray cluster of two nodes: equal to runs in this process, also with actors and nodes that die."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import toy
from finished import small_experiment
from prefed import Experiment, run
from prefed.core import Callback, Key
from prefed.data import synthetic
from prefed.engines import BackendSettings, JobFactory, RayActors, WorkerError
from prefed.models.tiny import make_tiny
from ray_cluster import two_nodes, wait_for_nodes


@pytest.fixture
def nodes():
    return two_nodes()


class At(Callback):
    """Does things after some tasks: number of the task → what to do."""

    def __init__(self, **acts):
        self.acts, self.done = {int(name[1:]): act for name, act in acts.items()}, 0

    def on_task_end(self, what, done, of):
        self.done += 1
        self.acts.pop(self.done, lambda: None)()


def actors(workers=3, timeout=0.0, **changes):
    """Makes the backend for the toy with these options."""
    factory = JobFactory("toy:build", toy.text(**changes))
    settings = BackendSettings(workers, timeout=timeout)
    return lambda job, states: RayActors(job, factory, states, settings)


def left_behind(path):
    """What must not depend on where a run was carried out."""
    apart = ("cache/", "config.toml")
    return {name: value for name, value in toy.outcome(path).items() if not name.startswith(apart)}


def copies():
    """Folders of runs' files that lie on this machine."""
    return list(Path(tempfile.gettempdir(), f"prefed-ray-{os.getuid()}").glob("*"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Six clients of opposite tastes, and a model of two small blocks."""
    folder = tmp_path_factory.mktemp("place")
    synthetic.write(folder, synthetic.generate(Key(5), clients=6, train=6, test=2))
    make_tiny(folder / "model", synthetic.corpus(Key(5), 60), Key(5), layers=2, width=32, heads=2, steps=2)
    return folder


@pytest.mark.parametrize("method", ["feddpo", "fedpdpo"])
def test_an_actor_and_a_node_are_killed_in_the_middle(nodes, place, method, tmp_path):
    """Law: the run ends as one in this process, to the bit; nothing of the data stays on a node."""
    tree = small_experiment(place, rounds=2)
    tree["data"]["partition"]["column"] = "client"
    tree["method"] |= {"name": method, "local_steps": 2}
    whole = run(Experiment.model_validate(tree), tmp_path / "here")
    tree["engine"] = {"name": "ray", "workers": 3, "threads": 1, "ray": {"address": nodes.address}}
    killed = []

    def kill_actor():
        killed.append(nodes.actors()[0])
        os.kill(killed[0], signal.SIGKILL)

    at = At(t2=kill_actor, t14=nodes.kill_node)
    try:
        spread = run(Experiment.model_validate(tree), tmp_path / "there", callbacks=[at])
    finally:
        wait_for_nodes(1)
        nodes.add_node()
        wait_for_nodes(2)
    assert killed
    assert not at.acts
    assert left_behind(whole.path) == left_behind(spread.path)
    assert [record["dropped"] for record in spread.rounds] == [[], []]
    assert copies() == []
