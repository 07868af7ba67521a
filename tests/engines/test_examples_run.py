"""In-context examples through whole runs: workers, resume, evaluation, newcomers, what is refused."""

import json

import pytest
from tests.engines.test_experiment import experiment
from tests.engines.test_experiment import place as place

from prefed import Experiment, run
from prefed.config import ConfigError
from prefed.core import Callback
from prefed.data.examples import ExampleEncoder
from prefed.runs.dry_run import dry_run
from prefed.runs.evaluate import evaluate, evaluate_file
from prefed.runs.export import write_model
from prefed.runs.finished_run import RunError
from prefed.runs.loaded_run import load_run
from prefed.runs.responses import Models
from prefed.train.generation import Sampling


def shown(place, count, **changes):
    tree = {
        **experiment(place).tables(),
        "rounds": 1,
        "method": {"name": "icl", "examples": count},
        **changes,
    }
    return Experiment.model_validate(tree)


@pytest.fixture(scope="module")
def finished(place):
    path = place / "shown"
    run(shown(place, 2, evaluate={"unseen": ["w1"], "unseen_steps": [0, 5], "unseen_pairs": [1, 2]}), path)
    return path


def summary(path):
    return json.loads((path / "summary.json").read_text())


def test_a_client_judges_with_its_examples_and_the_published_model_without(place, finished):
    """Without examples a client is the base model. With them its log-probabilities differ, and so does the
    mean margin, which is 0 without. A newcomer takes no steps, so it has no accuracy after five."""
    run(shown(place, 0), place / "none")
    none, some = summary(place / "none"), summary(finished)
    assert none["preference_accuracy"] == none["baseline_accuracy"] == none["shared_accuracy"]
    assert none["margin"] == 0.0
    assert abs(some["margin"]) > 1e-3
    assert some["shared_accuracy"] == some["baseline_accuracy"]
    assert some["parameters"]["communicated"] == 0
    assert set(some["unseen_accuracy"]) == {"0", "pairs/1", "pairs/2"}


def test_a_dry_run_judges_with_examples_as_the_run_does(place, tmp_path, monkeypatch):
    """Only the prompts of a client's own model get examples, so those of the base model alone are shorter."""
    encode, counts = ExampleEncoder.encode, []

    def counted(self, record, examples):
        counts.append(len(examples))
        return encode(self, record, examples)

    monkeypatch.setattr(ExampleEncoder, "encode", counted)
    dry_run(shown(place, 2), tmp_path / "run")
    assert set(counts) == {2}


@pytest.mark.rare
def test_workers_and_evaluation_from_disk_give_the_same_metrics(place, finished):
    whole = summary(finished)
    newcomers = {"unseen": ["w1"], "unseen_steps": [0, 5], "unseen_pairs": [1, 2]}
    run(shown(place, 2, evaluate=newcomers, engine={"workers": 2, "threads": 1}), place / "two")
    for name in ("preference_accuracy", "margin", "unseen_accuracy"):
        assert summary(place / "two")[name] == whole[name]
    opened = load_run(finished, data=True)
    here = evaluate(opened).figures
    assert here["preference_accuracy"] == whole["preference_accuracy"]
    judged = evaluate_file(opened, opened.experiment.data.test.path, ["w0"]).figures
    own = here["margin"]["per_client"]["w0"]
    assert judged["margin"]["per_client"]["w0"] == pytest.approx(own, abs=1e-4)


def test_a_run_that_was_stopped_is_resumed(place):
    class Stop(Callback):
        def on_round_end(self, record):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(shown(place, 2, rounds=2), place / "stopped", callbacks=[Stop()])
    run(shown(place, 2, rounds=2), place / "stopped", resume=True)
    run(shown(place, 2, rounds=2), place / "once")
    for name in ("preference_accuracy", "margin", "rounds"):
        assert summary(place / "stopped").get(name) == summary(place / "once").get(name)


def test_what_has_no_model_of_its_own_is_refused(place, finished):
    for client in (None, "w0"):
        with pytest.raises(RunError, match="icl trains nothing, so there is nothing to export"):
            write_model(finished, place / "export", client=client)
    with pytest.raises(RunError, match="icl judges pairs with the base model, and has no other"):
        Models(load_run(finished), Sampling()).own("w0")
    with pytest.raises(ConfigError, match=r"\[report\]: icl trains no model that writes text"):
        shown(place, 2, report={"prompts": "prompts.txt"})
