"""Mixing matrices: the weights of neighbours in each round, and the rate of consensus.

Models are the rows of a matrix that need not be in memory. They are mixed a few columns at a time, so memory
use does not depend on the number of nodes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from prefed.core import Key
from prefed.core.lazy import np, torch
from prefed.merge.config import GraphConfig, WeightsName
from prefed.merge.graphs import Graph, draw_graph, draw_matching

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


Matrix: TypeAlias = Any
"""A float64 ``scipy.sparse.csr_array`` ``[nodes, nodes]``; scipy has no types."""

_DENSE = 2048
"""Maximum number of nodes for eigenvalues of the dense matrix, which take about a second."""
_ROUNDING = 1e-6
"""Tolerance for the numbers of a user's file, which :func:`read_matrix` corrects."""


def mixing_matrix(graph: Graph, weights: WeightsName = "metropolis") -> Matrix:
    """Return W of a graph: symmetric, with rows and columns that sum to 1.

    ``metropolis``: W_ij = 1/(1 + max(deg i, deg j)) for neighbours (Metropolis–Hastings). ``max_degree``:
    I − L/(1 + d_max) with the graph Laplacian L. Self weights are correctly rounded, so they are 1/N on the
    complete graph.

    >>> mixing_matrix(Graph.of(3, [(0, 1), (1, 2)])).toarray().round(3).tolist()
    [[0.667, 0.333, 0.0], [0.333, 0.333, 0.333], [0.0, 0.333, 0.667]]
    """
    degrees, (left, right) = graph.degrees, graph.edges.T
    if weights == "metropolis":
        below = 1 + np.maximum(degrees[left], degrees[right])
    else:
        below = np.full(len(left), 1 + degrees.max(initial=0))
    # A row has few distinct denominators, so its exact sum takes only a few fractions.
    ends, counts = np.unique(
        np.stack([np.concatenate([left, right]), np.concatenate([below, below])]), axis=1, return_counts=True
    )
    rest = [Fraction(1)] * graph.nodes
    for node, denominator, count in zip(*ends.tolist(), counts.tolist(), strict=True):
        rest[node] -= Fraction(count, denominator)
    return _assemble(graph, 1.0 / below, np.array([float(weight) for weight in rest]))


def _assemble(graph: Graph, values: NDArray[np.float64], own: NDArray[np.float64]) -> Matrix:
    from scipy.sparse import coo_array

    (left, right), nodes = graph.edges.T, np.arange(graph.nodes)
    rows, columns = np.concatenate([left, right, nodes]), np.concatenate([right, left, nodes])
    numbers = np.concatenate([values, values, own])
    return coo_array((numbers, (rows, columns)), shape=(graph.nodes, graph.nodes)).tocsr()


def matrix_graph(matrix: Matrix) -> Graph:
    """Return the graph with an edge for each positive weight between neighbours."""
    return _neighbour_weights(matrix)[0]


def _neighbour_weights(matrix: Matrix) -> tuple[Graph, NDArray[np.float64]]:
    """Return the edges of a symmetric W, and their weights."""
    from scipy.sparse import triu

    above = triu(matrix, k=1).tocoo()
    order = np.lexsort((above.col, above.row))
    order = order[above.data[order] != 0]
    edges = np.stack([above.row[order], above.col[order]], axis=1).astype(np.int64)
    return Graph(matrix.shape[0], edges), above.data[order]


def fail_edges(matrix: Matrix, probability: float, key: Key) -> Matrix:
    """Return W of a round in which each edge fails with ``probability``.

    The weight of a failed edge is added to the self weights of both ends, so W stays symmetric and doubly
    stochastic.
    """
    values = _neighbour_weights(matrix)[1]
    return _without(matrix, key.numpy().random(len(values)) < probability)


def without_edges(matrix: Matrix, edges: Sequence[tuple[int, int]]) -> Matrix:
    """Return W of a round in which these edges (i < j) fail; see :func:`fail_edges`."""
    if not edges:
        return matrix
    graph, gone = matrix_graph(matrix), set(edges)
    return _without(matrix, np.array([tuple(edge) in gone for edge in graph.edges.tolist()], dtype=bool))


def _without(matrix: Matrix, fails: NDArray[np.bool_]) -> Matrix:
    graph, values = _neighbour_weights(matrix)
    works = ~fails
    failed = np.bincount(graph.edges[~works].ravel(), np.repeat(values[~works], 2), minlength=graph.nodes)
    own = matrix.diagonal() + failed
    return _assemble(Graph(graph.nodes, graph.edges[works]), values[works], own)


def read_matrix(path: Path, clients: Sequence[str]) -> Matrix:
    """Read a mixing matrix: text with one row per client, in order, or a Matrix Market file.

    Rounding errors of up to 1e-6 are corrected: W is made exactly symmetric, and self weights are recomputed.

    Raises:
        ValueError: the file is not a matrix of that size, or :func:`check_mixing` refuses it.
    """
    matrix = _read_numbers(path)
    if matrix.shape != (len(clients), len(clients)):
        rows, columns = matrix.shape
        raise ValueError(
            f"{path}: {rows} × {columns} numbers for {len(clients)} training clients; give one row and one "
            "column per client, sorted by name"
        )
    try:
        check_mixing(matrix, clients)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    graph, values = _neighbour_weights((matrix + matrix.T) / 2)
    given = np.bincount(graph.edges.ravel(), np.repeat(values, 2), minlength=graph.nodes)
    return _assemble(graph, values, np.maximum(1.0 - given, 0.0))


def _read_numbers(path: Path) -> Matrix:
    from scipy.io import mmread
    from scipy.sparse import csr_array

    try:
        if path.suffix == ".mtx":
            return csr_array(mmread(path), dtype=np.float64)
        text = path.read_text("utf-8-sig").replace(",", " ").splitlines()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about an empty file, refused later by its size
            return csr_array(np.loadtxt(text, ndmin=2))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not rows of numbers: {error}") from None


def check_mixing(matrix: Matrix, clients: Sequence[str]) -> None:
    """Refuse a matrix with which clients do not converge to the mean of their models.

    Args:
        matrix: W, square.
        clients: names of the nodes.

    Raises:
        ValueError: a number is negative or not finite, W is not symmetric, doubly stochastic or connected, or
            ρ = 1. The message names the clients.
    """
    whole = matrix.tocoo()
    wrong = np.flatnonzero(~(np.isfinite(whole.data) & (whole.data >= 0)))
    if len(wrong):
        row, column = whole.row[wrong[0]], whole.col[wrong[0]]
        raise ValueError(
            f"the mixing matrix has {whole.data[wrong[0]]:g} for {clients[column]!r} at {clients[row]!r}; "
            "weights must be finite and at least 0"
        )
    uneven = abs(matrix - matrix.T).tocoo()
    if uneven.data.max(initial=0.0) > _ROUNDING:
        worst = int(uneven.data.argmax())
        row, column = int(uneven.row[worst]), int(uneven.col[worst])
        raise ValueError(
            f"the mixing matrix is not symmetric: {clients[row]!r} gives {clients[column]!r} the weight "
            f"{matrix[row, column]:g}, and {clients[column]!r} gives {clients[row]!r} {matrix[column, row]:g}"
        )
    sums = np.asarray(matrix.sum(axis=1)).reshape(-1)
    worst = int(abs(sums - 1.0).argmax())
    if abs(sums[worst] - 1.0) > _ROUNDING:
        raise ValueError(
            f"the mixing matrix is not doubly stochastic: the weights of {clients[worst]!r} sum to "
            f"{sums[worst]:.7g}, not to 1; change its self weight"
        )
    matrix_graph(matrix).check_connected(clients)
    if rho(matrix) >= 1 - 1e-12:
        raise ValueError(
            "the mixing matrix has ρ = 1, so two groups would swap their models forever; give clients a self "
            "weight"
        )


def rho(matrix: Matrix) -> float:
    """Return ρ = ‖W − 11ᵀ/N‖₂, the contraction factor of a symmetric, doubly stochastic W.

    >>> round(rho(mixing_matrix(Graph.of(5, [(0, 1), (0, 2), (0, 3), (0, 4)]))), 4)
    0.8
    """
    nodes = matrix.shape[0]
    if nodes <= _DENSE:
        return float(abs(np.linalg.eigvalsh(matrix.toarray() - 1.0 / nodes)).max())
    from scipy.sparse.linalg import LinearOperator, eigsh

    centred = LinearOperator(
        (nodes, nodes), matvec=lambda x: matrix @ x.reshape(-1) - x.mean(), dtype=np.float64
    )
    start = Key(0).at("rho").numpy().standard_normal(nodes)
    return float(abs(eigsh(centred, k=1, tol=1e-6, v0=start, return_eigenvectors=False)[0]))


def rho_of_sequence(matrices: Iterable[Matrix]) -> float:
    """Return √λ₂(E[W²]), the root mean square contraction of equally likely ``matrices``.

    λ₂ is the second-largest eigenvalue. With one matrix, the result is :func:`rho`.

    Raises:
        ValueError: there is no matrix.
    """
    total, count = None, 0
    for matrix in matrices:
        square = matrix @ matrix
        total, count = square if total is None else total + square, count + 1
    if total is None:
        raise ValueError("no mixing matrices")
    return math.sqrt(rho(total / count))


@dataclass(frozen=True)
class ConsensusFactors:
    """Factors of the steady-state consensus error, before and after mixing.

    They are means over placements of clients on nodes, for plain gradient descent with small steps η. Errors
    due to heterogeneity have the prefactor η² κ² / (N − 1) with κ² = mean ‖∇F_i − ∇F‖², those due to noise
    η² / N times the variance of a client gradient.

    Attributes:
        heterogeneity_before: Σ_{k≥2} 1/(1 − λ_k)².
        heterogeneity_after: Σ λ²/(1 − λ)².
        noise_before: Σ 1/(1 − λ²).
        noise_after: Σ λ²/(1 − λ²).
    """

    heterogeneity_before: float
    heterogeneity_after: float
    noise_before: float
    noise_after: float


def consensus_factors(matrix: Matrix) -> ConsensusFactors:
    """Return the factors of the consensus error (1/N) Σ‖θ_i − θ̄‖² for a connected W, in O(N³).

    >>> consensus_factors(mixing_matrix(Graph.of(3, [(0, 1), (1, 2), (0, 2)]))).noise_before
    2.0
    """
    others = np.linalg.eigvalsh(matrix.toarray())[:-1]
    # For the complete graph, the decomposition gives ±1e-17 instead of 0.
    others = np.where(abs(others) < 1e-12, 0.0, others)
    different, noisy = 1.0 / (1.0 - others) ** 2, 1.0 / (1.0 - others**2)
    square = others**2
    return ConsensusFactors(
        *(float(terms.sum()) for terms in (different, square * different, noisy, square * noisy))
    )


_MEMORY = 1 << 26
"""Bytes of numbers in memory at a time."""

Read = Callable[[slice], "Tensor"]
"""Columns → float64 ``[nodes, columns]``."""
Write = Callable[[slice, "Tensor"], None]
"""Receives columns and their new values."""


@dataclass(frozen=True)
class Mixed:
    """Consensus errors (1/N) Σ‖θ_i − θ̄‖² before and after mixing."""

    before: float
    after: float


def mix(matrix: Matrix, size: int, read: Read, write: Write) -> Mixed:
    """Compute θ_i ← Σ_j W_ij θ_j for all nodes, accumulated in float64.

    A row is computed as θ_0 + Σ_j W_ij (θ_j − θ_0), in the order of the nodes. Thus, equal models, and the
    model of a node without neighbours, do not change by a bit. On the complete graph, the result is that of
    :func:`prefed.merge.means_distances.weighted_mean`.

    Args:
        matrix: W, with rows that sum to 1.
        size: number of parameters of a model.
        read: reads columns of all models.
        write: writes columns of all models.

    >>> from prefed.merge.graphs import Graph
    >>> from prefed.merge.mixing_matrices import mixing_matrix
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
    # Allocate once, to avoid fragmentation over many blocks.
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
        del rows  # before the next read
    return Mixed(before, after)


def mix_row(weights: Sequence[float], rows: Sequence[Tensor]) -> Tensor:
    """Return one row of :func:`mix`, Σ_j w_j θ_j, float64 ``[size]``, computed by the node itself.

    θ_0 is the first model of the neighbourhood. If that is the first of all nodes, the result is that of
    :func:`mix` bit for bit.

    Args:
        weights: nonzero weights of the node's row of W.
        rows: the models in the order of the nodes, including the node's own.

    >>> mix_row([0.5, 0.5], [torch.tensor([0.0, 1.0]), torch.tensor([3.0, 1.0])]).tolist()
    [1.5, 1.0]
    """
    first = rows[0].double()
    mixed = torch.zeros_like(first)
    for weight, row in zip(weights, rows, strict=True):
        mixed.add_(row.double() - first, alpha=weight)
    return mixed.add_(first) if len(rows) > 1 else first


def mean_row(nodes: int, size: int, read: Read) -> Tensor:
    """Return the mean of all rows θ̄, float64 ``[size]``; the mean of equal rows is exact."""
    mean = torch.empty(size, dtype=torch.float64)
    for columns in column_blocks(nodes, size):
        rows = read(columns)
        mean[columns] = rows[0] + (rows - rows[0]).mean(0)
    return mean


def row_norms(nodes: int, size: int, read: Read) -> list[float]:
    """Return the Euclidean norm of each row."""
    squares = torch.zeros(nodes, dtype=torch.float64)
    for columns in column_blocks(nodes, size):
        squares += read(columns).square().sum(1)
    return [float(square) for square in squares.sqrt()]


def column_blocks(nodes: int, size: int) -> Iterator[slice]:
    """Yield slices of columns, so that three matrices of them fit into ``_MEMORY`` bytes."""
    width = max(1, _MEMORY // (3 * 8 * nodes))
    yield from (slice(start, min(start + width, size)) for start in range(0, size, width))


def _spread(rows: Tensor) -> float:
    """Return (1/N) Σ‖x_i − x̄‖², exactly 0 for equal rows."""
    away = rows - rows[0]
    away -= away.mean(0)
    return float(away.square_().sum()) / len(rows)


@dataclass(frozen=True)
class Topology:
    """The mixing matrix of each round.

    Attributes:
        config: the ``[graph]`` table.
        clients: sorted names of training clients. Row k of a matrix is client k.
        key: ``Key(seed)`` of the run.

    >>> topology = Topology(GraphConfig(name="star"), ("a", "b", "c", "d", "e"), Key(42))
    >>> topology.matrix(3)[[0], :].toarray().round(2).tolist(), round(topology.rho, 4)
    ([[0.2, 0.2, 0.2, 0.2, 0.2]], 0.8)
    """

    config: GraphConfig
    clients: tuple[str, ...]
    key: Key

    def matrix(self, number: int) -> Matrix:
        """Return W of round ``number``, counted from 1: sparse, symmetric, doubly stochastic.

        Raises:
            ValueError: no such graph exists for these clients, a file is malformed, or a fixed graph is not
                connected.
        """
        key = self.key.at("round", number)
        if self.config.changes == "never":
            matrix = self._fixed
        else:
            matrix = mixing_matrix(self._graph(key), self.config.weights)
        failure = self.config.edge_failure
        return fail_edges(matrix, failure, key.at("edges")) if failure else matrix

    def check(self, start: int = 1) -> None:
        """Refuse a graph that is not connected over a window of rounds.

        Args:
            start: first round of the window of a changing graph.

        Raises:
            ValueError: the union of the graphs in the window is not connected, or :meth:`matrix` fails.
        """
        config, end = self.config, start + self.config.window - 1
        when = f" in rounds {start} to {end} taken together (window = {config.window})"
        try:
            graphs = [matrix_graph(matrix) for matrix in self._window(start)]
            union = Graph.of(len(self.clients), np.concatenate([graph.edges for graph in graphs]))
            union.check_connected(self.clients, when if config.varies else "", ": raise [graph] window")
        except ValueError as error:
            if config.file is not None and str(error).startswith(config.file):
                raise
            where = f"name = {config.name!r}" if config.file is None else f"file = {config.file!r}"
            raise ValueError(f"[graph] {where}: {error}") from None

    @cached_property
    def rho(self) -> float:
        """ρ of a fixed graph, or √λ₂(E[W²]) of a changing graph over the first window of rounds."""
        return rho_of_sequence(self._window(1)) if self.config.varies else rho(self._fixed)

    def _window(self, start: int) -> Iterator[Matrix]:
        yield from map(self.matrix, range(start, start + (self.config.window if self.config.varies else 1)))

    @cached_property
    def _fixed(self) -> Matrix:
        """W without failures."""
        if self.config.name == "matrix":
            return read_matrix(Path(str(self.config.file)), self.clients)
        graph = self._base
        drawn = self.config.name == "erdos_renyi"
        graph.check_connected(self.clients, how=": raise [graph] probability" if drawn else "")
        return mixing_matrix(graph, self.config.weights)

    @cached_property
    def _base(self) -> Graph:
        return self._place(draw_graph(self.config, self.clients, self.key.at("graph")))

    def _graph(self, key: Key) -> Graph:
        """Draw the graph of one round."""
        if self.config.changes == "matching":
            return draw_matching(self._base, key.at("matching"))
        return self._place(draw_graph(self.config, self.clients, key.at("graph")))

    def _place(self, graph: Graph) -> Graph:
        """Assign clients to nodes. Edges from a file already name their clients."""
        if self.config.placement == "sorted" or self.config.file is not None:
            return graph
        places = self.key.at("placement").numpy().permutation(graph.nodes)
        return Graph.of(graph.nodes, places[graph.edges])


def neighbours(matrix: Matrix, client: int) -> Sequence[tuple[int, float]]:
    """Return the nodes mixed by ``client``, including itself, in ascending order, with their weights."""
    start, end = matrix.indptr[client], matrix.indptr[client + 1]
    return sorted(zip(matrix.indices[start:end].tolist(), matrix.data[start:end].tolist(), strict=True))
