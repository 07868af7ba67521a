import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console
from scipy.spatial.distance import jensenshannon

from prefed.core import Key
from prefed.data import DataConfig, build_dataset, statistics
from prefed.data.statistics import DatasetStatistics, dataset_statistics, gini
from prefed.ui.pages.terminal import print_dataset_statistics
from preferences import jsonl, pairs, tokenizer

BY_WORKER = {"by": "column", "column": "worker"}


def build(tmp_path, rows, **settings):
    for role in ("test",):
        if role in settings:
            settings[role] = str(jsonl(tmp_path / f"{role}.jsonl", settings[role]))
    config = DataConfig(
        **({"train": str(jsonl(tmp_path / "train.jsonl", rows)), "partition": BY_WORKER} | settings)
    )
    return build_dataset(config, tokenizer(), Key(0), tmp_path / "t")


def test_by_hand(tmp_path):
    """Two clients. a: Q0 Q1 Q2 (kinds x x y); b: Q1 with the opposite preference, Q3 Q3 (kinds x y y).

    - Prompts in both: Q1 alone; pairs in both: the same one, and they disagree on it.
    - b says Q3 twice (kept). Test: a on a new pair of prompt Q0; b on the pair Q0, which a trains on.
    - Categories over all: 3 x, 3 y. For a: 2/3, 1/3 against 1/2, 1/2.
    """
    base = pairs(4)
    mirror = base[1] | {"chosen": base[1]["rejected"], "rejected": base[1]["chosen"]}
    rows = [
        base[0] | {"worker": "a", "category": "x"},
        base[1] | {"worker": "a", "category": "x"},
        base[2] | {"worker": "a", "category": "y"},
        mirror | {"worker": "b", "category": "x"},
        base[3] | {"worker": "b", "category": "y"},
        base[3] | {"worker": "b", "category": "y"},
    ]
    test = [{"prompt": "Q0:", "chosen": "new", "rejected": "old", "worker": "a"}, base[0] | {"worker": "b"}]
    statistics = dataset_statistics(build(tmp_path, rows, test=test, duplicates="keep"))
    a, b = statistics.clients
    assert (a.id, a.train, a.validation, a.test) == ("a", 3, 0, 1)
    assert (a.categories, b.categories, statistics.categories) == (
        {"x": 2, "y": 1},
        {"x": 1, "y": 2},
        {"x": 3, "y": 3},
    )
    assert (a.shared_prompts, a.shared_pairs, a.contradictions, a.duplicates) == (1, 1, 1, 0)
    assert (b.shared_prompts, b.shared_pairs, b.contradictions, b.duplicates) == (1, 1, 1, 1)
    assert (a.test_prompts, a.test_elsewhere) == (1, 0)
    assert (b.test_prompts, b.test_elsewhere) == (0, 1)
    assert (
        statistics.shared_prompts,
        statistics.shared_pairs,
        statistics.contradictions,
        statistics.test_trained,
    ) == (1, 1, 1, 1)
    out = io.StringIO()
    print_dataset_statistics(statistics, Console(file=out, width=160))
    assert re.search(r"test pairs that another client trains on +1 of 2 ", out.getvalue())
    expected = jensenshannon([2 / 3, 1 / 3], [0.5, 0.5], base=2)
    assert a.category_distance == pytest.approx(expected)
    assert statistics.category_distance == pytest.approx(expected)
    assert statistics.gini == 0.0
    # One token per byte, and one for the end of a response: "Q0:" is 3, " yes 0" is 7, " no 0" is 6.
    assert a.prompt.model_dump() == {"median": 3.0, "p95": 3.0, "max": 3}
    assert a.response.model_dump() == {"median": 6.5, "p95": 7.0, "max": 7}


def test_rows_read_include_those_that_are_no_json(tmp_path):
    """Of three lines one is not JSON: three rows read, one left out, as a run counts them."""
    path = jsonl(tmp_path / "train.jsonl", pairs(2))
    path.write_text(path.read_text() + "{\n")
    config = DataConfig(train=str(path), partition={"by": "iid", "clients": 1}, invalid="drop")
    dataset = build_dataset(config, tokenizer(), Key(0), tmp_path / "tokens")
    out = io.StringIO()
    print_dataset_statistics(dataset_statistics(dataset), Console(file=out, width=160))
    assert re.search(r"rows read +3 ", out.getvalue())
    assert dataset.row_counts.rows == 3


def test_token_distance_against_scipy(tmp_path):
    """The bytes of both clients' chosen responses, counted in full."""
    rows = [
        {"prompt": "Q", "chosen": word, "rejected": "no", "worker": "ab"[k % 2]}
        for k, word in enumerate(["apple", "zebra", "pear", "fuzz", "plum", "jazz", "peach", "quiz"])
    ]
    dataset = build(tmp_path, rows, test_fraction=0)
    statistics = dataset_statistics(dataset)
    counts = {
        name: np.bincount(
            np.concatenate([dataset.tokens.pair(int(k)).chosen for k in data.train]), minlength=300
        )
        for name, data in dataset.clients.items()
    }
    pool = sum(counts.values())
    for client in statistics.clients:
        assert client.token_distance == pytest.approx(jensenshannon(counts[client.id], pool, base=2))
    assert statistics.token_distance > statistics.random_token_distance


def test_iid_clients_differ_from_the_whole_by_chance_alone(tmp_path):
    """Under an iid partition the distance and the random distance have one distribution: they are close."""
    rows = [
        {"prompt": f"Q{k}", "chosen": f"{k * k} a", "rejected": "b", "category": "xyz"[k % 3]}
        for k in range(300)
    ]
    statistics = dataset_statistics(build(tmp_path, rows, partition={"by": "iid", "clients": 5}))
    assert statistics.token_distance == pytest.approx(statistics.random_token_distance, rel=0.3)
    assert statistics.category_distance < 0.2


def test_survives_json_and_prints(tmp_path):
    rows = pairs(200, worker=lambda k: f"w{k % 50:02d}", category=lambda k: f"c{k % 7}")
    statistics = dataset_statistics(build(tmp_path, rows))
    assert DatasetStatistics.model_validate_json(statistics.model_dump_json()) == statistics
    out = io.StringIO()
    print_dataset_statistics(statistics, Console(file=out, width=160))
    text = out.getvalue()
    assert "50 clients" in text
    assert "w39" in text
    assert "w40" not in text
    assert "and 10 more" in text


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any))
def test_gini_against_its_definition(sizes):
    """Mean absolute difference over twice the mean."""
    x = np.array(sizes, dtype=float)
    expected = np.abs(x[:, None] - x[None, :]).mean() / (2 * x.mean())
    assert gini(sizes) == pytest.approx(expected, abs=1e-9)


table = st.integers(1, 30).flatmap(
    lambda n: st.tuples(
        arrays(np.uint64, n, elements=st.integers(0, 4)),
        arrays(np.uint8, n, elements=st.integers(0, 1)),
        arrays(np.int64, n, elements=st.integers(0, 3)),
    )
)


@given(table)
def test_overlaps_against_a_search(columns):
    """Oracle: compare every row with every other."""
    pair, side, who = columns
    same, other = pair[:, None] == pair[None, :], who[:, None] != who[None, :]
    opposite = side[:, None] != side[None, :]
    assert statistics.shared_mask(pair, who).tolist() == (same & other).any(1).tolist()
    contradictions = (same & other & opposite).any(1)
    assert statistics.contradiction_mask(pair, side, who).tolist() == contradictions.tolist()


@given(table, table)
def test_overlap_mask_against_a_search(first, second):
    item, _, client = first
    other_item, _, other_client = second
    same = item[:, None] == other_item[None, :]
    for same_client in (True, False):
        mask = statistics.overlap_mask(item, client, other_item, other_client, same_client=same_client)
        of_client = (client[:, None] == other_client[None, :]) == same_client
        assert mask.tolist() == (same & of_client).any(1).tolist()
