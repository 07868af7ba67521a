"""What a person reads about a dataset: rows that were left out, names that may be one, clients to look at."""

import pytest

from prefed.core import Key
from prefed.data import DataConfig, build_dataset
from prefed.runs.data_notices import data_notices, settings_warnings
from preferences import jsonl, pairs, tokenizer

BY_WORKER = {"by": "column", "column": "worker"}


@pytest.fixture
def build(tmp_path):
    def build(rows, **settings):
        config = {"train": str(jsonl(tmp_path / "train.jsonl", rows)), "partition": BY_WORKER, **settings}
        return build_dataset(DataConfig(**config), tokenizer(), Key(0), tmp_path / "tokens")

    return build


def rows(ann, ben, long_ann=0, long_ben=0):
    """Pairs of two workers; the last of each have a response of 50 bytes."""
    every = pairs(ann + ben, worker=lambda k: "ann" if k < ann else "ben")
    for k, row in enumerate(every):
        if ann - long_ann <= k < ann or k >= ann + ben - long_ben:
            row["chosen"] = f" {k:049}"
    return every


def test_without_rows_left_out_nothing_is_reported(build):
    assert data_notices(build(pairs(12, worker=lambda k: k % 2))) == ([], [])


def test_few_rows_left_out_are_a_note(build):
    """2 of 40 are too long: a twentieth."""
    notes, warnings = data_notices(build(rows(20, 20, 2), max_length=30))
    assert warnings == []
    assert notes == ["38 of 40 rows are used; left out: 2 longer than max_length"]


def test_many_rows_left_out_are_a_warning_with_the_client_and_the_key(build):
    """Of 20 and 20 rows 9 and 1 are too long: a quarter of all. Ben's twentieth is not much. A response of 50
    bytes and the end of text leave room for a token of the prompt at 52."""
    dataset = build(rows(20, 20, 9, 1), max_length=30)
    assert dataset.findings.lost == {"ann": 9, "ben": 1}
    notes, (warning,) = data_notices(dataset)
    assert notes == []
    assert warning.startswith("30 of 40 rows are used; left out: 10 longer than max_length; ")
    assert "'ann' (9 of 20)" in warning
    assert "'ben'" not in warning
    assert "raise [data] max_length (52 is enough for all pairs)" in warning


def test_many_prompts_that_are_cut_are_a_warning(build):
    """A prompt of 71 tokens loses its beginning at 40; every pair is used."""
    long = [row | {"prompt": " ".join("abcdefghijklmnopqrstuvwxyz0123456789")} for row in rows(20, 20)]
    dataset = build(long, max_length=40)
    assert dataset.row_counts.cut == dataset.row_counts.kept == 40
    notes, (warning,) = data_notices(dataset)
    assert notes == []
    assert "40 prompts lost their beginning" in warning
    assert "raise [data] max_length" in warning


def test_the_length_that_keeps_all_keeps_all(build):
    assert build(rows(20, 20, 9, 1), max_length=52).row_counts.too_long == 0


def test_repeats_are_their_clients(build, tmp_path):
    """Ann has each of her 5 pairs three times."""
    every = [dict(row, worker="ann") for row in pairs(5) * 3] + pairs(20, worker="ben")
    (warning,) = data_notices(build(every))[1]
    assert "10 repeats" in warning
    assert "'ann' (10 of 15)" in warning
    assert "duplicates" in warning


def test_pairs_that_others_are_tested_on_are_their_clients(build):
    """Ben tests on all that ann trains on, but for one pair: with drop_tested she loses 9 of 10."""
    train = pairs(10, worker="ann")
    test = [{**row, "worker": "ben", "split": "test"} for row in train[:9]]
    own = [{**row, "prompt": f"B{row['prompt']}", "worker": "ben", "split": "train"} for row in train]
    every = [{**row, "split": "train"} for row in train] + test + own
    dataset = build(every, duplicates="drop_tested")
    assert dataset.findings.lost == {"ann": 9}
    assert "'ann' (9 of 10)" in data_notices(dataset)[1][0]


def test_a_client_of_whom_nothing_is_left_is_named(build):
    """All of ben's rows are too long, so he is not a client; no other notice counts him."""
    dataset = build(rows(60, 3, 0, 3), max_length=30)
    assert list(dataset.clients) == ["ann"]
    assert dataset.findings.gone == ("ben",)
    notes, (warning,) = data_notices(dataset)
    assert "3 longer than max_length" in notes[0]
    assert "no training pairs left and cannot take part" in warning
    assert "'ben'" in warning


NAMES = ["Ann", "ann", "ann ", "Zoë", "Zoe\u0308", "ben"]


def test_names_that_may_be_one_are_named_together(build):
    """Case, blanks, and a letter as one character or as two, which look alike."""
    warnings = data_notices(build(pairs(60, worker=lambda k: NAMES[k % 6])))[1]
    people, letters = warnings
    assert "'Ann', 'ann', 'ann '" in people
    assert r"'Zoe\u0308', 'Zo\xeb'" in letters
    assert not any("ben" in warning for warning in warnings)


def test_blanks_around_a_name_are_reported(build):
    (warning,) = data_notices(build(pairs(20, worker=lambda k: ["ann ", "ben"][k % 2])))[1]
    assert "spaces around them: 'ann '" in warning
    assert "'ann '" in warning


def test_clients_with_one_pair_are_named(build):
    every = pairs(12, worker=lambda k: f"w{k}" if k < 2 else "ben")
    (warning,) = data_notices(build(every))[1]
    assert "2 clients have only one training pair" in warning
    assert "'w0', 'w1'" in warning


@pytest.mark.parametrize(
    ("max_length", "batch", "named"),
    [
        (2048, 8, ["max_length = 2,048", "1,024", "max_length = 1024"]),
        (1024, 8, []),
        (512, 13, ["batch_size", "13", "12"]),
        (512, 12, []),
    ],
)
def test_settings_that_do_not_fit(max_length, batch, named):
    data = DataConfig(train="x", partition=BY_WORKER, max_length=max_length)
    warnings = settings_warnings(data, batch, 1024, [5, 12])
    assert len(warnings) == bool(named)
    assert all(name in warnings[0] for name in named)
    assert settings_warnings(data, 1, None, [5, 12]) == []
