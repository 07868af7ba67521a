"""Thumbs: responses with a thumb up or down, as rows, records, tokens and scores."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from prefed.core import NO_MINIMUM, Key, Privacy
from prefed.data import DataConfig, DataError, Record, SelectorConfig, build_dataset
from prefed.data.tokens import pair_hash, thumbs
from prefed.train.metrics import ThumbScores, federated_metrics
from preferences import jsonl, tokenizer

TURN, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def build(tmp_path, rows, selector=None, **settings):
    settings = {"partition": {"by": "column", "column": "client"}, "test_fraction": 0.0, **settings}
    tmp_path.mkdir(exist_ok=True)
    config = DataConfig(train=str(jsonl(tmp_path / "rows.jsonl", rows)), **settings)
    return build_dataset(config, tokenizer(), Key(0), tmp_path / "data", selector)


def thumb(number, label, **columns):
    return {"prompt": f"Q{number}:", "completion": f" a{number}", "label": label, "client": "ann", **columns}


def test_rows_as_trl_has_them(tmp_path):
    """Text and messages; a label is a truth value or its number or text, and other columns are kept."""
    rows = [thumb(k, label) for k, label in enumerate([True, False, 1, 0.0, "up", "Down", "true", "0"])]
    rows += [
        {"prompt": [TURN], "completion": [ANSWER], "label": True, "client": "ann", "votes": 3},
        {"prompt": "Q9:", "completion": "Q9: again", "label": False, "client": "ann"},
    ]
    dataset = build(tmp_path, rows)
    records = [dataset.tokens.record(row) for row in range(10)]
    assert [record.label for record in records] == [True, False] * 5
    assert (records[0].chosen, records[0].rejected) == (" a0", "")
    assert (records[1].chosen, records[1].rejected) == ("", " a1")
    assert (records[8].response, records[8].extra["votes"]) == ("Hello", 3)
    assert records[9].response == " again"
    assert thumbs(dataset.tokens.lengths).tolist() == [1, -1] * 5


def test_tokens_of_a_thumb(tmp_path):
    """One token per byte, and an end of text: "Q0:" has 3, " a0" 4, an empty prompt 1. Of the
    unrelated response of 10 tokens, the 11 − 3 that fit after the prompt stay.

    A flip turns the thumb, not the response.
    """
    rows = [thumb(0, True), thumb(1, False) | {"prompt": "", "completion": "123456789"}]
    tokens = build(tmp_path, rows, max_length=11).tokens
    first, second = tokens.pair(0), tokens.pair(1)
    assert tokens.lengths.tolist() == [[3, 4, 0], [1, 0, 10]]
    assert [len(ids) for ids in first] == [3, 4, 0]
    assert [len(ids) for ids in second] == [1, 10, 0]
    both = tokens.pair(0, 1)
    np.testing.assert_array_equal(both.chosen, first.chosen)
    np.testing.assert_array_equal(both.rejected, second.chosen[:8])
    np.testing.assert_array_equal(tokens.pair(1, 0).rejected, first.chosen)
    again = tmp_path / "flipped"
    again.mkdir()
    flipped = build(again, rows, max_length=11, flip=("ann",)).tokens
    assert thumbs(flipped.lengths).tolist() == [-1, 1]
    assert [flipped.record(row).label for row in (0, 1)] == [False, True]
    for row in (0, 1):
        np.testing.assert_array_equal(flipped.pair(row).chosen, tokens.pair(row).chosen)


def test_pairs_are_read_as_two_thumbs(tmp_path):
    """With format "thumbs", a chosen response is up and a rejected one down, as TRL does. Equal ones tie."""
    rows = [
        {"prompt": [TURN], "chosen": "Hello", "rejected": "No", "client": "ann"},
        {"prompt": "Q:", "chosen": " yes", "rejected": " no", "client": "ann"},
        {"prompt": "Q:", "chosen": " so", "rejected": " so", "client": "ann"},
        thumb(3, False),
    ]
    dataset = build(tmp_path, rows, format="thumbs")
    records = [dataset.tokens.record(row) for row in range(5)]
    assert [(record.response, record.label) for record in records] == [
        *[("Hello", True), ("No", False), (" yes", True), (" no", False), (" a3", False)]
    ]
    assert (dataset.row_counts.ties, dataset.row_counts.kept) == (1, 5)


def test_columns_can_be_named(tmp_path):
    rows = [{"q": "Q:", "a": f" {liked}", "liked": liked, "who": "ann"} for liked in (1, 0)]
    columns = {"prompt": "q", "completion": "a", "label": "liked", "client": "who"}
    dataset = build(tmp_path, rows, columns=columns)
    assert [dataset.tokens.record(row).label for row in (0, 1)] == [True, False]
    assert [*dataset.clients] == ["ann"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (thumb(1, "yes"), 'true, 1 or "up" for a thumb up, or false, 0 or "down" for a thumb down'),
        (thumb(1, -1), "label must be true, 1 or"),
        (thumb(1, True, completion=" "), "completion is empty"),
        (thumb(1, True, completion=[TURN], prompt=[TURN]), "completion must end with an assistant message"),
        ({"prompt": "Q:", "chosen": " a", "rejected": " b", "client": "ann"}, "no column 'completion'"),
    ],
)
def test_errors_name_file_and_row(tmp_path, row, message):
    with pytest.raises(DataError) as error:
        build(tmp_path, [thumb(0, True), row], columns=None if "chosen" not in row else {"label": "label"})
    assert f"{tmp_path / 'rows.jsonl'}, row 2: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("first", ["a thumb", "a pair"])
def test_a_file_of_pairs_and_thumbs_is_refused_in_any_order(tmp_path, first):
    """The second row is named, and the way to read every pair as two thumbs."""
    rows = {
        "a thumb": thumb(0, True),
        "a pair": {"prompt": "Q:", "chosen": " a", "rejected": " b", "client": "ann"},
    }
    (second,) = rows.keys() - {first}
    with pytest.raises(DataError, match=r'format = "thumbs"') as error:
        build(tmp_path, [rows[first], rows[second]])
    place = tmp_path / "rows.jsonl"
    assert f"{place}, row 2: this train row is {second}, but {place}, row 1 is {first}" in str(error.value)


def test_pairs_and_thumbs_are_not_mixed(tmp_path):
    """The first training row decides. Test rows may be of the other kind."""
    pair = {"prompt": "Q:", "chosen": " a", "rejected": " b", "client": "ann"}
    jsonl(tmp_path / "a.jsonl", [thumb(0, True)])
    jsonl(tmp_path / "b.jsonl", [pair])
    config = DataConfig(
        train={"a": str(tmp_path / "a.jsonl"), "b": str(tmp_path / "b.jsonl")},
        partition={"by": "column", "column": "client"},
    )
    place = f"{tmp_path / 'b.jsonl'}, row 1: this train row is a pair, but {tmp_path / 'a.jsonl'}, row 1 is a"
    with pytest.raises(DataError, match="as two thumbs") as error:
        build_dataset(config, tokenizer(), Key(0), tmp_path / "mixed")
    assert place in str(error.value)
    apart = DataConfig(
        train=str(tmp_path / "a.jsonl"),
        test=str(tmp_path / "b.jsonl"),
        partition={"by": "column", "column": "client"},
    )
    dataset = build_dataset(apart, tokenizer(), Key(0), tmp_path / "apart")
    assert thumbs(dataset.tokens.lengths).tolist() == [1, 0]


PAIRS = [
    {"prompt": "Q0:", "chosen": " a0", "rejected": " b", "client": "ann"},
    {"prompt": "Q1:", "chosen": " b", "rejected": " a1", "client": "ann"},
    {"prompt": "Q2:", "chosen": " b", "rejected": " c", "client": "ann"},
    {"prompt": "Q3:", "chosen": " a3", "rejected": " c", "client": "bob"},
]
THUMBS = [thumb(k, k % 2 == 0) for k in range(6)] + [thumb(4, True, client="bob")]


@pytest.mark.parametrize(
    ("train", "test", "duplicates", "leaks", "left"),
    [
        (THUMBS, PAIRS, "drop", 2, ["Q2:", "Q3:", "Q4:", "Q5:"]),
        (THUMBS, PAIRS, "drop_tested", 3, ["Q2:", "Q4:", "Q5:"]),
        (PAIRS, THUMBS, "drop", 2, ["Q2:"]),
    ],
)
def test_what_is_tested_on_is_not_trained_on_as_another_kind(tmp_path, train, test, duplicates, leaks, left):
    """Ann's thumbs 0 and 1 are on the chosen and the rejected response of her pairs 0 and 1, and thumb 2 is
    on neither. Thumb 3 is on a response of bob's pair, which counts if all clients are compared."""
    given = {"test": str(jsonl(tmp_path / "test.jsonl", test)), "duplicates": duplicates}
    dataset = build(tmp_path, train, **given, test_fraction=None)
    prompts = [dataset.tokens.record(row).prompt for row in dataset.clients["ann"].train]
    assert (dataset.row_counts.leaks, prompts) == (leaks, left)


def test_a_selector_refuses_thumbs(tmp_path):
    """Each thumb is named once, although a selector sees every row in both orders."""
    alike = r"rows.jsonl, row 1: .* a selector compares two responses \(also row 2\)\n"
    with pytest.raises(DataError, match=alike):
        build(tmp_path, [thumb(0, True), thumb(1, False)], SelectorConfig())


def test_a_record_keeps_its_thumb():
    """JSON has TRL's columns. Both thumbs of a response have one hash, and so count as a contradiction."""
    record = Record.thumb("Q", "a", up=True, client="ann", margin=2.0)
    plain = {"prompt": "Q", "completion": "a", "label": True, "margin": 2.0, "client": "ann"}
    assert json.loads(record.to_json()) == plain
    assert Record.from_json(record.to_json()) == record
    assert record.swapped() == Record.thumb("Q", "a", up=False, client="ann", margin=2.0)
    assert pair_hash(record) == pair_hash(record.swapped())
    with pytest.raises(ValueError, match="this record has two"):
        Record("Q", "a", "b", label=True)
    with pytest.raises(ValueError, match="completion is empty"):
        Record.thumb("Q", "", up=False)


def scores(ratios, others, up):
    both = np.stack([ratios, others], 1).astype(np.float32)
    return ThumbScores(both - 3, np.full_like(both, -3.0), np.array(up))


def test_metrics_by_hand():
    """t = mean(−4, −2, 0) = −2 and z_0 = 0. Of the ups at −1 and −3, ½ are over t and none over z_0, and the
    down at −5 is below both: balanced 3/4 and 1/2. Margin ½ [(1 − 1)/2 + 3] = 3/2; losses σ(−s r), β = 1.
    """
    metrics = scores([-1.0, -3, -5], [-4.0, -2, 0], [True, True, False]).metrics(beta=1.0)
    losses = [1 / (1 + math.exp(gain)) for gain in (-1, -3, 5)]
    assert metrics == pytest.approx(
        {
            "preference_accuracy": 0.75,
            "reward_accuracy": 0.5,
            "baseline_accuracy": 0.5,
            "margin": 1.5,
            "kto_loss": sum(losses) / 3,
            "reward_up": -2.0,
            "reward_down": -5.0,
        }
    )


def test_metrics_of_one_kind_and_of_one_thumb():
    """Without downs there is no reward of downs. A single response has no unrelated one, so t = 0."""
    ups = scores([2.0, 0.5], [1.0, 1.0], [True, True]).metrics(beta=0.1)
    assert "reward_down" not in ups
    assert (ups["preference_accuracy"], ups["baseline_accuracy"]) == (0.5, 0.0)
    assert ups["margin"] == pytest.approx(0.25)
    one = scores([-1.0], [-9.0], [False]).metrics(beta=0.1)
    assert (one["preference_accuracy"], one["baseline_accuracy"], one["margin"]) == (1.0, 1.0, 1.0)
    broken = scores([np.nan, 1.0], [0.0, 0.0], [False, True]).metrics(beta=0.1)
    assert (broken["preference_accuracy"], broken["not_finite"]) == (0.5, 1)


def test_metrics_that_some_clients_lack():
    """The mean of a metric is over the clients that have it; small clients alone never show it."""
    metrics = {"a": {"margin": 1.0, "reward_up": 2.0}, "b": {"margin": 3.0, "reward_down": 4.0}}
    every = federated_metrics(metrics, {"a": 9, "b": 9}, NO_MINIMUM)
    assert {name: metric["mean"] for name, metric in every.items()} == {
        "margin": 2.0,
        "reward_up": 2.0,
        "reward_down": 4.0,
    }
    few = federated_metrics(metrics, {"a": 9, "b": 2}, Privacy(minimum_pairs=5))
    assert [*few] == ["margin", "reward_up"]
