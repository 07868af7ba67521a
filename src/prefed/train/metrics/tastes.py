"""Metrics of latent tastes: whether z carries information about its client.

Active units and KL measure the distance of posteriors from N(0, I). Because a pull towards prototypes also
activates units, they are not conclusive. :func:`transfer` compares a client's own z with those of other
clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def kl_per_dimension(means: npt.ArrayLike, log_variances: npt.ArrayLike) -> Array:
    """Return ``[d_z]`` KL to N(0, 1) per dimension in nats, ½ (μ² + σ² − 1 − log σ²), averaged over clients.

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
    """Return the length of the sum of vectors divided by the sum of their lengths.

    It is 1 if all point in one direction, and 0 if they cancel: the mean resultant length of directional
    statistics, weighted by length. Zero vectors only give 1.

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
    """Accuracies on each client's pairs, averaged over clients.

    Attributes:
        own: with the client's own z.
        another: with another client's z, averaged over all others; ``None`` for a single client.
        same_taste: as ``another``, over clients of the same taste; ``None`` if no client has such a peer.
        other_taste: as ``another``, over clients of other tastes; ``None`` if all have one taste.
    """

    own: float
    another: float | None
    same_taste: float | None
    other_taste: float | None


def transfer(accuracies: npt.ArrayLike, tastes: Sequence[str] | None = None) -> Transfer:
    """Compare accuracies with a client's own z and with other clients' z. All clients have equal weight.

    Args:
        accuracies: ``[n, n]``; row i has client i's pairs, column j client j's z.
        tastes: taste of each client, if known.

    Raises:
        ValueError: the table is empty or not square, or does not match ``tastes``.

    >>> transfer([[1.0, 0.75, 0.0], [0.75, 1.0, 0.0], [0.5, 0.25, 1.0]], ["warm", "warm", "cold"])
    Transfer(own=1.0, another=0.375, same_taste=0.75, other_taste=0.125)
    """
    table = np.asarray(accuracies, np.float64)
    n = len(table)
    if n == 0 or table.shape != (n, n) or (tastes is not None and len(tastes) != n):
        raise ValueError(f"accuracies must have a row and a column per client, not shape {table.shape}")
    others = ~np.eye(n, dtype=bool)
    own, another = float(table.diagonal().mean()), _mean_by_row(table, others)
    if tastes is None:
        return Transfer(own, another, None, None)
    alike = np.array([[one == other for other in tastes] for one in tastes])
    return Transfer(own, another, _mean_by_row(table, others & alike), _mean_by_row(table, ~alike))


def _mean_by_row(table: Array, chosen: npt.NDArray[np.bool_]) -> float | None:
    """Average the chosen cells per row, then average over rows with chosen cells; ``None`` without any."""
    rows = [float(row[cells].mean()) for row, cells in zip(table, chosen, strict=True) if cells.any()]
    return sum(rows) / len(rows) if rows else None


@dataclass(frozen=True)
class LatentMap:
    """Points on the plane of the first two principal components.

    Attributes:
        points: ``[n, 2]``, centred.
        shares: share of the total variance along each axis.
    """

    points: Array
    shares: tuple[float, float]


def latent_map(means: npt.ArrayLike, more: npt.ArrayLike | None = None) -> tuple[LatentMap, Array]:
    """Project the clients' μ̄ on their first two principal components.

    The sign of an axis makes its largest loading positive, so equal data give equal maps.

    Args:
        means: ``[n, d_z]``, which determine the components.
        more: ``[m, d_z]`` further points to project, such as the prototypes.

    Returns:
        The map of ``means``, and the further points on it, ``[m, 2]``.
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
