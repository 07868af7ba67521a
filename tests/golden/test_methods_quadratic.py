"""Methods on quadratics, against closed forms.

Client i has the loss ½ (φ − a_i)ᵀ H_i (φ − a_i). A step of gradient descent maps φ − a_i to
(I − η H_i)(φ − a_i), so E steps from φ_g end at φ_i = a_i + M_i (φ_g − a_i) with M_i = (I − η H_i)^E.
"""

import numpy as np
import pytest
import torch

from prefed.core import Entry, Key, Layout, Round, Tensors, Upload
from prefed.merge import BadUpload, MergeConfig
from prefed.testing import Quadratic, simulate
from quadratics import RATE, STEPS, make, model, problem, weighted


def line(size: int) -> Layout:
    return Layout((Entry("lora/0/q/B", (1, size), "lora", 0, "B"),))


def local_maps(curvatures: list[np.ndarray]) -> list[np.ndarray]:
    eye = np.eye(len(curvatures[0]))
    return [np.linalg.matrix_power(eye - RATE * h, STEPS) for h in curvatures]


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_feddpo_follows_the_closed_form_of_federated_averaging(rounds):
    """One round is φ ← Σ p_i (a_i + M_i (φ − a_i)); with M = Σ p_i M_i and the fixed point
    φ* = (I − M)⁻¹ Σ p_i (I − M_i) a_i, after t rounds φ = φ* + Mᵗ (φ⁰ − φ*)."""
    curvatures, optima, clients, start = problem()
    maps = local_maps(curvatures)
    eye, mean = np.eye(3), weighted(maps)
    fixed = np.linalg.solve(eye - mean, weighted([(eye - m) @ a for m, a in zip(maps, optima, strict=True)]))
    expected = fixed + np.linalg.matrix_power(mean, rounds) @ (start.flat.numpy() - fixed)
    run = simulate(make("feddpo", start.layout), clients, start, rounds)
    np.testing.assert_allclose(model(run), expected, rtol=1e-12, atol=1e-12)


def test_uniform_weights_replace_the_sizes():
    """With one round from φ⁰: (1/N) Σ (a_i + M_i (φ⁰ − a_i))."""
    curvatures, optima, clients, start = problem()
    ends = [a + m @ (start.flat.numpy() - a) for m, a in zip(local_maps(curvatures), optima, strict=True)]
    run = simulate(make("feddpo", start.layout, MergeConfig(weights="uniform")), clients, start, 1)
    np.testing.assert_allclose(model(run), np.mean(ends, axis=0), rtol=1e-12)


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_fedprox_comes_to_its_fixed_point(mu):
    """With the pull, a client's gradient is (H_i + μ)(φ − b_i), b_i = (H_i + μ)⁻¹ (H_i a_i + μ φ_g), so E
    steps from φ_g end at b_i + N_i (φ_g − b_i), N_i = (I − η (H_i + μ))^E. That is affine in φ_g, with
    slope S_i = N_i + μ (I − N_i)(H_i + μ)⁻¹ and offset t_i = (I − N_i)(H_i + μ)⁻¹ H_i a_i, and the fixed
    point solves (I − Σ p_i S_i) φ = Σ p_i t_i."""
    curvatures, optima, clients, start = problem()
    eye, slopes, offsets = np.eye(3), [], []
    for h, a in zip(curvatures, optima, strict=True):
        pulled = np.linalg.inv(h + mu * eye)
        n = np.linalg.matrix_power(eye - RATE * (h + mu * eye), STEPS)
        slopes.append(n + mu * (eye - n) @ pulled)
        offsets.append((eye - n) @ pulled @ h @ a)
    fixed = np.linalg.solve(eye - weighted(slopes), weighted(offsets))
    run = simulate(make("fedprox", start.layout, mu=mu), clients, start, 100)
    np.testing.assert_allclose(model(run), fixed, rtol=1e-9)


def test_fedprox_with_long_visits_solves_its_proximal_problem():
    """As E → ∞ a visit ends at b_i, and the fixed point solves Σ p_i (H_i + μ)⁻¹ H_i (φ − a_i) = 0."""
    curvatures, optima, clients, start = problem()
    weights = [np.linalg.inv(h + np.eye(3)) @ h for h in curvatures]
    fixed = np.linalg.solve(
        weighted(weights), weighted([w @ a for w, a in zip(weights, optima, strict=True)])
    )
    run = simulate(make("fedprox", start.layout, mu=1.0, local_steps=60), clients, start, 25)
    np.testing.assert_allclose(model(run), fixed, rtol=1e-6)


def optimum(curvatures: list[np.ndarray], optima: list[np.ndarray], mean=weighted) -> np.ndarray:
    """Where the gradient Σ p_i H_i (φ − a_i) is zero."""
    return np.linalg.solve(mean(curvatures), mean([h @ a for h, a in zip(curvatures, optima, strict=True)]))


def test_scaffold_reaches_the_optimum_that_averaging_misses():
    curvatures, optima, clients, start = problem()
    best = optimum(curvatures, optima)
    averaged = model(simulate(make("feddpo", start.layout), clients, start, 30))
    corrected = model(simulate(make("scaffold", start.layout), clients, start, 120))
    np.testing.assert_allclose(corrected, best, rtol=1e-9)
    assert np.linalg.norm(averaged - best) > 0.05


def test_scaffold_weights_its_variates_as_it_weights_the_mean():
    """With uniform weights the optimum is that of the plain mean of the losses."""
    curvatures, optima, clients, start = problem()
    best = optimum(curvatures, optima, lambda values: np.mean(values, axis=0))
    assert np.linalg.norm(best - optimum(curvatures, optima)) > 0.1
    method = make("scaffold", start.layout, MergeConfig(weights="uniform"))
    np.testing.assert_allclose(model(simulate(method, clients, start, 120)), best, rtol=1e-9)


def test_scaffold_reaches_the_optimum_with_partial_participation():
    curvatures, optima, clients, start = problem()
    best = optimum(curvatures, optima, lambda values: np.mean(values, axis=0))
    method = make("scaffold", start.layout, MergeConfig(weights="uniform"))
    run = simulate(method, clients, start, 250, cohort=2)
    np.testing.assert_allclose(model(run), best, rtol=1e-6)


def test_first_two_rounds_of_scaffold_by_hand():
    """One number, φ⁰ = 0, K = 2, η = ½; client 1 has H = 1, a = 4 and client 2 has H = ½, a = 8.

    Round 1 (all variates 0).  Client 1: gradients −4, −2, so φ: 0, 2, 3; c_1 = (0 − 3) / (2 · ½) = −3.
    Client 2: gradients −4, −3, so φ: 0, 2, 3.5; c_2 = −3.5.  Server: φ = 3.25, c = −3.25.

    Round 2.  Client 1, correction c − c_1 = −0.25: gradients −0.75 − 0.25 = −1 and −0.25 − 0.25 = −0.5,
    so φ: 3.25, 3.75, 4; c_1 = −3 + 3.25 + (3.25 − 4) = −0.5.  Client 2, correction 0.25: gradients
    −2.375 + 0.25 = −2.125 and −1.84375 + 0.25 = −1.59375, so φ: 3.25, 4.3125, 5.109375;
    c_2 = −3.5 + 3.25 + (3.25 − 5.109375) = −2.109375.
    Server: φ = (4 + 5.109375) / 2 = 4.5546875, c = −3.25 + ½ (2.5 + 1.390625) = −1.3046875.
    """
    clients = {"1": Quadratic.at([4.0], [1.0]), "2": Quadratic.at([8.0], [0.5])}
    start = Tensors.zeros(line(1), torch.float64)
    method = make("scaffold", start.layout, lr=0.5, local_steps=2)
    run = simulate(method, clients, start, 1)
    assert (model(run).item(), run.server.tensors["control"].flat.item()) == (3.25, -3.25)
    assert [run.private[c].tensors["control"].flat.item() for c in "12"] == [-3.0, -3.5]
    assert [upload.tensors["control"].flat.item() for upload in run.uploads] == [-3.0, -3.5]
    run = simulate(method, clients, start, 2, run=run)
    assert (model(run).item(), run.server.tensors["control"].flat.item()) == (4.5546875, -1.3046875)
    assert [run.private[c].tensors["control"].flat.item() for c in "12"] == [-0.5, -2.109375]


def test_scaffolds_variate_is_the_gradient_whatever_the_rate():
    """K = 1: φ_i = φ − η_t (g_i − c_i + c), so c_i − c + (φ − φ_i) / η_t is g_i = H_i (φ − a_i)."""
    curvatures, optima, clients, start = problem()
    method = make("scaffold", start.layout, local_steps=1, schedule="cosine", lr_min=0.01)
    before = simulate(method, clients, start, 29)
    received = model(before)
    run = simulate(method, clients, start, 30, run=before)
    for client, h, a in zip(clients, curvatures, optima, strict=True):
        variate = run.private[client].tensors["control"].flat.numpy()
        np.testing.assert_allclose(variate, h @ (received - a), rtol=1e-9, atol=1e-12)


def test_training_alone_ends_at_each_clients_own_optimum():
    """After t visits of E steps, φ_i = a_i + M_iᵗ (φ⁰ − a_i); the others do not matter."""
    curvatures, optima, clients, start = problem()
    method = make("local", start.layout)
    models = simulate(method, clients, start, 3).models(method, clients, start)
    for client, h, a in zip(clients, curvatures, optima, strict=True):
        alone = np.linalg.matrix_power(np.eye(3) - RATE * h, 3 * STEPS)
        expected = a + alone @ (start.flat.numpy() - a)
        np.testing.assert_allclose(models[client].flat.numpy(), expected, rtol=1e-12)


def test_centralised_training_descends_on_the_pool():
    """Equal curvatures I: the pooled loss has its optimum at the mean ā of all targets, and t rounds of E
    full-batch steps end at ā + (1 − η)^(tE) (φ⁰ − ā)."""
    clients = {"a": Quadratic.at([1.0, 2.0], size=1), "b": Quadratic.at([5.0, -2.0], size=3)}
    start = Tensors.zeros(line(2), torch.float64)
    run = simulate(make("centralized", start.layout), clients, start, 3)
    centre = np.array([4.0, -1.0])
    np.testing.assert_allclose(model(run), centre - (1 - RATE) ** (3 * STEPS) * centre, rtol=1e-12)
    assert [upload.client for upload in run.uploads] == ["pooled"] * 3


def test_a_step_of_scaffolds_variate_is_measured_as_a_step():
    """After three rounds c is of length 0.38. Two clients' variates moved by 1e-6, a third one's by 100: that
    is 1e8 times as far, though no more than 260 times as long as c, from which a place would be measured."""
    _, _, clients, start = problem()
    method = make("scaffold", start.layout)
    server = simulate(method, clients, start, 3).server
    assert server.tensors["control"].norm() == pytest.approx(0.384, abs=1e-3)
    one = Tensors(start.layout, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    uploads = [
        Upload(name, 1.0, {"model": server.tensors["model"], "control": one * size}, {"loss": 1.0}, 4)
        for name, size in (("c0", 1e-6), ("c1", 1e-6), ("c2", 100.0))
    ]
    with pytest.raises(BadUpload, match=r"client 'c2'.*'control' has length 100, 1e\+08 times"):
        method.exchanges[0].merge(server, uploads, Round(4, 50, Key(0), dict.fromkeys(clients, 1.0)))
