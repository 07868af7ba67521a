"""Whole runs in which clients have LoRA ranks of their own."""

from __future__ import annotations

import json

import pytest
import torch

from finished import small_experiment
from prefed import Experiment, run
from prefed.config import ConfigError
from prefed.runs.evaluate import evaluate
from prefed.runs.loaded_run import load_run


def test_a_run_with_ranks_is_resumed_and_evaluated(place, tmp_path):
    """The LoRA of "left" has rank 1 of 2: it sends half as many numbers, and predicts with rank 1. The run
    in one go, and that resumed after a round, end alike."""
    tree = small_experiment(place, merge={"ranks": {"left": 1}})
    run(Experiment.model_validate(tree | {"rounds": 1}), tmp_path / "parts")
    for name in ("parts", "whole"):
        run(Experiment.model_validate(tree), tmp_path / name, resume=name == "parts")
    parts, whole = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("parts", "whole"))
    assert parts["preference_accuracy"] == whole["preference_accuracy"]
    assert parts["loss"] == whole["loss"]
    plain = run(Experiment.model_validate(small_experiment(place)), tmp_path / "plain").summary
    tensors = load_run(tmp_path / "whole", data=True).backbone.layout.size
    assert plain["bytes"]["up"] - whole["bytes"]["up"] == pytest.approx(2 * 4 * tensors / 2, rel=0.02)
    loaded = load_run(tmp_path / "whole", data=True)
    again = evaluate(loaded).figures["preference_accuracy"]
    assert again["per_client"] == whole["preference_accuracy"]["per_client"]
    ranks = {}
    for client in ("left", "right"):
        factors = {n: value for n, value in loaded.model(client).items() if n.endswith("/B")}
        ranks[client] = {int(torch.linalg.matrix_rank(value)) for value in factors.values()}
    assert ranks == {"left": {1}, "right": {2}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merge": {"ranks": {"lefty": 1}}}, "ranks: no client is called 'lefty'; did you mean 'left'"),
        ({"merge": {"ranks": {"left": 3}}}, "'left' has rank 3, above that of .model.lora., 2: raise the"),
        ({"merge": {"ranks": {"left": 1}, "lora": "ffa"}}, "whose frozen A has the rank of the model"),
        ({"merge": {"ranks": {"left": 1}, "rule": "krum"}}, "counts the zeros of the padding"),
        ({"merge": {"ranks": {"left": 1}}, "graph": {"name": "ring"}}, "ranks needs a server"),
    ],
)
def test_what_is_refused(place, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(Experiment(**small_experiment(place, **changes)), tmp_path / "run")
