"""Clients' posteriors on the server: summary, noise, bounds, balanced clusters, matching with prototypes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefed.core import Key
from prefed.merge.clustering import assign_prototypes, balanced_assignment, kmeans
from prefed.merge.posteriors import Posterior, bound_posteriors, privatize, summarize

SEEDS = st.integers(0, 2**16)


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def tastes(
    seed: int, sizes: tuple[int, ...], spread: float = 0.5
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Clients around the axes of 6 dimensions at length 5, and whose axis each is at."""
    axes = np.repeat(np.arange(len(sizes)), sizes)
    points = 5 * np.eye(6)[axes] + spread * draw(seed, len(axes), 6)
    order = np.random.default_rng(seed + 1).permutation(len(axes))
    named = {f"c{k:02d}": torch.from_numpy(points[row]).float() for k, row in enumerate(order)}
    return named, axes[order].tolist()


def partitions(n: int, count: int) -> list[tuple[int, ...]]:
    """Every labelling of n points whose sizes differ by at most 1."""
    whole = itertools.product(range(count), repeat=n)
    sizes = ([labels.count(k) for k in range(count)] for labels in itertools.product(range(count), repeat=n))
    return [labels for labels, size in zip(whole, sizes, strict=True) if max(size) - min(size) <= 1]


@given(SEEDS, st.integers(1, 6), st.integers(1, 3))
def test_balanced_assignment_is_the_best_of_all(seed: int, n: int, count: int) -> None:
    """Against every balanced labelling, at random costs."""
    costs = draw(seed, n, count) ** 2
    labels = balanced_assignment(costs)
    total = costs[np.arange(n), labels].sum()
    least = min(sum(costs[k, label] for k, label in enumerate(choice)) for choice in partitions(n, count))
    sizes = np.bincount(labels, minlength=count)
    assert sizes.max() - sizes.min() <= 1
    assert total == pytest.approx(least)


def test_no_cluster_is_left_below_its_size() -> None:
    """Four points, three clusters, and cluster 0 costs 9: one point goes there nevertheless, and two of the
    other three share a cluster. Without the bound it would be 2 and 2 at cost 0."""
    costs = np.array([[9.0, 0.0, 1.0], [9.0, 0.0, 1.0], [9.0, 1.0, 0.0], [8.0, 1.0, 0.0]])
    assert balanced_assignment(costs).tolist() == [1, 1, 2, 0]


def test_a_bad_start_does_not_count() -> None:
    """Six heaps of four on a line, which one start of k-means++ often misses: for each of twenty keys the
    heaps come out whole."""
    points = np.repeat(np.arange(6.0) * 3, 4)[:, None] + 0.6 * draw(0, 24, 1)
    for seed in range(20):
        labels, _ = kmeans(points, 6, Key(seed), balanced=False)
        assert [len(set(heap)) for heap in labels.reshape(6, 4).tolist()] == [1] * 6


@given(SEEDS, st.booleans())
def test_kmeans_ends_where_no_step_helps(seed: int, balanced: bool) -> None:
    """Its centers are its clusters' means, and assigning the points again changes nothing."""
    points = draw(seed, 11, 3)
    labels, centers = kmeans(points, 3, Key(seed), balanced=balanced)
    for k in range(3):
        np.testing.assert_allclose(centers[k], points[labels == k].mean(0), atol=1e-12)
    costs = ((points[:, None] - centers) ** 2).sum(-1)
    again = balanced_assignment(costs) if balanced else costs.argmin(1)
    assert np.array_equal(again, labels)


@given(SEEDS)
def test_kmeans_finds_what_brute_force_finds(seed: int) -> None:
    """The least within-cluster sum of squares over all balanced halves of eight points in two heaps."""
    points = np.repeat([[-4.0, 0.0], [4.0, 0.0]], 4, axis=0) + draw(seed, 8, 2)

    def within(labels: np.ndarray) -> float:
        return sum(
            float(((points[labels == k] - points[labels == k].mean(0)) ** 2).sum()) for k in np.unique(labels)
        )

    labels, _ = kmeans(points, 2, Key(seed), balanced=True)
    assert within(labels) == pytest.approx(min(within(np.array(choice)) for choice in partitions(8, 2)))


@given(SEEDS, st.permutations(range(3)))
def test_relabelled_prototypes_relabel_clients(seed: int, order: list[int]) -> None:
    """The clients' prototypes are the same vectors in whatever order the prototypes come."""
    means, _ = tastes(seed, (3, 4, 3))
    prototypes = torch.from_numpy(5 * np.eye(6)[:3]).float()
    labels = assign_prototypes(means, prototypes, Key(seed))
    turned = assign_prototypes(means, prototypes[list(order)], Key(seed))
    assert {client: order[label] for client, label in turned.items()} == labels


@given(SEEDS, st.permutations(range(10)), st.booleans())
def test_the_order_of_clients_makes_no_difference(seed: int, order: list[int], balanced: bool) -> None:
    means, _ = tastes(seed, (5, 5), spread=4.0)
    prototypes = torch.from_numpy(draw(seed + 2, 2, 6)).float()
    clients = list(means)
    shuffled = {clients[k]: means[clients[k]] for k in order}
    labels = assign_prototypes(means, prototypes, Key(seed), balanced=balanced)
    assert assign_prototypes(shuffled, prototypes, Key(seed), balanced=balanced) == labels
    assert list(labels) == sorted(clients)


@given(SEEDS)
def test_seven_to_three(seed: int) -> None:
    """Clear tastes: unbalanced clusters are the tastes. Balanced ones are 5 and 5, so two of the seven sit at
    the other taste's prototype."""
    means, axes = tastes(seed, (7, 3))
    prototypes = torch.from_numpy(5 * np.eye(6)[:2]).float()
    free = assign_prototypes(means, prototypes, Key(seed), balanced=False)
    even = assign_prototypes(means, prototypes, Key(seed))
    assert list(free.values()) == axes
    wrong = [(mine, label) for mine, label in zip(axes, even.values(), strict=True) if mine != label]
    assert wrong == [(0, 1)] * 2


def test_matching_is_of_all_clusters_at_once() -> None:
    """Both clusters are nearest to prototype 0. Squared distances: 1 and 49 for the first, 4 and 16 for the
    second: 1 + 16 is less than 49 + 4."""
    means = {"a": torch.tensor([1.0]), "b": torch.tensor([4.0])}
    assert assign_prototypes(means, torch.tensor([[2.0], [8.0]]), Key(0)) == {"a": 0, "b": 1}


def test_fewer_clients_than_prototypes_and_equal_ones() -> None:
    prototypes = torch.eye(3)
    assert assign_prototypes({}, prototypes, Key(0)) == {}
    assert assign_prototypes({"a": torch.tensor([0.0, 0.0, 2.0])}, prototypes, Key(0)) == {"a": 2}
    same = {f"c{k}": torch.ones(3) for k in range(5)}
    labels = assign_prototypes(same, prototypes, Key(0))
    assert sorted(np.bincount(list(labels.values()), minlength=3)) == [1, 2, 2]
    assert set(assign_prototypes(same, prototypes, Key(0), balanced=False).values()) < {0, 1, 2}


@given(SEEDS, st.integers(1, 6))
def test_summary_has_the_moments_of_the_mixture(seed: int, count: int) -> None:
    """Of the even mixture of the contexts' posteriors: E z = mean μ and E z² = mean (μ² + σ²)."""
    means, log_variances = torch.from_numpy(draw(seed, count, 4)), torch.from_numpy(draw(seed + 1, count, 4))
    mean, log_variance = summarize(means, log_variances)
    second = (means.square() + log_variances.exp()).mean(0)
    torch.testing.assert_close(mean, means.mean(0))
    torch.testing.assert_close(log_variance.exp(), second - mean.square())
    if count == 1:
        torch.testing.assert_close(log_variance, log_variances[0])


def test_noise_is_off_unless_asked_for() -> None:
    posterior = Posterior(torch.tensor([3.0, 4.0]), torch.tensor([-3.0, -2.0]))
    for ours, theirs in zip(privatize(posterior, 0, 0, Key(0)), posterior, strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="requires a clip above 0"):
        privatize(posterior, 0, 1.0, Key(0))


def test_clip_by_hand() -> None:
    """(3, 4, −3 + 3, 9 + 3) has length 13; clipped to 6.5, each number is halved around (0, 0, −3, −3)."""
    long = Posterior(torch.tensor([3.0, 4.0]), torch.tensor([-3.0, 9.0]))
    mean, log_variance = privatize(long, 6.5, 0, Key(0))
    assert mean.tolist() == pytest.approx([1.5, 2.0])
    assert log_variance.tolist() == pytest.approx([-3.0, 3.0])
    short = Posterior(torch.tensor([0.3]), torch.tensor([-3.0]))
    assert privatize(short, 1.0, 0, Key(0)).mean.item() == pytest.approx(0.3)


def test_noise_has_the_size_it_says() -> None:
    """Standard deviation noise · clip = 1 on each of 20,000 numbers, whose mean is 0: within five standard
    errors, 0.025 for the deviation and 0.035 for the mean. Another key draws another noise."""
    zero = Posterior(torch.zeros(10_000), torch.full((10_000,), -3.0))
    mean, log_variance = privatize(zero, 2.0, 0.5, Key(1))
    vector = torch.cat([mean, log_variance + 3])
    assert float(vector.std()) == pytest.approx(1, abs=0.025)
    assert float(vector.mean()) == pytest.approx(0, abs=0.035)
    assert torch.equal(privatize(zero, 2.0, 0.5, Key(1)).mean, mean)
    assert not torch.equal(privatize(zero, 2.0, 0.5, Key(2)).mean, mean)


def test_bounds_leave_honest_posteriors_as_they_are() -> None:
    """Lengths 1, 2, 3, 1e30: the upper median is 3 and three times that is 9. Prototypes of length 20 let a
    mean of that length pass. Variances e⁻¹² and e¹² are cut to a width of 9: e¹² becomes 81."""
    lengths = {"d": 1e30, "a": 1.0, "c": 3.0, "b": 2.0}
    sent = {c: Posterior(torch.tensor([0.0, x]), torch.tensor([-2.0, -3.0])) for c, x in lengths.items()}
    sent["a"] = Posterior(sent["a"].mean, torch.tensor([-1e30, 1e30]))
    bounded = bound_posteriors(sent, 5.0)
    assert list(bounded) == ["a", "b", "c", "d"]
    assert all(bounded[c].mean is sent[c].mean for c in "abc")
    assert bounded["d"].mean.tolist() == pytest.approx([0.0, 9.0])
    assert bounded["a"].log_variance.tolist() == pytest.approx([-12.0, math.log(81)], abs=1e-6)
    assert bounded["b"].log_variance.tolist() == [-2.0, -3.0]
    assert bound_posteriors(sent, 20.0)["d"].mean.tolist() == pytest.approx([0.0, 20.0])
    assert bound_posteriors({}, 5.0) == {}


@pytest.mark.parametrize("others", [0, 1])
def test_the_first_to_send_is_bounded_too(others: int) -> None:
    """Among one or two posteriors the upper median would be the liar's own length. In 4 dimensions √d = 2,
    three times that is 6, and a prototype may be longer. An honest mean and variance are left as they are."""
    liar = Posterior(torch.tensor([0.0, 0.0, 0.0, 1e30]), torch.full((4,), 1e30))
    honest = Posterior(torch.tensor([3.0, -3.0, 0.0, 0.0]), torch.tensor([0.0, -3.0, 1.0, 2.0]))
    sent = {"liar": liar, **{f"c{k}": honest for k in range(others)}}
    for length, most in ((0.0, 6.0), (5.0, 6.0), (20.0, 20.0)):
        bounded = bound_posteriors(sent, length)
        assert bounded["liar"].mean.tolist() == pytest.approx([0, 0, 0, most])
        assert float(bounded["liar"].log_variance.exp().sum()) == pytest.approx(most**2)
        for k in range(others):
            assert [value.tolist() for value in bounded[f"c{k}"]] == [value.tolist() for value in honest]


@given(SEEDS)
def test_one_liar_moves_one_client_at_most(seed: int) -> None:
    """A mean of length 1e25 among six and five honest clients: with even clusters it takes the sixth
    place of either taste, so at most one client of the other six has to leave."""
    means, axes = tastes(seed, (6, 5), spread=0.3)
    sent = {client: Posterior(mean, torch.zeros(6)) for client, mean in means.items()}
    sent["zz"] = Posterior(torch.from_numpy(1e25 * draw(seed + 5, 6)).float(), torch.zeros(6))
    bounded = {client: posterior.mean for client, posterior in bound_posteriors(sent, 5.0).items()}
    labels = assign_prototypes(bounded, torch.from_numpy(5 * np.eye(6)[:2]).float(), Key(seed))
    assert sum(labels[client] != axis for client, axis in zip(means, axes, strict=True)) <= 1
