"""Log-probabilities of single tokens on disk: values come back, and damaged ones count as missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prefed.train.pair_cache import RecordCache

TOKENS = np.array([3, 2, 4])
VALUES = np.array([-1.5, 0.0, -2.0, -0.25, -3.0, -1.0, -1.0, -1.0, -7.0], np.float32)
ALL = np.arange(3)


def test_what_was_put_comes_back_in_any_order(tmp_path: Path) -> None:
    """In memory, and opened again from the disk. One token is certain: log 1 = 0."""
    for folder in (None, tmp_path):
        cache = RecordCache(TOKENS, folder, "r")
        assert cache.missing(ALL[:1])
        cache.put(ALL, VALUES)
        again = cache if folder is None else RecordCache(TOKENS, folder, "r")
        assert not again.missing(ALL)
        np.testing.assert_array_equal(again.get(ALL), VALUES)
        np.testing.assert_array_equal(again.get(np.array([2, 0])), np.r_[VALUES[5:], VALUES[:3]])
    assert [path.name for path in tmp_path.iterdir()] == ["r.f32"]


def test_what_was_not_put_is_missing_and_nothing_else(tmp_path: Path) -> None:
    """Row by row, after another row was stored, and in a file whose end was cut off."""
    cache = RecordCache(TOKENS, tmp_path, "r")
    cache.put(ALL[1:2], VALUES[3:5])
    again = RecordCache(TOKENS, tmp_path, "r")
    assert [again.missing(ALL[row : row + 1]) for row in range(3)] == [True, False, True]
    path = tmp_path / "r.f32"
    path.write_bytes(path.read_bytes()[: 4 * (4 + 2)])
    again = RecordCache(TOKENS, tmp_path, "r")
    assert [again.missing(ALL[row : row + 1]) for row in range(3)] == [True, True, True]
    assert path.stat().st_mode & 0o777 == 0o600


def test_any_flipped_byte_makes_its_row_missing_and_no_other(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Row 1 begins at byte 16, after row 0's check and three tokens: 4 bytes of check, 8 of tokens."""
    RecordCache(TOKENS, tmp_path, "r").put(ALL, VALUES)
    path = tmp_path / "r.f32"
    whole = path.read_bytes()
    for byte in range(16, 16 + 4 * (1 + 2)):
        with subtests.test(byte=byte):
            data = bytearray(whole)
            data[byte] ^= 0x10
            path.write_bytes(data)
            again = RecordCache(TOKENS, tmp_path, "r")
            assert [again.missing(ALL[row : row + 1]) for row in range(3)] == [False, True, False]


def test_another_rows_numbers_do_not_pass(tmp_path: Path) -> None:
    """Two rows of equal length whose blocks a disk swapped."""
    path = tmp_path / "r.f32"
    RecordCache(np.array([2, 2]), tmp_path, "r").put(ALL[:2], VALUES[:4])
    words = np.fromfile(path, np.uint32)
    np.roll(words, 3).tofile(path)
    again = RecordCache(np.array([2, 2]), tmp_path, "r")
    assert again.missing(ALL[:1])
    assert again.missing(ALL[1:2])
