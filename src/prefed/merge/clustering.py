"""Clusters of clients: by the losses of U models (FedBiscuit), and by posterior means (FedVPA-GP).

FedBiscuit (section 5, eq. 5): sizes of clusters differ by at most 1, and nothing depends on the order in
which clients are given. FedVPA-GP (arXiv:2605.30873): after each aggregation the server clusters the means
of the clients' posteriors and matches the clusters with the prototypes. A client is sent only the index of
its own prototype. Whoever has all means and prototypes can find the others' as the server does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from prefed.core import Key, Plain
from prefed.core.lazy import np, torch

MOST = 10.0
"""The highest loss of a client that counts: a claim beyond it weighs no more.

It does not keep a liar from its cluster of choice. Honest losses are near ln 2, so a client that claims 0
there and 10 elsewhere gets a place before them.
"""
MOST_CLIENTS = 2000
"""With more clients the greedy rule is not compared with the exact one, which takes seconds and more."""

Losses: TypeAlias = Mapping[str, Sequence[float]]
"""Client → its loss under each of the U models, in nats, from 0 to :data:`MOST`."""


def cut(loss: float) -> float:
    """``loss`` in the range from 0 to :data:`MOST`; one that is NaN is the highest.

    >>> cut(0.7), cut(-3.0), cut(1e30), cut(math.nan)
    (0.7, 0.0, 10.0, 10.0)
    """
    return MOST if math.isnan(loss) else min(max(float(loss), 0.0), MOST)


def greedy(losses: Losses) -> dict[str, int]:
    """Client → its cluster, by FedBiscuit's rule (section 5.1, step 2.1).

    Each client chooses the cluster in which it loses least. The cluster that most clients chose is filled
    first: it takes ⌈clients / clusters⌉ of those who are left, the ones that would lose most elsewhere. The
    rest choose again among the other clusters.

    A client's regret is its least loss in another open cluster minus its own. Ties go to the client whose id
    comes first, and to the lowest cluster.

    With two clusters no balanced assignment has a lower cost.

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

        # Sorting keeps the order of ids among equals.
        takers = sorted((c for c in waiting if choices[c] == fullest), key=regret, reverse=True)
        cap = math.ceil(len(waiting) / len(open_clusters))
        clusters |= dict.fromkeys(takers[:cap], fullest)
        waiting = [client for client in waiting if client not in clusters]
        open_clusters = others
    return {client: clusters[client] for client in sorted(clusters)}


def exact(losses: Losses) -> dict[str, int]:
    """Client → its cluster, with the least possible sum of losses over all balanced assignments.

    Every cluster has ⌊n / U⌋ slots that must be filled, and where n is no multiple of U one more that may
    be. Slots that stay empty are taken by fillers, which cost nothing there and must not be elsewhere. So one
    linear assignment covers every pattern of sizes.

    >>> exact({"a": (0.1, 0.9), "b": (0.2, 0.3), "c": (0.4, 0.8), "d": (0.5, 0.4)})
    {'a': 0, 'b': 1, 'c': 0, 'd': 1}
    """
    from scipy.optimize import linear_sum_assignment

    clients, count = sorted(losses), _clusters(losses)
    if not clients:
        return {}
    each, more = divmod(len(clients), count)
    slots = np.concatenate([np.repeat(np.arange(count), each), np.arange(count if more else 0)])
    costs = np.array([losses[client] for client in clients], dtype=np.float64)[:, slots]
    fillers = np.full((len(slots) - len(clients), len(slots)), np.inf)
    fillers[:, each * count :] = 0.0
    rows, columns = linear_sum_assignment(np.concatenate([costs, fillers]))
    return {
        clients[row]: int(slots[column])
        for row, column in zip(rows, columns, strict=True)
        if row < len(clients)
    }


def cost(losses: Losses, clusters: Mapping[str, int]) -> float:
    """The sum over clients of the loss in their clusters, exact to the last bit in any order.

    >>> cost({"a": (0.25, 1.0), "b": (0.5, 0.75)}, {"a": 0, "b": 1})
    1.0
    """
    return math.fsum(losses[client][cluster] for client, cluster in clusters.items())


def gap(losses: Losses) -> float | None:
    """The cost of :func:`greedy` above that of :func:`exact`; ``None`` beyond :data:`MOST_CLIENTS`."""
    if len(losses) > MOST_CLIENTS:
        return None
    return max(0.0, cost(losses, greedy(losses)) - cost(losses, exact(losses)))


def place(clients: Collection[str], clusters: Mapping[str, int], count: int) -> dict[str, int]:
    """``clusters`` and, for each of ``clients`` without one, the cluster that has fewest members then.

    Ties go to the lowest cluster, and clients are taken in the order of their ids.

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
    """Group the clients that report their losses. The others keep their cluster, or are placed.

    Args:
        reports: losses as clients tell them. Honest ones are cut; here all are.
        before: client → its cluster so far.
        clients: all clients, those without a report included.
        count: how many clusters.
        rule: ``"greedy"`` or ``"exact"``.

    Returns:
        ``clusters``, client → cluster; ``moved``, the clients whose cluster changed; ``selector_losses``, the
        means of the losses over those who report, none if nobody does; ``balance_gap``, see :func:`gap`.

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
    """The ids of each cluster's clients, sorted.

    >>> members({"b": 1, "c": 0, "a": 1}, 3)
    [['c'], ['a', 'b'], []]
    """
    return [[client for client in sorted(clusters) if clusters[client] == u] for u in range(count)]


def _clusters(losses: Losses) -> int:
    """U, which all clients agree on."""
    counts = {len(own) for own in losses.values()}
    if len(counts) > 1:
        raise ValueError(f"clients have losses under different numbers of models: {sorted(counts)}")
    return counts.pop() if counts else 0


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
