"""The mixing matrix of each round: a pure function of the settings, the clients, the seed and the round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from prefed.core import Key
from prefed.core.lazy import np
from prefed.merge.graphs import Graph, GraphConfig, draw_graph, draw_matching
from prefed.merge.mixing import (
    Matrix,
    fail_edges,
    matrix_graph,
    mixing_matrix,
    read_matrix,
    rho,
    rho_of_sequence,
)


@dataclass(frozen=True)
class Topology:
    """Who mixes with whom in each round, and by what weights.

    Attributes:
        config: the graph.
        clients: those who train, sorted. Row k of a matrix is client k.
        key: ``Key(seed)``, of the whole run.

    >>> topology = Topology(GraphConfig(name="star"), ("a", "b", "c", "d", "e"), Key(42))
    >>> topology.matrix(3)[[0], :].toarray().round(2).tolist(), round(topology.rho(), 4)
    ([[0.2, 0.2, 0.2, 0.2, 0.2]], 0.8)
    """

    config: GraphConfig
    clients: tuple[str, ...]
    key: Key

    def matrix(self, number: int) -> Matrix:
        """W of round ``number``, 1 for the first: sparse, symmetric, doubly stochastic.

        Raises:
            ValueError: the graph cannot be had over these clients, a file is wrong, or the graph is a fixed
                one and not connected.
        """
        key = self.key.at("round", number)
        if self.config.changes == "never":
            matrix = self._fixed
        else:
            matrix = mixing_matrix(self._graph(key), self.config.weights)
        return (
            fail_edges(matrix, self.config.edge_failure, key.at("edges"))
            if self.config.edge_failure
            else matrix
        )

    def check(self, start: int = 1) -> None:
        """Refuse a graph that leaves some clients apart for good.

        Args:
            start: a graph that changes is looked at in the ``window`` rounds from this one on.

        Raises:
            ValueError: as :meth:`matrix`; or the union of the graphs of the window is not connected.
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

    def rho(self, start: int = 1) -> float:
        """ρ of a fixed graph; √λ₂(E[W²]) over the window's rounds from ``start`` of one that changes."""
        return rho_of_sequence(self._window(start)) if self.config.varies else rho(self._fixed)

    def _window(self, start: int) -> Iterator[Matrix]:
        yield from map(self.matrix, range(start, start + (self.config.window if self.config.varies else 1)))

    @cached_property
    def _fixed(self) -> Matrix:
        """W where nothing fails."""
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
        """The graph of a round that has one of its own."""
        if self.config.changes == "matching":
            return draw_matching(self._base, key.at("matching"))
        return self._place(draw_graph(self.config, self.clients, key.at("graph")))

    def _place(self, graph: Graph) -> Graph:
        """Node k becomes the client that was drawn for it. Edges from a file name their clients."""
        if self.config.placement == "sorted" or self.config.file is not None:
            return graph
        places = self.key.at("placement").numpy().permutation(graph.nodes)
        return Graph.of(graph.nodes, places[graph.edges])


def neighbours(matrix: Matrix, client: int) -> Sequence[tuple[int, float]]:
    """The nodes whose models ``client`` mixes, itself included, in ascending order, with their weights."""
    start, end = matrix.indptr[client], matrix.indptr[client + 1]
    return sorted(zip(matrix.indices[start:end].tolist(), matrix.data[start:end].tolist(), strict=True))
