"""FedDPA by hand; ``test_whole_runs.py`` has its rounds in plain torch."""

from __future__ import annotations

import math

import numpy as np
import torch

from prefed.core import Entry, Layout, Tensors
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.testing import Quadratic, simulate

ALPHA, RATE, STEPS = 0.25, 0.1, 2
PLAIN = {
    "optimizer": "sgd",
    "clip": 0,
    "weight_decay": 0,
    "lr": RATE,
    "personal_lr": 2 * RATE,
    "local_steps": STEPS,
    "batch_size": 8,
    "accumulate": 1,
    "schedule": "constant",
    "local_weight": ALPHA,
}
TWO = Layout(
    (
        Entry("lora/0/q/B", (1, 2), "lora", 0, "B"),
        Entry("personal_lora/0/q/B", (1, 2), "personal_lora", 0, "B"),
        Entry("gate/0", (1,), "gate", 0),
    )
)


def build(layout: Layout, **settings: object):
    aggregator = Aggregator(MergeConfig(), layout, 2.0)
    return METHODS["feddpa"].build(METHODS["feddpa"].Settings(**PLAIN | settings), layout, aggregator, 9)


def test_a_round_by_hand():
    """H = I, one step from θ_g = (1, 1); the target of θ_g is (2, 0), that of the local adapter (3, 0).

    θ_g = (1, 1) + 0.1 · (1, −1) = (1.1, 0.9). The local adapter starts from 0, whatever the model's start is:
    θ_l = 0.2 · (3, 0) = (0.6, 0). A client predicts with ¾ θ_g, θ_l and a gate of σ(a) = ¼; one that was
    never asked with θ_g and no local adapter.
    """
    start = Tensors(TWO, torch.tensor([1.0, 1, 5, 5, 0], dtype=torch.float64))
    clients = {"a": Quadratic.at([2.0, 0, 3, 0, 4])}
    method = build(TWO, local_steps=1)
    run = simulate(method, clients, start, 1)
    np.testing.assert_allclose(run.server.tensors["model"].flat, [1.1, 0.9], rtol=1e-12)
    mine = run.models(method, clients, start)["a"]
    np.testing.assert_allclose(mine.flat, [0.825, 0.675, 0.6, 0, -math.log(3)], rtol=1e-12, atol=1e-15)
    new = simulate(method, clients, start, 0).models(method, clients, start)["a"]
    assert new.flat[:4].tolist() == [1, 1, 0, 0]


def test_the_shared_model_is_that_of_feddpo():
    """Bit for bit after three rounds: FedDPO of the global adapter only, towards the same targets."""
    one = Layout(TWO.entries[:1])
    targets = {"a": [2.0, 0, 3, 0, 4], "b": [-1.0, 5, 1, 7, 2]}
    kind, aggregator = METHODS["feddpo"], Aggregator(MergeConfig(), one, 2.0)
    plain = {name: value for name, value in PLAIN.items() if name in kind.Settings.model_fields}
    feddpo = kind.build(kind.Settings(**plain), one, aggregator, 9)
    finished = []
    for method, layout in ((build(TWO), TWO), (feddpo, one)):
        clients = {c: Quadratic.at(t[: layout.size], size=k + 1) for k, (c, t) in enumerate(targets.items())}
        finished.append(simulate(method, clients, Tensors(layout, torch.ones(layout.size).double()), 3))
    ours, theirs = (run.server.tensors["model"] for run in finished)
    assert ours.equal(theirs)
    assert {*finished[0].uploads[0].tensors["model"]} == {*one.names}
