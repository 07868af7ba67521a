"""Runs on a Ray cluster of two nodes: equal to runs in this process, also with actors and nodes that die."""

import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

import toy
from finished import small_experiment
from prefed import Experiment, run
from prefed.core import Callback, Key
from prefed.data import synthetic
from prefed.engines import BackendSettings, JobFactory, RayActors, WorkerError
from prefed.engines.backends import ray as backend
from prefed.engines.backends.ray import count_actors
from prefed.models.tiny import make_tiny
from ray_cluster import TESTS, two_nodes, wait_for_nodes
from waiting import WATCHDOG


@pytest.fixture(scope="session")
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
    """Law: the run ends as one in this process, bit for bit. Copies of the data stay only on the killed node,
    where the next actor removes them (``test_shipment.py``)."""
    import ray

    tree = small_experiment(place, rounds=2)
    tree["data"]["partition"]["column"] = "client"
    tree["method"] |= {"name": method, "local_steps": 2}
    whole = run(Experiment.model_validate(tree), tmp_path / "here")
    tree["engine"] = {"name": "ray", "workers": 3, "threads": 1, "ray": {"address": nodes.address}}
    killed, known = [], {node["NodeID"] for node in ray.nodes() if node["Alive"]}

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
    dead = known - {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    assert len(dead) == 1
    assert all(copy.name.endswith(f"-{node[:16]}") for node in dead for copy in copies())


def test_a_stopped_actor_is_noticed_by_the_visits_time_out(nodes, tmp_path, caplog):
    """An actor is stopped as by a debugger while it is idle or busy. Its next task, or this one, is done by
    another actor, and the run ends as an undisturbed one."""
    stop = At(t3=lambda: [os.kill(pid, signal.SIGSTOP) for pid in nodes.actors()[:1]])
    toy.run(tmp_path / "there", backend=actors(2, timeout=20), callback=stop)
    toy.run(tmp_path / "here")
    assert "exceeded [engine] visit_timeout = 20 seconds; retrying in another worker" in caplog.text
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there")


def test_a_visit_that_kills_each_actor_ends_the_run(nodes, tmp_path, caplog):
    """Three actors are lost to it, no more; without the fault the run continues."""
    ends = r"visit of client 'Client 4/ü' lost its worker.*; giving up after 3 attempts.*resume"
    with pytest.raises(WorkerError, match=ends):
        toy.run(tmp_path / "run", backend=actors(2, faults={"Client 4/ü": "die"}))
    assert caplog.text.count("retrying in another worker") == 2
    toy.run(tmp_path / "run", resume=True)
    toy.run(tmp_path / "whole")
    assert toy.outcome(tmp_path / "run") == toy.outcome(tmp_path / "whole")


def test_a_machine_with_another_job_is_refused(nodes, tmp_path):
    """Its builder knows five clients of six."""
    other = r"differs from this machine: it has data 5, not 6\. Install the same package versions"
    with pytest.raises(WorkerError, match=other):
        toy.run(tmp_path / "run", backend=actors(1, clients=5))


def test_an_exception_arrives_with_its_place(nodes, tmp_path):
    factory = JobFactory("toy:build", "no JSON")
    with pytest.raises(WorkerError, match=r"a worker process failed:(.|\n)*JSONDecodeError"):
        toy.run(tmp_path / "run", backend=lambda j, s: RayActors(j, factory, s, BackendSettings(1)))


def test_a_cluster_that_is_too_small(nodes):
    """One CPU and two CPUs: room for three actors of one thread, for one of two; no GPU anywhere. The
    message has a line for each machine."""
    rooms = (
        r"the Ray cluster has room for only {}, each with {}:\n"
        r"(  [\d.]+ \(\w+\): [12] CPUs, 0 GPUs: room for \d\n){{2}}"
        r"Request less, or add machines \(ray start --address=HOST:PORT on each\)$"
    )
    asked = [
        (BackendSettings(4), "workers = 4: .*", 3, r"1 CPUs \(\[engine\] threads\)"),
        (BackendSettings(2, threads=2), "workers = 2: .*", 1, "2 CPUs .*"),
        (BackendSettings(0, gpus=0.5), "an actor: .*", 0, r"1 CPUs .* and 0.5 GPUs \(\[engine.ray\]"),
    ]
    for settings, what, room, need in asked:
        with pytest.raises(WorkerError, match=what + rooms.format(room, need)):
            count_actors(settings)
    assert count_actors(BackendSettings(0)) == 3
    assert count_actors(BackendSettings(0, threads=2)) == 1


LOCAL = """
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
import psutil, toy
from prefed.core import Callback

class Listening(Callback):
    def on_task_end(self, what, done, of):
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            for socket in process.net_connections("inet"):
                if socket.status == psutil.CONN_LISTEN:
                    print("listens", socket.laddr.ip, flush=True)

from prefed.engines import BackendSettings, JobFactory, RayActors
factory = JobFactory("toy:build", toy.text(rounds=1))
make = lambda job, states: RayActors(job, factory, states, BackendSettings(2))
toy.run(Path(sys.argv[1]), backend=make, callback=Listening(), rounds=1)
import ray
print("joined", ray.is_initialized())
"""


def test_a_cluster_of_this_machine_alone_is_quiet_and_on_the_loopback_interface(tmp_path):
    """No address is given, and a cluster of this machine is not joined. It is gone after the run."""
    if find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'prefed[ray]'")
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own["PYTHONPATH"] = os.pathsep.join([str(TESTS), own.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", LOCAL, str(tmp_path / "there")]
    done = subprocess.run(words, env=own, cwd=tmp_path, capture_output=True, text=True)
    lines = set(done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert lines <= {"listens 127.0.0.1", "listens ::ffff:127.0.0.1", "joined False"}
    assert "joined False" in lines
    assert len(lines) > 1
    toy.run(tmp_path / "here", rounds=1)
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there")


@pytest.mark.parametrize("inline", [0, 1 << 30])
def test_a_download_is_serialised_once_for_all_its_tasks(nodes, place, tmp_path, monkeypatch, inline):
    """FedDPO sends six clients the same model in each of two rounds, and once more for their evaluation. Ray
    serialises it once for each time that it changes. The control has it in every task: 24 times. The run is
    the same bit for bit."""
    from ray._private.serialization import SerializationContext

    serialize, store, lengths, given = SerializationContext.serialize, RayActors._message, [], []

    def counts(context, value):
        made = serialize(context, value)
        lengths.append(made.total_bytes)
        return made

    def notes(actors, message):
        given.append(message)
        return store(actors, message)

    tree = small_experiment(place, rounds=2)
    tree["data"]["partition"]["column"] = "client"
    tree["method"] |= {"name": "feddpo", "local_steps": 2}
    whole = run(Experiment.model_validate(tree), tmp_path / "here")
    monkeypatch.setattr(backend, "INLINE", inline)
    monkeypatch.setattr(SerializationContext, "serialize", counts)
    monkeypatch.setattr(RayActors, "_message", notes)
    tree["engine"] = {"name": "ray", "workers": 2, "threads": 1, "ray": {"address": nodes.address}}
    spread = run(Experiment.model_validate(tree), tmp_path / "there")
    assert left_behind(whole.path) == left_behind(spread.path)
    assert len(given) == 24
    size, changes = len(given[0]), 1 + sum(one != other for one, other in pairwise(given))
    assert changes in (3, 4)
    assert sum(size <= length < size + 1000 for length in lengths) == (24 if inline else changes)


HEADLESS = """
import sys
from pathlib import Path
import psutil, toy
from prefed.core import Callback
from prefed.engines import BackendSettings, JobFactory, RayActors, WorkerError
from prefed.engines.backends import worker_pool as pool, ray

class Kills(Callback):
    def on_round_end(self, record):
        if record["round"] == 1:
            below = psutil.Process().children(recursive=True)
            (head,) = [process for process in below if process.name() == "gcs_server"]
            head.kill()

ray.HEADLESS, pool.LOOK = 3.0, 0.1
factory = JobFactory("toy:build", toy.text(pause=0.2))
make = lambda job, states: RayActors(job, factory, states, BackendSettings(2))
try:
    toy.run(Path(sys.argv[1]), backend=make, callback=Kills())
except WorkerError as error:
    print(error, flush=True)
"""


def test_without_the_head_of_its_cluster_a_run_ends_with_our_message(tmp_path):
    """Its process is killed after round 1. Ray itself would end the run's process after a minute, with lines
    of its own. Resumed in one process, the run is the undisturbed one."""
    if find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'prefed[ray]'")
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own["PYTHONPATH"] = os.pathsep.join([str(TESTS), own.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", HEADLESS, str(tmp_path / "there")]
    done = subprocess.run(words, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=WATCHDOG)
    assert "the head of the Ray cluster" in done.stdout, done.stderr
    assert "--resume" in done.stdout
    assert "terminate" not in done.stderr
    assert done.returncode == 0
    toy.run(tmp_path / "there", resume=True)
    toy.run(tmp_path / "here")
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there")
