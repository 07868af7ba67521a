"""What must not change a number: the order of tasks, who does them, stops on the way.

Every law is held by every registered backend. The run to compare with is done in this process.
"""

from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import toy
from law_examples import examples
from prefed.core.wire import decode_state, encode
from prefed.engines import BACKENDS, ServerRounds, Task
from prefed.store import RunReader, RunWriter

pytestmark = pytest.mark.usefixtures("forked_workers")

FAULTS = [{}, {"Client 1/ü": "nan"}, {"Client 0/ü": "leak", "Client 2/ü": "nan"}]


def around(name, change, workers=1, **options):
    """Makes the backend of that name, for the toy's job; ``change`` wraps what runs its tasks."""

    def make(job, states):
        backend = toy.registered(name, toy.text(**options), job, states, workers)
        backend.run = partial(change, backend.run)
        return backend

    return make


@pytest.mark.parametrize("name", BACKENDS)
def test_any_order_of_tasks(name, tmp_path_factory):
    """Law: tasks done in any order leave the same bytes behind, also where uploads are dropped. A backend
    that starts processes has one example, of all clients and both faults."""

    def law(draw, cohort, personal, faults):
        def shuffled(run, tasks):
            waiting = list(tasks)
            draw.shuffle(waiting)
            return run(waiting)

        options = {"rounds": 3, "cohort": cohort, "personal": personal, "faults": faults}
        folder = tmp_path_factory.mktemp("order")
        toy.run(folder / "sorted", **options)
        toy.run(folder / "shuffled", backend=around(name, shuffled, 2, **options), **options)
        assert toy.outcome(folder / "sorted") == toy.outcome(folder / "shuffled")

    if name != "in_process":
        law(Random(0), 6, True, FAULTS[2])
        return
    values = st.randoms(use_true_random=False), st.integers(1, 6), st.booleans(), st.sampled_from(FAULTS)
    examples(10)(given(*values)(law))()


@pytest.mark.parametrize("name", BACKENDS)
def test_any_order_in_which_the_data_name_the_clients(name, tmp_path):
    toy.run(tmp_path / "there")
    toy.run(tmp_path / "back", backend=name, order=-1)
    assert toy.outcome(tmp_path / "there") == toy.outcome(tmp_path / "back")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", BACKENDS)
def test_any_number_of_workers(name, workers, tmp_path):
    """Law: every backend gives what this process gives, bit by bit, bad uploads included."""
    options = {"faults": {"Client 3/ü": "nan"}}
    toy.run(tmp_path / "here", **options)
    backend = partial(toy.registered, name, toy.text(**options), workers=workers)
    toy.run(tmp_path / "there", backend=backend, **options)
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there")


@pytest.mark.parametrize("name", BACKENDS)
def test_stopping_and_resuming_anywhere(name, tmp_path_factory):
    """Law: a run carried out in any number of sittings is the run carried out in one."""

    def law(stops):
        folder = tmp_path_factory.mktemp("stops")
        toy.run(folder / "whole", rounds=6)
        for number in [*stops, 6]:
            resume = (folder / "parts").exists()
            toy.run(folder / "parts", rounds=number, resume=resume, backend=name)
        assert toy.outcome(folder / "whole") == toy.outcome(folder / "parts")

    if name != "in_process":
        law([3])
        return
    stops = st.lists(st.integers(1, 5), unique=True, max_size=5).map(sorted)
    examples(8)(given(stops)(law))()


@pytest.mark.parametrize("name", BACKENDS)
def test_no_private_state_passes_between_the_round_and_a_backend(name, tmp_path):
    """Law: tasks and results hold what a server may know. Every message of a run, in either direction, is
    searched for every float of every private state."""
    messages = []

    def overheard(run, tasks):
        for each in run(kept(tasks)):
            messages.append(each.message)
            yield each

    def kept(tasks):
        for task in tasks:
            messages.append(task.message)
            yield task

    server = toy.run(tmp_path / "run", backend=around(name, overheard))
    wires, reader, searched = b"".join(messages), RunReader(tmp_path / "run"), 0
    for number in range(6):
        state = reader.client(f"Client {number}/ü")
        if state is not None and "personal" in state.tensors:
            for value in state.tensors["personal"].flat:
                assert value.numpy().tobytes() not in wires
                searched += 1
    assert searched >= 4
    assert all(word not in wires for word in (b'"head"', b'"norm"'))
    assert b'"lora/0/A"' in wires.replace(b"\\", b"")
    assert server.tensors["model"].flat[:1].numpy().tobytes() in wires  # it was published


@pytest.mark.parametrize("name", BACKENDS)
def test_a_private_state_counts_once_it_is_accepted(name, tmp_path):
    """Law: a visit whose upload is not merged leaves its client's private state as it was. An accepted state
    is what the client's next visit starts from, also within a round."""
    job = toy.build(toy.text())
    exchange, server = job.exchange("train"), job.method.init_server(job.trainers.initial)
    clients = job.members[:2]
    message = encode(exchange.send(server, clients[0], job.round(1)))
    with (
        RunWriter(tmp_path / "run") as writer,
        toy.registered(name, toy.text(), job, writer.states) as backend,
    ):

        def visits_after(accepted):
            results = backend.run(Task("visit", client, 1, exchange.name, message) for client in clients)
            assert {result.client for result in results} == set(clients)
            backend.accept(accepted)
            states = [backend.states.read(client) for client in clients]
            return [None if state is None else decode_state(state).values["visits"] for state in states]

        assert visits_after(()) == [None, None]
        assert visits_after(clients[:1]) == [1, None]
        assert visits_after(clients) == [2, 1]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_valid_upload_that_is_not_merged_leaves_the_private_state_as_it_was(name, tmp_path):
    """Law: of uploads that are valid, those that the merge refuses move no private state."""
    toy.run(tmp_path / "run", rounds=3, cohort=6, faults={"Client 1/ü": "unmerged"}, backend=name)
    reader = RunReader(tmp_path / "run")
    for record in reader.rounds():
        assert [drop["client"] for drop in record["dropped"]] == ["Client 1/ü"]
    visits = [reader.client(f"Client {number}/ü").values.get("visits", 0) for number in range(6)]
    assert visits == [3, 0, 3, 3, 3, 3]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_round_that_was_left_is_done_anew(name, tmp_path):
    """Law: interrupted after any of its first 18 tasks, of 27, and run again on the same writer and backend,
    a run ends as one that was not. The interrupt is after a merged exchange too, and while one of two workers
    is busy: the 13th task is the first visit after the scores of round 2."""
    options = {"rounds": 3, "clients": 4, "cohort": 4}
    text = toy.text(**options)
    toy.run(tmp_path / "whole", **options)
    for task in range(1, 19) if name == "in_process" else [13]:
        job, path = toy.build(text), tmp_path / str(task)
        with RunWriter(path) as writer, toy.registered(name, text, job, writer.states, 2) as backend:
            writer.begin(encode(job.method.init_server(job.trainers.initial)), job.trainers.fingerprint)
            rounds = ServerRounds(job, writer, backend, toy.InterruptAt(task))
            with pytest.raises(KeyboardInterrupt):
                rounds.run()
            rounds.run()
        assert toy.outcome(path) == toy.outcome(tmp_path / "whole"), f"after task {task}"
