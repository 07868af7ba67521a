"""FedDPA by hand; ``test_whole_runs.py`` has its rounds in plain torch."""

from __future__ import annotations

import math

import numpy as np
import torch

from prefed.core import Entry, Layout, Tensors
from prefed.testing import Quadratic, simulate
from quadratics import make

OWN = {"lr": 0.1, "personal_lr": 0.2, "local_weight": 0.25}
TWO = Layout(
    (
        Entry("lora/0/q/B", (1, 2), "lora", 0, "B"),
        Entry("personal_lora/0/q/B", (1, 2), "personal_lora", 0, "B"),
        Entry("gate/0", (1,), "gate", 0),
    )
)


def test_a_round_by_hand():
    """H = I, one step from θ_g = (1, 1); the target of θ_g is (2, 0), that of the local adapter (3, 0).

    θ_g = (1, 1) + 0.1 · (1, −1) = (1.1, 0.9). The local adapter starts from 0, whatever the model's start is:
    θ_l = 0.2 · (3, 0) = (0.6, 0). A client predicts with ¾ θ_g, θ_l and a gate of σ(a) = ¼; one that was
    never asked with θ_g and no local adapter.
    """
    start = Tensors(TWO, torch.tensor([1.0, 1, 5, 5, 0], dtype=torch.float64))
    clients = {"a": Quadratic.at([2.0, 0, 3, 0, 4])}
    method = make("feddpa", TWO, local_steps=1, **OWN)
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
    finished = []
    for method, layout in ((make("feddpa", TWO, **OWN), TWO), (make("feddpo", one, lr=0.1), one)):
        clients = {c: Quadratic.at(t[: layout.size], size=k + 1) for k, (c, t) in enumerate(targets.items())}
        finished.append(simulate(method, clients, Tensors(layout, torch.ones(layout.size).double()), 3))
    ours, theirs = (run.server.tensors["model"] for run in finished)
    assert ours.equal(theirs)
    assert {*finished[0].uploads[0].tensors["model"]} == {*one.names}
