"""A small real run that is judged by validation pairs, and the commands that take its best round."""

import json

import pytest
import torch
from tests.cli.test_push import hub as hub

from commands import prefed_
from finished import small_experiment, small_place
from prefed import Experiment, run
from prefed.runs.loaded_run import load_run
from prefed.store import RunReader
from prefed.ui.pages.terminal import best_line

STOP = {"delta": 1.0, "patience": 2}
"""No accuracy is better than another by more than 1: round 1 stays the best, and round 3 is the last."""


def experiment(place, rounds, **changes):
    tree = small_experiment(place, rounds=rounds, **changes)
    tree["method"]["name"] = "fedper"
    tree["data"]["validation_fraction"] = 0.25
    return Experiment.model_validate(tree)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs of FedPer, which has private states: one of five rounds that stops, and one of round 1 alone
    that computes its blocks twice."""
    folder = small_place(tmp_path_factory.mktemp("place"))
    run(experiment(folder, 5, stop=STOP), folder / "run")
    model = {"name": str(folder / "model"), "lora": {"rank": 2}, "checkpointing": True}
    run(experiment(folder, 1, model=model), folder / "short")
    return folder


def summary(path):
    return json.loads((path / "summary.json").read_text())


def test_the_summary_has_the_last_and_the_best(place):
    got, whole = summary(place / "run")["stop"], summary(place / "run")
    first, *_, last = map(json.loads, (place / "run/rounds.jsonl").read_text().splitlines())
    assert whole["rounds"] == last["round"] == 3
    assert (got["metric"], got["over"], got["split"]) == ("preference_accuracy", "mean", "validation")
    assert got["last"] == {"round": 3, "value": last["validation"]}
    assert (got["best"]["round"], got["best"]["value"]) == (1, first["validation"])
    for name in ("preference_accuracy", "reward_accuracy", "shared_accuracy", "margin", "split"):
        assert got["best"][name] == first["evaluation"][name]
        assert whole[name] == last["evaluation"][name]
    assert got["best"]["split"] == "test"
    assert best_line(got) == (
        f"best round by mean preference accuracy on validation pairs: 1 ({first['validation']:.3f}); "
        f"early stopping after round 3 ({last['validation']:.3f})"
    )


def test_the_best_is_a_run_of_so_many_rounds_with_or_without_checkpointing(place):
    """Bit for bit: states of the server and of both clients, and the tensors that they predict with."""
    best, short = RunReader(place / "run", best=True), RunReader(place / "short")
    assert best.commit.round == short.commit.round == 1
    assert best.server().tensors["model"].equal(short.server().tensors["model"])
    loaded, other = load_run(place / "run", best=True), load_run(place / "short")
    for client in ("left", "right"):
        assert loaded.model(client).equal(other.model(client))
        assert not loaded.model(client).equal(load_run(place / "run").model(client))


def test_the_best_round_is_pushed_with_its_own_card(place, hub):
    """What is pushed is what is exported of that round, to the byte; the card has that round's figure."""
    out = place / "exported"
    prefed_("export", place / "run", "--client", "left", "--round", "best", "--out", out)
    prefed_("push", place / "run", "ann/best", "--client", "left", "--round", "best")
    files = hub.repos["ann/best"].files
    weights = "adapter_model.safetensors"
    assert files[weights] == (out / weights).read_bytes()
    card = files["README.md"].decode()
    assert "Measured after round 1, the best round on validation pairs, on " in card
    own = summary(place / "run")["stop"]["best"]["preference_accuracy"]["per_client"]["left"]
    assert f"| own model | {own:.1%} |" in card


def test_commands_take_the_best_round(place, tmp_path):
    """Evaluated again it has the summary's figures to the digit; exports of both rounds stay apart."""
    run_path, got = place / "run", summary(place / "run")
    for words, want in ((("--round", "best"), got["stop"]["best"]), ((), got)):
        figures = json.loads(prefed_("evaluate", run_path, "--json", *words))
        assert figures["preference_accuracy"] == want["preference_accuracy"]
        assert figures["margin"]["mean"] == want["margin"]
    assert "run, best round 1" in prefed_("evaluate", run_path, "--round", "best")
    exported = prefed_("export", run_path, "--client", "left", "--round", "best")
    assert str(run_path / "adapters/best-client-left") in exported
    prefed_("export", run_path, "--client", "left")
    prefed_("export", place / "short", "--client", "left")
    files = [
        folder / "client.safetensors"
        for folder in (
            run_path / "adapters/best-client-left",
            place / "short/adapters/client-left",
            run_path / "adapters/client-left",
        )
    ]
    best, short, last = (file.read_bytes() for file in files)
    assert best == short != last
    answer = json.loads(prefed_("generate", run_path, "--prompt", "Case 1:", "--round", "best", "--json"))
    assert answer[0]["prompt"] == "Case 1:"


def test_a_run_that_stopped_does_not_go_on(place):
    """Not even with more rounds, or on another machine with less memory."""
    before = summary(place / "run")
    model = {"name": str(place / "model"), "lora": {"rank": 2}, "checkpointing": True}
    for again in (experiment(place, 5, stop=STOP), experiment(place, 9, stop=STOP, model=model)):
        result = run(again, place / "run", resume=True)
        assert result.summary == before
        assert torch.equal(
            result.server.tensors["model"].flat, RunReader(place / "run").server().tensors["model"].flat
        )
