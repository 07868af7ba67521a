"""Laws of mixing without a server, over random graphs."""

from __future__ import annotations

from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

from prefed.core import Key
from prefed.merge.config import GraphConfig
from prefed.merge.graphs import Graph, draw_matching
from prefed.merge.mixing_matrices import Topology, fail_edges, mix, mixing_matrix, rho, rho_of_sequence


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph: connected or not."""
    nodes = draw(st.integers(2, 12))
    pairs = [(a, b) for a in range(nodes) for b in range(a)]
    return Graph.of(nodes, draw(st.lists(st.sampled_from(pairs), max_size=30)))


@st.composite
def matrices(draw: st.DrawFn):
    """The mixing matrix of a round: of a graph, of a matching in it, or with edges that failed."""
    graph, key = draw(graphs()), Key(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        graph = draw_matching(graph, key)
    matrix = mixing_matrix(graph, draw(st.sampled_from(["metropolis", "max_degree"])))
    return fail_edges(matrix, draw(st.floats(0, 0.9)), key)


def states(matrix, seed: int):
    return Key(seed).numpy().standard_normal((matrix.shape[0], 3))


def apart(theta):
    """√N times the root of the consensus error."""
    return np.linalg.norm(theta - theta.mean(axis=0))


@given(matrices())
def test_every_matrix_is_symmetric_and_doubly_stochastic(matrix):
    dense = matrix.toarray()
    assert (dense >= 0).all()
    assert (dense == dense.T).all()
    assert abs(dense.sum(axis=0) - 1).max() < 1e-14
    assert (dense.diagonal() > 0).all()


@given(matrices(), st.integers(0, 2**32))
def test_mixing_keeps_the_mean(matrix, seed):
    theta = states(matrix, seed)
    assert np.allclose((matrix @ theta).mean(axis=0), theta.mean(axis=0), rtol=0, atol=1e-14)


@given(matrices(), st.integers(0, 2**32))
def test_a_mix_shrinks_what_parts_the_clients_by_rho_at_least(matrix, seed):
    theta = states(matrix, seed)
    assert apart(matrix @ theta) <= rho(matrix) * apart(theta) + 1e-12


@given(matrices(), st.integers(0, 2**32), st.integers(1, 9))
def test_these_laws_hold_of_models_that_are_mixed_a_few_numbers_at_a_time(matrix, seed, size):
    """Two columns in memory at a time, read and written elsewhere. The reported errors are those of the
    rows."""
    nodes = matrix.shape[0]
    theta = torch.from_numpy(Key(seed).numpy().standard_normal((nodes, size)))
    new = torch.zeros_like(theta)
    with patch("prefed.merge.mixing_matrices._MEMORY", 3 * 8 * nodes * 2):
        mixed = mix(matrix, size, lambda c: theta[:, c].clone(), lambda c, rows: new[:, c].copy_(rows))
    assert np.allclose(new, matrix.toarray() @ theta.numpy(), rtol=0, atol=1e-13)
    assert np.allclose(new.mean(0), theta.mean(0), rtol=0, atol=1e-14)
    errors = [apart(rows.numpy()) ** 2 / nodes for rows in (theta, new)]
    assert np.allclose((mixed.before, mixed.after), errors, rtol=1e-9, atol=1e-15)
    assert mixed.after <= rho(matrix) ** 2 * mixed.before + 1e-12


@given(matrices())
def test_rho_is_reached(matrix):
    """Along the eigenvector that parts clients most, the contraction is ρ and no less."""
    centred = matrix.toarray() - 1 / matrix.shape[0]
    values, vectors = np.linalg.eigh(centred)
    worst = vectors[:, [abs(values).argmax()]]
    assert abs(apart(matrix @ worst) - rho(matrix) * apart(worst)) < 1e-10


@given(graphs())
def test_a_graph_is_connected_where_rho_is_below_one(graph):
    """Self weights are positive, so λ = −1 cannot be."""
    connected = graph.parts().max() == 0
    assert (rho(mixing_matrix(graph)) < 1 - 1e-9) == connected


@given(graphs(), st.integers(0, 2**32), st.integers(1, 6))
def test_a_sequence_shrinks_by_its_rho_in_the_mean(graph, seed, rounds):
    """Over the matrices alike: mean ‖(W − J) θ‖² ≤ ρ² ‖(I − J) θ‖²."""
    sequence = [mixing_matrix(draw_matching(graph, Key(seed).at("round", n))) for n in range(rounds)]
    theta = states(sequence[0], seed)
    mean = np.mean([apart(matrix @ theta) ** 2 for matrix in sequence])
    assert mean <= rho_of_sequence(sequence) ** 2 * apart(theta) ** 2 + 1e-12


@given(graphs(), st.integers(0, 2**32))
def test_a_matching_is_maximal_and_touches_nobody_twice(graph, seed):
    matching = draw_matching(graph, Key(seed))
    assert matching.degrees.max(initial=0) <= 1
    edges = set(map(tuple, graph.edges.tolist()))
    assert set(map(tuple, matching.edges.tolist())) <= edges
    matched = set(matching.edges.ravel().tolist())
    assert all({a, b} & matched for a, b in edges)


@given(st.sampled_from(["path", "ring", "star", "complete", "exponential"]), st.integers(1, 40))
def test_named_graphs_connect_any_number_of_clients(name, nodes):
    topology = Topology(GraphConfig(name=name), tuple(f"{k:02}" for k in range(nodes)), Key(0))
    topology.check()
    assert topology.rho < 1
