"""Answers that are forged, missing, doubled or somebody else's: a run names them and continues."""

import json
import os
import subprocess
from dataclasses import replace
from functools import partial

import pytest

import toy
from prefed.engines import InProcess, Job, JobFactory, RoundError, WorkerProcesses
from prefed.engines.backends import BackendSettings
from prefed.engines.validation import read_figures
from prefed.store import RunReader
from toy import Warned
from waiting import until

BAD = "Client 2/ü"


def altered(change, what="evaluate"):
    """What makes a backend: ``change`` gives, for each result of a task of this kind, those that arrive."""

    class Altered(InProcess):
        def run(self, tasks):
            for task in tasks:
                for result in super().run([task]):
                    yield from change(result) if task.kind == what else [result]

    return Altered


def play(path, backend, **options):
    """Run the toy: its records and its warnings."""
    listener = Warned()
    toy.run(path, backend=backend, callback=listener, **{"rounds": 2, "cohort": 6, **options})
    return RunReader(path).rounds(), listener.texts


def fixed(**changes):
    return lambda message: json.dumps({**json.loads(message), **changes}).encode()


def without(name):
    return lambda message: json.dumps({n: v for n, v in json.loads(message).items() if n != name}).encode()


FORGED = {
    "empty": lambda message: b"",
    "a list": lambda message: b"[]",
    "nothing": lambda message: b"{}",
    "deep": lambda message: b"[" * 1000,
    "long": lambda message: message + b" " * 10**4,
    "latin": lambda message: b"\xff",
    "a text": fixed(preference_accuracy="Mr X"),
    "a bool": fixed(preference_accuracy=True),
    "above 1": fixed(shared_accuracy=1.5),
    "below 0": fixed(reward_accuracy=-1e-9),
    "NaN": fixed(preference_accuracy=float("nan")),
    "400 digits": fixed(preference_accuracy=10**400),
    "a margin of NaN": fixed(margin=float("nan")),
    "a loss beyond measure": fixed(dpo_loss=1e308),
    "a long loss": fixed(dpo_loss=10**400),
    "another figure": fixed(**{"Mr X takes 5 mg": 1.0}),
    "a reward head's": fixed(agreement=1.0),
    "one missing": without("margin"),
    "too many pairs": fixed(not_finite=1000),
    "pairs as text": fixed(not_finite="Mr X"),
}


def test_a_forged_evaluation_counts_its_client_out(tmp_path, subtests):
    """The means are over the others, and the record says why; the reason quotes nothing of the forgery."""

    def change(result, forge):
        yield replace(result, message=forge(result.message)) if result.client == BAD else result

    toy.run(tmp_path / "whole", rounds=2, cohort=6)
    for name, forge in FORGED.items():
        with subtests.test(name):
            records, warnings = play(tmp_path / name, altered(partial(change, forge=forge)))
            for record, whole in zip(records, RunReader(tmp_path / "whole").rounds(), strict=True):
                own, expected = record["evaluation"], whole["evaluation"]["preference_accuracy"]["per_client"]
                assert list(own["not_evaluated"]) == [BAD]
                assert own["clients"] == 5
                del expected[BAD]
                assert own["preference_accuracy"]["per_client"] == expected
                assert own["preference_accuracy"]["mean"] == pytest.approx(sum(expected.values()) / 5)
            assert [text.split(":")[0] for text in warnings] == ["round 1", "round 2"]
            assert all(f"{BAD!r} is not evaluated" in text and "Mr" not in text for text in warnings)


def test_a_diverged_model_is_still_evaluated():
    """Its margin may be NaN, or infinite, which is read as NaN: means of both signs of infinity have none."""
    job = toy.build(toy.text())
    names = ("preference_accuracy", "reward_accuracy", "baseline_accuracy", "normalized_accuracy")
    figures = {**dict.fromkeys((*names, "shared_accuracy"), 0.5), "dpo_loss": float("inf"), "not_finite": 1}
    figures |= dict.fromkeys(
        ("margin", "chosen_shift", "rejected_shift", "chosen_shift_error"), float("-inf")
    )
    read, reason = read_figures(job, json.dumps(figures).encode(), BAD)
    assert not reason
    assert str([read["margin"], read["dpo_loss"], read["not_finite"]]) == "[nan, nan, 1.0]"


def test_a_newcomers_answer_may_be_missing(tmp_path):
    newcomers = ("Client 0/ü", BAD)
    built: Job = toy.build(toy.text(rounds=1))
    job = replace(built, unseen=newcomers, evaluate=built.evaluate.model_copy(update={"unseen_steps": [0]}))
    for silent in (newcomers[:1], newcomers):
        listener, path = Warned(), tmp_path / str(len(silent))
        answers = altered(lambda result, silent=silent: [result] if result.client not in silent else [])
        toy.run_job(path, job, answers, listener)
        evaluation = RunReader(path).rounds()[0]["evaluation"]
        assert evaluation["not_evaluated"] == dict.fromkeys(silent, "no answer")
        steps = evaluation.get("unseen_accuracy", {})
        assert {n: list(figure["per_client"]) for n, figure in steps.items()} == (
            {"0": [BAD]} if len(silent) == 1 else {}
        )
        assert ("no newcomer has valid metrics; unseen_accuracy is missing" in listener.texts[-1]) == (
            len(silent) == 2
        )


def test_a_withheld_evaluation_is_honoured(tmp_path):
    def change(result):
        yield replace(result, withheld="no\x1b") if result.client == BAD else result

    records, _ = play(tmp_path / "run", altered(change))
    assert records[0]["evaluation"]["not_evaluated"] == {BAD: "no\\x1b"}


@pytest.mark.parametrize("privacy", [0, 8])
def test_without_any_figures_a_round_has_no_evaluation(tmp_path, privacy):
    """And the last round, whose evaluation the summary needs, says so and can be run again."""
    small = [name for name, sizes in toy.build(toy.text()).trainers.clients.items() if sizes.test < 8]
    assert 0 < len(small) < 6

    def silent(result):
        return [result] if privacy and result.client in small else []

    with pytest.raises(RoundError, match=r"no client has valid metrics after the last round"):
        play(tmp_path / "run", altered(silent), minimum_pairs=privacy)
    (record,) = RunReader(tmp_path / "run").rounds()
    assert "evaluation" not in record
    assert record["loss"] is not None
    toy.run(tmp_path / "run", resume=True, rounds=2, cohort=6, minimum_pairs=privacy)
    assert "evaluation" in RunReader(tmp_path / "run").rounds()[1]


@pytest.mark.parametrize("who", [BAD, "Client 3/ü", "nobody\x1b"])
def test_a_result_that_nobody_awaits_is_ignored(tmp_path, who):
    """It comes after the client's own, or a client that has answered is named in it, or nobody is."""

    def change(result):
        yield result
        if result.client == "Client 5/ü":
            yield replace(result, client=who)

    expected, _ = play(tmp_path / "whole", InProcess)
    for what in ("visit", "evaluate"):
        records, warnings = play(tmp_path / what, altered(change, what))
        assert toy.outcome(tmp_path / what) == toy.outcome(tmp_path / "whole")
        assert [record["dropped"] for record in records] == [[], []]
        assert len(records) == len(expected)
        assert len(warnings) == (3 if what == "visit" else 2)
        assert all("ignored an unexpected result of" in text and text.isprintable() for text in warnings)


def test_a_client_without_an_answer_is_dropped(tmp_path):
    records, _ = play(
        tmp_path / "run", altered(lambda r: [] if r.client == BAD else [r], "visit"), personal=False
    )
    for record in records:
        assert {drop["client"]: drop["reason"] for drop in record["dropped"]} == {BAD: "no answer"}
    assert RunReader(tmp_path / "run").client(BAD) is None


def test_if_nobody_answers_the_run_ends_and_resumes(tmp_path):
    left = [6]

    def change(result):
        left[0] -= 1
        return [result] if left[0] >= 0 else []

    with pytest.raises(RoundError, match=r"none of 6 clients answered in 'score'\. Complete rounds are kept"):
        play(tmp_path / "run", altered(change, "visit"))
    toy.run(tmp_path / "run", resume=True, rounds=2, cohort=6)
    toy.run(tmp_path / "whole", rounds=2, cohort=6)
    assert toy.outcome(tmp_path / "run") == toy.outcome(tmp_path / "whole")


@pytest.mark.usefixtures("forked_workers")
def test_an_interrupt_while_workers_are_ended_leaves_none(monkeypatch):
    """All are killed before the first is waited for."""
    backend = WorkerProcesses(JobFactory("toy:build", toy.text()), toy.MemoryStates(), BackendSettings(2))
    wait, pids = subprocess.Popen.wait, []

    def interrupted(process, timeout=None):
        pids.append(process.pid)
        raise KeyboardInterrupt

    with backend:
        processes = [worker._process for worker in backend._idle]
        monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backend.__exit__()
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        until(lambda: all(process.poll() is not None for process in processes), "the end of the workers")
    assert len(pids) == 1
    assert {process.returncode for process in processes} == {-9}
    assert os.getpid() not in pids
