"""A file of rows that one process appends to: what comes back, and what is noticed."""

import json
import re

import pytest

from prefed.runs.append_log import Journal
from prefed.runs.finished_run import RunError
from prefed.runs.responses import slug

ROWS = [{"row": 1, "outcome": 1.0, "words": "é \x9b31m"}, {"row": 2, "outcome": None, "words": "\ud800"}]


@pytest.fixture
def path(tmp_path):
    with Journal(tmp_path / "judge" / "verdicts.jsonl") as journal:
        journal.append(ROWS)
    return tmp_path / "judge" / "verdicts.jsonl"


def test_rows_come_back_and_what_cannot_be_encoded_is_replaced(path):
    with Journal(path) as journal:
        assert journal.rows == {1: ROWS[0], 2: {**ROWS[1], "words": "?"}}


@pytest.mark.parametrize(
    ("there", "changed"), [(b"1.0", b"0.0"), (b'"row": 1', b'"row": 2'), (b"31m", b"32m")]
)
def test_a_changed_row_is_noticed_and_its_line_named(path, there, changed):
    """Otherwise a win becomes a loss, or a text the answer to another prompt, without a word."""
    path.write_bytes(path.read_bytes().replace(there, changed, 1))
    with pytest.raises(RunError, match=r"verdicts.jsonl, line 1 is damaged \(its content does not match"):
        Journal(path)


def test_rows_without_a_digest_and_half_a_line(path):
    """Half a line is what a killed process leaves."""
    path.write_text(json.dumps(ROWS[0]) + '\n{"row": 2, "outc')
    with Journal(path) as journal:
        assert journal.rows == {1: ROWS[0]}


def test_a_name_of_a_file_has_room_in_a_file_system():
    """255 bytes are the most, and a digest and an ending come after it. A cut name ends with 16 digits of the
    whole text's digest, so that texts which differ only behind the cut have different names."""
    assert len(slug("安" * 200).encode()) <= 160
    assert slug("安" * 53) == "安" * 53
    assert slug("a" * 80) == "a" * 80
    assert re.fullmatch("a{63}-[0-9a-f]{16}", slug("a" * 81))
    assert len({slug("a" * 81), slug("a" * 82), slug("安" * 54), slug("安" * 55)}) == 4
    assert slug(slug("a" * 81)) == slug("a" * 81)
