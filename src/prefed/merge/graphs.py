"""Graphs of clients that talk without a server: who is whose neighbour."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from prefed.core import Key
from prefed.core.lazy import np
from prefed.core.strict_settings import StrictModel
from prefed.core.text import did_you_mean, pluralize

if TYPE_CHECKING:
    from numpy.typing import NDArray

GraphName = Literal[
    "path",
    "ring",
    "star",
    "complete",
    "torus",
    "hypercube",
    "exponential",
    "erdos_renyi",
    "edges",
    "matrix",
]
WeightsName = Literal["metropolis", "max_degree"]


class GraphConfig(StrictModel):
    """Who exchanges models with whom where there is no server, and how much a neighbour's model counts.

    Raises:
        ValueError: two of the keys cannot serve together; the error says why.
    """

    name: GraphName = Field(
        "ring",
        description="exponential joins i to i ± 1, 2, 4 … around a ring; erdos_renyi draws each edge; edges "
        "reads them from a file, and matrix the mixing matrix itself",
    )
    probability: float | None = Field(None, gt=0, le=1, description="of each edge of erdos_renyi")
    file: str | None = Field(
        None,
        description="of edges: two clients a line; of matrix: the rows of sorted clients as text, or .mtx",
    )
    weights: WeightsName = Field(
        "metropolis",
        description="weight of neighbour j at i: 1/(1 + max(deg i, deg j)), or 1/(1 + the largest degree)",
    )
    placement: Literal["sorted", "random"] = Field(
        "sorted",
        description="which client is which node: in the order of names (a star's hub is the first), or drawn",
    )
    changes: Literal["never", "redrawn", "matching"] = Field(
        "never",
        description="redrawn: a new erdos_renyi graph each round; matching: each round a client talks to one "
        "neighbour at most, drawn anew",
    )
    order: Literal["train_mix", "mix_train"] = Field(
        "train_mix", description="what comes first in a round: the clients' training, or the mix"
    )
    edge_failure: float = Field(0.0, ge=0, lt=1, description="probability that an edge fails in a round")
    window: int = Field(
        10, ge=1, description="a graph that changes must connect all clients within so many rounds"
    )

    @property
    def varies(self) -> bool:
        """Whether two rounds may have different graphs."""
        return self.changes != "never" or self.edge_failure > 0

    @model_validator(mode="after")
    def _coherent(self) -> GraphConfig:
        if (self.name == "erdos_renyi") != (self.probability is not None):
            raise ValueError("probability belongs to graph 'erdos_renyi', which needs it, and to no other")
        if (self.name in ("edges", "matrix")) != (self.file is not None):
            raise ValueError("file belongs to graphs 'edges' and 'matrix', which need it, and to no other")
        if self.changes == "redrawn" and self.name != "erdos_renyi":
            raise ValueError(
                f"graph {self.name!r} is not drawn, so it cannot be redrawn; use 'erdos_renyi', or changes "
                "'matching'"
            )
        if self.name == "matrix" and (self.changes == "matching" or "weights" in self.model_fields_set):
            raise ValueError("graph 'matrix' gives all weights: leave out weights and changes")
        return self


@dataclass(frozen=True, eq=False)
class Graph:
    """An undirected graph over the nodes 0 … ``nodes`` − 1.

    Attributes:
        edges: int64 ``[edges, 2]``, each row i < j, sorted, each edge once.
    """

    nodes: int
    edges: NDArray[np.int64]

    @classmethod
    def of(cls, nodes: int, edges: Any) -> Graph:
        """The graph with these pairs of nodes as edges; their order and direction make no difference."""
        pairs = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
        return cls(nodes, np.unique(np.sort(pairs, axis=1), axis=0))

    @property
    def degrees(self) -> NDArray[np.int64]:
        """int64 ``[nodes]``: how many neighbours each node has."""
        return np.bincount(self.edges.ravel(), minlength=self.nodes)

    def parts(self) -> NDArray[np.int32]:
        """int32 ``[nodes]``: the number of the connected part that each node is in."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        ones = np.ones(len(self.edges), dtype=np.int8)
        links = coo_array((ones, (self.edges[:, 0], self.edges[:, 1])), shape=(self.nodes, self.nodes))
        return np.asarray(connected_components(links, directed=False)[1])

    def check_connected(self, clients: Sequence[str], when: str = "", how: str = "") -> None:
        """Refuse a graph in which some client cannot reach another.

        Args:
            clients: the nodes' names.
            when: end of the message's first part, e.g. ``" in rounds 1 to 10"``.
            how: what to set so that there are more edges, e.g. ``": raise [graph] window"``.

        Raises:
            ValueError: it is not connected. The message names two clients that cannot reach each other.
        """
        parts = self.parts()
        if parts.max(initial=0) == 0:
            return
        sizes = np.bincount(parts)
        alone = int(np.flatnonzero(parts == sizes.argmin())[0])
        other = int(np.flatnonzero(parts != parts[alone])[0])
        raise ValueError(
            f"the graph is not connected{when}: it has {len(sizes)} parts, and no path leads from "
            f"{clients[alone]!r} (in a part of {pluralize(int(sizes.min()), 'client', 'clients')}) to "
            f"{clients[other]!r}; add edges{how}"
        )


def draw_graph(config: GraphConfig, clients: Sequence[str], key: Key) -> Graph:
    """The graph that ``config`` names over ``clients``: node k is client k.

    Edges are those of networkx. One client alone has no edge.

    Args:
        config: its name is not ``"matrix"``, which has no graph apart from its numbers.
        clients: sorted names.
        key: randomness of ``erdos_renyi``.

    Raises:
        ValueError: no such graph has that many nodes, or the file of edges is wrong.

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
    if config.name == "path":
        made = nx.path_graph(nodes)
    elif config.name == "ring":
        made = nx.cycle_graph(nodes)
    elif config.name == "star":
        made = nx.star_graph(nodes - 1)
    elif config.name == "complete":
        made = nx.complete_graph(nodes)
    elif config.name == "torus":
        made = nx.grid_2d_graph(*_sides(nodes), periodic=True)
    elif config.name == "hypercube":
        if nodes & (nodes - 1):
            low = 1 << nodes.bit_length() - 1
            raise ValueError(f"a hypercube has {low} or {2 * low} nodes, not {nodes}; use 'exponential'")
        made = nx.hypercube_graph(nodes.bit_length() - 1)
    elif config.name == "exponential":
        made = nx.circulant_graph(nodes, [1 << k for k in range((nodes - 1).bit_length())])
    else:
        made = nx.fast_gnp_random_graph(nodes, config.probability, seed=key.number())
    # A torus and a hypercube have coordinates for nodes, and these count in the order of the nodes.
    number = {node: index for index, node in enumerate(sorted(made))}
    return Graph.of(nodes, [(number[a], number[b]) for a, b in made.edges])


def _sides(nodes: int) -> tuple[int, int]:
    """The sides of the squarest torus with so many nodes."""
    side = next(side for side in range(math.isqrt(nodes), 0, -1) if nodes % side == 0)
    if side == 1:
        raise ValueError(
            f"{nodes} nodes make no torus of at least two rows, as {nodes} is a prime number; use 'ring'"
        )
    return side, nodes // side


def read_edges(path: Path, clients: Sequence[str]) -> Graph:
    """Read a list of edges: two clients a line, parted by a comma, a tab or spaces; # begins a comment.

    Raises:
        ValueError: the file cannot be read, or a line is not two different clients. The message names file,
            line and client.
    """
    index = {client: number for number, client in enumerate(clients)}
    edges = []
    for number, line in enumerate(_lines(path), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{path}, line {number}"
        separator = next((mark for mark in ",\t" if mark in text), None)
        words = next(csv.reader([text], delimiter=separator)) if separator else text.split()
        names = [word.strip() for word in words]
        if len(names) != 2:
            raise ValueError(
                f"{where}: an edge is two clients, and here are {len(names)} words; part names that hold "
                "spaces by a comma"
            )
        for name in names:
            if name not in index:
                raise ValueError(
                    f"{where}: there is no client {name!r} among those that train{did_you_mean(name, index)}"
                )
        if names[0] == names[1]:
            raise ValueError(f"{where}: {names[0]!r} is no neighbour of itself; remove the line")
        edges.append((index[names[0]], index[names[1]]))
    return Graph.of(len(clients), edges)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; save it as UTF-8") from None


def draw_matching(graph: Graph, key: Key) -> Graph:
    """A maximal matching of ``graph``: no two edges share a node, and no edge can be added.

    Edges come in a random order, and each that touches no earlier one is taken.
    """
    left, right = graph.edges.T
    rank = key.numpy().permutation(len(graph.edges))
    pairs = []
    while len(rank):
        # An edge that comes first at both of its ends is taken, whatever else is.
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
