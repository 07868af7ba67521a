"""Graphs of clients without a server."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefed.core import Key, files
from prefed.core.lazy import np
from prefed.core.text import did_you_mean, pluralize
from prefed.merge.config import GraphConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Graph:
    """An undirected graph over the nodes 0 … ``nodes`` − 1.

    Attributes:
        edges: int64 ``[edges, 2]``, sorted and unique, with i < j in each row.
    """

    nodes: int
    edges: NDArray[np.int64]

    @classmethod
    def of(cls, nodes: int, edges: Any) -> Graph:
        """Return the graph with these pairs of nodes as edges, in any order and direction."""
        pairs = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
        return cls(nodes, np.unique(np.sort(pairs, axis=1), axis=0))

    @property
    def degrees(self) -> NDArray[np.int64]:
        """Number of neighbours of each node, int64 ``[nodes]``."""
        return np.bincount(self.edges.ravel(), minlength=self.nodes)

    def parts(self) -> NDArray[np.int32]:
        """Return the index of the connected component of each node, int32 ``[nodes]``."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        ones = np.ones(len(self.edges), dtype=np.int8)
        links = coo_array((ones, (self.edges[:, 0], self.edges[:, 1])), shape=(self.nodes, self.nodes))
        return np.asarray(connected_components(links, directed=False)[1])

    def check_connected(self, clients: Sequence[str], when: str = "", how: str = "") -> None:
        """Refuse a graph that is not connected.

        Args:
            clients: names of the nodes.
            when: rounds of the graph, for the message, e.g. ``" in rounds 1 to 10"``.
            how: remedy, e.g. ``": raise [graph] window"``.

        Raises:
            ValueError: the graph is not connected. The message names two clients without a path.
        """
        parts = self.parts()
        if parts.max(initial=0) == 0:
            return
        sizes = np.bincount(parts)
        alone = int(np.flatnonzero(parts == sizes.argmin())[0])
        other = int(np.flatnonzero(parts != parts[alone])[0])
        raise ValueError(
            f"the graph is not connected{when}: it has {len(sizes)} components, with no path from "
            f"{clients[alone]!r} (in a component of {pluralize(int(sizes.min()), 'client', 'clients')}) to "
            f"{clients[other]!r}; add edges{how}"
        )


def draw_graph(config: GraphConfig, clients: Sequence[str], key: Key) -> Graph:
    """Return the configured graph, in which node k is client k. A single client has no edges.

    Args:
        config: any graph but ``"matrix"``.
        clients: sorted names.
        key: randomness of ``erdos_renyi``.

    Raises:
        ValueError: no such graph has that many nodes, or the file of edges is malformed.

    >>> draw_graph(GraphConfig(name="ring"), ["a", "b", "c", "d"], Key(0)).edges.tolist()
    [[0, 1], [0, 3], [1, 2], [2, 3]]
    >>> draw_graph(GraphConfig(name="exponential"), "abcdefgh", Key(0)).degrees.tolist()
    [5, 5, 5, 5, 5, 5, 5, 5]
    """
    import networkx as nx

    nodes = len(clients)
    if config.file is not None:
        return read_edges(Path(config.file), clients)
    if nodes == 1:
        return Graph.of(1, [])
    makers: dict[str, Callable[[], Any]] = {
        "path": lambda: nx.path_graph(nodes),
        "ring": lambda: nx.cycle_graph(nodes),
        "star": lambda: nx.star_graph(nodes - 1),
        "complete": lambda: nx.complete_graph(nodes),
        "torus": lambda: nx.grid_2d_graph(*_sides(nodes), periodic=True),
        "hypercube": lambda: nx.hypercube_graph(_dimension(nodes)),
        "exponential": lambda: nx.circulant_graph(nodes, [1 << k for k in range((nodes - 1).bit_length())]),
        "erdos_renyi": lambda: nx.fast_gnp_random_graph(nodes, config.probability, seed=key.number()),
    }
    made = makers[config.name]()
    # The nodes of a torus and of a hypercube are coordinates, numbered in sorted order.
    number = {node: index for index, node in enumerate(sorted(made))}
    return Graph.of(nodes, [(number[a], number[b]) for a, b in made.edges])


def _sides(nodes: int) -> tuple[int, int]:
    """Return the sides of the torus closest to a square."""
    side = next(side for side in range(math.isqrt(nodes), 0, -1) if nodes % side == 0)
    if side == 1:
        raise ValueError(
            f"a torus of {nodes} clients does not exist, since {nodes} is a prime number; use graph 'ring'"
        )
    return side, nodes // side


def _dimension(nodes: int) -> int:
    """Return the dimension of the hypercube with this number of nodes."""
    dimension = nodes.bit_length() - 1
    if nodes != 1 << dimension:
        raise ValueError(
            f"a hypercube of {nodes} clients does not exist; use {1 << dimension} or {2 << dimension} "
            "clients, or graph 'exponential'"
        )
    return dimension


def read_edges(path: Path, clients: Sequence[str]) -> Graph:
    """Read a list of edges: two clients per line, separated by a comma, a tab or spaces; # starts a comment.

    Raises:
        ValueError: the file cannot be read, or a line is not two different clients. The message names file,
            line and client.
    """
    index = {client: number for number, client in enumerate(clients)}
    edges = []
    for number, line in enumerate(files.read_lines(path), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{path}, line {number}"
        separator = next((mark for mark in ",\t" if mark in text), None)
        words = next(csv.reader([text], delimiter=separator)) if separator else text.split()
        names = [word.strip() for word in words]
        if len(names) != 2:
            raise ValueError(
                f"{where}: expected two clients, found {len(names)} words; separate names that contain "
                "spaces by a comma"
            )
        for name in names:
            if name not in index:
                raise ValueError(f"{where}: no training client {name!r}{did_you_mean(name, index)}")
        if names[0] == names[1]:
            raise ValueError(f"{where}: {names[0]!r} cannot be its own neighbour; remove the line")
        edges.append((index[names[0]], index[names[1]]))
    return Graph.of(len(clients), edges)


def draw_matching(graph: Graph, key: Key) -> Graph:
    """Draw a maximal matching: take edges in random order, each without a node of an earlier one."""
    left, right = graph.edges.T
    rank = key.numpy().permutation(len(graph.edges))
    pairs = []
    while len(rank):
        # Take each edge that comes first at both of its ends.
        first = np.full(graph.nodes, len(graph.edges))
        np.minimum.at(first, left, rank)
        np.minimum.at(first, right, rank)
        taken = (first[left] == rank) & (first[right] == rank)
        pairs.append(np.stack([left[taken], right[taken]], axis=1))
        matched = np.zeros(graph.nodes, dtype=bool)
        matched[pairs[-1]] = True
        free = ~(matched[left] | matched[right])
        left, right, rank = left[free], right[free], rank[free]
    return Graph.of(graph.nodes, np.concatenate(pairs) if pairs else [])
