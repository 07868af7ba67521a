from dataclasses import replace

import numpy as np
import pytest

from prefed.core import Key
from prefed.data import DataError, partition
from prefed.data.config import ByColumn, BySource, Conflict, Dirichlet, Iid, Margin
from prefed.data.partition import RowTable, assign_clients, first_kind_count, partition_value
from prefed.data.record import Record


def make(labels, role=None, margin=None, prompt=None):
    names = sorted(set(labels), key=labels.index)
    n = len(labels)
    return RowTable(
        role=np.array(role or [0] * n),
        value=np.array([names.index(name) for name in labels]),
        values=names,
        margin=np.array(margin if margin is not None else [0.0] * n),
        prompt=np.array(prompt if prompt is not None else range(n), dtype=np.uint64),
        usable=np.ones(n, dtype=bool),
    )


def test_power_law_sizes():
    """(k+1)^−1 over three clients: shares 6/11, 3/11, 2/11 of 110 rows."""
    assert partition.shard_sizes(110, partition.client_weights(3, 1.0)).tolist() == [60, 30, 20]


def test_sizes_that_add_up_are_met():
    assert partition.shard_sizes(160, partition.client_weights(3, [100, 50, 10])).tolist() == [100, 50, 10]
    with pytest.raises(DataError, match="sizes has 2 weights for 3 clients"):
        partition.client_weights(3, [1, 2])


def test_everyone_gets_something():
    """With exponent 5 the last clients have shares below one row. They get one row each."""
    sizes = partition.shard_sizes(20, partition.client_weights(6, 5.0))
    assert sizes.tolist() == [15, 1, 1, 1, 1, 1]
    with pytest.raises(DataError, match="3 pairs are too few for 4 clients; use fewer clients"):
        partition.shard_sizes(3, np.ones(4))


def test_a_column_makes_clients_sorted_by_name():
    assignment = assign_clients(ByColumn(column="w"), make(["b", "a", "b", "c"], role=[0, 0, 2, 2]), Key(0))
    assert assignment.ids == ("a", "b")
    # The test row of "c" belongs to nobody, because nobody trains on "c".
    assert assignment.client.tolist() == [1, 0, 1, -1]


def test_groups_name_clients():
    """A small version of FedPDPO's three clients of programming languages."""
    groups = {"web": ["js", "php"], "system": ["c", "go"]}
    assignment = assign_clients(
        ByColumn(column="lang", groups=groups), make(["go", "js", "c", "php"]), Key(0)
    )
    assert assignment.ids == ("web", "system")
    assert assignment.client.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"web": ["js"]}, "no group contains c; add each to a group"),
        ({"web": ["js"], "all": ["c", "js"]}, "'js' is in 'web' and 'all'; remove it from one of them"),
        ({"web": ["js"], "system": ["c"], "old": ["cobol"]}, "no rows for old; the values in the data are c"),
    ],
)
def test_groups_must_fit_the_values(groups, message):
    with pytest.raises(DataError, match=message):
        assign_clients(ByColumn(column="lang", groups=groups), make(["js", "c"]), Key(0))


def test_sources_keep_the_order_of_the_table():
    assignment = assign_clients(BySource(), make(["web", "code", "web"]), Key(0))
    assert (assignment.ids, assignment.client.tolist()) == (("web", "code"), [0, 1, 0])


def test_margin_shards():
    """Sorted 5 4 | 3 2 | 1: the remainder goes to the first shards."""
    assignment = assign_clients(Margin(clients=3), make(["x"] * 5, margin=[1, 5, 3, 2, 4]), Key(0))
    assert assignment.client.tolist() == [2, 0, 1, 1, 0]
    assert assignment.ids == ("client-0", "client-1", "client-2")


def test_test_rows_are_cut_like_training_rows():
    """Each role is sorted and cut on its own: the first client has the largest margins of each role."""
    table = make(["x"] * 6, role=[0, 0, 0, 2, 2, 2], margin=[9, 8, 7, 3, 1, 2])
    assert assign_clients(Margin(clients=3), table, Key(0)).client.tolist() == [0, 1, 2, 0, 2, 1]


def test_conflict_gives_each_kind_its_category():
    """Ratio 0.7 of 10 clients: seven have helpful rows, three harmless ones."""
    table = make(["helpful"] * 70 + ["harmless"] * 30)
    assignment = assign_clients(
        Conflict(clients=10, ratio=0.7, column="k", categories=("helpful", "harmless")), table, Key(0)
    )
    assert np.bincount(assignment.client).tolist() == [10] * 10
    assert set(assignment.client[:70]) == set(range(7))
    assert assignment.ids[0] == "helpful-0"
    assert assignment.ids[-1] == "harmless-2"
    assert assignment.flipped == frozenset()


def test_how_many_clients_are_of_the_first_kind():
    """The ratio of them, rounded half up, and at least one of each kind."""
    assert [first_kind_count(5, ratio) for ratio in (0.5, 0.48, 0.01, 0.99)] == [3, 2, 1, 4]


def test_conflict_by_flipping():
    assignment = assign_clients(Conflict(clients=10, ratio=0.3, flip=True), make(["x"] * 40), Key(0))
    assert assignment.flipped == set(assignment.ids[3:])
    assert len(assignment.ids) == 10
    assert np.bincount(assignment.client).tolist() == [4] * 10


@pytest.mark.parametrize(
    ("labels", "categories", "message"),
    [
        (["a", "b", "c"], None, "column 'k' has 3: a, b, c"),
        (["a", "a"], None, "has 1: a"),
        (["a", "b"], ("a", "d"), r"\[data\.partition\] categories: a, d"),
    ],
)
def test_a_conflict_needs_two_categories(labels, categories, message):
    with pytest.raises(DataError, match=message):
        assign_clients(Conflict(clients=2, column="k", categories=categories), make(labels), Key(0))


def test_dirichlet_partition_follows_the_shares():
    """Category 0 is halved, category 1 goes to the second client. Each of 1,000 rows is a prompt."""
    category = np.arange(1000) % 2
    share = np.array([[0.5, 0.5], [0.0, 1.0]])
    client = partition.dirichlet_partition(category, np.arange(1000, dtype=np.uint64), share, Key(0))
    assert np.bincount(client[category == 0]).tolist() == [250, 250]
    assert set(client[category == 1]) == {1}


def test_test_prompts_go_to_the_client_that_trains_on_them():
    placed = (np.array([7, 3], dtype=np.uint64), np.array([1, 0]))
    prompt = np.array([3, 7, 7, 9], dtype=np.uint64)
    category, share = np.zeros(4, dtype=np.int64), np.array([[0.0, 1.0]])
    client = partition.dirichlet_partition(category, prompt, share, Key(0), placed)
    assert client.tolist() == [0, 1, 1, 1]


def test_an_empty_client_gets_the_smallest_prompt_of_the_largest_client():
    """Client 0 has prompts of 3, 1 and 2 rows. Client 2 has none and gets the prompt of 1 row."""
    prompt = np.array([1, 1, 1, 2, 3, 3, 4], dtype=np.uint64)
    client = partition.fill_empty_clients(np.array([0, 0, 0, 0, 0, 0, 1]), prompt, 3)
    assert client.tolist() == [0, 0, 0, 2, 0, 0, 1]
    with pytest.raises(DataError, match="4 distinct prompts are too few for 5 clients"):
        partition.fill_empty_clients(np.zeros(7, dtype=np.int64), prompt, 5)


@pytest.mark.parametrize("alpha", [0.01, 0.3, 100.0])
def test_alpha_concentrates_categories(alpha):
    """For Dir(α) over N clients, E Σ p² = (α + 1) / (Nα + 1): 0.92, 0.33 and 0.10 for N = 10."""
    share = partition.dirichlet_shares(4000, 10, alpha, Key(0))
    expected = (alpha + 1) / (10 * alpha + 1)
    assert (share**2).sum(axis=1).mean() == pytest.approx(expected, rel=0.03)


def test_dirichlet_refuses_prompts_that_cross_categories():
    """All rows have one of two prompts, and both occur in both categories."""
    table = make(["a", "b"] * 10, prompt=[0, 0, 1, 1] * 5)
    with pytest.raises(DataError, match=r"100% of .* \(distinct prompts: 2\).* share_prompts = true"):
        assign_clients(Dirichlet(column="k", clients=2), table, Key(0))
    assignment = assign_clients(
        Dirichlet(column="k", clients=2, alpha=0.5, share_prompts=True), table, Key(0)
    )
    assert sorted(set(assignment.client)) == [0, 1]


def test_dirichlet_does_not_depend_on_the_order_of_categories():
    """If the values are listed in another order, each category gets the same shares."""
    labels = ["a"] * 50 + ["b"] * 50
    first = assign_clients(Dirichlet(column="k", clients=3), make(labels), Key(1)).client
    table = make(labels)
    swapped = replace(table, value=1 - table.value, values=["b", "a"])
    assert (assign_clients(Dirichlet(column="k", clients=3), swapped, Key(1)).client == first).all()


def test_partition_values():
    record = Record("Q", "a", "b", category="c", extra={"worker": 3.0, "lang": "go"})
    assert partition_value(ByColumn(column="lang"), record, None) == "go"
    assert partition_value(ByColumn(column="worker"), record, None) == "3"
    assert partition_value(Dirichlet(clients=2), record, None) == "c"
    assert partition_value(BySource(), record, "web") == "web"
    assert partition_value(Iid(clients=2), record, None) == ""
    expected = "no value in column 'w', which the partition requires; other columns: category, worker, lang"
    with pytest.raises(ValueError, match=expected):
        partition_value(ByColumn(column="w"), record, None)
    with pytest.raises(ValueError, match="no margin"):
        partition_value(Margin(clients=2), record, None)
