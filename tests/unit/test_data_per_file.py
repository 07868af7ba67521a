"""A file for each client. Oracle: the same files as a table of sources, which is written by hand."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from pydantic import ValidationError

from prefed.core import Key
from prefed.data import DataConfig, DataError, build_dataset
from preferences import jsonl, pairs, tokenizer

BY_FILE = {"by": "file"}


def build(folder, **data):
    return build_dataset(DataConfig(**data), tokenizer(), Key(0), folder)


@pytest.fixture
def place(tmp_path):
    """Three clients, a file of another kind each, with 10, 8 and 6 pairs; tests for two of them."""
    rows = pairs(24)
    train = tmp_path / "train"
    (train / "north").mkdir(parents=True)
    jsonl(train / "ann.jsonl", rows[:10])
    lines = "".join(json.dumps(row) + "\n" for row in rows[10:18]).encode()
    (train / "north" / "ben.jsonl.gz").write_bytes(gzip.compress(lines))
    header = "\t".join(rows[0])
    (train / "dr.cy.tsv").write_text("\n".join([header, *("\t".join(row.values()) for row in rows[18:])]))
    (train / "README.md").write_text("Who is who")
    (tmp_path / "test").mkdir()
    for name in ("ann", "dr.cy"):
        jsonl(tmp_path / "test" / f"{name}.jsonl", [{**row, "prompt": f"{name}?"} for row in pairs(2)])
    return tmp_path


def table(place, role):
    """What a user would have to write."""
    found = {"ann": "ann.jsonl", "dr.cy": "dr.cy.tsv", "ben": "north/ben.jsonl.gz"}
    if role == "test":
        found = {"ann": "ann.jsonl", "dr.cy": "dr.cy.jsonl"}
    return {name: str(place / role / file) for name, file in found.items()}


def test_it_is_the_table_that_names_each_file(place):
    """Bit for bit: clients, order, splits, fractions of the client without tests, and the fingerprint."""
    settings = {"test_fraction": 0.25, "validation_fraction": 0.25}
    folders = {role: str(place / role) for role in ("train", "test")}
    found = build(place / "found", **folders, partition=BY_FILE, **settings)
    tables = {role: table(place, role) for role in ("train", "test")}
    given = build(place / "given", **tables, **settings)
    assert list(found.clients) == list(given.clients) == ["ann", "dr.cy", "ben"]
    assert found.fingerprint == given.fingerprint
    assert dict(found.sizes) == dict(given.sizes)
    # Of 10, 6 and 8 pairs: a quarter to validate on, rounded up at a half; ben has no test file, so a quarter
    # of the file is tested on.
    assert [tuple(sizes) for sizes in found.sizes.values()] == [(7, 3, 2), (4, 2, 2), (4, 2, 2)]
    for name, data in found.clients.items():
        assert np.array_equal(data.train, given.clients[name].train)
    assert found.findings.ignored == ("train/README.md",)


def test_a_test_file_of_nobody_is_counted(place):
    jsonl(place / "test" / "Ann.jsonl", pairs(3))
    folders = {role: str(place / role) for role in ("train", "test")}
    dataset = build(place / "tokens", **folders, partition=BY_FILE)
    assert dataset.row_counts.unplaced == 3
    assert dataset.findings.similar == (("Ann", "ann"),)


def test_saved_data_sets_are_clients_too(tmp_path):
    """One saved alone, one with splits: each role takes its own."""
    Dataset.from_list(pairs(5)).save_to_disk(tmp_path / "all" / "ann")
    splits = {"train": Dataset.from_list(pairs(4)), "test": Dataset.from_list(pairs(7)[4:])}
    DatasetDict(splits).save_to_disk(tmp_path / "all" / "ben")
    dataset = build(tmp_path / "tokens", train=str(tmp_path / "all"), partition=BY_FILE, test_fraction=0.0)
    assert {name: sizes.train for name, sizes in dataset.sizes.items()} == {"ann": 5, "ben": 4}


def clash(place):
    jsonl(place / "train" / "ann.json", pairs(1))


def clash_below(place):
    (place / "train" / "south").mkdir()
    jsonl(place / "train" / "south" / "ben.jsonl", pairs(1))


def empty(place):
    (place / "train" / "zoe.jsonl").write_text("\n")
    (place / "train" / "abe.csv").write_text("prompt,chosen,rejected\n")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (clash, ["train/ann.json", "train/ann.jsonl", "'ann'"]),
        (clash_below, ["train/north/ben.jsonl.gz", "train/south/ben.jsonl", "'ben'"]),
        (empty, ["train/abe.csv", "train/zoe.jsonl", "no row"]),
    ],
)
def test_files_that_make_no_client_are_named(place, spoil, named):
    spoil(place)
    with pytest.raises(DataError) as error:
        build(place / "tokens", train=str(place / "train"), partition=BY_FILE)
    assert Counter(name for name in named if name in str(error.value)) == Counter(named)


@pytest.mark.parametrize("path", ["train/ann.jsonl", "nowhere", "owner/name"])
def test_what_is_no_folder_is_refused(place, path, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(DataError, match=rf'by = "file".*data\.train = .{path}'):
        build(place / "tokens", train=path, partition=BY_FILE)


def test_a_saved_data_set_is_no_folder_of_clients(tmp_path):
    Dataset.from_list(pairs(5)).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="saved' is one dataset; set it to a folder with one file per client"):
        build(tmp_path / "tokens", train=str(tmp_path / "saved"), partition=BY_FILE)


def test_a_table_has_no_files_to_name():
    with pytest.raises(ValidationError, match="test must be a folder with one file"):
        DataConfig(train="train", test={"ann": "a.jsonl"}, partition=BY_FILE)


@pytest.mark.parametrize(("source", "suggested"), [("train", True), ("train/ann.jsonl", False)])
def test_by_file_is_suggested_where_the_rows_of_several_files_name_no_client(place, source, suggested):
    with pytest.raises(DataError, match="no row has the column 'worker'") as caught:
        build(place / "built", train=str(place / source), partition={"by": "column", "column": "worker"})
    assert ('by = "file"' in str(caught.value)) == suggested
