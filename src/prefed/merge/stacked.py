"""Mixing the models of many nodes at once, a few columns of all of them at a time.

The models are the rows of a matrix that need not be in memory. What is held at a time is the same for any
number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefed.core.lazy import torch
from prefed.merge.mixing import Matrix

if TYPE_CHECKING:
    from torch import Tensor

_MEMORY = 1 << 26
"""Bytes for the numbers that are held at a time."""

Read = Callable[[slice], "Tensor"]
"""Columns → float64 ``[nodes, columns]``."""
Write = Callable[[slice, "Tensor"], None]
"""Takes the columns and their new numbers."""


@dataclass(frozen=True)
class Mixed:
    """What a mix did.

    Attributes:
        before: consensus error e = (1/N) Σ‖θ_i − θ̄‖² of what was mixed.
        after: that of the result.
    """

    before: float
    after: float


def mix(matrix: Matrix, size: int, read: Read, write: Write) -> Mixed:
    """θ_i ← Σ_j W_ij θ_j for all nodes, accumulated in float64.

    A row is computed as θ_0 + Σ_j W_ij (θ_j − θ_0), in the order of the nodes. So equal models stay as they
    are to the bit, as does that of a node without a neighbour. On the complete graph a row is what
    :func:`prefed.merge.flat.weighted_mean` gives.

    Args:
        matrix: W, each row of which sums to 1.
        size: numbers in a model.

    >>> from prefed.merge.graphs import Graph
    >>> from prefed.merge.mixing import mixing_matrix
    >>> rows = torch.tensor([[0.0, 1.0], [3.0, 1.0], [6.0, 1.0]], dtype=torch.float64)
    >>> path, mixed = mixing_matrix(Graph.of(3, [(0, 1), (1, 2)])), torch.zeros(3, 2)
    >>> errors = mix(path, 2, lambda c: rows[:, c], lambda c, new: mixed[:, c].copy_(new))
    >>> mixed.tolist(), errors.before, round(errors.after, 4)
    ([[1.0, 1.0], [3.0, 1.0], [5.0, 1.0]], 6.0, 2.6667)
    """
    matrix.sort_indices()
    ends, others, weights = (part.tolist() for part in (matrix.indptr, matrix.indices, matrix.data))
    nodes, before, after = len(ends) - 1, 0.0, 0.0
    alone = [node for node in range(nodes) if ends[node + 1] - ends[node] == 1]
    blocks = list(column_blocks(nodes, size))
    # Made once: matrices that come and go leave holes between them, more of them the more blocks there are.
    whole = torch.empty(2, nodes, blocks[0].stop if blocks else 0, dtype=torch.float64)
    for columns in blocks:
        rows = read(columns)
        away, mixed = whole[:, :, : rows.shape[1]]
        torch.sub(rows, rows[0], out=away)
        mixed.zero_()
        for node in range(nodes):
            for place in range(ends[node], ends[node + 1]):
                mixed[node].add_(away[others[place]], alpha=weights[place])
        before, after = before + _spread(away), after + _spread(mixed)
        mixed.add_(rows[0])
        mixed[alone] = rows[alone]
        write(columns, mixed)
        del rows  # before the next are read
    return Mixed(before, after)


def mix_row(weights: Sequence[float], rows: Sequence[Tensor]) -> Tensor:
    """float64 ``[size]``: Σ_j w_j θ_j, the row of one node in :func:`mix`, computed by the node itself.

    A node knows the models of its neighbourhood alone, so that θ_0 is the first of these. Where that is the
    first of all nodes, the result is :func:`mix`'s to the bit.

    Args:
        weights: those of the node's row of W that are not 0, which sum to 1.
        rows: the models in the order of the nodes, the node's own among them.

    >>> mix_row([0.5, 0.5], [torch.tensor([0.0, 1.0]), torch.tensor([3.0, 1.0])]).tolist()
    [1.5, 1.0]
    """
    first = rows[0].double()
    mixed = torch.zeros_like(first)
    for weight, row in zip(weights, rows, strict=True):
        mixed.add_(row.double() - first, alpha=weight)
    return mixed.add_(first) if len(rows) > 1 else first


def mean_row(nodes: int, size: int, read: Read) -> Tensor:
    """float64 ``[size]``: the mean of all rows, θ̄; that of equal rows is the row to the bit."""
    mean = torch.empty(size, dtype=torch.float64)
    for columns in column_blocks(nodes, size):
        rows = read(columns)
        mean[columns] = rows[0] + (rows - rows[0]).mean(0)
    return mean


def row_norms(nodes: int, size: int, read: Read) -> list[float]:
    """The Euclidean length of each row."""
    squares = torch.zeros(nodes, dtype=torch.float64)
    for columns in column_blocks(nodes, size):
        squares += read(columns).square().sum(1)
    return [float(square) for square in squares.sqrt()]


def column_blocks(nodes: int, size: int) -> Iterator[slice]:
    """Columns, so many at a time that three matrices of them fit into the memory that is meant for them."""
    width = max(1, _MEMORY // (3 * 8 * nodes))
    yield from (slice(start, min(start + width, size)) for start in range(0, size, width))


def _spread(rows: Tensor) -> float:
    """(1/N) Σ‖x_i − x̄‖²; 0 for equal rows."""
    away = rows - rows[0]
    away -= away.mean(0)
    return float(away.square_().sum()) / len(rows)
