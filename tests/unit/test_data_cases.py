"""Small files as people have them: written here, and the shared cases where they are present."""

# ruff: noqa: E501 - one case a line
import csv
import io
import json
import re

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefed.core import Key
from prefed.data import DataConfig, DataError, Message, build_dataset
from prefed.data.errors import ErrorCollector
from prefed.data.sources import files
from prefed.runs.data_notices import data_notices
from preferences import CHATML, jsonl, pairs, tokenizer


def row(prompt, chosen, rejected, k):
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", **chosen}],
        "rejected": [{"role": "assistant", **rejected}],
        "client": f"ward_{'ab'[k % 2]}",
    }


def text(content):
    return [{"type": "text", "text": content}]


def lines(rows):
    return "".join(json.dumps(each) + "\n" for each in rows).encode()


def excel(mark, encoding, words):
    """24 thumbs, down and up in turn, as Excel writes them: quoted only where the text needs it."""
    out = io.StringIO()
    writer = csv.writer(out, delimiter=mark)
    writer.writerow(["prompt", "completion", "label", "client"])
    up, down = words.split()
    for k in range(24):
        answer = f"Antwort „{k}“ – größer; so"
        writer.writerow([f"Frage {k} für Ärzte?", answer, up if k % 2 else down, f"ward_{'ab'[k // 2 % 2]}"])
    return out.getvalue().encode(encoding)


CALL = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
TURNS = "\n\nHuman: Hi {k}\n\nAssistant: {first}\n\nHuman: A\n\nAssistant: {last}"
FILES = {
    "tool_calls_beside_text.jsonl": lines(
        row(f"dose {k}?", {"content": "Let me look.", "tool_calls": [CALL]}, {"content": f"dunno {k}"}, k)
        for k in range(12)
    ),
    "text_parts.jsonl": lines(
        row(text(f"What is this {k}?"), {"content": text(f"a cat {k}")}, {"content": text(f"a dog {k}")}, k)
        for k in range(12)
    ),
    "excel_semicolon_bom.csv": excel(";", "utf-8-sig", "TRUE FALSE"),
    "excel_cp1252.csv": excel(",", "cp1252", "TRUE FALSE"),
    "pandas_columns.json": json.dumps(
        {name: {str(k): f"{name} {k}" for k in range(12)} for name in ("prompt", "chosen", "rejected")}
    ).encode(),
    "dialogues_that_diverge_early.jsonl": lines(
        {
            "chosen": TURNS.format(k=k, first="Hello", last="x"),
            "rejected": TURNS.format(k=k, first="Nope", last="y"),
        }
        for k in range(12)
    ),
    **{
        f"folders_as_clients/ward_{name}/data.jsonl": lines(
            row(f"Q{k}", {"content": f"good {k}"}, {"content": f"bad {k}"}, k) for k in range(12)
        )
        for name in "ab"
    },
}


@pytest.fixture(params=["own", "shared"])
def case(request, tmp_path):
    """The path of a file by name, for :data:`FILES` and for the shared cases."""

    def path(name):
        if request.param == "shared":
            return request.getfixturevalue("shared_cases") / "data" / name
        for file, content in FILES.items():
            if file.split("/")[0] == name:
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / file).write_bytes(content)
        return tmp_path / name

    return path


def build(path, tmp_path, by="client", **settings):
    partition = {"by": "column", "column": by} if by else {"by": "iid", "clients": 2}
    config = DataConfig(train=str(path), partition=partition, test_fraction=0.0, **settings)
    return build_dataset(config, tokenizer(chat=CHATML), Key(0), tmp_path / "built")


def first(dataset, client):
    """The first record of a client."""
    return dataset.tokens.record(int(dataset.clients[client].train[0]))


def test_text_parts_are_joined(case, tmp_path):
    record = first(build(case("text_parts.jsonl"), tmp_path), "ward_a")
    assert record.prompt == (Message("user", "What is this 0?"),)
    assert (record.chosen, record.rejected) == ("a cat 0", "a dog 0")


@pytest.mark.parametrize(
    ("name", "by", "message"),
    [
        ("tool_calls_beside_text.jsonl", "client", "row 1: chosen has a message with tool_calls, but only"),
        ("dialogues_that_diverge_early.jsonl", None, "row 1: chosen must have one assistant message"),
    ],
)
def test_what_would_be_lost_or_scored_is_refused(case, tmp_path, name, by, message):
    with pytest.raises(DataError, match=message):
        build(case(name), tmp_path, by)
    with pytest.raises(DataError, match="12: malformed or blank"):
        build(case(name), tmp_path, by, invalid="drop")


@pytest.mark.parametrize(
    ("name", "settings"), [("excel_semicolon_bom.csv", {}), ("excel_cp1252.csv", {"encoding": "cp1252"})]
)
def test_what_excel_writes_is_read(case, tmp_path, name, settings):
    """Semicolons are found, also inside quotes; FALSE is a thumb down."""
    dataset = build(case(name), tmp_path, **settings)
    record = first(dataset, "ward_a")
    assert (record.prompt, record.response) == ("Frage 0 für Ärzte?", "Antwort „0“ – größer; so")
    assert (record.label, len(dataset.tokens)) == (False, 24)
    assert dataset.findings.garbled == {}


def test_another_encoding_is_named(case, tmp_path):
    """Read as Latin-1, the quotation marks of Windows-1252 become control characters."""
    path = case("excel_cp1252.csv")
    with pytest.raises(DataError, match=r'row 2: not utf-8 text .* set encoding = "cp1252"'):
        build(path, tmp_path)
    dataset = build(path, tmp_path, encoding="latin-1")
    assert dataset.findings.garbled == {"\x84": 24, "\x93": 24, "\x96": 24}
    assert "signs of a wrong encoding in the texts: U+0084 (24 pairs), " in data_notices(dataset)[1][-1]
    with pytest.raises(DataError, match=r'UTF-8 text: set encoding = "utf-8" instead of .cp1252'):
        build(case("excel_semicolon_bom.csv"), tmp_path / "other", encoding="cp1252")


def test_a_table_of_pandas_is_named(case, tmp_path):
    with pytest.raises(DataError, match=r'a whole table in one object, as pandas .*orient="records", lines'):
        build(case("pandas_columns.json"), tmp_path, None)


@pytest.mark.parametrize("orient", ["columns", "index", "split", "table"])
def test_other_tables_of_pandas_are_refused(tmp_path, orient):
    frame = pd.DataFrame(pairs(3))
    frame.to_json(tmp_path / "rows.json", orient=orient)
    with pytest.raises(DataError, match="a whole table in one object"):
        build(tmp_path / "rows.json", tmp_path, None)
    frame.to_json(tmp_path / "rows.json", orient="records")
    assert len(build(tmp_path / "rows.json", tmp_path, None).tokens) == 3


@pytest.mark.sample
@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize(
    "words", ["TRUE FALSE", "WAHR FALSCH", "VRAI FAUX", "DOĞRU YANLIŞ", "👍 👎", "Thumbs_up thumbs_down"]
)
def test_spreadsheets_of_other_languages(tmp_path, mark, words):
    """Each separator, also with the line in which Excel names it, and each pair of words for a thumb."""
    content = excel(mark, "utf-8", words)
    for text in (content, f"sep={mark}\n".encode() + content):
        (tmp_path / "rows.csv").write_bytes(text)
        dataset = build(tmp_path / "rows.csv", tmp_path / str(len(text)))
        labels = [dataset.tokens.record(k).label for k in range(4)]
        assert labels == [False, True, False, True]


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("prompt; or task,chosen\na,b\n", ["prompt; or task", "chosen"]),
        ('"prompt, or task";chosen\na;b\n', ["prompt, or task", "chosen"]),
        ("text\na;b\n", ["text"]),
        ('"text; all"\na\n', ["text; all"]),
        (";;\n\na;b;c\n1;2;3\n", ["a", "b", "c"]),
    ],
)
def test_the_separator_is_that_of_the_header(tmp_path, content, columns):
    """The usual one if it separates anything; none inside quotes; a single column stays a single one."""
    (tmp_path / "rows.csv").write_text(content)
    ((found, _),) = files.read_rows(tmp_path / "rows.csv", "utf-8", ErrorCollector())
    assert list(found) == columns


def by_file(path, tmp_path, **settings):
    config = DataConfig(train=str(path), partition={"by": "file"}, **settings)
    dataset = build_dataset(config, tokenizer(chat=CHATML), Key(0), tmp_path / "built")
    return {name: tuple(sizes) for name, sizes in dataset.sizes.items()}, dataset.findings.ignored


def test_folders_name_the_clients(case, tmp_path):
    sizes, _ = by_file(case("folders_as_clients"), tmp_path, test_fraction=0.0)
    assert sizes == {"ward_a": (12, 0, 0), "ward_b": (12, 0, 0)}


@pytest.mark.parametrize(
    ("train", "test", "clients"),
    [
        (["a/x", "b/x"], ["a/x"], {"a": 1, "b": 0}),
        (["a/x", "b/x"], ["a", "b"], {"a": 1, "b": 1}),
        (["h1/a/x", "h2/a/x"], ["h2/a/x"], {"h1": 0, "h2": 1}),
        (["h1/a/x", "h1/b/x", "h2/a/x"], ["h1/b/x"], {"h1/a": 0, "h1/b": 1, "h2/a": 0}),
        (["h1/a", "h2/b"], ["b"], {"a": 0, "b": 1}),
    ],
)
def test_the_shortest_parts_of_a_path_that_differ_name_a_client(tmp_path, train, test, clients):
    """Test files may be in folders of the same names, or have the clients' names."""
    for role, names in (("train", train), ("test", test)):
        for k, name in enumerate(names):
            path = tmp_path / role / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            jsonl(path, [{**each, "prompt": f"{role} {k} {name}"} for each in pairs(2)])
    sizes, _ = by_file(tmp_path / "train", tmp_path, test=str(tmp_path / "test"), test_fraction=0.0)
    assert sizes == {name: (2, 0, 2 * tests) for name, tests in clients.items()}


@pytest.mark.parametrize(
    ("names", "read", "left"),
    [
        (["train", "test"], ["train"], ["test"]),
        (["train", "dev", "test"], ["train"], ["dev", "test"]),
        (["train-0-of-2", "train-1-of-2", "test-0-of-1"], ["train-0-of-2", "train-1-of-2"], ["test-0-of-1"]),
        # No training file, another name among them, or a single split: all are training rows.
        (["test", "dev"], ["dev", "test"], []),
        (["train", "test", "ann"], ["ann", "test", "train"], []),
        (["train-0-of-2", "train-1-of-2"], ["train-0-of-2", "train-1-of-2"], []),
    ],
)
def test_a_folder_with_a_file_per_split(tmp_path, names, read, left):
    """Training reads only the training files; the others are listed, and read if another key names them."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in names:
        jsonl(folder / f"{name}.jsonl", [{**each, "prompt": name} for each in pairs(2)])
    one = {"by": "iid", "clients": 1}
    config = DataConfig(train=str(folder), partition=one, test_fraction=0.0)
    dataset = build_dataset(config, tokenizer(), Key(0), tmp_path / "built")
    tokens = dataset.tokens
    assert sorted({tokens.record(k).prompt for k in range(len(tokens))}) == sorted(read)
    assert dataset.findings.ignored == tuple(f"rows/{name}.jsonl" for name in left)
    if "test" in left:
        both = DataConfig(train=str(folder), test=str(folder), partition=one)
        dataset = build_dataset(both, tokenizer(), Key(0), tmp_path / "both")
        assert tuple(dataset.sizes["client-0"]) == (2, 0, 2)


def test_each_client_may_have_a_folder_with_a_file_per_split(tmp_path):
    for ward in "ab":
        (tmp_path / "wards" / ward).mkdir(parents=True)
        for role in ("train", "test"):
            rows = [{**each, "prompt": f"{ward} {role}"} for each in pairs(3)]
            jsonl(tmp_path / "wards" / ward / f"{role}.jsonl", rows)
    wards = tmp_path / "wards"
    assert by_file(wards, tmp_path / "1", test_fraction=0.0) == (
        {"a": (3, 0, 0), "b": (3, 0, 0)},
        ("wards/a/test.jsonl", "wards/b/test.jsonl"),
    )
    assert by_file(wards, tmp_path / "2", test=str(wards)) == ({"a": (3, 0, 3), "b": (3, 0, 3)}, ())


def test_a_missing_split_is_named(tmp_path):
    for name in ("train_sft-00000-of-00001", "train_prefs-00000-of-00001"):
        jsonl(tmp_path / f"{name}.jsonl", pairs(2))
    with pytest.raises(DataError, match=r"no split 'train' in .* its splits: train_prefs, train_sft"):
        build(tmp_path, tmp_path, None)


@pytest.mark.parametrize("row", [{"meta": {"who": "a"}}, {"meta.who": "a"}, {"meta": {"who": 7}}])
def test_a_dot_in_the_column_of_the_partition(tmp_path, row):
    """A nested value, or a column with a dot in its name, as for `columns`."""
    file = jsonl(tmp_path / "rows.jsonl", [{**each, **row} for each in pairs(3)])
    dataset = build(file, tmp_path, "meta.who")
    assert list(dataset.clients) == ["7" if row == {"meta": {"who": 7}} else "a"]


def folder(*names, link=False):
    """A function that makes a folder with rows in ``rows.jsonl``, and other files and links by name."""

    def make(path):
        path.mkdir()
        jsonl(path / "rows.jsonl", pairs(3))
        for name in names:
            (path / name).symlink_to(path / "absent") if link else (path / name).write_bytes(b"")

    return make


def columns(path):
    texts = [pa.array([f"{name} {k}" for k in range(3)]) for name in ("Q", "lost", " yes", " no")]
    pq.write_table(pa.Table.from_arrays(texts, names=["prompt", "prompt", "chosen", "rejected"]), path)


HEAD, ROW = "prompt,chosen,rejected\n", "Q{}, yes {}, no {}\n"
CSV = HEAD + "".join(ROW.format(k, k, k) for k in range(3))
REFUSED = {
    "a key twice": ("a.jsonl", '{"prompt": "lost", "prompt": "Q", "chosen": "a", "rejected": "b"}\n', "row 1: not readable as JSON: an object has several values of 'prompt'"),
    "a key twice in a message": ("a.json", '[{"prompt": [{"role": "user", "content": "a", "content": "b"}]}]', "several values of 'content'"),
    "a column twice": ("a.parquet", columns, "several columns are called prompt; rename or remove one"),
    "two CSV files joined": ("a.csv", CSV + CSV.replace("Q", "R"), "row 5: repeats the header"),
    "lines of a Macintosh": ("a.csv", CSV.replace("\n", "\r"), "row 1: not CSV: a line ends in CR without LF; save it as CSV UTF-8"),
    "a formula": ("a.csv", CSV + "Q,#NAME?, no\n", "row 5: a spreadsheet has lost the text of a field: #NAME?"),
    "a full cell": ("a.csv", CSV + f"Q,{'x' * 32_767}, no\n", "row 5: a spreadsheet has lost the text .* 32,767 characters, the most"),
    "a number for a prompt": ("a.jsonl", lines({**each, "prompt": 0} for each in pairs(1)), "prompt must be text or a list of messages, not a number"),
    "a workbook": ("a.xlsx", b"PK\x03\x04", "an Excel workbook: unpack it, or save the sheet as CSV UTF-8"),
    "an old workbook": ("a.xls", b"\xd0\xcf\x11\xe0", "an Excel workbook: save the sheet as CSV UTF-8"),
}  # fmt: skip
REPORTED = {
    "a file without rows": ("a", folder("b.jsonl", "c.csv"), "files without rows: a/b.jsonl, a/c.csv"),
    "a link to nothing": ("a", folder("b.jsonl", link=True), "files not read: a/b.jsonl"),
    "UTF-8 read as Windows-1252": ("a.csv", CSV.replace(" yes", " für").encode().decode("cp1252"), "signs of a wrong encoding in the texts: Ã¼ (3 pairs);"),
    "a mark in the middle": ("a.csv", CSV + "\ufeffR, yes, no\n", "in the texts: U+FEFF (1 pair);"),
    "undecodable bytes": ("a.csv", CSV.replace(" yes", " f\ufffdr"), "in the texts: U+FFFD (3 pairs);"),
}  # fmt: skip


def make(path, content):
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(("name", "content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_read_wrongly_is_refused(tmp_path, name, content, message):
    with pytest.raises(DataError, match=re.escape(message).replace(r"\.\*", ".*")):
        build(make(tmp_path / name, content), tmp_path, None)


@pytest.mark.parametrize(("name", "content", "message"), REPORTED.values(), ids=REPORTED)
def test_what_may_be_wrong_is_reported(tmp_path, name, content, message):
    notes, warnings = data_notices(build(make(tmp_path / name, content), tmp_path, None))
    assert any(message in text for text in notes + warnings)
