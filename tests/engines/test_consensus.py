"""The consensus error at which runs without a server settle, compared with section 3's four formulas."""

from __future__ import annotations

import json
from itertools import permutations
from statistics import fmean

import numpy as np
import pytest
import torch

import toy
from prefed.core import Entry, Key, Layout, Tensors
from prefed.core.wire import encode
from prefed.engines import Job, NeighbourRounds
from prefed.engines.config import EvaluateConfig
from prefed.merge import Aggregator, MergeConfig
from prefed.merge.config import GraphConfig
from prefed.merge.mixing_matrices import consensus_factors
from prefed.methods import METHODS
from prefed.store import RunWriter
from prefed.testing import Quadratic, QuadraticTrainer
from prefed.train.metrics import PairScores

NAMES = ("a", "b", "c", "d", "e")
GRAPHS = ("path", "ring", "star", "complete")


class Five:
    """Five clients on quadratics ½‖φ − a‖², whose pairs are the rows a of ``targets[client]``."""

    def __init__(self, targets):
        self.data = {name: Quadratic(torch.from_numpy(t)) for name, t in zip(NAMES, targets, strict=True)}
        layout = Layout((Entry("head", (targets[0].shape[1],), "head"),))
        self.initial = Tensors(layout, torch.zeros(layout.size, dtype=torch.float64))
        self.clients = {name: toy.Sizes(data.size, 0, data.size) for name, data in self.data.items()}
        self.fingerprint = {"data": "five", "model": "quadratic"}

    def trainer(self, client, now, key, ownership):
        return QuadraticTrainer(client, self.data[client], now, key, ownership, self.initial)

    def score(self, client, tensors, split):
        distances = (tensors.flat - self.data[client].targets).norm(dim=1)
        both = torch.stack([-distances, torch.zeros_like(distances)], 1).numpy()
        return PairScores(both, both * 0, np.full(both.shape, 1))


def resting(path, graph, targets, rate, rounds):
    """The consensus error before and after the mix at the end of a DecDPO run, mean of five rounds."""
    trainers, kind = Five(targets), METHODS["decdpo"]
    chosen = {"optimizer": "sgd", "weight_decay": 0.0, "clip": 0.0, "local_steps": 1, "batch_size": 1}
    layout = trainers.initial.layout
    method = kind.build(
        kind.Settings(lr=rate, **chosen), layout, Aggregator(MergeConfig(), layout, 1.0), rounds
    )
    job = Job(trainers, method, 3, rounds, evaluate=EvaluateConfig(every=0), graph=GraphConfig(name=graph))
    with RunWriter(path) as writer, toy.InProcess(job, writer.states) as backend:
        writer.begin(encode(method.init_server(trainers.initial)), trainers.fingerprint)
        NeighbourRounds(job, writer, backend, toy.Callback()).run()
    got = [json.loads(text) for text in (path / "rounds.jsonl").read_text().splitlines()][-5:]
    errors = (fmean(record[f"consensus_{when}"] for record in got) for when in ("before", "after"))
    return *errors, consensus_factors(job.topology.matrix(1))


@pytest.mark.rare
@pytest.mark.parametrize("graph", GRAPHS)
def test_clients_that_differ(tmp_path, graph):
    """Each number of the model is a placement of its own: number p of client k has its least loss at
    b_{p(k)}. So one run has the mean over all 120 placements. e = η² mean (b − b̄)²/4 · Σ, for small η."""
    optima, rate = np.array([3.0, -1.0, 0.5, -4.0, 1.5]), 1e-4
    placed = np.array(list(permutations(optima)))
    before, after, known = resting(tmp_path / "run", graph, placed.T[:, None], rate, 65)
    factor = len(placed) * rate**2 * optima.var() / 4
    assert before / factor == pytest.approx(known.heterogeneity_before, rel=5e-3)
    assert after / factor == pytest.approx(known.heterogeneity_after, rel=5e-3, abs=1e-9)


@pytest.mark.rare
@pytest.mark.parametrize("graph", GRAPHS)
def test_gradients_that_are_noisy(tmp_path, graph):
    """All clients have their least loss at 0, and a batch of one pair of ±1 has a gradient of variance 1 in
    each of 2,000 numbers. e = η²/5 · Σ for each of them; 2,000 draws or more: a standard error of 2%."""
    rate, numbers = 1e-3, 2000
    signs = Key(5).numpy().choice([-1.0, 1.0], (5, 16, numbers))
    before, after, known = resting(
        tmp_path / "run", graph, [*np.concatenate([signs, -signs], axis=1)], rate, 35
    )
    factor = numbers * rate**2 / 5
    assert before / factor == pytest.approx(known.noise_before, rel=0.07)
    assert after / factor == pytest.approx(known.noise_after, rel=0.07, abs=1e-9)
