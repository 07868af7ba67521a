"""FedBis and FedBiscuit on a real, tiny language model: what a run leaves, and what can be done with it."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests.engines.test_experiment import experiment, left
from tests.engines.test_experiment import place as place
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import toy
from prefed import ConfigError, Experiment, run
from prefed.runs.evaluate import evaluate, evaluate_file
from prefed.runs.finished_run import RunError, read_run
from prefed.runs.loaded_run import load_run
from prefed.store import RunReader
from prefed.trackers.terminal import stdout_console
from prefed.ui.cli import app
from prefed.ui.pages.page import render
from prefed.ui.pages.terminal import print_evaluation, print_result

BISCUIT = {"name": "fedbiscuit", "lr": 0.01, "local_steps": 2, "batch_size": 4, "selectors": 2}
BISCUIT |= {"warmup_rounds": 1, "regroup_every": 1, "cluster_mean": "normalised"}


def selectors(place, method, **changes):
    tables = experiment(place).tables()
    return Experiment.model_validate(
        {**tables, "rounds": 4, "cohort": {"size": 3}, "method": method, **changes}
    )


def biscuit(place, **changes):
    return selectors(place, BISCUIT, **changes)


@pytest.fixture(scope="module")
def finished(place):
    """A finished run of two selectors."""
    path = place / "biscuit"
    run(biscuit(place), path)
    return path


def test_a_run_leaves_each_selector_as_an_adapter_that_peft_loads(place, finished):
    opened = load_run(finished)
    assert sorted(p.name for p in (finished / "adapters").iterdir()) == ["selector-0", "selector-1"]
    result = run(biscuit(place), finished, resume=True)
    assert result.adapter is None
    assert (
        [path.name for path in result.adapters] == result.summary["selectors"] == ["selector-0", "selector-1"]
    )
    for path in result.adapters:
        model = opened.published_models[path.name]
        base = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
        loaded = PeftModel.from_pretrained(base, path).state_dict()
        opened.backbone.load(model)
        own = opened.backbone.causal.state_dict()
        shared = [name for name in own if ".lora_" in name]
        assert shared
        match = {name.replace("base_model.model.", ""): value for name, value in loaded.items()}
        for name in shared:
            torch.testing.assert_close(match[name.replace("base_model.model.", "")], own[name])
    assert not opened.published_models["selector-0"].equal(opened.published_models["selector-1"])


def test_an_evaluation_afterwards_gives_what_the_summary_has(finished, place):
    opened = load_run(finished, data=True)
    again = evaluate(opened).figures
    summary = json.loads((finished / "summary.json").read_text())
    names = ("preference_accuracy", "majority_accuracy", "baseline_accuracy", "selector_1_accuracy")
    assert {name: again[name] for name in names} == {name: summary[name] for name in names}
    assert summary["choice_loss"] == pytest.approx(again["choice_loss"]["mean"])
    members = opened.server.values["clusters"]
    scored = {}
    for client, u in members.items():
        if client in summary["preference_accuracy"]["per_client"]:
            models = opened.published_models.values()
            scored = [opened.trainers.score(client, model, "test") for model in models]
            figures = scored[u].metrics(jury=scored)
            for name in names:
                assert summary[name]["per_client"][client] == figures[name]
    other = evaluate_file(opened, str(place / "test.jsonl"), everyone=True)
    assert set(other.pairs) == set(members)
    assert "majority_accuracy" in other.figures
    print_evaluation(other, "biscuit", stdout_console())
    print_result(summary, stdout_console())


def test_a_stopped_run_ends_in_the_same_bytes(place, finished, tmp_path):
    """Stopped in round 3 between its grouping, the first, and the end of its training. A round of warm-up has
    three visits and two evaluations, and a grouping has three answers."""
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(biscuit(place), path, callbacks=[toy.InterruptAt(2 * (3 + 2) + 3 + 2)])
    assert RunReader(path).commit.round == 2
    run(biscuit(place), path, resume=True)
    assert left(path) == left(finished)


def test_commands_know_selectors(finished, tmp_path):
    def command(*words, code=0):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, result.output
        return result.output

    kept = {path.name: path.read_bytes() for path in (finished / "adapters/selector-1").iterdir()}
    assert "selector-1" in command("export", finished, "--selector", 1)
    assert kept == {path.name: path.read_bytes() for path in (finished / "adapters/selector-1").iterdir()}
    assert "2 selectors instead of one model: choose one with --selector" in " ".join(
        command("export", finished, "--out", tmp_path / "x", code=1).split()
    )
    assert "no selector-2: its selectors are selector-0, selector" in " ".join(
        command("export", finished, "--selector", 2, "--out", tmp_path / "y", code=1).split()
    )
    assert "not both" in command("export", finished, "--selector", 1, "--client", "w1", code=2)
    command("export", finished, "--client", "w1", "--out", tmp_path / "w1")
    assert "trains selectors" in command("generate", finished, "--prompt", "Hello?", code=1)
    assert "majority" in render(read_run(finished))


def test_a_run_whose_rounds_are_raised_keeps_its_warm_up(place, tmp_path):
    """Of 4 rounds one is left for each of two selectors; of 8 rounds it would be two. The run of another
    warm-up is refused."""
    method = {
        name: value for name, value in BISCUIT.items() if name not in ("warmup_rounds", "regroup_every")
    }
    run(selectors(place, method), tmp_path / "run")
    assert read_run(tmp_path / "run").config["method"]["warmup_rounds"] == 1
    result = run(selectors(place, method, rounds=8), tmp_path / "run", resume=True)
    assert [record["round"] for record in result.rounds if "clusters" in record] == list(range(3, 9))
    with pytest.raises(ConfigError, match=r"method\.warmup_rounds: 1 → 2"):
        run(selectors(place, {**method, "warmup_rounds": 2}, rounds=8), tmp_path / "run", resume=True)


def test_fedbis_shares_one_selector(place, tmp_path):
    """As an adapter under the usual name, with no vote; unseen clients have it too."""
    method = {**BISCUIT, "name": "fedbis"}
    for name in ("selectors", "warmup_rounds", "regroup_every", "cluster_mean"):
        method.pop(name)
    chosen = selectors(place, method, cohort={"size": 2}, evaluate={"unseen": ["w1"], "unseen_steps": [0, 1]})
    result = run(chosen, tmp_path / "run")
    assert result.adapters == (result.adapter,) == (tmp_path / "run/adapters/shared",)
    assert not {"selectors", "majority_accuracy", "dpo_loss"} & set(result.summary)
    assert set(result.summary["unseen_accuracy"]) == {"0", "1"}
    opened = load_run(tmp_path / "run", data=True)
    with pytest.raises(RunError, match="has no selector-0: it has one model"):
        opened.selector("selector-0")
    common = evaluate_file(opened, str(place / "test.jsonl"), everyone=True)
    assert list(common.pairs) == ["everybody"]
    assert np.isfinite(common.figures["choice_loss"]["mean"])
