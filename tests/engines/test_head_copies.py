"""How often a personal head is in memory, counted in tensors."""

import gc

import pytest
import torch

from peering import experiment
from prefed import Experiment
from prefed.core.wire import encode
from prefed.engines import tasks
from prefed.engines.tasks import Task, run_task
from prefed.runs.build import build_job
from prefed.train.optimizer_steps import FlatOptimizer, PhaseSteps
from workers import CLIENTS
from workers import place as place

VOCABULARY, WIDTH = 280, 32
"""Of the model that :func:`peering.make_place` makes; none of its other matrices is as large as its head."""


class Stored(bytes):
    """A stored private state that counts how many of its kind are alive."""

    alive = 0

    def __new__(cls, data):
        cls.alive += 1
        return super().__new__(cls, data)

    def __del__(self):
        Stored.alive -= 1


class States(dict):
    """Private states in memory, as bytes of their own for each reading."""

    def read(self, client):
        return Stored(self[client]) if client in self else None

    stage = dict.__setitem__


def copies():
    """Buffers that hold at least the head: those of live tensors, and stored states that are being read."""
    gc.collect()
    found = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    places = (each.untyped_storage() for each in found)
    large = {place.data_ptr() for place in places if place.nbytes() >= 4 * VOCABULARY * WIDTH}
    return len(large) + Stored.alive


@pytest.fixture(autouse=True)
def only_new_objects():
    """What modules hold is not looked through at every count."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def most(place, folder, method, monkeypatch, clients):
    """The most copies at any optimiser step, at the end of any phase, and while a state becomes bytes."""
    counts = []

    def counted(owner, name):
        real = getattr(owner, name)

        def call(*arguments, **named):
            given = real(*arguments, **named)
            counts.append(copies() + (len(given) > 4 * VOCABULARY * WIDTH if name == "encode" else 0))
            return given

        monkeypatch.setattr(owner, name, call)

    made = experiment(place, method)
    narrow = {part: {"width": 4} for part in ("bottleneck", "reward")}
    made = Experiment.model_validate({**made.tables(), "model": {**made.tables()["model"], **narrow}})
    job = build_job(made, folder)
    for owner, name in ((FlatOptimizer, "step"), (PhaseSteps, "result"), (tasks, "encode")):
        counted(owner, name)
    (exchange,), states = job.method.exchanges, States()
    server = job.method.init_server(job.trainers.initial)
    for number in (1, 2):
        now = job.round(number)
        for client in clients:
            message = encode(exchange.send(server, client, now))
            run_task(job, Task("visit", client, number, "train", message), states)
    return max(counts)


@pytest.mark.rare
@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedpdpo"])
def test_a_personal_head_is_in_memory_five_times(place, tmp_path, monkeypatch, method):
    """The head, its gradient, two moments, and one that is read or written, for any number of clients. FedDPO
    has none of them."""
    with monkeypatch.context() as patch:
        without = most(place, tmp_path / "without", "feddpo", patch, CLIENTS[:1])
    for number in (1, 2):
        with monkeypatch.context() as patch:
            most_here = most(place, tmp_path / str(number), method, patch, CLIENTS[:number])
        assert most_here - without <= 5
