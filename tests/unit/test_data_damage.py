"""What the power or a full disk may do to kept data is noticed when they are opened."""

import re

import numpy as np
import pytest

from prefed.core import Key
from prefed.data import DataConfig, DataError, Federation, federate
from prefed.train.references import References
from preferences import jsonl, pairs, tokenizer


@pytest.fixture
def kept(tmp_path):
    """40 rows over 3 clients, kept in a folder."""
    rows = jsonl(tmp_path / "train.jsonl", pairs(40))
    config = DataConfig(train=str(rows), partition={"by": "iid", "clients": 3})
    federate(config, tokenizer(), Key(0), tmp_path / "tokens")
    return tmp_path / "tokens"


@pytest.mark.parametrize("name", ["ids.i32", "records.jsonl", "held.i64", "bounds.i64", "margins.f32"])
@pytest.mark.parametrize("change", [lambda data: data[:-8], lambda data: b"", lambda data: data + bytes(8)])
def test_a_file_of_another_size_is_refused(kept, name, change):
    """Every file's size follows from another file: the tokens' from the last offset, the rows' from the last
    bound. 8 bytes less are one row held, or two tokens; 8 more are one that nobody wrote."""
    assert len(Federation.open(kept).clients) == 3
    (kept / name).write_bytes(change((kept / name).read_bytes()))
    with pytest.raises(DataError, match=re.escape(name)) as caught:
        Federation.open(kept)
    assert f"delete {kept} to have it made again" in str(caught.value) or "delete it" in str(caught.value)


def test_rows_that_are_none_of_the_tokens_are_refused(kept):
    rows = np.fromfile(kept / "held.i64", "<i8")
    rows[0] = 40
    rows.tofile(kept / "held.i64")
    with pytest.raises(DataError, match=r"held.i64 has rows beyond the 40"):
        Federation.open(kept)


def test_a_page_of_zeros_is_computed_anew(tmp_path):
    """A file system may give zeros for what was not written before the power failed: no log-probability is
    taken to be 0, that of certainty."""
    rows = np.arange(3)
    References(3, tmp_path).put(rows, np.full((3, 2), -1.5, np.float32))
    again = References(3, tmp_path)
    assert not again.missing(rows)
    held = np.fromfile(tmp_path / "reference.f32", np.float32).reshape(3, 2)
    held[2] = 0
    held.tofile(tmp_path / "reference.f32")
    again = References(3, tmp_path)
    assert again.missing(rows)
    assert not again.missing(rows[:2])
