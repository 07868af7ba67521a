import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from prefed.data import DataError
from prefed.data.errors import ErrorCollector
from prefed.data.sources import files
from prefed.data.sources.folders import data_files
from preferences import pairs, read_source

ROWS = [
    {"prompt": "Q1, “quoted”\nline two", "chosen": " yes", "rejected": " no", "worker": 7, "score": 0.5},
    {"prompt": "Q2", "chosen": " häuser", "rejected": ' "no"', "worker": 8, "score": None},
]


# The header of a gzip file, and then a block of the type that deflate leaves undefined.
CORRUPT = gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows, encoding="utf-8"):
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode(encoding)


def read(path, encoding="utf-8", limit=10):
    errors = ErrorCollector(limit=limit)
    rows = list(files.read_rows(Path(path), encoding, errors))
    errors.raise_if_any()
    return rows


@pytest.mark.parametrize(
    ("name", "content", "numbers"),
    [
        ("a.jsonl", lines(ROWS), [1, 2]),
        ("a.ndjson", b"\n" + lines(ROWS[:1]) + b"  \n" + lines(ROWS[1:]), [2, 4]),
        ("a.jsonl", b"\xef\xbb\xbf" + lines(ROWS), [1, 2]),
        ("a.jsonl.gz", gzip.compress(lines(ROWS)), [1, 2]),
        ("a.json", lines(ROWS), [1, 2]),
        ("a.json", json.dumps(ROWS).encode(), [1, 2]),
        ("a.json", json.dumps(ROWS, indent=2).encode(), [1, 2]),
        ("unnamed.jsonl", gzip.compress(lines(ROWS)), [1, 2]),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode()), [1, 2]),
    ],
)
def test_json_in_all_its_forms(tmp_path, name, content, numbers):
    """All forms give the same two rows. A blank line counts as a line, a byte order mark does not."""
    path = tmp_path / name
    path.write_bytes(content)
    result = read(path)
    assert [row for row, _ in result] == ROWS
    assert [(location.file, location.row) for _, location in result] == [(str(path), row) for row in numbers]


def test_csv_rows_are_numbered_by_their_first_line(tmp_path):
    """The header is line 1; the first row spans lines 2 and 3, so the second is row 4.

    An empty field counts as missing.
    """
    path = tmp_path / "a.csv"
    path.write_bytes(as_csv(ROWS))
    result = read(path)
    assert [row["prompt"] for row, _ in result] == [row["prompt"] for row in ROWS]
    assert [row["score"] for row, _ in result] == ["0.5", None]
    assert [location.row for _, location in result] == [2, 4]
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(as_csv(ROWS)))
    assert [row for row, _ in read(tmp_path / "b.csv.gz")] == [row for row, _ in result]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig", "cp1252"])
def test_other_encodings(tmp_path, encoding):
    rows = [{**row, "prompt": "“Größe”\nline two"} for row in ROWS]
    (tmp_path / "a.csv").write_bytes(as_csv(rows, encoding))
    (tmp_path / "a.jsonl").write_bytes(lines(rows).decode().encode(encoding))
    for name in ("a.csv", "a.jsonl"):
        assert [row["chosen"] for row, _ in read(tmp_path / name, encoding)] == [" yes", " häuser"]


def test_parquet_streams_row_groups(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [
        {"prompt": f"Q{k}", "chosen": [{"role": "assistant", "content": "a"}], "n": k} for k in range(1200)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    result = read(path)
    assert [row for row, _ in result] == rows
    assert [location.row for _, location in result] == list(range(1, 1201))


def test_a_parquet_value_that_python_cannot_hold(tmp_path):
    """2^62 µs after 1970 is after the year 9999: the value is absent. Text that is not UTF-8 is an error."""
    path = tmp_path / "a.parquet"
    late = pa.array([0, 2**62, 0], pa.timestamp("us"))
    words = pa.array([b"a", b"b", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"late": late, "word": words}), path)
    errors = ErrorCollector(limit=2)
    result = list(files.read_rows(path, "utf-8", errors))
    assert [(row["word"], row["late"] is None, location.row) for row, location in result] == [
        ("a", False, 1),
        ("b", True, 2),
    ]
    with pytest.raises(DataError, match=r"a.parquet, row 3: not UTF-8 text"):
        errors.raise_if_any()


def test_a_folder_is_its_files_in_order(tmp_path):
    """Files are sorted by path. Hidden files and files of other kinds are ignored."""
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.csv", "sub/c.jsonl.gz", "README.md", ".hidden.jsonl", "x.parquet.gz"):
        (tmp_path / name).write_bytes(b"")
    assert [p.relative_to(tmp_path).as_posix() for p in data_files(tmp_path)] == [
        "a.csv",
        "b.jsonl",
        "sub/c.jsonl.gz",
    ]


def test_tabs_separate_the_fields_of_a_tsv(tmp_path):
    """As in CSV, quotes hold tabs and line breaks; a line with only tabs is skipped."""
    path = tmp_path / "a.tsv"
    path.write_bytes(b'a\tb\n"one\ttwo\nthree"\t1,5\n\t\nx\t\n')
    rows = [(row, location.row) for row, location in files.read_rows(path, "utf-8", ErrorCollector())]
    assert rows == [({"a": "one\ttwo\nthree", "b": "1,5"}, 2), ({"a": "x", "b": None}, 5)]


def test_a_saved_data_set_is_read_by_the_library_that_wrote_it(tmp_path):
    """In two files, with some rows taken out; and its files have nothing to do with the digest's names."""
    data = Dataset.from_list(ROWS * 5)
    data.select([1, 4, 6]).save_to_disk(tmp_path / "saved", num_shards=2)
    (item,) = data_files(tmp_path / "saved")
    rows = list(files.read_rows(item, "utf-8", ErrorCollector()))
    assert [row for row, _ in rows] == [ROWS[1], ROWS[0], ROWS[0]]
    assert [location.row for _, location in rows] == [1, 2, 3]
    before = files.sha256_of(item)
    data.select([1, 4, 7]).save_to_disk(tmp_path / "saved", num_shards=2)
    assert files.sha256_of(item) != before


def test_of_a_saved_data_set_with_splits_a_role_takes_its_own(tmp_path):
    splits = {name: Dataset.from_list(pairs(count)) for name, count in (("train", 3), ("test", 2))}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert len(read_source(str(tmp_path / "saved"))[0]) == 3
    assert len(read_source({"path": str(tmp_path / "saved"), "split": "test"})[0]) == 2
    with pytest.raises(DataError, match=r"no split 'dev' in this saved dataset; its splits: train, test"):
        read_source({"path": str(tmp_path / "saved"), "split": "dev"})


def test_a_damaged_saved_data_set_is_named(tmp_path):
    Dataset.from_list(pairs(3)).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/data-00000-of-00001.arrow").write_bytes(b"no")
    with pytest.raises(DataError, match=r"saved: cannot read this saved dataset"):
        read_source(str(tmp_path / "saved"))


def test_a_broken_file_is_named_with_its_row(tmp_path, subtests):
    for name, content, message in (
        ("a.jsonl", b'{"a": "b\n', r"a.jsonl, row 1: not JSON: Unterminated string starting at character 7$"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a.jsonl, row 2: not JSON: Expecting value at character"),
        ("a.jsonl", b'{"a": 1}\n\n["x"]\n', r"a\.jsonl, row 3: a row must be an object with named columns"),
        ("a.jsonl", b'{"a": 1}\n{"a": "gr\xfc\xdfe"}\n', r"row 2: not utf-8 text \(byte 0xfc at position 9"),
        ("a.json", b'[{"a": 1},\n {"a": ]', r"a.json, line 2: not JSON"),
        ("a.json", b'[{"a": 1},\n {"a": "\xff"}]', r"a.json, line 2: not utf-8 text \(byte 0xff\)"),
        ("a.csv", b"a,b\n1,2\n3\n", "row 3: 1 fields, but the header has 2"),
        ("a.csv", b"a,a\n1,2\n", r"the header repeats a; rename or remove one column"),
        ("a.csv", b'a,b\n1,"x\n', r"a.csv, row 2: not CSV"),
        ("a.csv", b'a,b\n1,"x\n\xff"\n', r"row 3: not utf-8 text \(byte 0xff at position 0\)"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS) * 50)[:-20], "incomplete gzip file"),
        ("a.jsonl.gz", b"plain", "incomplete gzip file"),
        ("a.parquet", b"PAR1 and no more", "incomplete Parquet file"),
        ("a.json", b'{\n "data": []\n}', r"a\.json contains a single object; write one object per line"),
        ("a.jsonl", b"[" * 100_000, r"row 1: not (readable as )?JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", r"row 2: not readable as JSON: .* 5000 digits"),
        ("a.json", b"[" * 100_000, r"a.json: not readable as JSON: nested too deeply"),
        ("a.jsonl.gz", CORRUPT, r"a\.jsonl\.gz: incomplete gzip file"),
    ):
        with subtests.test(name=name, content=content):
            path = tmp_path / name
            path.write_bytes(content)
            with pytest.raises(DataError, match=message):
                read(path)


def test_a_csv_row_with_an_undecodable_line_goes_as_a_whole(tmp_path):
    """The quoted field of the first row spans lines 2 to 5, two of them not UTF-8: one row is invalid.

    What follows keeps its own line's number.
    """
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'prompt,chosen,rejected\nQ1,"Please do\nnot tak\xe9 this\n\xff\nmedicine",no\nQ2,yes,no\n'
    )
    errors = ErrorCollector(count_only=True)
    result = list(files.read_rows(path, "utf-8", errors))
    assert [(row["prompt"], location.row) for row, location in result] == [("Q2", 6)]
    assert errors.count == 1


def test_ten_problems_are_listed_and_then_it_stops(tmp_path):
    """Rows 1 to 30 are all wrong in the same way. Ten are named in a line, and the eleventh is never read."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"no\n" * 30)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).count("a.jsonl, row") == 1
    assert "row 1: not JSON" in str(caught.value)
    assert "(also rows 2, 3, 4, 5, 6, 7, 8, 9, 10)" in str(caught.value)
    assert "stopped after 10 errors" in str(caught.value)
    assert "11" not in str(caught.value).rpartition("(")[2]


def test_a_list_with_the_name_of_lines_is_one_problem(tmp_path):
    """None of its rows parses as JSON: the wrong part is its name. Control: renamed, it is read."""
    (tmp_path / "a.jsonl").write_text(json.dumps([{"a": 1}, {"a": 2}], indent=1))
    with pytest.raises(DataError, match=r"a.jsonl: a JSON list, not one object per line; rename it to .json"):
        read(tmp_path / "a.jsonl")
    assert len(list(read((tmp_path / "a.jsonl").rename(tmp_path / "a.json")))) == 2


def test_an_unusable_row_is_an_error_or_dropped(tmp_path, subtests):
    """``invalid`` decides. The other two rows are good in both cases."""
    for row, message in (
        ({"chosen": "  "}, "row 2: chosen is empty"),
        ({"rejected": None}, "row 2: rejected is missing"),
        ({"margin": True}, "row 2: margin must be a finite number, not True"),
        ({"client": ["a"]}, r"row 2: client must be a text or an integer, not \['a'\]"),
        ({"split": "training"}, "row 2: split must be one of train, validation, valid, val, dev, test"),
        ({"margin": 10**400}, "row 2: margin must be a finite number, not 1000.*000"),
        ({"margin": 1e39}, "row 2: margin must be a finite 32-bit number"),
        ({"client": "a\ud83d"}, "row 2: client has half a surrogate pair at character 2"),
        ({"title": "cut \ud83d"}, "row 2: title has half a surrogate pair at character 5"),
        ({"cut \ud83d": 1}, "row 2: a column name has half a surrogate pair"),
        (
            {"chosen": [{"role": ["user"], "content": "a"}], "rejected": [{"role": "user", "content": "b"}]},
            r"row 2: chosen has a message with role \['user'\]",
        ),
    ):
        with subtests.test(row=row, message=message):
            path = tmp_path / "a.jsonl"
            rows = pairs(3)
            rows[1] |= row
            path.write_text("\n".join(map(json.dumps, rows)))
            with pytest.raises(DataError, match=message):
                read_source(str(path))
            records, counts, errors = read_source(str(path), invalid="drop")
            assert [record.prompt for record in records] == ["Q0:", "Q2:"]
            assert (counts.read, errors.count) == (3, 1)


def test_each_file_of_a_folder_has_its_own_format(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(pairs(1)))
    shp = {"history": "Why?", "human_ref_A": "A", "human_ref_B": "B", "labels": 0, "domain": "askvet_test"}
    (tmp_path / "b.jsonl").write_bytes(lines([shp]))
    records, _, _ = read_source(str(tmp_path))
    assert [record.chosen for record in records] == [" yes 0", "B"]
    assert len(read_source(str(tmp_path), rows=1)[0]) == 1
