"""FedBis and FedBiscuit on quadratics, against a plain account of algorithm 1 in numpy.

Client i has the loss ½ (φ − a_i)ᵀ H_i (φ − a_i), which it also reports for the grouping. E steps of gradient
descent from φ end at a_i + (I − η H_i)^E (φ − a_i).
"""

import itertools

import numpy as np
import pytest
import torch

from prefed.core import Entry, Key, Layout, Method, Tensors
from prefed.merge import Aggregator, MergeConfig
from prefed.methods import METHODS
from prefed.testing import Quadratic, Run, simulate

STEPS, RATE = 3, 0.25
PLAIN = {"optimizer": "sgd", "clip": 0, "weight_decay": 0, "lr": RATE, "local_steps": STEPS, "batch_size": 64}
LAYOUT = Layout((Entry("lora/0/q/B", (1, 3), "lora", 0, "B"),))
SIZES = (1, 4, 2, 6, 3, 1, 5)
TASTES = np.array([[1.0, 0, 0]] * 3 + [[0, 1.0, 0]] * 4)


def make(name: str, **settings: object) -> Method:
    aggregator = Aggregator(MergeConfig(), LAYOUT, 1.0)
    return METHODS[name].build(METHODS[name].Settings(**PLAIN, **settings), LAYOUT, aggregator, 50)


def problem() -> tuple[dict[str, Quadratic], list[np.ndarray], list[np.ndarray], Tensors]:
    """Seven clients of two tastes, of different sizes and curvatures."""
    draw = np.random.default_rng(3)
    clients, optima, curvatures = {}, [], []
    for number, (size, taste) in enumerate(zip(SIZES, TASTES, strict=True)):
        optima.append(taste + 0.2 * draw.normal(size=3))
        curvatures.append(np.diag(draw.uniform(0.5, 1.5, 3)))
        clients[f"c{number}"] = Quadratic.at(list(optima[-1]), list(np.diag(curvatures[-1])), size)
    return clients, optima, curvatures, Tensors(LAYOUT, torch.from_numpy(0.1 * draw.normal(size=3)))


def cohort(number: int, size: int, seed: int = 0) -> list[int]:
    names = [f"c{k}" for k in range(len(SIZES))]
    draw = Key(seed).at("round", number).at("cohort").numpy().choice(names, size, replace=False)
    return sorted(names.index(name) for name in draw)


def brute_force(losses: np.ndarray) -> tuple[int, ...]:
    """The balanced assignment to two clusters with the least sum of losses."""
    choices = [c for c in itertools.product((0, 1), repeat=len(losses)) if sum(c) in (3, 4)]
    return min(choices, key=lambda choice: losses[np.arange(len(losses)), choice].sum())


def algorithm_1(
    mean: str, rounds: int, size: int, warm: int, every: int
) -> tuple[list[np.ndarray], list[tuple]]:
    """The two selectors after the last round, and the clusters of each grouping."""
    _, optima, curvatures, start = problem()
    maps = [np.linalg.matrix_power(np.eye(3) - RATE * h, STEPS) for h in curvatures]
    phi, shares, groupings = [start.flat.numpy().copy() for _ in range(2)], np.array(SIZES) / sum(SIZES), []
    for number in range(1, rounds + 1):
        if number <= 2 * warm:
            belongs = [(number - 1) // warm] * len(SIZES)
        elif (number - 2 * warm - 1) % every == 0:
            away = [[p - a for p in phi] for a in optima]
            rows = zip(away, curvatures, strict=True)
            losses = np.array([[min(d @ h @ d / 2, 10) for d in row] for row, h in rows])
            belongs = list(brute_force(losses))
            groupings.append(tuple(belongs))
        for u in (0, 1):
            own = [i for i in cohort(number, size) if belongs[i] == u]
            if not own:
                continue
            new = {i: optima[i] + maps[i] @ (phi[u] - optima[i]) for i in own}
            if mean == "normalised" or number <= 2 * warm:
                phi[u] = sum(shares[i] * new[i] for i in own) / sum(shares[i] for i in own)
            else:
                phi[u] = (1 - sum(shares[i] for i in own)) * phi[u] + sum(shares[i] * new[i] for i in own)
    return phi, groupings


def selectors(run: Run) -> list[np.ndarray]:
    return [run.server.tensors[f"selector-{u}"].flat.numpy() for u in (0, 1)]


@pytest.mark.sample
@pytest.mark.parametrize("mean", ["eq6", "normalised"])
@pytest.mark.parametrize(("rounds", "size"), [(2, 3), (5, 3), (11, 3), (9, 7)])
def test_fedbiscuit_is_algorithm_1(mean, rounds, size):
    """Warm-up of two rounds each, groupings before rounds 5, 8 and 11, and between them the same clusters."""
    clients, _, _, start = problem()
    method = make("fedbiscuit", selectors=2, warmup_rounds=2, regroup_every=3, cluster_mean=mean)
    run = simulate(method, clients, start, rounds, cohort=size)
    phi, groupings = algorithm_1(mean, rounds, size, warm=2, every=3)
    for ours, plain in zip(selectors(run), phi, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-12)
    if groupings:
        assert tuple(run.server.values["clusters"].values()) == groupings[-1]


@pytest.mark.parametrize("balance", ["greedy", "exact"])
def test_clusters_find_the_two_tastes(balance):
    """Three clients want one thing and four another, and cohorts are small."""
    clients, _, _, start = problem()
    settings = {"selectors": 2, "warmup_rounds": 1, "regroup_every": 2, "cluster_mean": "normalised"}
    run = simulate(make("fedbiscuit", balance=balance, **settings), clients, start, 16, cohort=3)
    members = run.server.values["clusters"]
    assert len({members[f"c{k}"] for k in range(3)}) == len({members[f"c{k}"] for k in range(3, 7)}) == 1
    assert members["c0"] != members["c6"]


def test_equation_6_takes_shares_of_pairs_not_of_clients():
    """The known mistake: 1/M in place of p_m. The cohort is one client with 6 of 22 pairs. With φ at 0
    and its own φ_i at x, the selector goes to 6/22 x; the mistake would be x/7."""
    clients, *_ = problem()
    start = Tensors(LAYOUT, torch.zeros(3, dtype=torch.float64))
    method = make("fedbiscuit", selectors=1, warmup_rounds=0)
    seed = next(s for s in range(50) if cohort(1, 1, s) == [3])
    run = simulate(method, clients, start, 1, cohort=1, seed=seed)
    (sent,) = (upload.tensors["model"].flat for upload in run.uploads if upload.tensors)
    torch.testing.assert_close(run.server.tensors["selector-0"].flat, sent * 6 / 22, rtol=0, atol=1e-15)


def test_equation_8_is_the_papers_sum():
    """(M/A) Σ p_m φ_m over the cohort, p_m = n_m / Σ n: with unequal sizes its weights are not 1 in sum."""
    clients, _, _, start = problem()
    run = simulate(make("fedbis", mean="eq8"), clients, start, 1, cohort=3)
    total = sum(SIZES)
    expected = sum(upload.tensors["model"].flat * (upload.weight / total) for upload in run.uploads) * 7 / 3
    torch.testing.assert_close(run.server.tensors["model"].flat, expected, rtol=0, atol=1e-14)
    factor = 7 / 3 * sum(upload.weight for upload in run.uploads) / total
    assert abs(factor - 1) > 0.1
    assert run.report["factor"] == pytest.approx(factor)


def test_fedbis_is_the_mean_of_its_participants():
    clients, _, _, start = problem()
    run = simulate(make("fedbis"), clients, start, 1, cohort=3)
    weights = sum(upload.weight for upload in run.uploads)
    expected = sum(upload.tensors["model"].flat * (upload.weight / weights) for upload in run.uploads)
    torch.testing.assert_close(run.server.tensors["model"].flat, expected, rtol=0, atol=1e-14)
