"""Whole runs on thumbs: shared and personal models, paired test data, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import peering
from finished import small_experiment, small_place
from prefed import Experiment, run
from prefed.config import ConfigError
from prefed.engines.validation import read_figures
from prefed.runs.evaluate import evaluate, evaluate_file
from prefed.runs.finished_run import read_run
from prefed.runs.loaded_run import load_run
from prefed.train.feedback import PAIRS
from prefed.ui.pages.page import render

THUMBS = {"preference_accuracy", "reward_accuracy", "baseline_accuracy", "margin", "kto_loss"}
REWARDS = {"reward_up", "reward_down"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The small place, each of its pairs as two thumbs too; the worker "left" has no test thumb down."""
    folder = small_place(tmp_path_factory.mktemp("thumbs"))
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        thumbs = [
            {
                "prompt": row["prompt"],
                "completion": row[key],
                "label": key == "chosen",
                "worker": row["worker"],
            }
            for row in rows
            for key in ("chosen", "rejected")
            if key == "chosen" or name == "train" or row["worker"] == "right"
        ]
        lines = "".join(json.dumps(row) + "\n" for row in thumbs)
        (folder / f"thumbs-{name}.jsonl").write_text(lines)
    return folder


def experiment(place, method="feddpo", *, test="thumbs-test", train="thumbs-train", **settings):
    tree = small_experiment(place)
    tree["data"] |= {"train": str(place / f"{train}.jsonl"), "test": str(place / f"{test}.jsonl")}
    tree["method"] |= {"name": method, "objective": "kto", **settings}
    return tree


def trained(tree, path):
    run(Experiment.model_validate(tree), path)
    return json.loads((path / "summary.json").read_text())


def test_a_run_on_thumbs(place, tmp_path):
    """Metrics of thumbs, the mean rewards over the clients that have them; an evaluation repeats them."""
    summary = trained(experiment(place, "fedper"), tmp_path / "run")
    assert {*summary} >= THUMBS | REWARDS | {"shared_accuracy"}
    assert not {"dpo_loss", "normalized_accuracy"} & {*summary}
    assert summary["baseline_accuracy"]["per_client"] == {"left": 0.0, "right": 0.5}
    assert summary["clients"]["left"]["train"] == 16
    assert summary["loss"] < 0.5
    page = render(read_run(tmp_path / "run"))
    assert "balanced accuracy over thumbs" in page
    assert not re.search("share of pairs (whose|on which|in which)", page)
    again = evaluate(load_run(tmp_path / "run", data=True))
    for name in THUMBS | REWARDS:
        got = summary[name]
        got = got if isinstance(got, float) else got["mean"]
        assert again.figures[name]["mean"] == pytest.approx(got, rel=1e-6)
    assert [*again.figures["reward_down"]["per_client"]] == ["right"]


def test_paired_test_data(place, tmp_path):
    """A policy trained on thumbs is compared on pairs as any other, in the run and afterwards."""
    summary = trained(experiment(place, test="test"), tmp_path / "run")
    assert "dpo_loss" in summary
    assert not (REWARDS | {"kto_loss"}) & {*summary}
    loaded = load_run(tmp_path / "run", data=True)
    found = evaluate_file(loaded, str(place / "test.jsonl"))
    assert found.figures["preference_accuracy"] == summary["preference_accuracy"]
    of_thumbs = evaluate_file(loaded, str(place / "thumbs-test.jsonl"))
    assert {*of_thumbs.figures} == THUMBS | REWARDS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "dpo"}, "objective 'dpo' trains on pairs, but the training data are thumbs"),
        ({"objective": "ppo"}, "objective 'ppo' trains on pairs"),
        ({"train": "train"}, "objective 'kto' trains on thumbs, but the training data are pairs"),
        ({"batch_size": 1}, "set batch_size to 2 or more"),
    ],
)
def test_what_is_refused(place, settings, message, tmp_path):
    with pytest.raises((ConfigError, ValueError), match=message):
        run(Experiment.model_validate(experiment(place, **settings)), tmp_path / "run")


@pytest.mark.parametrize("method", ["fedpdpo", "fedsft", "icl"])
def test_methods_without_the_setting_are_named(place, method, tmp_path):
    tree = experiment(place, method)
    del tree["method"]["objective"]
    with pytest.raises(ConfigError, match=rf"\[method\] {method} trains on pairs, but the training"):
        run(Experiment.model_validate(tree), tmp_path / "run")


def test_stopping_by_the_loss_is_refused(place):
    tree = experiment(place) | {"stop": {"metric": "loss"}}
    with pytest.raises(ValueError, match="it is the DPO loss of pairs, but clients train on thumbs"):
        Experiment.model_validate(tree)


def test_what_a_client_may_report(place, tmp_path):
    """A run on thumbs takes the metrics of thumbs or of pairs, but no mix; one on pairs, only of pairs."""
    trained(experiment(place), tmp_path / "run")
    job = load_run(tmp_path / "run", data=True).job
    half = dict.fromkeys(("preference_accuracy", "reward_accuracy", "baseline_accuracy", "margin"), 0.5)
    thumbs, pairs = half | {"kto_loss": 0.5}, half | {"normalized_accuracy": 0.5, "dpo_loss": 0.7}
    pairs |= {"chosen_shift": 0.1, "rejected_shift": -0.1, "chosen_shift_error": 0.1}

    def reason(figures, job=job):
        return read_figures(job, json.dumps(figures).encode(), "left")[1]

    assert [reason(thumbs), reason(thumbs | {"reward_up": -1.0}), reason(pairs)] == ["", "", ""]
    assert "does not expect: dpo_loss" in reason(thumbs | {"dpo_loss": 0.7})
    assert "lacks metrics that an evaluation expects: margin" in reason(
        {name: value for name, value in thumbs.items() if name != "margin"}
    )
    assert "does not expect: reward_up" in reason(pairs | {"reward_up": 0.5})
    assert "not finite" in reason(thumbs | {"reward_up": float("nan")})
    assert "expects: chosen_shift, chosen_shift_error, dpo_loss, normalized_accuracy" in reason(
        thumbs, replace(job, feedback=PAIRS)
    )


def numbers(summary):
    return {name: value for name, value in summary.items() if name in THUMBS | REWARDS | {"loss", "bytes"}}


@pytest.mark.usefixtures("forked_workers")
def test_two_workers_and_a_resumed_run_give_the_run_of_one_process(place, tmp_path):
    """Bit for bit: thumbs, their KL divergences and the rewards of the metrics are the same."""
    tree = experiment(place)
    whole = numbers(trained(tree, tmp_path / "whole"))
    assert numbers(trained(tree | {"engine": {"workers": 2, "threads": 1}}, tmp_path / "workers")) == whole
    trained(tree | {"rounds": tree["rounds"] - 1}, tmp_path / "parts")
    run(Experiment.model_validate(tree), tmp_path / "parts", resume=True)
    assert numbers(json.loads((tmp_path / "parts/summary.json").read_text())) == whole


def test_peers_train_on_thumbs(tmp_path):
    """Each peer measures its own model on its own thumbs, as one process over the same graph does."""
    folder = peering.make_place(tmp_path)
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    thumbs = [
        {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen", "worker": row["worker"]}
        for row in pairs
        for key in ("chosen", "rejected")
    ]
    (folder / "thumbs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in thumbs))
    asked = peering.experiment(folder, graph={"name": "complete"}, data="thumbs", objective="kto")
    asked = asked.model_copy(update={"rounds": 2})
    whole = run(asked, tmp_path / "whole").summary
    for ended in peering.peers(tmp_path / "run", [asked] * 3):
        assert ended.status == 0, ended.text
    own = [read_run(tmp_path / f"run/peer-{number}").summary for number in range(3)]
    for name in ("preference_accuracy", "reward_accuracy"):
        per_client = {client: each for summary in own for client, each in summary[name]["per_client"].items()}
        assert per_client == whole[name]["per_client"]
    for name in ("kto_loss", "margin"):
        assert sum(summary[name] for summary in own) / 3 == pytest.approx(whole[name], rel=1e-6)
