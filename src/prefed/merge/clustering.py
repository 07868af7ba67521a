"""Cluster clients by their losses under U models (FedBiscuit) or by posterior means (FedVPA-GP).

FedBiscuit (section 5, eq. 5): the sizes of clusters differ by at most 1. FedVPA-GP (arXiv:2605.30873): after
each aggregation, the server clusters the posterior means and matches the clusters with the prototypes. Each
client receives only the index of its own prototype. No result depends on the order of the clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from prefed.core import Key, Plain
from prefed.core.lazy import np, torch

MOST = 10.0
"""Upper bound on reported losses, in nats. Honest losses are near ln 2.

It does not prevent a dishonest client from choosing its cluster by reporting 0 there and 10 elsewhere.
"""
MOST_CLIENTS = 2000
"""Maximum number of clients for comparing the greedy rule with the slower exact one."""

Losses: TypeAlias = Mapping[str, Sequence[float]]
"""Client → its loss under each of the U models, in nats, from 0 to :data:`MOST`."""


def cut(loss: float) -> float:
    """Clip ``loss`` to the range from 0 to :data:`MOST`; NaN becomes :data:`MOST`.

    >>> cut(0.7), cut(-3.0), cut(1e30), cut(math.nan)
    (0.7, 0.0, 10.0, 10.0)
    """
    return MOST if math.isnan(loss) else min(max(float(loss), 0.0), MOST)


def greedy(losses: Losses) -> dict[str, int]:
    """Assign clients to clusters by FedBiscuit's rule (section 5.1, step 2.1).

    Each client chooses the open cluster with its lowest loss. The cluster with the most votes closes first.
    It keeps ⌈remaining clients / open clusters⌉ clients with the highest regret, which is the lowest loss in
    another open cluster minus the loss in this one. All others choose again among the open clusters. Ties go
    to the first client id and the lowest cluster.

    With two clusters, no balanced assignment has a lower cost.

    >>> greedy({"a": (0.1, 0.9), "b": (0.2, 0.3), "c": (0.4, 0.8), "d": (0.5, 0.4)})
    {'a': 0, 'b': 1, 'c': 0, 'd': 1}
    """
    waiting, clusters = sorted(losses), dict[str, int]()
    open_clusters = list(range(_clusters(losses)))
    while waiting:
        choices = {client: min(open_clusters, key=losses[client].__getitem__) for client in waiting}
        votes = Counter(choices.values())
        fullest = max(open_clusters, key=lambda cluster: (votes[cluster], -cluster))
        others = [cluster for cluster in open_clusters if cluster != fullest]

        def regret(client: str, own: int = fullest, others: Sequence[int] = others) -> float:
            elsewhere = min((losses[client][cluster] for cluster in others), default=MOST)
            return elsewhere - losses[client][own]

        # The sort is stable, so that ties go to the first id.
        takers = sorted((c for c in waiting if choices[c] == fullest), key=regret, reverse=True)
        cap = math.ceil(len(waiting) / len(open_clusters))
        clusters |= dict.fromkeys(takers[:cap], fullest)
        waiting = [client for client in waiting if client not in clusters]
        open_clusters = others
    return {client: clusters[client] for client in sorted(clusters)}


def exact(losses: Losses) -> dict[str, int]:
    """Assign clients to clusters with the lowest sum of losses over all balanced assignments.

    >>> exact({"a": (0.1, 0.9), "b": (0.2, 0.3), "c": (0.4, 0.8), "d": (0.5, 0.4)})
    {'a': 0, 'b': 1, 'c': 0, 'd': 1}
    """
    if not _clusters(losses):
        return {}
    clients = sorted(losses)
    costs = np.array([losses[client] for client in clients], dtype=np.float64)
    return dict(zip(clients, balanced_assignment(costs).tolist(), strict=True))


def cost(losses: Losses, clusters: Mapping[str, int]) -> float:
    """Return the exactly rounded sum of the losses of all clients in their clusters.

    >>> cost({"a": (0.25, 1.0), "b": (0.5, 0.75)}, {"a": 0, "b": 1})
    1.0
    """
    return math.fsum(losses[client][cluster] for client, cluster in clusters.items())


def gap(losses: Losses) -> float | None:
    """Return the cost of :func:`greedy` minus that of :func:`exact`; ``None`` above :data:`MOST_CLIENTS`."""
    if len(losses) > MOST_CLIENTS:
        return None
    return max(0.0, cost(losses, greedy(losses)) - cost(losses, exact(losses)))


def place(clients: Collection[str], clusters: Mapping[str, int], count: int) -> dict[str, int]:
    """Add each of ``clients`` without a cluster, in order of ids, to the smallest cluster.

    Ties go to the lowest cluster.

    >>> place(["d", "c"], {"a": 1, "b": 0}, 3)
    {'a': 1, 'b': 0, 'c': 2, 'd': 0}
    """
    placed, sizes = dict(clusters), Counter(clusters.values())
    for client in sorted(set(clients) - set(clusters)):
        placed[client] = min(range(count), key=sizes.__getitem__)
        sizes[placed[client]] += 1
    return placed


def regroup(
    reports: Losses, before: Mapping[str, int], clients: Collection[str], count: int, rule: str
) -> dict[str, Plain]:
    """Group the clients that report losses. Others keep their cluster or get one by :func:`place`.

    Args:
        reports: reported losses, which are clipped by :func:`cut`.
        before: client → current cluster.
        clients: all clients, with or without a report.
        rule: ``"greedy"`` or ``"exact"``.

    Returns:
        ``clusters``: client → cluster; ``moved``: clients that changed clusters; ``selector_losses``: mean
        reported losses, empty without reports; ``balance_gap``: see :func:`gap`.

    >>> regroup({"a": (0.5, 0.25), "b": (0.5, 0.75)}, {"a": 0, "c": 1}, ["a", "b", "c", "d"], 2, "greedy")[
    ...     "clusters"
    ... ]
    {'a': 1, 'b': 0, 'c': 1, 'd': 0}
    """
    losses = {client: tuple(map(cut, reports[client])) for client in sorted(reports)}
    assigned = greedy(losses) if rule == "greedy" else exact(losses)
    after = place(clients, {**before, **assigned}, count)
    return {
        "clusters": {client: after[client] for client in sorted(after)},
        "moved": [client for client in sorted(before) if after[client] != before[client]],
        "selector_losses": [math.fsum(own) / len(losses) for own in zip(*losses.values(), strict=True)],
        "balance_gap": gap(losses),
    }


def members(clusters: Mapping[str, int], count: int) -> list[Plain]:
    """Return the sorted client ids of each cluster.

    >>> members({"b": 1, "c": 0, "a": 1}, 3)
    [['c'], ['a', 'b'], []]
    """
    return [[client for client in sorted(clusters) if clusters[client] == u] for u in range(count)]


def _clusters(losses: Losses) -> int:
    """Return the number of clusters U; 0 without clients."""
    counts = {len(own) for own in losses.values()}
    if len(counts) > 1:
        raise ValueError(f"clients report different numbers of losses: {sorted(counts)}")
    return counts.pop() if counts else 0


if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Labels = NDArray[np.int64]

RESTARTS = 8
"""Number of starts of k-means. The result with the smallest distances counts."""
STEPS = 100
"""Maximum number of steps per start. Few take more than ten."""


def assign_prototypes(
    means: Mapping[str, torch.Tensor], prototypes: torch.Tensor, key: Key, *, balanced: bool = True
) -> dict[str, int]:
    """Return client → index y* of its prototype, by k-means of the posterior means.

    Clusters are matched with prototypes so that the sum of squared distances between their centers and the
    prototypes is smallest (Hungarian method).

    Args:
        means: client → ``[d]`` μ̄, for clients that sent a posterior.
        prototypes: ``[M, d]``.
        key: randomness of the starts of k-means.
        balanced: let the sizes of clusters differ by at most 1, as in the source. Two tastes of 7 and 3
            clients are then split into 5 and 5, and two clients get the prototype of the other taste.

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
        key: randomness of the starts.
        balanced: assign points by :func:`balanced_assignment`; otherwise to the nearest center.

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
            # A cluster without points keeps its center.
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
    """Assign points to clusters of sizes that differ by at most 1, with the lowest sum of costs.

    Args:
        costs: ``[n, clusters]``, finite.

    >>> balanced_assignment(np.array([[0.0, 9.0], [1.0, 9.0], [2.0, 3.0]])).tolist()
    [0, 0, 1]
    """
    from scipy.optimize import linear_sum_assignment

    n, count = costs.shape
    size, more = divmod(n, count)
    # Each cluster has `size` mandatory seats and, if `more` points remain, an optional one. Idle points fill
    # the free optional seats and cannot take mandatory ones.
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
    """k-means++: draw centers from the points in proportion to the squared distance to the nearest center."""
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
