"""Prompts without preferences, from files of every kind."""

import json

import pytest

from prefed.data import Columns, DataError, Message, Source
from prefed.data.prompts import prompt_digests, read_prompts
from prefed.data.record import parse_prompt, plain_prompt
from preferences import jsonl

TURN = (Message("user", "Name a colour."),)
POST = {"subreddit": "books", "title": "Help", "post": "I lost it."}


def read(path, usual="auto", **options):
    return [row for row, _ in read_prompts(Source(path=str(path), **options), usual=usual)]


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"prompt": "Q:"}, "Q:", None),
        ({"prompt": "Q:", "response": " A"}, "Q:", " A"),
        ({"prompt": "Q:", "output": " A", "chosen": " B"}, "Q:", " A"),
        ({"prompt": [{"role": "user", "content": "Name a colour."}]}, TURN, None),
        ({"prompt": '[{"role": "user", "content": "Name a colour."}]'}, TURN, None),
        ({"prompt": "Q:", "response": [{"role": "assistant", "content": "A"}]}, "Q:", "A"),
        ({"prompt": "Q:", "chosen": " A", "rejected": " B"}, "Q:", " A"),
        (
            {"chosen": "\n\nHuman: Hi\n\nAssistant: A", "rejected": "\n\nHuman: Hi\n\nAssistant: B"},
            "\n\nHuman: Hi\n\nAssistant:",
            " A",
        ),
        (
            {"history": "Why?", "human_ref_A": "So.", "human_ref_B": "No.", "labels": 0, "domain": "x"},
            (Message("user", "Why?"),),
            "No.",
        ),
    ],
)
def test_the_prompt_and_the_response_of_a_row(tmp_path, row, prompt, response):
    (found,) = read(jsonl(tmp_path / "rows.jsonl", [row]))
    assert (found.prompt, found.response) == (prompt, response)
    assert parse_prompt(json.loads(json.dumps(plain_prompt(found.prompt)))) == prompt


def test_a_text_file_has_a_prompt_in_each_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffOne.\n\n Two. \n")
    assert [row.prompt for row in read(file)] == ["One.", " Two. "]
    before = prompt_digests(Source(path=str(file)))
    file.write_text("One.\n")
    assert prompt_digests(Source(path=str(file))) != before


def test_a_line_of_a_text_file_ends_with_a_line_break(tmp_path):
    """Windows, old Macs and Unix; a form feed and other separators of Unicode are text."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("One.\u2028Still one.\r\nTwo\x0c.\x85\rThree.\nFour.".encode())
    assert [row.prompt for row in read(file)] == ["One.\u2028Still one.", "Two\x0c.\x85", "Three.", "Four."]


@pytest.mark.parametrize(
    ("content", "encoding", "message"),
    [
        ("„Hi“".encode("cp1252"), "utf-8", 'row 1: not utf-8 text .* set encoding = "cp1252"'),
        ("Hi".encode("utf-16"), "utf-8", 'UTF-16 text: set encoding = "utf-16"'),
        (b"Hi", "utf-9", "prompts.txt: unknown encoding: utf-9"),
    ],
)
def test_a_text_file_in_another_encoding(tmp_path, content, encoding, message):
    (tmp_path / "prompts.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "prompts.txt", encoding=encoding)


def test_named_columns_and_the_others(tmp_path):
    """A number and a short text stay with the prompt; they may be what a selector's template shows."""
    rows = [{"question": "Why?", "answer": "So.", "post": "A post.", "votes": 3, "long": "x" * 2000}]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    (row,) = read(file, columns=Columns(prompt="question", chosen="answer"))
    assert (row.prompt, row.response, row.extra) == ("Why?", "So.", {"post": "A post.", "votes": 3})


def test_preference_sets_are_worded_as_the_clients_are(tmp_path):
    """A comparison of summaries in the format of the clients' data, or in the one that its columns show."""
    summaries = [{"text": "One."}, {"text": "Two."}]
    file = jsonl(
        tmp_path / "rows.jsonl", [{"info": POST, "summaries": summaries, "choice": 1, "worker": "w"}]
    )
    (plain,), (worded,) = read(file), read(file, "summarize-from-feedback-instruction")
    assert str(plain.prompt).startswith("SUBREDDIT: r/books")
    assert str(worded.prompt).startswith("Below is an instruction")
    assert plain.extra["post"] == worded.extra["post"] == "I lost it."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": " "}\n', "row 1: the prompt is blank"),
        ('{"prompt": 3}\n', "row 1: prompt must be text or a list of messages, not a number"),
        ('{"text": "x"}\n', "row 1: no known format has the columns text"),
        ('{"prompt": "\\ud83d"}\n', "row 1: prompt has half a surrogate pair at character 1"),
        ("", "rows.jsonl contains no prompts"),
        ('{"prompt": [{"role": "user", "content": "Q", "name": "ann"}]}\n', "prompt has a message with name"),
        ('{"prompt": "Q", "response": [{"content": "a", "x": "b"}]}\n', "response has a message with x,"),
    ],
)
def test_rows_without_a_prompt_are_named(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "rows.jsonl")
