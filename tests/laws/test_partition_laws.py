"""Laws of every partition: each row gets one client, the key alone decides, and sizes follow the settings."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from law_examples import examples
from prefed.core import Key
from prefed.data import partition
from prefed.data.config import ByColumn, BySource, Conflict, Dirichlet, Iid, Margin
from prefed.data.partition import RowTable, assign_clients

keys = st.builds(Key, st.integers(0, 2**31))
clients = st.integers(1, 8)


@st.composite
def sizes(draw, count):
    return draw(st.none() | st.floats(0, 3) | st.lists(st.floats(0.1, 100), min_size=count, max_size=count))


@st.composite
def columns(draw):
    """Rows with prompts that repeat, one to four categories, and margins with ties."""
    n = draw(st.integers(16, 60))
    kinds = draw(st.integers(1, 4))
    prompts = draw(st.integers(8, 60))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return RowTable(
        role=random.choice([0, 0, 0, 1, 2], n),
        value=random.integers(0, kinds, n),
        values=[f"kind {k}" for k in range(kinds)],
        margin=random.integers(-5, 5, n).astype(float),
        prompt=random.integers(0, prompts, n).astype(np.uint64) * np.uint64(2**40 + 1),
        usable=random.random(n) < 0.8,
    )


@st.composite
def cases(draw):
    rows = draw(columns())
    count = draw(st.integers(2, 5))
    train = rows.rows_of(0)
    kinds = np.unique(rows.value[train])
    assume(len(train) >= 2 * count and len(np.unique(rows.prompt[train])) >= count)
    options = [
        Iid(clients=count, sizes=draw(sizes(count))),
        Margin(clients=count, sizes=draw(sizes(count))),
        ByColumn(column="kind"),
        BySource(),
        Dirichlet(
            column="kind", alpha=draw(st.sampled_from([0.01, 0.3, 10.0])), clients=count, share_prompts=True
        ),
        Conflict(clients=count, flip=True, ratio=draw(st.floats(0.05, 0.95))),
    ]
    if len(kinds) == 2 and np.bincount(rows.value[train])[kinds].min() >= count:
        options.append(Conflict(clients=count, column="kind", ratio=draw(st.floats(0.05, 0.95))))
    return draw(st.sampled_from(options)), rows, draw(keys)


@examples(200)
@given(cases())
def test_each_training_row_has_one_client_and_each_client_a_row(case):
    rule, rows, key = case
    assignment = assign_clients(rule, rows, key)
    assert len(set(assignment.ids)) == len(assignment.ids)
    assert assignment.flipped <= set(assignment.ids)
    assert (assignment.client[~rows.usable] == -1).all()
    client = assignment.client[rows.rows_of(0)]
    assert ((client >= 0) & (client < len(assignment.ids))).all()
    assert np.bincount(client, minlength=len(assignment.ids)).min() >= 1
    assert (assignment.client < len(assignment.ids)).all()


@examples(100)
@given(cases())
def test_the_key_alone_decides(case):
    """Equal keys give equal assignments, and the test rows do not influence that of the training rows."""
    rule, rows, key = case
    assignment = assign_clients(rule, rows, key)
    again = assign_clients(rule, rows, Key(key.seed))
    assert assignment.ids == again.ids
    assert (assignment.client == again.client).all()
    train = replace(rows, usable=rows.usable & (rows.role == 0))
    alone = assign_clients(rule, train, key)
    assert (alone.client[rows.rows_of(0)] == assignment.client[rows.rows_of(0)]).all()


@examples(100)
@given(columns(), st.integers(2, 5), st.floats(0.01, 10), keys)
def test_two_dirichlet_clients_never_have_the_same_prompt(rows, count, alpha, key):
    """This holds for the rows of all three roles together."""
    # Each prompt has one category.
    value = (rows.prompt // np.uint64(2**40) % np.uint64(len(rows.values))).astype(np.int64)
    rows = replace(rows, value=value)
    assume(len(np.unique(rows.prompt[rows.rows_of(0)])) >= count)
    client = assign_clients(Dirichlet(column="kind", alpha=alpha, clients=count), rows, key).client
    used = client >= 0
    pairs = np.unique(np.stack([rows.prompt[used], client[used].astype(np.uint64)]), axis=1)
    assert len(np.unique(pairs[0])) == pairs.shape[1]


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.integers(0, 2))
def test_shard_sizes_add_up_and_stay_near(total, weight, least):
    """Sizes sum to the total. Without a minimum, each is within one of its exact share."""
    weights = np.array(weight)
    assume(total >= least * len(weight))
    result = partition.shard_sizes(total, weights, least=least)
    assert result.sum() == total
    assert result.min() >= least
    if least == 0:
        assert (np.abs(result - total * weights / weights.sum()) < 1 + 1e-9).all()


@given(st.integers(1, 300), clients, keys)
def test_iid_shards_are_equal(rows, count, key):
    """Sizes differ by at most one."""
    assume(rows >= count)
    sizes = np.bincount(partition.iid_partition(rows, np.ones(count), key), minlength=count)
    assert sizes.max() - sizes.min() <= 1


@given(arrays(np.float64, st.integers(8, 60), elements=st.floats(-5, 5)), clients)
def test_margins_fall_from_shard_to_shard(margins, count):
    """The smallest margin of a shard is at least the largest of the next."""
    client = partition.margin_partition(margins, np.ones(count))
    for k in range(count - 1):
        assert margins[client == k].min() >= margins[client == k + 1].max()


@examples(25)
@given(st.integers(1, 6), st.integers(1, 30), st.floats(1e-4, 50), keys)
def test_shares_are_distributions(categories, count, alpha, key):
    share = partition.dirichlet_shares(categories, count, alpha, key)
    assert share.shape == (categories, count)
    assert np.isfinite(share).all()
    assert (share >= 0).all()
    np.testing.assert_allclose(share.sum(axis=1), 1)


@given(st.integers(2, 100), st.floats(0.01, 0.99))
def test_a_conflict_has_both_kinds(count, ratio):
    first = partition.first_kind_count(count, ratio)
    assert 1 <= first <= count - 1
    assert abs(first - ratio * count) <= 1


@pytest.mark.parametrize("alpha", [0.1, 1.0, 20.0])
def test_shares_have_the_moments_of_a_dirichlet(alpha):
    """Over 20,000 draws: mean 1/N, variance (1/N)(1 − 1/N)/(Nα + 1), within 5 standard errors or so."""
    n = 5
    share = partition.dirichlet_shares(20_000, n, alpha, Key(3))
    assert abs(share.mean() - 1 / n) < 1e-12
    np.testing.assert_allclose(share.mean(axis=0), 1 / n, atol=0.015)
    np.testing.assert_allclose(share.var(), (1 / n) * (1 - 1 / n) / (n * alpha + 1), rtol=0.05)
