"""Damage to a dataset on disk, by a power failure or a full disk, is noticed when it is opened."""

import errno
import os
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from prefed.core import Key, files
from prefed.data import DataConfig, DataError, FederatedDataset, TokenWriter, build_dataset
from prefed.data.tokens import COLUMNS, column_path
from prefed.train.pair_cache import PairScoreCache
from preferences import jsonl, pairs, tokenizer


@pytest.fixture
def folder(tmp_path):
    """A dataset of 40 rows and 3 clients."""
    rows = jsonl(tmp_path / "train.jsonl", pairs(40))
    config = DataConfig(train=str(rows), partition={"by": "iid", "clients": 3})
    build_dataset(config, tokenizer(), Key(0), tmp_path / "tokens")
    return tmp_path / "tokens"


@pytest.mark.sample
@pytest.mark.parametrize("name", ["ids.i32", "records.jsonl", "held.i64", "bounds.i64", "margins.f32"])
@pytest.mark.parametrize("change", [lambda data: data[:-8], lambda data: b"", lambda data: data + bytes(8)])
def test_a_file_of_another_size_is_refused(folder, name, change):
    """Every file's size follows from another file: the tokens' from the last offset, the rows' from the last
    bound. 8 bytes less are one row held, or two tokens; 8 more are one that nobody wrote."""
    assert len(FederatedDataset.open(folder).clients) == 3
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    with pytest.raises(DataError, match=re.escape(name)) as caught:
        FederatedDataset.open(folder)
    assert f"delete {folder} to rebuild it" in str(caught.value) or "delete it" in str(caught.value)


FILES = (
    *("tokens.json", "clients.json", "ids.i32", "records.jsonl", "held.i64", "bounds.i64"),
    *(column_path(Path(), name).name for name in COLUMNS),
)


def test_a_flipped_bit_is_noticed_and_its_file_named(folder, subtests):
    """In the first, the middle and the last byte of each file, which keeps its size."""
    for name in FILES:
        with subtests.test(name=name):
            assert {path.name for path in folder.iterdir()} == set(FILES)
            data = (folder / name).read_bytes()
            for at in (0, len(data) // 2, len(data) - 1):
                (folder / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                with pytest.raises(DataError, match=re.escape(name)) as caught:
                    FederatedDataset.open(folder)
                assert "delete it to rebuild it" in str(caught.value)
            (folder / name).write_bytes(data)
            assert len(FederatedDataset.open(folder).clients) == 3


def test_equal_inputs_do_not_hide_damage(folder, tmp_path):
    """The call that made the data, made again, opens them as anybody does."""
    path = folder / "clients.json"
    path.write_bytes(path.read_bytes().replace(b'"kept": 4', b'"kept": 5'))
    config = DataConfig(train=str(tmp_path / "train.jsonl"), partition={"by": "iid", "clients": 3})
    with pytest.raises(DataError, match=r"clients.json: its content .*delete it"):
        build_dataset(config, tokenizer(), Key(0), folder)


def test_only_the_owner_can_read_a_dataset(folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_rows_beyond_the_token_set_are_refused(folder):
    path = folder / "clients.json"
    manifest = files.loads_with_digest(path.read_bytes())
    manifest["digests"].clear()
    path.write_bytes(files.dumps_with_digest(manifest))
    rows = np.fromfile(folder / "held.i64", "<i8")
    rows[0] = 40
    rows.tofile(folder / "held.i64")
    with pytest.raises(DataError, match=r"\(held\.i64 has row numbers outside the 40 rows\)"):
        FederatedDataset.open(folder)


@pytest.mark.parametrize("full", ["records", "room"])
def test_a_full_disk_names_the_folder_and_what_would_do(tmp_path, monkeypatch, full):
    """Full while rows are written, and while a file for the references is given room: 12 bytes a record."""
    if full == "room":
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        message = rf"cannot write {tmp_path}/cache/x.f32 \(36 bytes\): No space left; free up space"
        with pytest.raises(OSError, match=message):
            PairScoreCache(3, tmp_path / "cache", "x")
        return
    rows = jsonl(tmp_path / "train.jsonl", pairs(40))
    config = DataConfig(train=str(rows), partition={"by": "iid", "clients": 3})
    monkeypatch.setattr(TokenWriter, "finish", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    message = rf"cannot write {tmp_path}/tokens \(\d\S+ bytes\): No space left; free up space on the disk"
    with pytest.raises(DataError, match=message):
        build_dataset(config, tokenizer(), Key(0), tmp_path / "tokens")
    assert not list(tmp_path.glob("tokens*"))


def test_a_page_of_zeros_is_computed_anew(tmp_path):
    """A file system may give zeros for what was not written before the power failed: no log-probability is
    taken to be 0, that of certainty."""
    rows = np.arange(3)
    PairScoreCache(3, tmp_path).put(rows, np.full((3, 2), -1.5, np.float32))
    again = PairScoreCache(3, tmp_path)
    assert not again.missing(rows)
    values = np.fromfile(tmp_path / "reference.f32", np.float32).reshape(3, 3)
    values[2] = 0
    values.tofile(tmp_path / "reference.f32")
    again = PairScoreCache(3, tmp_path)
    assert again.missing(rows)
    assert not again.missing(rows[:2])


def test_a_flipped_bit_in_a_kept_value_is_computed_anew(tmp_path):
    """Each of the 96 bits of each row in turn: that row is missing, and no other. A value may be any float, 0
    and NaN too; and a row that stands in place of another is not that one."""
    rows, values = np.arange(3), np.array([[0, -1.5], [np.nan, -np.inf], [-2, -1e-30]], np.float32)
    PairScoreCache(3, tmp_path).put(rows, values)
    path = tmp_path / "reference.f32"
    data = path.read_bytes()
    assert len(data) == 3 * 12
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        cache = PairScoreCache(3, tmp_path)
        assert [row for row in rows if cache.missing(rows[row : row + 1])] == [bit // 96]
    path.write_bytes(data[12:24] + data[:12] + data[24:])
    cache = PairScoreCache(3, tmp_path)
    assert [cache.missing(rows[row : row + 1]) for row in rows] == [True, True, False]
    path.write_bytes(data)
    np.testing.assert_array_equal(PairScoreCache(3, tmp_path).get(rows), values)


def test_values_without_a_check_are_computed_anew(tmp_path):
    """Two floats a record: 8 bytes instead of 12."""
    np.full((3, 2), -1.5, np.float32).tofile(tmp_path / "reference.f32")
    cache, rows = PairScoreCache(3, tmp_path), np.arange(3)
    assert all(cache.missing(rows[row : row + 1]) for row in rows)
    cache.put(rows, np.full((3, 2), -2.5, np.float32))
    assert not PairScoreCache(3, tmp_path).missing(rows)
    assert (tmp_path / "reference.f32").stat().st_size == 36


def test_kept_values_are_their_owners_to_read(tmp_path):
    PairScoreCache(3, tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache/reference.f32").stat().st_mode & 0o777 == 0o600
