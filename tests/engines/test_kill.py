"""A run killed anywhere and resumed is the run not killed, bit for bit."""

import os
import random
import signal
import time

import pytest
import torch

import toy
from prefed.store import RunReader
from waiting import until

OPTIONS = {"rounds": 4, "clients": 4, "cohort": 3, "pause": 0.002}


def forked(path, resume):
    """Start the run in a forked process; its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            toy.run(path, resume=resume, **OPTIONS)
            status = 0
        finally:
            os._exit(status)
    return child


@pytest.mark.rare
def test_killed_at_random_moments(tmp_path):
    """SIGKILL at 25 moments spread over the rounds of the run, each then killed once more while resuming."""
    toy.run(tmp_path / "imports", **OPTIONS)  # so that no child spends its time on them
    started = time.perf_counter()
    assert os.waitpid(forked(tmp_path / "whole", False), 0)[1] == 0
    took = time.perf_counter() - started
    expected, draw, rounds = toy.outcome(tmp_path / "whole"), random.Random(0), set()
    for number in range(25):
        run = tmp_path / str(number)
        log = run / "rounds.jsonl"

        def done(log=log):
            return log.read_bytes().count(b"\n") if log.exists() else 0

        for share in number / 25, draw.random():
            child = forked(run, resume=run.exists())
            until(lambda share=share: done() >= int(share * OPTIONS["rounds"]), "a round")
            time.sleep(draw.random() * took / OPTIONS["rounds"])
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            rounds.add(done())
        assert os.waitpid(forked(run, resume=True), 0)[1] == 0
        assert toy.outcome(run) == expected
    assert len(rounds) >= 3, "the kills did not land in different rounds"


@pytest.mark.parametrize("hook", ["on_run_begin", "on_task_end", "on_round_end", "on_run_end"])
def test_an_error_in_a_callback_ends_the_run_and_keeps_whole_rounds(tmp_path, hook):
    """Callbacks are the user's own code. A round is committed before ``on_round_end`` is called; each
    of the 4 clients answers twice in round 1, to train and in its evaluation."""
    calls = []

    class Broken(toy.Callback):
        pass

    def broken(self, *arguments):
        calls.append(arguments)
        if len(calls) == {"on_task_end": 9, "on_round_end": 2}.get(hook, 1):
            raise ZeroDivisionError("no such luck")

    setattr(Broken, hook, broken)
    options = {**OPTIONS, "cohort": None}
    with pytest.raises(ZeroDivisionError, match="no such luck"):
        toy.run(tmp_path / "run", callback=Broken(), **options)
    rounds = {"on_run_begin": 0, "on_task_end": 1, "on_round_end": 2, "on_run_end": 4}[hook]
    assert RunReader(tmp_path / "run").commit.round == rounds
    toy.run(tmp_path / "run", resume=True, **options)
    toy.run(tmp_path / "whole", **options)
    assert toy.outcome(tmp_path / "run") == toy.outcome(tmp_path / "whole")
