"""Whole runs whose clients end with own models: what is shared, and what states contain."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import toy
from finished import logprobs, small_experiment, small_place
from prefed import Experiment, run
from prefed.core.wire import encode
from prefed.engines import Task, run_task
from prefed.runs.evaluate import evaluate, evaluate_file
from prefed.runs.loaded_run import load_run
from prefed.store import RunReader

CLIENTS = ("left", "right")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The small place, and finished runs: FedSDG in either way of joining its two LoRAs, and others."""
    folder = small_place(tmp_path_factory.mktemp("place"))
    for branch in ("products", "factors"):
        tree = small_experiment(folder, cohort={"size": 1}, rounds=1)
        tree["method"] |= {"name": "fedsdg", "branch": branch, "gate_lr": 0.5}
        run(Experiment.model_validate(tree), folder / branch)
    others = {"fedpdpo": {"lr": 0.05, "personal_lr": 0.05}, "fedala": {"weight_lr": 50.0}, "fedrep": {}}
    for name, settings in others.items():
        tree = small_experiment(folder)
        tree["method"] |= {"name": name, **settings}
        run(Experiment.model_validate(tree), folder / name)
    return folder


def summary_of(path):
    return json.loads((path / "summary.json").read_text())


def with_shared_alone(folder, opened):
    """Oracle: the plain base model with s B_g A_g added to its weights by hand."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    shared, scale = opened.server.tensors["model"], opened.backbone.scaling
    with torch.no_grad():
        for name in shared:
            _, block, module, factor = name.split("/")
            if factor == "A":
                product = shared[name.removesuffix("A") + "B"] @ shared[name]
                # GPT-2 keeps its weights as inputs × outputs.
                weight = model.get_submodule(f"transformer.h.{block}.{module}").weight
                weight.add_(scale * product.T)
    return model


@pytest.mark.parametrize("branch", ["products", "factors"])
def test_the_shared_model_of_fedsdg_is_the_base_with_the_shared_lora_alone(place, branch):
    """W0 + s B_g A_g and nothing else: neither the small draw that personal LoRAs start from, nor in factor
    space (B_g + m B_p)(A_g + m A_p) the cross term m B_g A_p, which stays where B_p alone is 0."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    opened = load_run(place / branch, data=True)
    rows = opened.trainers.dataset.clients["left"].test
    alone = with_shared_alone(place, opened)
    want = logprobs(alone, opened.trainers.dataset.tokens, rows)
    base = AutoModelForCausalLM.from_pretrained(place / "model")
    adapted = PeftModel.from_pretrained(base, place / branch / "adapters/shared").eval()
    tolerance = 1e-6 * np.abs(want).max()
    for values in (
        opened.trainers.pair_trainer.score(opened.published_model, rows).policy,
        opened.trainers.pair_trainer.score(opened.published_model, rows).policy,
        logprobs(adapted, opened.trainers.dataset.tokens, rows),
    ):
        assert np.abs(values - want).max() < tolerance
    start = opened.backbone.initial.replace(opened.server.tensors["model"])
    assert np.abs(opened.trainers.pair_trainer.score(start, rows).policy - want).max() > 20 * tolerance


@pytest.mark.parametrize("branch", ["products", "factors"])
def test_the_run_evaluates_that_shared_model(place, branch, monkeypatch):
    """An evaluation scores a client's own model and then the shared one, tensor for tensor that above."""
    opened, scored = load_run(place / branch, data=True), []
    score = opened.trainers.score

    def spy(client, tensors, split):
        scored.append(tensors)
        return score(client, tensors, split)

    monkeypatch.setattr(opened.trainers, "score", spy)
    message = encode(opened.method.publish(opened.server, "left"))
    result = run_task(opened.job, Task("evaluate", "left", 1, "", message), toy.MemoryStates())
    own, shared = scored
    assert shared.equal(opened.published_model)
    personal = [name for name in own if name.startswith("personal_lora/")]
    assert all(own[name].any() and not shared[name].any() for name in personal)
    summary = json.loads((place / branch / "summary.json").read_text())
    assert json.loads(result.message)["shared_accuracy"] == summary["shared_accuracy"]["per_client"]["left"]


REWARDED = ("combined_accuracy", "explicit_accuracy", "agreement")


def test_a_reward_heads_figures_come_from_its_scores(place):
    """From each client's scores and the s that it keeps; w_r is 1.5 in the last of the rounds."""
    opened = load_run(place / "fedpdpo", data=True)
    summary = summary_of(place / "fedpdpo")
    explicit = []
    for client in CLIENTS:
        data = opened.trainers.dataset.clients[client].test
        scores = opened.trainers.pair_trainer.score(opened.model(client), data)
        implicit = (scores.policy - scores.reference).astype(np.float64) @ [1, -1]
        given = scores.rewards.astype(np.float64) @ [1, -1]
        scale = opened.reader.client(client).values["scale"]
        assert scale != 1
        combined = implicit + 1.5 * scale * given
        for name, right in zip(REWARDED, (combined > 0, given > 0, implicit * given > 0), strict=True):
            assert summary[name]["per_client"][client] == right.mean()
        explicit.append(given.mean())
    assert summary["explicit_margin"] == pytest.approx(np.mean(explicit), rel=1e-6)
    last = json.loads((place / "fedpdpo/rounds.jsonl").read_text().splitlines()[-1])
    for name in (*REWARDED, "explicit_margin"):
        assert last["evaluation"][name] == summary[name]
    without = summary_of(place / "products")
    assert not {*REWARDED, "explicit_margin"} & without.keys()


def test_evaluating_again_and_on_other_pairs_gives_the_same(place):
    opened = load_run(place / "fedpdpo", data=True)
    summary = summary_of(place / "fedpdpo")
    for evaluation in (evaluate(opened), evaluate_file(opened, str(place / "test.jsonl"))):
        for name in REWARDED:
            assert evaluation.figures[name] == summary[name]
        assert evaluation.figures["explicit_margin"]["mean"] == pytest.approx(summary["explicit_margin"])
    # Where the head's margin outweighs all, with its sign turned, the sum is right where the head is wrong.
    turned = replace(opened.method, reward_weight=lambda private, number: -1e9)
    opened = replace(opened, job=replace(opened.job, method=turned))
    for evaluation in (evaluate(opened), evaluate_file(opened, str(place / "test.jsonl"))):
        for client in CLIENTS:
            combined, head = (evaluation.figures[name]["per_client"][client] for name in REWARDED[:2])
            assert combined == 1 - head


@pytest.mark.parametrize("branch", ["products", "factors"])
def test_the_summary_has_the_gates_that_private_states_hold(place, branch):
    """m = 1 / (1 + e^−a) of each block's logit a on the client's disk; who never took part has none. Every
    digit gives the logit back, so the summary has two, and the whole is its owner's alone to read."""
    (record,) = RunReader(place / branch).rounds()
    (client,) = record["cohort"]
    own = RunReader(place / branch).client(client).tensors["personal"]
    logits = {name.split("/")[1]: float(own[name]) for name in own if name.startswith("gate/")}
    assert sorted(logits) == ["0", "1"]
    assert all(abs(a) > 1e-3 for a in logits.values())
    gates = {block: 1 / (1 + math.exp(-a)) for block, a in logits.items()}
    expected = {"gate": {client: {block: round(m, 2) for block, m in gates.items()}}}
    assert summary_of(place / branch)["personal"] == expected
    whole = place / branch / "checkpoint/personal.json"
    assert json.loads(whole.read_text()) == {"gate": {client: pytest.approx(gates)}}
    assert whole.stat().st_mode & 0o777 == 0o600


def test_the_summary_has_fedalas_weights(place):
    """One weight for all of a block's factors, which is what each of its elements has."""
    exact = json.loads((place / "fedala/checkpoint/personal.json").read_text())["weight"]
    assert sorted(exact) == list(CLIENTS)
    shown = {client: {b: round(w, 2) for b, w in blocks.items()} for client, blocks in exact.items()}
    assert summary_of(place / "fedala")["personal"]["weight"] == shown
    seen = RunReader(place / "fedala")
    for client in CLIENTS:
        weights = seen.client(client).tensors["weights"]
        for name in weights:
            block = name.split("/")[1]
            assert torch.equal(weights[name], torch.full_like(weights[name], exact[client][block]))
    assert {value for blocks in exact.values() for value in blocks.values()} != {1.0}


def test_methods_without_figures_of_blocks_report_none(place):
    assert "personal" not in summary_of(place / "fedrep")
    assert not (place / "fedrep/checkpoint/personal.json").exists()
