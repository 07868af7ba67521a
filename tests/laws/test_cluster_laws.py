"""Balanced clusters: sizes, the least cost, no influence of order, and what a lie about a loss can buy."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from law_examples import examples
from prefed.merge import clustering
from prefed.merge.clustering import MOST, cost, cut, exact, greedy, place

RULES = {"greedy": greedy, "exact": exact}
values = st.one_of(st.integers(0, 4).map(lambda k: k / 4), st.floats(0, MOST, width=32))
"""Ties, and numbers of any size."""


@st.composite
def tables(draw, most_clients=9, least=1, most=4):
    """Client → its losses under U models."""
    count = draw(st.integers(least, most))
    names = [f"client-{number}" for number in range(draw(st.integers(1, most_clients)))]
    return {name: tuple(draw(st.lists(values, min_size=count, max_size=count))) for name in names}


def balanced(losses):
    """Every assignment whose sizes differ by at most 1."""
    names, count = sorted(losses), len(next(iter(losses.values())))
    for choice in itertools.product(range(count), repeat=len(names)):
        sizes = [choice.count(cluster) for cluster in range(count)]
        if max(sizes) - min(sizes) <= 1:
            yield dict(zip(names, choice, strict=True))


@pytest.mark.parametrize("rule", RULES)
@examples(100)
@given(losses=tables(most_clients=14, most=5))
def test_every_client_has_one_cluster_and_sizes_differ_by_at_most_one(rule, losses):
    assigned, count = RULES[rule](losses), len(next(iter(losses.values())))
    sizes = Counter(assigned.values())
    assert set(assigned) == set(losses)
    assert set(sizes) <= set(range(count))
    assert max(sizes.values()) - min(sizes[cluster] for cluster in range(count)) <= 1


@examples(60)
@given(tables(most_clients=7, least=2, most=2))
def test_with_two_clusters_the_greedy_rule_is_brute_force(losses):
    best = min(cost(losses, assigned) for assigned in balanced(losses))
    assert cost(losses, greedy(losses)) == pytest.approx(best, abs=1e-9)


@examples(40)
@given(tables(most_clients=6, least=1, most=4))
def test_the_exact_assignment_is_brute_force(losses):
    """Over every pattern of sizes, fewer clients than clusters included."""
    best = min(cost(losses, assigned) for assigned in balanced(losses))
    assert cost(losses, exact(losses)) == pytest.approx(best, abs=1e-9)


@examples(100)
@given(tables(most_clients=14, least=3, most=5))
def test_the_greedy_rule_is_never_below_the_exact_one(losses):
    assert cost(losses, greedy(losses)) >= cost(losses, exact(losses)) - 1e-9


def test_with_three_clusters_the_greedy_rule_can_lose():
    """a and b choose 0. a stays, with regret 0.5 against 0.4, although b's third choice costs 5 and a's 0.6:
    then c keeps b from 1. The greedy sum is 0 + 5 + 0; with b in 0 and a in 2 it is 0.6."""
    losses = {"a": (0.0, 0.5, 0.6), "b": (0.0, 0.4, 5.0), "c": (9.0, 0.0, 9.0)}
    assert greedy(losses) == {"a": 0, "b": 2, "c": 1}
    assert exact(losses) == {"a": 2, "b": 0, "c": 1}


@pytest.mark.parametrize("rule", RULES)
@examples(60)
@given(losses=tables(most_clients=10), data=st.data())
def test_the_order_of_clients_changes_nothing(rule, losses, data):
    """The known mistake: members cut off at the cap in the order of a shuffle."""
    shuffled = {name: losses[name] for name in data.draw(st.permutations(sorted(losses)))}
    assert RULES[rule](shuffled) == RULES[rule](losses)


def test_those_who_would_lose_most_elsewhere_stay():
    """Four clients choose cluster 0, which has two places. Regrets are 0.1, 0.4, 0.2 and 0.3."""
    losses = {"a": (0.0, 0.1), "b": (0.0, 0.4), "c": (0.0, 0.2), "d": (0.0, 0.3)}
    assert greedy(losses) == {"a": 1, "b": 0, "c": 1, "d": 0}


def test_ties_go_to_the_first_id_and_the_lowest_cluster():
    losses = dict.fromkeys("dcbae", (0.5, 0.5))
    assert greedy(losses) == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1}


@examples(60)
@given(tables(most_clients=8, least=2), st.one_of(st.floats(MOST), st.just(math.nan)), st.data())
def test_an_inflated_loss_buys_no_more_than_the_highest_one(losses, lie, data):
    """Whatever a client claims, the assignment is that of the highest loss that counts."""
    liar = data.draw(st.sampled_from(sorted(losses)))
    where = data.draw(st.integers(0, len(losses[liar]) - 1))

    def claimed(value):
        own = [value if cluster == where else loss for cluster, loss in enumerate(losses[liar])]
        return {**losses, liar: tuple(map(cut, own))}

    for rule in RULES.values():
        assert rule(claimed(lie)) == rule(claimed(MOST))


def test_an_honest_regret_of_ten_stands_against_any_claim():
    """Both choose cluster 0, which has one place: equal regrets, so the first id has it."""
    losses = {"a": (0.0, cut(10.0)), "b": (0.0, cut(1e30))}
    assert greedy(losses) == {"a": 0, "b": 1}


@pytest.mark.parametrize("rule", RULES)
@examples(30)
@given(st.integers(3, 20), st.integers(2, 5), st.data())
def test_liars_get_the_cluster_they_want_until_it_is_full(rule, size, count, data):
    """Honest losses are within 0.1 of ln 2. As many liars as the smallest cluster has places claim 0
    there and 10 elsewhere: all get in. So ten of 53 are more than half of a cluster of 18 or 17."""
    number, wanted = max(size, count), data.draw(st.integers(0, count - 1))
    near = st.floats(math.log(2) - 0.1, math.log(2) + 0.1)
    losses = {f"h{k:02}": data.draw(st.lists(near, min_size=count, max_size=count)) for k in range(number)}
    liars = sorted(losses, reverse=True)[: number // count]
    losses |= {liar: [0.0 if u == wanted else MOST for u in range(count)] for liar in liars}
    assigned = RULES[rule](losses)
    assert all(assigned[liar] == wanted for liar in liars)


@examples(40)
@given(tables(most_clients=8), st.sets(st.text("xyz", min_size=1, max_size=2), max_size=5))
def test_clients_without_losses_go_where_fewest_are(losses, others):
    count = len(next(iter(losses.values())))
    before = greedy(losses)
    placed = place([*others, *losses], before, count)
    sizes = Counter(placed.values())
    assert {client: placed[client] for client in before} == before
    assert set(placed) == set(losses) | others
    assert max(sizes.values()) - min(sizes[cluster] for cluster in range(count)) <= 1


def test_clients_must_agree_on_the_number_of_models():
    with pytest.raises(ValueError, match=r"clients report different numbers of losses: \[1, 2\]"):
        clustering.greedy({"a": (0.1,), "b": (0.1, 0.2)})
