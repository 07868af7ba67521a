"""Small files as people have them: written here, and the shared cases where they are present."""

import json

import pytest

from prefed.core import Key
from prefed.data import DataConfig, DataError, Message, build_dataset
from preferences import CHATML, tokenizer


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
    "dialogues_that_diverge_early.jsonl": lines(
        {
            "chosen": TURNS.format(k=k, first="Hello", last="x"),
            "rejected": TURNS.format(k=k, first="Nope", last="y"),
        }
        for k in range(12)
    ),
}


@pytest.fixture(params=["own", "shared"])
def case(request, tmp_path):
    """The path of a file by name, for :data:`FILES` and for the shared cases."""

    def path(name):
        if request.param == "shared":
            return request.getfixturevalue("shared_cases") / "data" / name
        (tmp_path / name).write_bytes(FILES[name])
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
