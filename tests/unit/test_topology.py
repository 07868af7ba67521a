"""Graphs, mixing matrices and what is known of them in closed form."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.io import mmwrite

from prefed.core import Key
from prefed.merge.config import GraphConfig
from prefed.merge.graphs import Graph, draw_graph, draw_matching, read_edges
from prefed.merge.mixing_matrices import (
    Topology,
    check_mixing,
    consensus_factors,
    fail_edges,
    matrix_graph,
    mixing_matrix,
    neighbours,
    read_matrix,
    rho,
    rho_of_sequence,
)

FIVE = ("a", "b", "c", "d", "e")
NAMES = ("star", "path", "ring", "complete")


def five(name, **settings):
    return Topology(GraphConfig(name=name, **settings), FIVE, Key(42))


def clients(number):
    return tuple(f"client-{index:04}" for index in range(number))


def test_rho_of_the_papers_graphs():
    """[D] table 2 prints 0.87, 0.54, 0.45 and 0.00. On the star two leaves that differ keep their self weight
    4/5, so λ = 0.8: the table's 0.45 comes of no rule."""
    known = {"path": 0.8727, "ring": 0.5393, "star": 0.8, "complete": 0.0}
    assert {name: five(name).rho for name in known} == pytest.approx(known, abs=1e-4)


def test_rho_of_the_ring_and_the_path_by_hand():
    """W of the ring is circulant. On the path every row has weights 1/3, so W = I − L/3 and
    λ = 1 − (2 − 2 cos(πk/5))/3."""
    assert five("ring").rho == pytest.approx((1 + 2 * np.cos(2 * np.pi / 5)) / 3, abs=1e-12)
    assert five("path").rho == pytest.approx(1 - (2 - 2 * np.cos(np.pi / 5)) / 3, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("star", (76.0, 48.0, 9.33, 5.33)),
        ("path", (68.4, 48.4, 7.67, 3.67)),
        ("ring", (10.8, 2.8, 4.91, 0.91)),
        ("complete", (4.0, 0.0, 4.0, 0.0)),
    ],
)
def test_consensus_factors_of_the_papers_graphs(name, figures):
    """Star by hand: λ = 4/5 three times and 0, so 3 · 25 + 1, 3 · 16, 3/(1 − 0.64) + 1 and 3 · 0.64/0.36."""
    known = consensus_factors(five(name).matrix(1))
    assert (
        known.heterogeneity_before,
        known.heterogeneity_after,
        known.noise_before,
        known.noise_after,
    ) == pytest.approx(figures, abs=5e-3)


@pytest.mark.parametrize("name", NAMES)
def test_consensus_error_on_quadratics_is_what_the_formulas_say(name):
    """Gradient descent on F_i = ½‖θ − b_i‖², then a mix: its fixed point, averaged over all 120 placements of
    five different b_i. The formulas leave out the step's own contraction, hence the tolerance of some η."""
    weights, rate = five(name).matrix(1).toarray(), 1e-5
    optima = np.array([3.0, -1.0, 0.5, -4.0, 1.5])
    spread = ((optima - optima.mean()) ** 2).mean()
    placed = np.array(list(permutations(optima))).T
    step = lambda theta: theta - rate * (theta - placed)  # noqa: E731
    # θ = W((1 − η) θ + η b), solved instead of iterated.
    after = np.linalg.solve(np.eye(5) - (1 - rate) * weights, rate * weights @ placed)
    assert weights @ step(after) == pytest.approx(after, abs=1e-9)
    error = lambda theta: ((theta - theta.mean(axis=0)) ** 2).mean()  # noqa: E731
    factor = rate**2 * spread / 4
    known = consensus_factors(five(name).matrix(1))
    assert error(step(after)) / factor == pytest.approx(known.heterogeneity_before, rel=1e-3)
    assert error(after) / factor == pytest.approx(known.heterogeneity_after, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_consensus_error_of_noise_is_what_the_formulas_say(name):
    """Independent noise of variance 1 at every node and step: the covariance of what parts the nodes follows
    C ← W(C + P)W with P = I − 11ᵀ/5, until it stands still."""
    weights, apart = five(name).matrix(1).toarray(), np.eye(5) - 0.2
    after = np.zeros((5, 5))
    for _ in range(300):
        after = weights @ (after + apart) @ weights
    known = consensus_factors(five(name).matrix(1))
    assert np.trace(after + apart) == pytest.approx(known.noise_before, rel=1e-9)
    assert np.trace(after) == pytest.approx(known.noise_after, rel=1e-9, abs=1e-12)


def test_noise_alone_puts_the_star_above_the_path_after_the_mix():
    star, path = (consensus_factors(five(name).matrix(1)) for name in ("star", "path"))
    assert star.noise_after > path.noise_after
    assert star.heterogeneity_after < path.heterogeneity_after


def test_shapes():
    """Exponential over 16: ±1, ±2, ±4 and 8, which is its own opposite: seven neighbours."""
    shapes = {
        ("path", 6): (5, {1, 2}),
        ("ring", 6): (6, {2}),
        ("star", 6): (5, {1, 5}),
        ("complete", 6): (15, {5}),
        ("torus", 12): (24, {4}),
        ("hypercube", 8): (12, {3}),
        ("exponential", 16): (56, {7}),
    }
    graphs = {(name, n): draw_graph(GraphConfig(name=name), clients(n), Key(0)) for name, n in shapes}
    assert {key: (len(g.edges), set(g.degrees.tolist())) for key, g in graphs.items()} == shapes


def test_a_star_has_its_hub_first_and_a_hypercube_joins_numbers_one_bit_apart():
    assert draw_graph(GraphConfig(name="star"), FIVE, Key(0)).degrees.tolist() == [4, 1, 1, 1, 1]
    cube = draw_graph(GraphConfig(name="hypercube"), clients(16), Key(0)).edges
    assert {int(a ^ b).bit_count() for a, b in cube} == {1}


def test_erdos_renyi_is_drawn_by_its_key():
    """4,950 edges, each there with probability 0.3: a standard deviation of 32."""
    config = GraphConfig(name="erdos_renyi", probability=0.3)
    graph = draw_graph(config, clients(100), Key(7))
    assert abs(len(graph.edges) - 1485) < 5 * 32
    assert np.array_equal(graph.edges, draw_graph(config, clients(100), Key(7)).edges)
    assert not np.array_equal(graph.edges, draw_graph(config, clients(100), Key(8)).edges)


def test_self_weights_of_a_complete_graph_are_one_nth_to_the_bit():
    """1 − 4 · 0.2 is 0.19999999999999996 in floating point."""
    for number in (1, 3, 5, 7, 49, 200):
        matrix = Topology(GraphConfig(name="complete"), clients(number), Key(0)).matrix(1)
        assert set(matrix.data.tolist()) == {1 / number}


def test_max_degree_is_the_laplacian():
    graph = draw_graph(GraphConfig(name="star"), FIVE, Key(0))
    laplacian = np.diag([4.0, 1, 1, 1, 1])
    laplacian[0, 1:] = laplacian[1:, 0] = -1
    assert mixing_matrix(graph, "max_degree").toarray() == pytest.approx(np.eye(5) - laplacian / 5)


def test_edges_that_fail_are_self_weight_at_both_ends():
    """Which edges fail is read off the zeros; the only other value that may change is the diagonal."""
    whole = five("ring").matrix(1).toarray()
    failing = five("ring", edge_failure=0.5)
    rounds = [failing.matrix(number).toarray() for number in range(1, 9)]
    assert any((matrix != whole).any() for matrix in rounds)
    for matrix in rounds:
        failed = (whole > 0) & (matrix == 0)
        assert matrix.diagonal() == pytest.approx(whole.diagonal() + (whole * failed).sum(axis=1))
        assert (matrix - np.diag(matrix.diagonal()) == (whole - np.diag(whole.diagonal())) * ~failed).all()
    share = np.mean([(matrix == 0).sum() - 10 for matrix in rounds]) / 10
    assert 0.2 < share < 0.8


def test_a_round_is_a_function_of_key_and_round_alone():
    for settings in (
        {"edge_failure": 0.3},
        {"changes": "matching"},
        {"name": "erdos_renyi", "probability": 0.6, "changes": "redrawn"},
    ):
        config = GraphConfig(**{"name": "complete", **settings})
        ahead, fresh = Topology(config, clients(9), Key(3)), Topology(config, clients(9), Key(3))
        forward = [ahead.matrix(number).toarray() for number in (1, 2, 3)]
        assert all(np.array_equal(forward[n - 1], fresh.matrix(n).toarray()) for n in (3, 1, 2))
        assert not np.array_equal(forward[0], forward[1])


def test_a_matching_of_a_complete_graph_pairs_all():
    topology = Topology(GraphConfig(name="complete", changes="matching"), clients(10), Key(5))
    for number in range(1, 6):
        matrix = topology.matrix(number).toarray()
        assert sorted(matrix.ravel())[-20:] == [0.5] * 20
        assert matrix.sum() == 10


def test_a_matching_equals_taking_edges_in_their_drawn_order():
    graph = draw_graph(GraphConfig(name="erdos_renyi", probability=0.2), clients(30), Key(1))
    key = Key(11)
    rank = key.numpy().permutation(len(graph.edges))
    free, taken = set(range(30)), []
    for a, b in graph.edges[np.argsort(rank)].tolist():
        if {a, b} <= free:
            free -= {a, b}
            taken.append((a, b))
    assert draw_matching(graph, key).edges.tolist() == sorted(map(list, taken))


def test_rho_of_a_sequence():
    """Two nodes of three average, one pair after the other: W is a projection, so E[W²] = E[W] =
    I − L/6 of the triangle, with λ₂ = 1 − 3/6. A single matrix has its own ρ."""
    pairs = [mixing_matrix(Graph.of(3, [pair])) for pair in ((0, 1), (1, 2), (0, 2))]
    assert rho_of_sequence(pairs) == pytest.approx(0.5**0.5)
    assert rho_of_sequence([five("path").matrix(1)]) == pytest.approx(five("path").rho)
    with pytest.raises(ValueError, match="no mixing matrices"):
        rho_of_sequence([])


def test_rho_of_many_nodes_is_that_of_few(monkeypatch):
    matrix = Topology(GraphConfig(name="exponential"), clients(300), Key(0)).matrix(1)
    dense = rho(matrix)
    monkeypatch.setattr("prefed.merge.mixing_matrices._DENSE", 10)
    assert rho(matrix) == pytest.approx(dense, abs=1e-5)


def test_placements_move_clients_and_keep_rho():
    """Over the seeds, the hub of a star is drawn among all."""
    config = GraphConfig(name="star", placement="random")
    stars = [Topology(config, FIVE, Key(seed)) for seed in range(40)]
    hubs = {max(range(5), key=lambda node, s=star: len(neighbours(s.matrix(1), node))) for star in stars}
    assert hubs == set(range(5))
    assert {round(star.rho, 9) for star in stars} == {0.8}


def test_neighbours_are_in_the_order_of_clients():
    assert neighbours(five("ring").matrix(1), 3) == [
        (2, pytest.approx(1 / 3)),
        (3, pytest.approx(1 / 3)),
        (4, pytest.approx(1 / 3)),
    ]


def test_edges_from_a_file(tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text('# who talks to whom\na b\nb\tc\n"d", c  # twice is once\nc,d\n\ne a\n')
    graph = read_edges(path, FIVE)
    assert graph.edges.tolist() == [[0, 1], [0, 4], [1, 2], [2, 3]]
    assert five("edges", file=str(path)).rho == pytest.approx(five("path").rho)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b\nb f\n", "line 2: no training client 'f'"),
        ("a b c\n", "line 1: expected two clients, found 3 words"),
        ("a b\n\nc c\n", "line 3: 'c' cannot be its own neighbour"),
        ("a b\nc d\nd e\n", "not connected: it has 2 components, with no path from 'a' .in a component of 2"),
    ],
)
def test_wrong_edges_are_refused_with_the_name_of_the_file(tmp_path, text, message):
    path = tmp_path / "edges.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        five("edges", file=str(path)).check()
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        five("edges", file=str(tmp_path / "none.txt")).matrix(1)


def test_a_matrix_from_a_file(tmp_path):
    """Numbers with seven digits come back doubly stochastic to rounding, text and Matrix Market alike."""
    whole = five("path").matrix(1)
    np.savetxt(tmp_path / "w.csv", whole.toarray().round(7), delimiter=",")
    mmwrite(tmp_path / "w.mtx", whole)
    for name in ("w.csv", "w.mtx"):
        matrix = read_matrix(tmp_path / name, FIVE)
        assert abs(matrix.sum(axis=1) - 1).max() < 1e-15
        assert matrix.toarray() == pytest.approx(whole.toarray(), abs=1e-6)
        assert five("matrix", file=str(tmp_path / name)).rho == pytest.approx(0.8727, abs=1e-4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1 0 0\n0 1 0\n0 0 1\n", "not connected"),
        (".5 .5 0\n.3 .3 .4\n.1 .4 .5\n", "not symmetric: 'a' gives 'b' the weight 0.5"),
        (".5 .5 0\n.5 .4 .2\n0 .2 .8\n", "not doubly stochastic: the weights of 'b' sum to 1.1"),
        ("1.5 -.5 0\n-.5 1 .5\n0 .5 .5\n", "has -0.5 for 'b' at 'a'"),
        ("0 1\n1 0\n", "2 × 2 numbers for 3 training clients"),
        ("", "0 × "),
    ],
)
def test_wrong_matrices_are_refused(tmp_path, rows, message):
    path = tmp_path / "w.txt"
    path.write_text(rows)
    with pytest.raises(ValueError, match=message) as caught:
        read_matrix(path, ("a", "b", "c"))
    assert str(caught.value).startswith(f"{path}: ")


def test_two_groups_that_swap_their_models_are_refused():
    """A ring of four without self weights: connected, symmetric, doubly stochastic, and λ = −1."""
    ring = draw_graph(GraphConfig(name="ring"), "abcd", Key(0))
    swap = mixing_matrix(ring).toarray()
    swap = (swap - np.diag(swap.diagonal())) * 1.5
    from scipy.sparse import csr_array

    with pytest.raises(ValueError, match="swap their models"):
        check_mixing(csr_array(swap), "abcd")


def test_a_sequence_must_be_connected_in_its_union():
    """Two of four clients at a time; in one round never all, in ten rounds with near certainty."""
    config = {"name": "path", "changes": "matching"}
    Topology(GraphConfig(**config, window=10), clients(4), Key(0)).check()
    with pytest.raises(ValueError, match=r"in rounds 3 to 3 taken together \(window = 1\)"):
        Topology(GraphConfig(**config, window=1), clients(4), Key(0)).check(3)
    with pytest.raises(ValueError, match=r"raise \[graph\] window"):
        Topology(GraphConfig(**config, window=1), clients(4), Key(0)).check()
    with pytest.raises(ValueError, match=r"^\[graph\] name = 'erdos_renyi': the graph is not connected"):
        Topology(GraphConfig(name="erdos_renyi", probability=0.01), clients(9), Key(0)).check()
    assert 0 < Topology(GraphConfig(**config), clients(4), Key(0)).rho < 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "erdos_renyi"}, "set probability for graph 'erdos_renyi'"),
        ({"name": "ring", "probability": 0.5}, "and only for this graph"),
        ({"name": "ring", "file": "x"}, "and only for these"),
        ({"name": "ring", "changes": "redrawn"}, "cannot be redrawn"),
        ({"name": "matrix", "file": "x", "weights": "metropolis"}, "defines all weights; remove weights"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        GraphConfig(**settings)


def test_a_failed_edge_is_no_edge():
    ring = five("ring").matrix(1)
    assert len(matrix_graph(fail_edges(ring, 0.999999, Key(0))).edges) == 0
