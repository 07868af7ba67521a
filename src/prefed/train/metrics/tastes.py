"""Metrics of latent tastes: whether z carries information about its client.

Active units and KL measure how far posteriors are from N(0, I). A pull towards prototypes makes units active
by itself, so they prove nothing. :func:`transfer` does: a client's own z against another client's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def kl_per_dimension(means: npt.ArrayLike, log_variances: npt.ArrayLike) -> Array:
    """``[d_z]`` KL to N(0, 1) of each dimension in nats, ½ (μ² + σ² − 1 − log σ²), averaged over clients.

    Args:
        means: ``[n, d_z]``.
        log_variances: ``[n, d_z]`` log σ².

    >>> kl_per_dimension([[2.0, 0.0], [0.0, 0.0]], np.zeros((2, 2))).tolist()
    [1.0, 0.0]
    """
    mean, log_variance = np.asarray(means, np.float64), np.asarray(log_variances, np.float64)
    each: Array = 0.5 * (mean**2 + np.exp(log_variance) - 1 - log_variance)
    return np.asarray(each.mean(0))


def resultant(vectors: npt.ArrayLike) -> float:
    """Length of the sum of vectors over the sum of their lengths.

    It is 1 where all point one way, and 0 where they cancel: the mean resultant length of directional
    statistics, each direction weighted by its length. Vectors that are all zero give 1.

    Args:
        vectors: ``[n, d]``.

    >>> resultant([[2.0, 0.0], [-1.0, 0.0]]), resultant([[0.0, 3.0], [4.0, 0.0]])
    (0.3333333333333333, 0.7142857142857143)
    """
    data = np.asarray(vectors, np.float64)
    total = float(np.linalg.norm(data, axis=1).sum())
    return float(np.linalg.norm(data.sum(0))) / total if total else 1.0


@dataclass(frozen=True)
class Transfer:
    """Mean accuracies over clients, of each client's pairs.

    Attributes:
        own: with the client's own z.
        another: with another client's z, averaged over all others; ``None`` where there is one client.
        same_taste: as ``another``, over clients of the same taste; ``None`` where no client has such a peer.
        other_taste: as ``another``, over clients of other tastes; ``None`` where all have one taste.
    """

    own: float
    another: float | None
    same_taste: float | None
    other_taste: float | None


def transfer(accuracies: npt.ArrayLike, tastes: Sequence[str] | None = None) -> Transfer:
    """Accuracy with a client's own z, and with other clients' z. Every client has the same weight.

    Args:
        accuracies: ``[n, n]``; row i has client i's pairs, column j client j's z.
        tastes: the taste of each client, where it is known.

    Raises:
        ValueError: the table is not square, empty, or has not one row per taste.

    >>> transfer([[1.0, 0.75, 0.0], [0.75, 1.0, 0.0], [0.5, 0.25, 1.0]], ["warm", "warm", "cold"])
    Transfer(own=1.0, another=0.375, same_taste=0.75, other_taste=0.125)
    """
    table = np.asarray(accuracies, np.float64)
    n = len(table)
    if n == 0 or table.shape != (n, n) or (tastes is not None and len(tastes) != n):
        raise ValueError(f"accuracies need a row and a column per client, not {table.shape}")
    others = ~np.eye(n, dtype=bool)
    own, another = float(table.diagonal().mean()), _mean_by_row(table, others)
    if tastes is None:
        return Transfer(own, another, None, None)
    alike = np.array([[one == other for other in tastes] for one in tastes])
    return Transfer(own, another, _mean_by_row(table, others & alike), _mean_by_row(table, ~alike))


def _mean_by_row(table: Array, chosen: npt.NDArray[np.bool_]) -> float | None:
    """Mean over the rows that have a chosen cell of each row's mean over these; ``None`` without any."""
    rows = [float(row[cells].mean()) for row, cells in zip(table, chosen, strict=True) if cells.any()]
    return sum(rows) / len(rows) if rows else None


@dataclass(frozen=True)
class LatentMap:
    """Points on the plane of most variance.

    Attributes:
        points: ``[n, 2]``, centred.
        shares: the share of all variance along each of the two axes.
    """

    points: Array
    shares: tuple[float, float]


def latent_map(means: npt.ArrayLike, more: npt.ArrayLike | None = None) -> tuple[LatentMap, Array]:
    """The clients' μ̄ on their first two principal components.

    By NumPy's singular value decomposition: two components of a small table need no other library. An axis
    points where its largest loading is positive, so that equal data give equal maps.

    Args:
        means: ``[n, d_z]``; only these determine the plane.
        more: ``[m, d_z]`` other points to put on the same plane, such as the prototypes.

    Returns:
        The map of ``means``, and ``[m, 2]`` the other points on it.
    """
    data = np.asarray(means, np.float64)
    extra = np.zeros((0, data.shape[1])) if more is None else np.asarray(more, np.float64)
    center = data.mean(0)
    _, singular, rows = np.linalg.svd(data - center, full_matrices=False)
    axes = np.zeros((2, data.shape[1]))
    count = min(2, len(rows))
    axes[:count] = rows[:count]
    largest = np.abs(axes).argmax(1)
    signs = np.where(axes[np.arange(2), largest] < 0, -1.0, 1.0)
    axes *= signs[:, None]
    energy = np.zeros(2)
    total = float((singular**2).sum())
    if total:
        energy[:count] = singular[:count] ** 2 / total
    shares = (float(energy[0]), float(energy[1]))
    return LatentMap((data - center) @ axes.T, shares), (extra - center) @ axes.T
