"""Whole runs in which the steps of several clients share a pass, next to runs without."""

import json

import pytest
import torch
from tests import toy

from prefed import Experiment, run
from prefed.config import ConfigError
from prefed.core import Key
from prefed.models import ModelError
from prefed.models.tiny import make_tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model of two small blocks, and clients of 9, 6, 3 and 2 pairs."""
    folder, lines = tmp_path_factory.mktemp("place"), []
    for client, count in zip("abcd", (9, 6, 3, 2), strict=True):
        lines += [
            {"prompt": f"Question {n}?", "chosen": f" yes {n}", "rejected": f" no {n}", "who": client}
            for n in range(count)
        ]
    tests = [{**line, "prompt": f"Test {line['prompt']}"} for line in lines]
    for name, rows in (("train", lines), ("test", tests)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [line["prompt"] + line["chosen"] for line in lines]
    make_tiny(folder / "model", texts, Key(0), layers=2, width=32, heads=2, vocabulary=280, steps=2)
    return folder


def experiment(place, stack, method="feddpo", engine=(), **changes):
    """Two rounds of an epoch in batches of at most four pairs, with dropout."""
    train, test = (str(place / f"{name}.jsonl") for name in ("train", "test"))
    tables = {
        "rounds": 2,
        "data": {"train": train, "test": test, "partition": {"by": "column", "column": "who"}},
        "model": {"name": str(place / "model"), "lora": {"rank": 2, "dropout": 0.1}},
        "method": {"name": method, "lr": 0.01, "local_epochs": 1, "batch_size": 4},
        "engine": {"threads": 1, "stack": stack, **dict(engine)},
    }
    return Experiment.model_validate({**tables, **changes})


def server(result):
    return torch.cat([group.flat for group in result.server.tensors.values()])


@pytest.mark.parametrize("method", ["feddpo", "scaffold", "ditto"])
def test_a_run_with_a_stack_equals_one_without(place, tmp_path, method):
    """Methods do not know of it: one of one phase, one with corrections and a client's state, one of two
    phases. In two rounds of up to three steps rounding grows to less than 1e-4 of the model's norm."""
    runs = [run(experiment(place, n, method), tmp_path / f"{n}") for n in (1, 3)]
    one, three = (server(each) for each in runs)
    assert (one - three).norm() < 1e-4 * one.norm()
    plain, stacked = (toy.records(each.path) for each in runs)
    for before, after in zip(plain, stacked, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-5)
        assert "stacked_steps" not in before
    # A stack of three clients and one of a single client, whose steps are alone. By default, a step of Ditto
    # draws two batches, so that clients of 9, 6, 3 and 2 pairs take 2, 1, 1 and 1 steps in either phase.
    together, alone = (8, 2) if method == "ditto" else (3 + 2 + 1, 1)
    assert stacked[0]["stacked_steps"] == {"together": together, "alone": alone}


def test_resumed_after_a_round_it_ends_the_same(place, tmp_path):
    """Stacks are formed anew in each round, from the cohort alone; here of three of four clients."""
    cohort = {"cohort": {"size": 3}}
    whole = run(experiment(place, 8, **cohort), tmp_path / "whole")
    run(experiment(place, 8, rounds=1, **cohort), tmp_path / "parts")
    parts = run(experiment(place, 8, **cohort), tmp_path / "parts", resume=True)
    assert torch.equal(server(whole), server(parts))


def test_it_cannot_change_when_a_run_is_resumed(place, tmp_path):
    """It changes the order of sums, as max_tokens does."""
    run(experiment(place, 2, rounds=1), tmp_path / "run")
    with pytest.raises(ValueError, match=r"engine\.stack"):
        run(experiment(place, 3), tmp_path / "run", resume=True)


def test_settings_that_rule_it_out_are_named(place, tmp_path):
    """Other processes, which get a client at a time, and methods with personal parts on top of the model."""
    with pytest.raises(ConfigError, match=r"stack = 2 needs all clients in one process"):
        experiment(place, 2, engine={"workers": 2})
    with pytest.raises(ModelError, match=r"\[engine\] stack = 2 .*bottleneck"):
        run(experiment(place, 2, "fedpdpo"), tmp_path / "run")
