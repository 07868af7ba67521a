"""Which prototype of a taste each client belongs to (FedVPA-GP, arXiv:2605.30873).

After each aggregation the server clusters the means of the clients' posteriors and matches the clusters with
the prototypes. A client is sent the index of its own prototype alone. Whoever has all means and prototypes
can find the others' as the server does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefed.core import Key
from prefed.core.lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Labels = NDArray[np.int64]

RESTARTS = 8
"""How often k-means starts; the start that ends with the least distances counts."""
STEPS = 100
"""The most steps of a start. Few take more than ten."""


def assign_prototypes(
    means: Mapping[str, torch.Tensor], prototypes: torch.Tensor, key: Key, *, balanced: bool = True
) -> dict[str, int]:
    """Client → index y* of its prototype: k-means of the clients' means, clusters matched with prototypes.

    The clusters are matched as a whole (Hungarian method), such that the squared distances from the clusters'
    centres to their prototypes are the least in sum. So the numbering of the clusters, which k-means draws,
    makes no difference, nor does the order of the clients.

    Args:
        means: client → ``[d]`` μ̄; those that sent a posterior.
        prototypes: ``[M, d]``.
        key: the randomness of k-means' starts.
        balanced: the clusters' sizes differ by at most 1, as in the source. Ten clients with 7 and 3 of two
            tastes are then split into 5 and 5, and two of them learn the other taste's prototype.

    >>> ends = {"a": torch.tensor([4.0, 0.0]), "b": torch.tensor([0.0, 4.0]), "c": torch.tensor([5.0, 1.0])}
    >>> assign_prototypes(ends, torch.tensor([[0.0, 5.0], [5.0, 0.0]]), Key(0))
    {'a': 1, 'b': 0, 'c': 1}
    """
    from scipy.optimize import linear_sum_assignment

    clients = sorted(means)
    if not clients:
        return {}
    points = torch.stack([means[client] for client in clients]).double().numpy()
    goals = prototypes.detach().double().numpy()
    labels, centers = kmeans(points, min(len(goals), len(clients)), key, balanced=balanced)
    _, match = linear_sum_assignment(_squared_distances(centers, goals))
    return {client: int(match[label]) for client, label in zip(clients, labels, strict=True)}


def kmeans(points: Array, count: int, key: Key, *, balanced: bool) -> tuple[Labels, Array]:
    """Lloyd's k-means from several starts of k-means++ (Arthur, Vassilvitskii 2007).

    Args:
        points: ``[n, d]``, n at least ``count``.
        count: number of clusters.
        key: the randomness of the starts.
        balanced: the points of a step are assigned together, at the least sum of squared distances with
            which the clusters' sizes differ by at most 1; otherwise each goes to the nearest center.

    Returns:
        ``[n]`` the cluster of each point, and ``[count, d]`` the centers.
    """
    best: tuple[float, Labels, Array] | None = None
    for start in range(RESTARTS):
        centers = _spread_start(points, count, key.at("start", start).numpy())
        labels: Labels | None = None
        for _ in range(STEPS):
            costs = _squared_distances(points, centers)
            after = balanced_assignment(costs) if balanced else costs.argmin(1)
            if labels is not None and np.array_equal(after, labels):
                break
            labels = after
            # A cluster that has lost every point keeps its center.
            centers = np.stack(
                [points[labels == k].mean(0) if (labels == k).any() else centers[k] for k in range(count)]
            )
        assert labels is not None
        total = float(((points - centers[labels]) ** 2).sum())
        if best is None or total < best[0]:
            best = total, labels, centers
    assert best is not None
    return best[1], best[2]


def balanced_assignment(costs: Array) -> Labels:
    """The cluster of each point, at the least sum of costs with which sizes differ by at most 1.

    Args:
        costs: ``[n, clusters]``, finite.

    >>> balanced_assignment(np.array([[0.0, 9.0], [1.0, 9.0], [2.0, 3.0]])).tolist()
    [0, 0, 1]
    """
    from scipy.optimize import linear_sum_assignment

    n, count = costs.shape
    size, more = divmod(n, count)
    # Each cluster has `size` seats that must be taken. If `more` points are left over, each cluster has one
    # seat besides, and as many idle points as there are seats too many take any of those.
    must = np.repeat(costs, size, axis=1)
    table = must
    if more:
        idle = np.full((count - more, must.shape[1]), np.inf)
        table = np.block([[must, costs], [idle, np.zeros((count - more, count))]])
    seats = np.concatenate([np.repeat(np.arange(count), size), np.arange(count)])
    _, columns = linear_sum_assignment(table)
    labels: Labels = seats[columns[:n]]
    return labels


def _spread_start(points: Array, count: int, generator: np.random.Generator) -> Array:
    """k-means++: each further center is a point, drawn by its squared distance to the nearest center."""
    chosen = [int(generator.integers(len(points)))]
    while len(chosen) < count:
        nearest = _squared_distances(points, points[chosen]).min(1)
        total = nearest.sum()
        draw = generator.choice(len(points), p=nearest / total if total else None)
        chosen.append(int(draw))
    return points[chosen].copy()


def _squared_distances(points: Array, centers: Array) -> Array:
    """``[n, m]`` ‖x_i − c_j‖²."""
    distances: Array = ((points[:, None] - centers[None]) ** 2).sum(-1)
    return distances
