"""Clients that send bad uploads again and again, in runs whose ``[cohort]`` sets them aside."""

from dataclasses import replace
from typing import ClassVar

import pytest

import toy
from prefed.core import Callback
from prefed.engines import InProcess, RoundError
from prefed.runs.summary import summarize
from prefed.store import RunReader, RunWriter

BAD = "Client 2/ü"


class Notes(Callback):
    """Keeps warnings; the process ends after round ``dies``."""

    def __init__(self, dies=0):
        self.warnings, self.dies = [], dies

    def on_warning(self, text):
        self.warnings.append(text)

    def on_round_end(self, record):
        if record["round"] == self.dies:
            raise KeyboardInterrupt


class Asks(InProcess):
    """Notes each task."""

    asked: ClassVar = []

    def run(self, tasks):
        return super().run(self.noted(tasks))

    def noted(self, tasks):
        for task in tasks:
            self.asked.append((task.round, task.exchange, task.client))
            yield task


def job(offences=2, fault="unmerged", **options):
    """The toy; one of its clients sends what its server cannot merge, or makes what it must not send."""
    chosen = {"cohort": None, "rounds": 5, "faults": {BAD: fault} if fault else {}, **options}
    made = toy.build(toy.text(**chosen))
    return replace(made, cohort=made.cohort.model_copy(update={"offences": offences}))


def play(path, job, backend=InProcess, notes=None, resume=False):
    toy.run_job(path, job, backend, notes or Notes(), resume=resume)
    return RunReader(path).rounds()


def test_who_is_dropped_twice_is_asked_no_more(tmp_path, monkeypatch):
    """Rounds 1 and 2 drop its upload; from round 3 on neither exchange asks it, and it is still evaluated.
    Since a dropped upload moves nothing, the server is that of the run that continues asking, but for the
    scores, which an honest ``score`` of round 4 would be among."""
    monkeypatch.setattr(Asks, "asked", [])
    notes, counted = Notes(), job()
    server = toy.run_job(tmp_path / "counted", counted, Asks, notes)
    rounds = RunReader(tmp_path / "counted").rounds()
    asked = {(number, what) for number, what, client in Asks.asked if client == BAD}
    assert asked == {(1, "train"), (2, "score"), (2, "train"), *((number, "") for number in range(1, 6))}
    assert [record["offences"] for record in rounds] == [{BAD: 1}, *[{BAD: 2}] * 4]
    assert [record["set_aside"] for record in rounds] == [[], *[[BAD]] * 4]
    assert [BAD in record["cohort"] for record in rounds] == [True, True, False, False, False]
    assert [text for text in notes.warnings if "set aside" in text] == [
        f"round 2: {BAD!r} is set aside after [cohort] offences = 2 bad uploads"
    ]
    with RunWriter(tmp_path / "counted", resume=True) as writer:
        assert summarize(counted, writer, RunReader(writer.path).rounds(), {})["set_aside"] == {BAD: 2}
    other = toy.run_job(tmp_path / "other", job(None), InProcess, Notes())
    assert server.tensors["model"].equal(other.tensors["model"])
    assert set(other.values["scores"]) - set(server.values["scores"]) == {BAD}


@pytest.mark.parametrize("dies", [1, 3])
def test_a_run_that_is_stopped_remembers(tmp_path, dies):
    """Stopped before the second offence, and after it."""
    play(tmp_path / "whole", job())
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "stopped", job(), notes=Notes(dies))
    play(tmp_path / "stopped", job(), resume=True)
    assert toy.outcome(tmp_path / "stopped") == toy.outcome(tmp_path / "whole")


def test_a_run_without_bad_uploads_is_the_run_that_counts_none(tmp_path):
    counted = play(tmp_path / "counted", job(1, None, cohort=3))
    other = play(tmp_path / "other", job(None, None, cohort=3))
    for record, plain in zip(counted, other, strict=True):
        assert (record.pop("offences"), record.pop("set_aside")) == ({}, [])
        record["seconds"] = plain["seconds"]
    assert counted == other


def test_another_client_is_drawn_in_its_place(tmp_path):
    """Three of six a round. Those that the run without offences draws stay, and none is drawn twice."""
    counted = play(tmp_path / "counted", job(1, rounds=12, cohort=3))
    other = play(tmp_path / "other", job(None, rounds=12, cohort=3))
    first = next(record["round"] for record in other if BAD in record["cohort"])
    places = 0
    for record, plain in zip(counted, other, strict=True):
        assert len(set(record["cohort"])) == len(record["cohort"]) == 3
        assert record["cohort"] == sorted(record["cohort"])
        if record["round"] <= first:
            assert record["cohort"] == plain["cohort"]
        else:
            assert BAD not in record["cohort"]
            assert set(plain["cohort"]) - {BAD} <= set(record["cohort"])
            places += BAD in plain["cohort"]
    assert places > 1


def poisson(made):
    return replace(made, cohort=made.cohort.model_copy(update={"sampling": "poisson"}))


def test_where_the_draw_is_reckoned_with_nobody_takes_the_place(tmp_path):
    """Cohorts by chance: each other client is drawn in the same rounds as before."""
    counted = play(tmp_path / "counted", poisson(job(1, rounds=12, cohort=3)))
    other = play(tmp_path / "other", poisson(job(None, rounds=12, cohort=3)))
    first = next(record["round"] for record in other if BAD in record["cohort"])
    for record, plain in zip(counted, other, strict=True):
        gone = {BAD} if record["round"] > first else set()
        assert set(record["cohort"]) == set(plain["cohort"]) - gone


class Silent(InProcess):
    """One client never answers a visit."""

    def run(self, tasks):
        return super().run(task for task in tasks if task.client != BAD or task.kind == "evaluate")


@pytest.mark.parametrize(("fault", "backend", "scored"), [("nan", InProcess, 0), (None, Silent, 1)])
def test_what_the_clients_own_side_withholds_and_silence_are_no_offences(tmp_path, fault, backend, scored):
    """Every second round asks for a score too, which the client with the fault gives."""
    rounds = play(tmp_path / "run", job(1, fault), backend)
    assert [len(record["dropped"]) for record in rounds] == [1, 1 + scored, 1, 1 + scored, 1]
    assert [record["offences"] for record in rounds] == [{}] * 5


def test_what_is_no_answer_is_an_offence(tmp_path):
    """As a federation's hub gives it on where a site's bytes are no message."""

    class Babbles(InProcess):
        def run(self, tasks):
            for result in super().run(tasks):
                if result.client == BAD:
                    result = replace(result, message=b"", withheld="its answer is not a message", broken=True)
                yield result

    rounds = play(tmp_path / "run", job(2, None), Babbles)
    assert [record["offences"] for record in rounds] == [{BAD: 1}, *[{BAD: 3}] * 4]


def test_nobody_is_left(tmp_path):
    everybody = {f"Client {number}/ü": "unmerged" for number in range(3)}
    with pytest.raises(RoundError, match=r"all clients are set aside after 1 bad uploads each"):
        play(tmp_path / "run", job(1, clients=3, faults=everybody))
