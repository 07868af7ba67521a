"""Layouts of public preference sets: no prompt is lost silently, and rows read as advised are correct."""

import re
import tomllib

import pytest

from prefed.core import Key
from prefed.data import DataConfig, DataError, Message, SelectorConfig, Source, build_dataset
from prefed.data.prompts import read_prompts
from prefed.runs.data_notices import data_notices, left_out_table
from preferences import CHATML, jsonl, pairs, read_source, tokenizer

HUMAN = "\n\nHuman: Q\n\nAssistant: "
AB = {"chosen": "a", "rejected": "b"}
ROLES = {"s": "system", "u": "user", "a": "assistant"}


def turns(*lines):
    """Messages from lines like ``u:Hi``."""
    return tuple(Message(ROLES[line[0]], line[2:]) for line in lines)


def chat(*lines):
    return [{"role": turn.role, "content": turn.content} for turn in turns(*lines)]


def sharegpt(*lines):
    names = {"s": "system", "u": "human", "a": "gpt"}
    return [{"from": names[line[0]], "value": line[2:]} for line in lines]


@pytest.fixture
def read(tmp_path):
    def read(*rows, **settings):
        return read_source(jsonl(tmp_path / "rows.jsonl", rows), **settings)[:2]

    return read


TREE = {
    "text": "Q",
    "role": "prompter",
    "replies": [
        {"text": "b", "role": "assistant", "rank": 1, "replies": []},
        {"text": "spam", "role": "assistant", "rank": 2, "deleted": True},
        {
            "text": "a",
            "role": "assistant",
            "rank": 0,
            "replies": [{"text": "More?", "role": "prompter", "replies": []}],
        },
    ],
}
TASK = {
    "id": 4,
    "data": {"prompt": "Q", "answer1": "b", "answer2": "a"},
    "annotations": [
        {
            "completed_by": 7,
            "result": [{"type": "pairwise", "to_name": "answer1,answer2", "value": {"selected": "right"}}],
        }
    ],
}
ARGILLA = {
    "id": "4",
    "fields": {"prompt": "Q", "first": "b", "second": "a"},
    "suggestions": {},
    "responses": {"better": [{"value": "second", "user_id": "ann"}]},
}
DISCARDED = {"value": "first", "status": "discarded"}
RANKED = {"value": [{"value": "first", "rank": 2}, {"value": "second", "rank": 1}]}

LAYOUTS = {
    # Layout: the row, and the prompt of the pair of "a" and "b" or of the thumb on "a" that it means.
    "orca": ({"system": "S", "question": "Q", **AB}, turns("s:S", "u:Q")),
    "orca without a system message": ({"system": "", "question": "Q", **AB}, turns("u:Q")),
    "distilabel-orca": (
        {"system": "S", "input": "Q", "labelling_prompt": chat("u:?"), **AB},
        turns("s:S", "u:Q"),
    ),
    "alpaca": ({"instruction": "I", "input": "Q", **AB}, turns("u:I\nQ")),
    "alpaca without input": ({"instruction": "I", "input": "", **AB}, turns("u:I")),
    "alpaca with history": (
        {"instruction": "I", "input": "Q", "system": "S", "history": [["1", "2"]], **AB},
        turns("s:S", "u:1", "a:2", "u:I\nQ"),
    ),
    "sharegpt": (
        {
            "conversations": sharegpt("u:1", "a:2", "u:Q"),
            "chosen": sharegpt("a:a")[0],
            "rejected": sharegpt("a:b")[0],
            "tools": "[]",
        },
        turns("u:1", "a:2", "u:Q"),
    ),
    "messages": ({"messages": chat("s:S", "u:Q"), **AB}, turns("s:S", "u:Q")),
    "a question that is a dialogue": ({"question": HUMAN, **AB}, HUMAN),
    "a question with tokens": ({"question": "<|im_start|>Q", **AB}, turns("u:<|im_start|>Q")),
    "history in a CSV file": (
        {"instruction": "Q", "input": "[]", "history": '[["1", "2"]]', **AB},
        turns("u:1", "a:2", "u:Q"),
    ),
    "ultrainteract": ({"task": "Coding", "trajectory": sharegpt("u:Q"), **AB}, turns("u:Q")),
    "axolotl": (
        {"system": "S", "instruction": "Q", "chosen_response": "a", "rejected_response": "b"},
        turns("s:S", "u:Q"),
    ),
    "ultrafeedback-binarized": (
        {
            "prompt": "Q",
            "chosen": chat("u:Q", "a:a"),
            "rejected": chat("u:Q", "a:b"),
            "messages": chat("u:Q", "a:a"),
            "question": "Q",
        },
        turns("u:Q"),
    ),
    "dialogues with a system column": (
        {"system": "S", "chosen": chat("u:Q", "a:a"), "rejected": chat("u:Q", "a:b")},
        turns("s:S", "u:Q"),
    ),
    "text": ({"prompt": "Q:", "images": [], "tools": None, **AB}, "Q:"),
    "text with a system column": ({"system": "S", "prompt": "Q", **AB}, turns("s:S", "u:Q")),
    "text with an empty system column": ({"system": None, "prompt": "Q", **AB}, turns("u:Q")),
    "text that begins like its system message": (
        {"system": "Sum", "prompt": "Sum 1, 2", **AB},
        turns("s:Sum", "u:Sum 1, 2"),
    ),
    "dialogue that contains the system message": ({"system": "S", "prompt": f"S{HUMAN}", **AB}, f"S{HUMAN}"),
    "messages with a system column": ({"system": "S", "prompt": chat("u:Q"), **AB}, turns("s:S", "u:Q")),
    "messages that repeat the system message": (
        {"system_prompt": "S", "prompt": chat("s:S", "u:Q"), **AB},
        turns("s:S", "u:Q"),
    ),
    "openai": (
        {
            "input": {"messages": chat("u:Q"), "tools": []},
            "preferred_output": chat("a:a"),
            "non_preferred_output": chat("a:b"),
        },
        turns("u:Q"),
    ),
    "openai with a developer": (
        {
            "input": {"messages": [{"role": "developer", "content": "S"}, *chat("u:Q")]},
            "system": "S",
            "preferred_output": chat("a:a"),
            "non_preferred_output": chat("a:b"),
        },
        turns("s:S", "u:Q"),
    ),
    "helpsteer2": (
        {"prompt": "Q", "response_1": "b", "response_2": "a", "preference_strength": 3},
        turns("u:Q"),
    ),
    "helpsteer2, first": (
        {"prompt": "Q", "response_1": "a", "response_2": "b", "preference_strength": -1},
        turns("u:Q"),
    ),
    "alpaca-farm": (
        {"instruction": "I", "input": "", "output_1": "b", "output_2": "a", "preference": 2},
        turns("u:I"),
    ),
    "nectar": (
        {
            "prompt": "\n\nHuman: Q\n\nAssistant: ",
            "num_responses": 3,
            "answers": [
                {"answer": text, "rank": rank} for text, rank in (("c", 2.0), ("a", 1.0), ("b", 3.0))
            ],
        },
        "\n\nHuman: Q\n\nAssistant: ",
    ),
    "ratings": (
        {"system": "S", "question": "Q", "responses": ["b", "a"], "ratings": [1, 5]},
        turns("s:S", "u:Q"),
    ),
    "distilabel": ({"instruction": "Q", "generations": ["b", "a"], "ratings": [1, 5]}, turns("u:Q")),
    "oasst": ({"message_tree_id": "t", "prompt": TREE}, turns("u:Q")),
    "label-studio": (TASK, "Q"),
    "argilla": (ARGILLA, "Q"),
    "argilla, ranked, one discarded": (ARGILLA | {"responses": {"better": [DISCARDED, RANKED]}}, "Q"),
    "kto": ({"system": "S", "question": "Q", "completion": "a", "label": True}, turns("s:S", "u:Q")),
    "kto of llama-factory": (
        {"instruction": "I", "input": "Q", "output": "a", "kto_tag": True},
        turns("u:I\nQ"),
    ),
    "kto of llama-factory, sharegpt": ({"messages": chat("u:Q", "a:a"), "kto_tag": True}, turns("u:Q")),
}


def test_a_known_layout_has_its_prompt(read, subtests):
    for case, (row, prompt) in LAYOUTS.items():
        with subtests.test(case):
            (record,), _ = read(row)
            assert record.prompt == prompt
            assert (record.chosen, record.rejected) == ("a", "b" if record.label is None else "")


def test_annotators_are_clients(read):
    assert [read(row)[0][0].client for row in (TASK, ARGILLA)] == ["7", "ann"]


HH = {"chosen": f"{HUMAN}a", "rejected": f"{HUMAN}b"}
NUMBERED = {"output_1": "b", "output_2": "a"}
ADVISED = {
    # Name: the row, a column in the message, and the prompt if one follows the advice "columns = {…}".
    "context": ({"question": "Q", "context": "C", "client": "ann", **AB}, "context", turns("u:Q\nC")),
    "history": ({"prompt": "Q", "history": chat("u:1", "a:2"), **AB}, "history", turns("u:1", "a:2", "u:Q")),
    "context like a response": ({"prompt": "Q", "context": "a", **AB}, "context", turns("u:Q\na")),
    "two prompts": ({"question": "Q", "query": "P", **AB}, "question", None),
    "vote": ({"prompt": "Q", "winner": "output_2", **NUMBERED}, "winner", "Q"),
    "vote by number": ({"query": "Q", "choice": 2, **NUMBERED}, "choice", turns("u:Q")),
    "thumb": ({"question": "Q", "response": "a", "is_safe": True}, "is_safe", turns("u:Q")),
    "thumb on a dialogue": ({"messages": chat("u:Q", "a:a"), "good": True}, "good", turns("u:Q")),
    "vote on models": (
        {"input": "Q", "model_a_output": "b", "model_b_output": "a", "our_choice": "B"},
        "our_choice",
        turns("u:Q"),
    ),
    "another name": ({"Question": "Q", **AB}, "Question", turns("u:Q")),
    "accepted": ({"input": "Q", "accepted": "a", "rejected": "b"}, "accepted", turns("u:Q")),
    "capitals": ({"Prompt": "Q", "Chosen": "a", "Rejected": "b", "Client": "ann"}, "Chosen", "Q"),
    "blanks": ({" Question": "Q", "chosen ": "a", "rejected ": "b"}, "chosen ", turns("u:Q")),
    "a blank": ({"prompt ": "Q", **AB}, "prompt ", turns("u:Q")),
    "a thumb with capitals": ({"Prompt": "Q", "Completion": "a", "Label": "👍"}, "Label", "Q"),
    "two outputs of llama-factory": (
        {"instruction": "Q", "system": "S", "output": ["a", "b"]},
        "output",
        turns("s:S", "u:Q"),
    ),
    "suffix": ({"prompt": "Q", "text_chosen": "a", "text_rejected": "b"}, "text_chosen", "Q"),
}


def test_what_an_error_advises_is_right_to_follow(read, subtests):
    for case, (row, named, prompt) in ADVISED.items():
        with subtests.test(case):
            with pytest.raises(DataError, match=named) as error:
                read(row)
            found = re.search(r"columns = \{.*?\}", str(error.value))
            assert found is not None
            if prompt is None:
                # The remaining one is named in turn.
                with pytest.raises(DataError, match="query") as error:
                    read(row, **tomllib.loads(found[0]))
                found, prompt = re.search(r"columns = \{.*?\}", str(error.value)), turns("u:Q\nP")
            (record,), _ = read(row, **tomllib.loads(found[0]))
            assert record.prompt == prompt
            assert (record.chosen, record.client) == ("a", row.get("client", row.get("Client")))


@pytest.mark.parametrize("date", ["2026-11-28", "2026-11-28T10:00:00Z", "28.11.2026 10:00", "11/28/2026"])
def test_a_date_is_no_part_of_a_prompt(read, date):
    assert read({"prompt": "Q", "history": date, **AB})[1].unread == {"history": None}
    for text in ("12/4", "20261128"):
        with pytest.raises(DataError, match="problem is not read"):
            read({"prompt": "Divide.", "problem": text, **AB})


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "Q", "images": ["a.png"], **AB}, "images"),
        ({"prompt": "Q", "tools": '[{"name": "clock"}]', **AB}, "tools"),
        ({"prompt": "Q", "image_url": "https://a.png", **AB}, "image_url"),
        (HH | {"question": "P"}, "question"),
        ({"chosen": chat("u:Q", "a:a"), "rejected": chat("u:Q", "a:b"), "history": chat("u:1")}, "history"),
        (
            {"prompt": "Q", "context": "C", "chosen": chat("u:Q", "a:a"), "rejected": chat("u:Q", "a:b")},
            "context",
        ),
    ],
)
def test_what_no_setting_can_read_is_refused_unless_it_is_metadata(read, row, column):
    with pytest.raises(DataError, match=rf"row 1: {column} ") as error:
        read(row)
    assert "columns = {" not in str(error.value)
    (advice,) = re.findall(r"metadata = \[.*?\]", str(error.value))
    (record,), counts = read(row, **tomllib.loads(advice))
    assert (record.chosen.strip(), list(counts.unread)) == ("a", [])


def test_a_prompt_that_is_lost_is_refused(read, subtests):
    for rows, words in (
        ([{"frage": "Q", **AB}], "no common beginning, so this row has no prompt"),
        ([{"prompt": "", **AB}, {"prompt": " ", **AB}], "the prompt of every row is empty"),
        ([{"question": None, "system": "S", **AB}], "system is not read"),
        ([{"messages": chat("u:Q", "a:a"), **AB}], "messages ends with a message of the assistant"),
        ([{"system": "S", "prompt": f"{HUMAN}", **AB}], "prompt is a dialogue in one text"),
        ([{"system": "S", "prompt": chat("s:T", "u:Q"), **AB}], "system differs from the system message"),
        (
            [{"system": "S", "chosen": chat("s:T", "u:Q", "a:a"), "rejected": chat("s:T", "u:Q", "a:b")}],
            "system differs from the system message",
        ),
        ([{"prompt": "Q", "system": "S", **AB}, {"prompt": "Q", **AB}], "row 2: this row has no system"),
        ([LAYOUTS["alpaca-farm"][0] | {"preference": 0}], "preference is 0, which names neither output_1"),
        ([{"prompt": "Q", **NUMBERED, "preference": 1.8}], "better response, which 'preference' may name"),
        ([TASK | {"annotations": [{"result": [{"type": "choices"}]}]}], "of type choices; prefed reads"),
    ):
        with subtests.test(rows=rows, words=words), pytest.raises(DataError, match=words):
            read(*rows)


def test_no_thumb_is_advised_for_a_number(read):
    """An identifier may be 1."""
    with pytest.raises(DataError, match="two responses to each prompt") as error:
        read({"qid": 1, "question": "Q", "response": "a"})
    assert "columns = {" not in str(error.value)


def test_an_empty_prompt_is_read_where_it_is_asked_for(read):
    for settings in ({"columns": {"prompt": "prompt"}}, {"score": "whole"}):
        (record,), _ = read({"prompt": "", **AB}, **settings)
        assert record.prompt == ""
    assert read(AB, score="whole")[0][0].chosen == "a"


def test_a_tie_is_no_vote(read):
    """Of the four, one names neither answer, and in one the strength is 0."""
    votes = [{"prompt": "Q", "winner": winner, **NUMBERED} for winner in ("tie", None, "both_bad", "1")]
    named = {"prompt": "prompt", "responses": list(NUMBERED), "preference": "winner"}
    records, counts = read(*votes, columns=named)
    assert ([record.chosen for record in records], counts.ties) == (["b"], 3)
    with pytest.raises(ValueError, match="responses requires preference"):
        read(votes[0], columns={"responses": list(NUMBERED)})


@pytest.mark.parametrize(
    ("row", "contradicts"),
    [
        ({"margin": -0.5}, True),
        ({"margin": 0}, False),
        ({"score_chosen": 2, "score_rejected": 3.5}, True),
        ({"score_chosen": "10", "score_rejected": "9"}, False),
        ({"rating_chosen": "9", "rating_rejected": "10"}, True),
        ({"chosen-rating": 3, "rejected-rating": 3}, False),
        ({"chosen_reward": -1.0, "rejected_reward": -2.0}, False),
        ({"chosen_rating": 1, "rejected_length": 9, "chosen_length": 3}, False),
    ],
)
def test_scores_that_contradict_the_choice_are_counted(read, row, contradicts):
    _, counts = read({"prompt": "Q", **AB, **row})
    assert counts.contradicted == contradicts


ROW = {"source": "web", "id": 3, "empty": [None, ""], "nested": {"a": 1}}


def test_columns_that_are_not_used_are_reported(tmp_path):
    """The partition uses its column, a selector's template the post; the user names metadata."""
    rows = [row | ROW | {"post": "P", "title": "T", "subreddit": "r"} for row in pairs(20, worker="ann")]
    rows[0]["prompt"] = ""
    file = str(jsonl(tmp_path / "rows.jsonl", [row | {"margin": -1} for row in rows]))

    def build(name, selector=None, **settings):
        config = DataConfig(train=file, partition={"by": "column", "column": "worker"}, **settings)
        return build_dataset(config, tokenizer(), Key(0), tmp_path / name, selector)

    every = ["source", "id", "nested", "post", "title", "subreddit"]
    dataset = build("every")
    assert left_out_table(dataset)["unused_columns"] == every
    notes, warnings = data_notices(dataset)
    assert notes == [f"columns not used: {', '.join(every)}", "1 row has an empty prompt"]
    assert "20 rows rate their rejected response higher" in warnings[0]
    named = build("named", SelectorConfig(template="summary"), metadata=["source", "nested"])
    assert named.findings.unread == ("id",)
    assert build("row", metadata=every).findings.unread == ()
    with pytest.raises(DataError, match="no row has the column 'sources'; did you mean 'source'"):
        build("wrong", metadata=["sources"])


def test_prompts_that_are_common_beginnings_are_reported(tmp_path):
    """It may be accidental if another column holds the prompt. Marked dialogues are not reported."""
    texts = {"chosen": "The a", "rejected": "The b", "frage": "Q"}
    rows = [{key: f"{text} {k}" for key, text in texts.items()} for k in range(6)]
    marked = [{name: f"{HUMAN}{row[name]}" for name in AB} for row in rows]
    words = "6 rows have no column of prompts: the common beginning of both responses is the prompt"
    for name, every, expected in (("plain", rows, [words]), ("marked", marked, [])):
        file = str(jsonl(tmp_path / f"{name}.jsonl", every))
        config = DataConfig(train=file, partition={"by": "iid", "clients": 1})
        dataset = build_dataset(config, tokenizer(), Key(0), tmp_path / name)
        assert [note for note in data_notices(dataset)[0] if "prompt" in note] == expected


PROMPTS = {
    "question": ({"system": "S", "question": "Q"}, turns("s:S", "u:Q"), None),
    "instruction": ({"instruction": "I", "input": "Q", "output": "a"}, turns("u:I\nQ"), "a"),
    "system": ({"system": "S", "prompt": "Q", "response": "a"}, turns("s:S", "u:Q"), "a"),
    "thumb up": ({"prompt": "Q", "completion": "a", "label": 1}, "Q", "a"),
    "thumb down": ({"prompt": "Q", "completion": "a", "label": False}, "Q", None),
    "safe-rlhf": (
        {"prompt": "Q", "response_0": "b", "response_1": "a", "better_response_id": 1},
        turns("u:Q"),
        "a",
    ),
}


@pytest.mark.parametrize(("row", "prompt", "response"), PROMPTS.values(), ids=PROMPTS)
def test_prompts_without_preferences_have_the_same_layouts(tmp_path, row, prompt, response):
    (found,) = (row for row, _ in read_prompts(Source(path=str(jsonl(tmp_path / "rows.jsonl", [row])))))
    assert (found.prompt, found.response) == (prompt, response)


@pytest.mark.parametrize("row", [{"prompt": "Q", "context": "C"}, {"question": "Q", "images": ["a.png"]}])
def test_prompts_without_a_part_are_refused(tmp_path, row):
    source = Source(path=str(jsonl(tmp_path / "rows.jsonl", [row])))
    with pytest.raises(DataError, match=r"(context is not read|images changes).*--prompt-column NAME"):
        list(read_prompts(source, naming="--prompt-column NAME"))


def test_named_columns_of_prompts_are_asked_for(tmp_path, caplog):
    """Nothing is refused. What is not used is logged once, although the file is read twice."""
    file = jsonl(tmp_path / "rows.jsonl", [{"q": "Q", "context": "C", "post": "P"}])
    answers = jsonl(tmp_path / "answers.jsonl", [{"system": "S", "question": "Q", "answer": "a"}])
    (row,) = (row for row, _ in read_prompts(Source(path=str(answers), columns={"chosen": "answer"})))
    assert (row.prompt, row.response) == (turns("s:S", "u:Q"), "a")
    for _ in range(2):
        (row,) = (row for row, _ in read_prompts(Source(path=str(file), columns={"prompt": "q"})))
    assert (row.prompt, row.extra) == ("Q", {"context": "C", "post": "P"})
    assert [record.getMessage() for record in caplog.records] == [f"{file}: columns not used: context"]


@pytest.mark.parametrize(
    ("name", "ends", "words"),
    [
        ("control_tokens_in_text", [1, 1, 1], "rows contain control tokens of the tokenizer"),
        ("plain_text_for_a_chat_model", [0, 1, 1], '[data] template = "chat" renders them as user turns'),
    ],
)
def test_the_shared_cases_of_chat_models(shared_cases, tmp_path, name, ends, words):
    """The template ends a turn once, and so does each response; the text of a client ends none."""
    made, one = tokenizer(chat=CHATML, eos="<|im_end|>"), {"by": "iid", "clients": 1}
    config = DataConfig(train=str(shared_cases / f"data/{name}.jsonl"), partition=one)
    dataset = build_dataset(config, made, Key(0), tmp_path / "built")
    assert [list(ids).count(made.eos_token_id) for ids in dataset.tokens.pair(0)] == ends
    assert words in "".join(line for part in data_notices(dataset) for line in part)
