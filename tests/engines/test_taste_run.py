"""FedVPA-GP and FedVPL on a real, tiny language model: whole runs, their evaluations and their tastes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engines.test_experiment import experiment, left
from tests.engines.test_experiment import place as place
from typer.testing import CliRunner

import toy
from prefed import Experiment, run
from prefed.data import Message, Record, write_choices
from prefed.methods.base.tastes import POPULATION, Z, posteriors
from prefed.models import load_client, save_client
from prefed.runs.build import response_encoder
from prefed.runs.evaluate import evaluate, evaluate_file
from prefed.runs.finished_run import RunError, read_run
from prefed.runs.labels import selectors_of
from prefed.runs.loaded_run import load_run
from prefed.runs.start_or_resume import settings_digest
from prefed.runs.tastes import at_taste, measure_tastes, read_tastes
from prefed.store import RunReader
from prefed.train import PairTrainer
from prefed.ui.cli import app

VARIATIONAL = {"latent": 4, "widths": [16, 8], "scale": 2.0}
UNSEEN = {"unseen": ["w1"], "unseen_steps": [0, 1], "unseen_pairs": [2, 8]}
NO_PAIR = "1 client has no pairs in the test split"
METHOD = {"name": "fedvpa", "lr": 0.01, "local_steps": 2, "batch_size": 8}


def tasty(place, **changes):
    tables = experiment(place).tables()
    model = {**tables["model"], "variational": VARIATIONAL}
    tree = {**tables, "model": model, "cohort": {"size": 2}, "method": METHOD, **changes}
    return Experiment.model_validate(tree)


@pytest.fixture(scope="module")
def finished(place):
    path = place / "tasty"
    run(tasty(place), path)
    return path


def at_z(opened, z):
    """The run, with z for every client."""
    predict = opened.method.predict
    method = replace(opened.method, predict=lambda *given: predict(*given).replace({"latent/z": z}))
    return replace(opened, job=replace(opened.job, method=method))


def test_a_run_leaves_tastes_and_no_adapter(finished):
    """6 rounds' messages: two visits of three clients; trust in private states alone."""
    opened = load_run(finished, data=True)
    assert not (finished / "adapters").exists()
    summary = json.loads((finished / "summary.json").read_text())
    for name in ("preference_accuracy", "shared_accuracy", "baseline_accuracy"):
        assert set(summary[name]["per_client"]) == {"w0", "w1"}
    assert summary["parameters"]["communicated"] == opened.server.tensors["model"].layout.size + 8
    rounds = RunReader(finished).rounds()
    members = rounds[-1]["prototypes"]
    assert sorted(client for group in members.values() for client in group) == sorted(
        opened.server.values["sent"]
    )
    assert evaluate(opened).figures["preference_accuracy"] == summary["preference_accuracy"]
    tastes = read_tastes(opened)
    assert tastes.clients == ("w0", "w1")
    own = [summary["preference_accuracy"]["per_client"][client] for client in tastes.clients]
    assert tastes.accuracies.diagonal().tolist() == pytest.approx(own)
    population = [summary["shared_accuracy"]["per_client"][client] for client in tastes.clients]
    assert tastes.population.tolist() == pytest.approx(population)
    known = posteriors(opened.server)
    assert set(tastes.sent) == set(tastes.clients) & set(known)
    for client, figure in tastes.sent.items():
        judged = evaluate(at_z(opened, known[client].mean)).figures["preference_accuracy"]
        assert judged["per_client"][client] == figure
    plain = json.loads(json.dumps(tastes.plain()))
    assert np.array(plain["map"]["clients"]).shape == np.array(plain["map"]["prototypes"]).shape == (2, 2)
    for client, others in plain["trust"].items():
        assert client not in others
        assert sum(others.values()) == pytest.approx(1)
    assert plain["trust"]


def test_a_run_writes_its_tastes_for_its_owner(finished):
    """What ``read_tastes`` finds, to three digits; a run that continues has none until it ends."""
    path = finished / "tastes.json"
    assert path.stat().st_mode & 0o777 == 0o600
    got, plain = json.loads(path.read_text()), read_tastes(load_run(finished, data=True)).plain()
    assert got.keys() == plain.keys()
    assert got["clients"] == plain["clients"]
    for name in ("own", "another", "population", "accuracies", "kl_per_dimension", "active_units"):
        assert np.array(got[name]) == pytest.approx(np.array(plain[name]), abs=5e-4)
    assert got["kl_per_dimension"] == [round(value, 3) for value in plain["kl_per_dimension"]]
    assert got["prototypes"] == plain["prototypes"]
    assert read_run(finished).tastes == got


def test_only_some_of_many_clients_are_sent(finished):
    """Which of them, the seed decides; the others are in no row and no column."""
    opened = load_run(finished, data=True)
    goal = opened.experiment.method.settings.goal()
    found = measure_tastes(opened.job, opened.backbone, goal, opened.server, opened.private_state, "test", 1)
    assert found is not None
    assert len(found.clients) == 1
    assert found.accuracies.shape == (1, 1)


def test_pairs_that_another_client_trains_on_are_counted(finished, monkeypatch):
    """One judged pair of w0 among w1's training pairs, whichever response is the chosen one there."""
    opened = load_run(finished, data=True)
    dataset = opened.trainers.dataset
    clients = {name: dataset.clients[name] for name in ("w0", "w1")}
    judged = sum(len(data.test) for data in clients.values())
    assert read_tastes(opened).met == 0
    clients["w1"] = replace(clients["w1"], train=clients["w0"].test[:1])
    monkeypatch.setattr(opened.trainers, "dataset", replace(dataset, clients=clients))
    assert read_tastes(opened).met == pytest.approx(1 / judged)


def test_clients_are_judged_by_other_tastes(finished):
    """A cell of the table of tastes, the published taste, and what a method's ``infer`` gives."""
    opened = load_run(finished, data=True)
    tastes = read_tastes(opened)

    def accuracies(taste):
        per_client = evaluate(at_taste(opened, taste)).figures["preference_accuracy"]["per_client"]
        return [per_client[client] for client in tastes.clients]

    assert accuracies("own") == tastes.accuracies.diagonal().tolist()
    assert accuracies("w1") == tastes.accuracies[:, 1].tolist()
    assert accuracies("population") == tastes.population.tolist()
    published = opened.method.publish(opened.server, "w0")
    model = opened.method.infer(opened.job.trainer("w0", 3, "predict"), published, 2)
    orders = opened.trainers.score("w0", model, "test").orders.mean(1)
    assert accuracies("infer:2")[0] == float((orders > 0).mean())
    for taste, error in (
        ("w9", "no taste is called 'w9'"),
        ("infer:0", "at least 1"),
        ("infer:x", "at least 1"),
    ):
        with pytest.raises(ValueError, match=error):
            at_taste(opened, taste)
    shown = CliRunner().invoke(app, ["evaluate", str(finished), "--taste", "w1", "--json"])
    figures = json.loads(shown.output)["preference_accuracy"]["per_client"]
    assert figures == dict(zip(tastes.clients, tastes.accuracies[:, 1].tolist(), strict=True))


def test_a_stopped_run_goes_on_to_the_same_bytes(place, finished, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(tasty(place), path, callbacks=[toy.InterruptAt(5)])
    run(tasty(place), path, resume=True)
    assert left(path) == left(finished)


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_process_changes_no_bit(place, finished, tmp_path):
    run(tasty(place, engine={"threads": 1, "workers": 1}), tmp_path / "run")
    one, other = left(tmp_path / "run"), left(finished)
    assert one.keys() == other.keys()
    assert {n for n in one if n != "config.toml" and one[n] != other[n]} == set()


def test_the_second_visit_runs_no_language_model(place, finished, monkeypatch):
    """All that a visit and an evaluation read of it is on the disk."""
    opened = load_run(finished, data=True)
    model = opened.trainers.pair_trainer.model

    def refuse(*args, **kwargs):
        raise AssertionError("the language model was asked")

    monkeypatch.setattr(model.backbone.trunk, "forward", refuse)
    private, published = opened.private_state("w0"), opened.method.publish(opened.server, "w0")
    (exchange,) = opened.method.exchanges
    trainer = opened.job.trainer("w0", 3, "exchange", "train")
    upload, _ = exchange.work(trainer, private, exchange.send(opened.server, "w0", trainer.round))
    assert upload.tensors["model"].isfinite()
    opened.trainers.score("w0", opened.job.client_model("w0", private, published, 3), "test")


def test_labels_read_responses_as_the_training_did(finished, tmp_path):
    """The selector that labels completions gives the scores of an evaluation, under ``data.template`` too."""
    opened = load_run(finished, data=True)
    turns = [(Message("user", f"Question {number}?"),) for number in range(3)]
    pairs = [Record(turn, f"yes please {number}", "no thanks") for number, turn in enumerate(turns)]
    by_template = []
    for template in ("dialogue", "instruction"):
        data = opened.experiment.data.model_copy(update={"template": template})
        changed = replace(opened, experiment=opened.experiment.model_copy(update={"data": data}))
        selectors = selectors_of(changed)
        tokens = write_choices(
            tmp_path / template, opened.backbone.tokenizer, selectors.config, pairs, opened.backbone.window
        )
        encoder = response_encoder(changed.experiment, opened.backbone)
        trainer = PairTrainer(opened.backbone, tokens, responses=encoder)
        expected = trainer.score(opened.published_model, np.arange(3)).orders.mean(1)
        asked, (scores,) = selectors.scores(pairs)
        assert asked.tolist() == [0, 1, 2]
        assert scores.tolist() == pytest.approx(expected.tolist())
        by_template.append(scores)
    assert not np.allclose(*by_template)


def test_an_exported_client_is_the_model(finished, tmp_path):
    opened = load_run(finished, data=True)
    model = opened.model("w0")
    save_client(opened.backbone, model, tmp_path / "w0")
    again = load_client(tmp_path / "w0")
    assert torch.equal(again.flat, model.flat)
    assert not (tmp_path / "w0/adapter_model.safetensors").exists()


@pytest.fixture(scope="module")
def met(place, tmp_path_factory):
    """A run whose client w1 never takes part: its figures are by steps and by pairs."""
    path = tmp_path_factory.mktemp("met") / "run"
    method = {**METHOD, "name": "fedvpl", "lora": True}
    run(tasty(place, rounds=1, method=method, evaluate=UNSEEN), path)
    return load_run(path, data=True)


def accuracy(opened, client, model, split="test"):
    """Of a model on a client's pairs, from the scores of both orders."""
    orders = opened.trainers.score(client, model, split).orders.mean(1)
    return float((orders > 0).mean())


def test_newcomers_are_evaluated_by_pairs(place, met):
    """``unseen_pairs`` of a method without tastes change nothing."""
    summary = json.loads((met.record.path / "summary.json").read_text())
    assert list(summary["unseen_accuracy"]) == ["0", "1", "pairs/2", "pairs/8"]
    published = met.method.publish(met.server, "w1")
    model = met.method.infer(met.job.trainer("w1", 1, "predict"), published, 8)
    assert summary["unseen_accuracy"]["pairs/8"]["per_client"] == {"w1": accuracy(met, "w1", model)}
    job = replace(met.job, method=replace(met.method, infer=None))
    assert list(job.newcomer_figures) == ["0", "1"]


def test_newcomers_judge_by_a_taste_that_is_asked_for(met, monkeypatch):
    """One row, of the published selector with that z in it: what is inferred from all or three of w1's
    training pairs,
    another client's, the mean. The model that scores w1's pairs is this one, and the row has its accuracy."""
    published = met.published("w1")
    trainer = met.job.trainer("w1", 1, "predict")
    models = {
        "own": met.method.infer(trainer, published, trainer.size),
        "infer:3": met.method.infer(trainer, published, 3),
        "w0": met.model("w1").replace({Z: met.model("w0")[Z]}),
        "population": met.model("w1").replace(published.tensors[POPULATION]),
    }
    score, scored = met.trainers.score, []
    monkeypatch.setattr(met.trainers, "score", lambda *given: scored.append(given) or score(*given))
    for taste, model in models.items():
        scored.clear()
        evaluation = evaluate(at_taste(met, taste))
        own, shared = (tensors for client, tensors, _ in scored if client == "w1")
        assert own.equal(model)
        assert shared.equal(met.published_model)
        found = {name: of["per_client"] for name, of in evaluation.unseen.items()}
        assert found == {taste: {"w1": accuracy(met, "w1", model)}}
        assert evaluation.taste == taste
        assert list(evaluation.figures["preference_accuracy"]["per_client"]) == ["w0"]
        assert evaluation.notes == (NO_PAIR,)
    assert len({tuple(model[Z].tolist()) for model in models.values()}) == 4


def test_pairs_of_a_file_that_give_a_taste_are_not_judged(met, place):
    file = str(place / "train.jsonl")
    at_taste(met, f"infer:{file}")
    (known,) = evaluate(met, "train", ["w0"]).notes
    assert "inferred from training pairs" in known
    few, again = evaluate(at_taste(met, "infer:99"), "train", ["w0"]).notes
    assert ("99 pairs requested, client 'w0' has" in few, again) == (True, known)
    with pytest.raises(RunError, match="60 of the 60 pairs that the taste is inferred from are also"):
        at_taste(met, f"infer:{file}", split="train")


def test_at_one_taste_everybody_has_one_model(met, place):
    """Of a named taste there is one row, with the figures that each client had; by own tastes one each."""
    file = str(place / "test.jsonl")
    together = evaluate_file(at_taste(met, "w0"), file, everyone=True)
    assert together.pairs == {"everybody": 12}
    alone = evaluate_file(at_taste(met, "w0"), file, ["w0"], everyone=True)
    assert {name: of["mean"] for name, of in together.figures.items()} == {
        name: of["mean"] for name, of in alone.figures.items()
    }
    for taste in ("own", "infer:2"):
        assert list(evaluate_file(at_taste(met, taste), file, everyone=True).pairs) == ["w0", "w2"]


def test_methods_without_tastes_are_refused(place, tmp_path):
    """And the pairs of newcomers are part of a run's settings."""
    tables = experiment(place).tables()
    assert tasty(place).tables()["model"]["variational"]["latent"] == 4
    changed = Experiment.model_validate({**tables, "evaluate": {**tables["evaluate"], "unseen_pairs": [2]}})
    assert settings_digest(changed.tables()) != settings_digest(tables)
    run(experiment(place, rounds=1), tmp_path / "run")
    with pytest.raises(RunError, match="method feddpo has no latent tastes"):
        read_tastes(load_run(tmp_path / "run", data=True))
