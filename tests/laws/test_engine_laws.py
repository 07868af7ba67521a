"""What must not change a number: the order of clients, the number of workers, stops on the way."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toy
from prefed.engines import InProcess, JobFactory, WorkerProcesses
from prefed.engines.tasks import run_task


class Shuffled(InProcess):
    """Does a round's tasks in another order."""

    def __init__(self, job, draw):
        super().__init__(job)
        self.draw = draw

    def work(self, tasks):
        waiting = list(tasks)
        self.draw.shuffle(waiting)
        for task in waiting:
            yield run_task(self._job, task)


@settings(max_examples=10, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([{}, {"Client 1/ü": "nan"}, {"Client 0/ü": "leak", "Client 2/ü": "nan"}]),
)
def test_any_order_of_visits(tmp_path_factory, draw, cohort, personal, faults):
    """Law: tasks done in any order leave the same bytes behind."""
    changes = {"rounds": 3, "cohort": cohort, "personal": personal, "faults": faults}
    folder = tmp_path_factory.mktemp("order")
    toy.run(folder / "sorted", **changes)
    job = toy.build(json.dumps(toy.options(**changes)))
    toy.run(folder / "shuffled", backend=Shuffled(job, draw), **changes)
    assert toy.outcome(folder / "sorted") == toy.outcome(folder / "shuffled")


def test_any_order_in_which_the_data_name_the_clients(tmp_path):
    toy.run(tmp_path / "there")
    toy.run(tmp_path / "back", order=-1)
    assert toy.outcome(tmp_path / "there") == toy.outcome(tmp_path / "back")


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_workers(tmp_path, count):
    """Law: worker processes give what this process gives, bit by bit, bad uploads included."""
    changes = {"faults": {"Client 3/ü": "nan"}}
    toy.run(tmp_path / "here", **changes)
    backend = WorkerProcesses(JobFactory("toy:build", json.dumps(toy.options(**changes))), count)
    toy.run(tmp_path / "there", backend=backend, **changes)
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there")


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 5), unique=True).map(sorted))
def test_stopping_and_resuming_anywhere(tmp_path_factory, stops):
    """Law: a run carried out in any number of sittings is the run carried out in one."""
    folder = tmp_path_factory.mktemp("stops")
    toy.run(folder / "whole", rounds=6)
    for number in [*stops, 6]:
        toy.run(folder / "parts", rounds=number, resume=(folder / "parts").exists())
    assert toy.outcome(folder / "whole") == toy.outcome(folder / "parts")
