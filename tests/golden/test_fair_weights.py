"""Weights by losses, on quadratics: against autograd, and against the centre of a circle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefed.core import Entry, Key, Layout, Privacy, Round, Tensors, Upload
from prefed.merge import Aggregator, MergeConfig
from prefed.merge.rules import afl
from prefed.methods import METHODS
from prefed.testing import Quadratic, Run, simulate

PLANE = Layout((Entry("lora/0/q/B", (1, 2), "lora", 0, "B"),))
STEP = {"optimizer": "sgd", "clip": 0, "weight_decay": 0, "local_steps": 1, "batch_size": 64}
CORNERS = {"a": ([0.0, 0.0], 8), "b": ([4.0, 0.0], 1), "c": ([2.0, 3.0], 1), "d": ([2.0, 1.0], 5)}
CLIENTS = {name: Quadratic.at(at, size=size) for name, (at, size) in CORNERS.items()}


def run(rounds: int, lr: float, privacy: Privacy | None = None, **merge: object) -> Run:
    """FedDPO, each client taking one step on all of its targets, from (1, 1); F_k is the loss there."""
    kind, start = METHODS["feddpo"], Tensors(PLANE, torch.ones(2, dtype=torch.float64))
    method = kind.build(kind.Settings(lr=lr, **STEP), PLANE, Aggregator(MergeConfig(**merge), PLANE, 1), 9)
    return simulate(method, CLIENTS, start, rounds, **({} if privacy is None else {"privacy": privacy}))


def moved(outcome: Run) -> np.ndarray:
    return outcome.server.tensors["model"].flat.numpy() - 1


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 5.0])
def test_a_round_of_qffl_descends_on_its_objective(q):
    """The step is −η ∇ Σ n_k F_k^(q+1) / (q + 1), by autograd, over Σ n_k F_k^q. q = 0 is FedAvg."""
    at = torch.ones(2, dtype=torch.float64, requires_grad=True)
    losses = torch.stack([(at - data.targets[0]).square().sum() / 2 for data in CLIENTS.values()])
    pairs = torch.tensor([float(data.size) for data in CLIENTS.values()])
    (slope,) = torch.autograd.grad((pairs * losses ** (q + 1)).sum() / (q + 1), at)
    step = -0.3 * slope / (pairs * losses.detach() ** q).sum()
    np.testing.assert_allclose(moved(run(1, 0.3, weights="qffl", q=q)), step.numpy(), rtol=1e-12)
    if q == 0:
        np.testing.assert_array_equal(moved(run(1, 0.3, weights="qffl", q=q)), moved(run(1, 0.3)))


def test_afl_rests_at_the_smallest_worst_loss():
    """The centre of the smallest circle around all targets: through (0, 0), (4, 0) and (2, 3), so at (2, y)
    with 4 + y² = (3 − y)², y = 5/6, and d inside. There λ_d = 0, and λ_a = λ_b, λ_c weight the corners to
    (2, 5/6): 3 λ_c = 5/6. The number of pairs does not matter."""
    outcome = run(150, 0.6, weights="afl", afl_lr=0.06)
    np.testing.assert_allclose(moved(outcome), [1, -1 / 6], atol=1e-3)
    mixture = outcome.server.values["mixture"]
    corner = 5 / 18
    expected = [(1 - corner) / 2, (1 - corner) / 2, corner, 0]
    np.testing.assert_allclose([mixture[name] for name in "abcd"], expected, atol=2e-3)
    mean = np.average([at for at, _ in CORNERS.values()], axis=0, weights=[8, 1, 1, 5])
    np.testing.assert_allclose(moved(run(20, 0.6)), mean - 1, atol=1e-6)


@pytest.mark.parametrize("loss", [1e3, 3e38])
def test_an_enormous_loss_gets_all_weight_and_not_more(loss):
    """λ_a + ηF_a exceeds the others by more than 1, so Π(λ + ηF) = (1, 0), also where 1 is below rounding."""
    uploads = [Upload("a", 1, {}, {"loss": loss}), Upload("b", 1, {}, {"loss": 0.7})]
    assert afl(None, uploads, Round(1, 9, Key(0), {"a": 1, "b": 1}), 0.1)[1] == {"a": 1.0, "b": 0.0}


def test_a_step_of_afl_projects_on_the_simplex():
    """With η = ½ and the loss 0.6 of b alone, λ + ηF = (0.8, 0.45, 0.05). Less 1/8 each and at least 0, that
    is (0.675, 0.325, 0), of sum 1. A cohort of c alone has a mean all the same."""
    now = Round(1, 9, Key(0), {"a": 9.0, "b": 1.0, "c": 1.0})
    before = {"a": 0.8, "b": 0.15, "c": 0.05}
    weights, after = afl(before, [Upload("b", 1, {}, {"loss": 0.6})], now, 0.5)
    assert weights == [0.15]
    assert after == pytest.approx({"a": 0.675, "b": 0.325, "c": 0.0})
    assert afl(after, [Upload("c", 1)], now, 0.5)[0] == [1.0]


def test_clients_without_a_loss_and_losses_below_zero():
    """Clients of under five pairs send none: b and c count with the mean of F_a = 1 and F_d = ½. Nobody sends
    one: the weights are the numbers of pairs."""
    outcome = run(1, 1.0, Privacy(minimum_pairs=5), weights="qffl", q=2.0)
    targets, weights = np.array([at for at, _ in CORNERS.values()]), [8, 0.75**2, 0.75**2, 5 / 4]
    np.testing.assert_allclose(moved(outcome), np.average(targets, axis=0, weights=weights) - 1, rtol=1e-12)
    quiet = run(1, 1.0, Privacy(minimum_pairs=9), weights="qffl", q=2.0)
    np.testing.assert_array_equal(moved(quiet), moved(run(1, 1.0)))
    rule = Aggregator(MergeConfig(weights="qffl"), PLANE, 1)
    start, losses = Tensors(PLANE, torch.zeros(2)), {"a": -3.0, "b": 2.0}
    uploads = [Upload(name, 1, {"model": start + loss}, {"loss": loss}) for name, loss in losses.items()]
    merged, _ = rule.merge(rule.init(start), uploads, Round(1, 9, Key(0), {"a": 1, "b": 1}))
    assert merged.tensors["model"].flat.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "merge", "message"),
    [
        ("scaffold", {}, "control variate is a mean with constant weights"),
        ("fedamp", {}, "use rule 'mean', weights 'samples' or 'uniform'"),
        ("fedsdg", {}, "weights 'afl' in .merge. cannot be combined with the weights of FedSDG"),
        ("decdpo", {}, "weights 'samples' or"),
        ("fedbiscuit", {}, "cannot be combined with weights 'afl'"),
        ("feddpo", {"rule": "multi_krum"}, "drops clients or weights"),
    ],
)
def test_what_has_weights_of_its_own_refuses(name, merge, message):
    kind = METHODS[name]
    with pytest.raises(ValueError, match=message):
        kind.build(kind.Settings(), PLANE, Aggregator(MergeConfig(weights="afl", **merge), PLANE, 1), 9)


def test_a_client_that_the_stored_weights_lack_is_named():
    now = Round(2, 9, Key(0), {"a": 1, "b": 1, "zoe": 1})
    with pytest.raises(ValueError, match=r"'afl': the server has no weight for 'zoe'; .*start a new run"):
        afl({"a": 0.5, "b": 0.5}, [Upload("a", 1), Upload("zoe", 1)], now, 0.1)
