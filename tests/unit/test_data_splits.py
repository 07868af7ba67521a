import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from prefed.core import Key
from prefed.data.partition import duplicate_mask, leak_mask, random_split

small = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        arrays(np.int64, n, elements=st.integers(-1, 2)),
        arrays(np.int64, n, elements=st.integers(0, 2)),
        arrays(np.uint64, n, elements=st.integers(0, 5)),
        arrays(np.uint8, n, elements=st.integers(0, 1)),
    )
)


@given(small)
def test_duplicate_mask_against_a_set(columns):
    """Oracle: go through the rows with a set of earlier rows."""
    seen, expected = set(), []
    for row in zip(*(c.tolist() for c in columns), strict=True):
        expected.append(row in seen and row[0] >= 0)
        seen.add(row)
    assert duplicate_mask(*columns).tolist() == expected


@given(small)
def test_leak_mask_against_a_search(columns):
    """Oracle: a row leaks if any row of its scope and pair has a later role."""
    scope, role, pair, _ = columns
    expected = [
        bool(scope[k] >= 0 and ((scope == scope[k]) & (pair == pair[k]) & (role > role[k])).any())
        for k in range(len(scope))
    ]
    assert leak_mask(scope, role, pair).tolist() == expected


@given(small, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_leak_mask_between_pairs_and_thumbs(columns, thumb_of_role):
    """Oracle: two pairs are the same by both responses, a thumb is on one of them. Pair k of 6 has responses
    k and k + 1, or, as a thumb, k alone; so pairs share a response without being the same."""
    scope, role, pair, _ = columns
    thumb = np.array(thumb_of_role)[role]
    responses = np.stack([pair, pair + np.where(thumb, 0, 1).astype(np.uint64)], axis=1)
    hashes = np.where(thumb, pair, pair + 10)

    def same(j, k):
        shared = set(responses[j].tolist()) & set(responses[k].tolist())
        return hashes[j] == hashes[k] if thumb[j] == thumb[k] else bool(shared)

    rows = range(len(scope))
    expected = [
        any(scope[j] == scope[k] >= 0 and role[j] > role[k] and same(j, k) for j in rows) for k in rows
    ]
    assert leak_mask(scope, role, hashes, responses).tolist() == expected


def test_the_opposite_preference_is_no_duplicate_but_leaks():
    """A pair that is labelled both ways is not a duplicate, but it leaks if one of the two is a test pair."""
    scope, pair = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.uint64)
    assert not duplicate_mask(scope, np.zeros(2, dtype=np.int64), pair, np.array([0, 1])).any()
    assert leak_mask(scope, np.array([0, 2]), pair).tolist() == [True, False]


@given(
    arrays(np.uint64, st.integers(1, 60), elements=st.integers(0, 30)),
    st.floats(0, 0.6),
    st.floats(0, 0.39),
    st.integers(0, 2**31),
)
def test_random_split(group, validation, test, seed):
    """Groups stay whole, one is left for training, and the numbers are nearest to the fractions."""
    role = random_split(group, validation, test, Key(seed))
    assert (random_split(group, validation, test, Key(seed)) == role).all()
    groups = [set(group[role == r].tolist()) for r in range(3)]
    count = len(np.unique(group))
    assert groups[0]
    assert sum(map(len, groups)) == count
    assert len(groups[2]) == min(int(test * count + 0.5), count - 1)
    assert len(groups[1]) == min(int(validation * count + 0.5), count - 1 - len(groups[2]))


def test_random_split_by_hand():
    """Ten pairs, 0.2 and 0.1: 2 validate, 1 tests, 7 train. Two pairs, 0.1: round(0.2) = 0."""
    role = random_split(np.arange(10, dtype=np.uint64), 0.2, 0.1, Key(0))
    assert np.bincount(role).tolist() == [7, 2, 1]
    assert random_split(np.arange(2, dtype=np.uint64), 0.0, 0.1, Key(0)).tolist() == [0, 0]
    assert sorted(random_split(np.arange(2, dtype=np.uint64), 0.0, 0.9, Key(0)).tolist()) == [0, 2]
