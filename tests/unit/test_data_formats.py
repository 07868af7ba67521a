"""Every known set, on one or two rows in the published schema of the set."""

import json
import math

import pytest

from prefed.data import FORMATS, DataError, Message
from prefed.data.sources import formats
from prefed.data.sources.pairs import RawPair, split_dialogue, split_prompt
from preferences import jsonl, read_source


def read(tmp_path, rows, form="auto", **settings):
    return read_source(jsonl(tmp_path / "rows.jsonl", rows), format=form, **settings)[:2]


def user(content, system=None):
    return (*([Message("system", system)] if system else []), Message("user", content))


SHP = {
    "post_id": "qt3nxl",
    "domain": "askculinary_train",
    "upvote_ratio": 0.98,
    "history": "What's the best way to disassemble raspberries?",
    "c_root_id_A": "hkh25sc",
    "c_root_id_B": "hkh25lp",
    "created_at_utc_A": 1636822112,
    "created_at_utc_B": 1636822110,
    "score_A": 340,
    "score_B": 166,
    "human_ref_A": "Pectinex, perhaps?",
    "human_ref_B": "Raspberry juice will make a bright stain.",
    "labels": 1,
    "seconds_difference": 2.0,
    "score_ratio": 2.0481927711,
}


def test_shp_label_one_prefers_a(tmp_path):
    """The card: labels "is 1 if A is preferred to B; 0 if B is preferred to A".

    score_ratio is the better comment's score over the worse one's.
    """
    (first, second), _ = read(tmp_path, [SHP, SHP | {"labels": 0}])
    assert (first.chosen, first.rejected) == (SHP["human_ref_A"], SHP["human_ref_B"])
    assert (second.chosen, second.rejected) == (SHP["human_ref_B"], SHP["human_ref_A"])
    assert first.prompt == user(SHP["history"])
    assert first.category == "askculinary"
    assert first.margin == pytest.approx(math.log(340 / 166))
    assert first.extra["post_id"] == "qt3nxl"
    assert "history" not in first.extra


COMPARISON = {
    "info": {
        "id": "t3_2vwp1w",
        "post": "I had a car accident on friday.",
        "title": "Anybody with knowledge of the Dutch law around?",
        "subreddit": "legaladvice",
        "site": None,
        "article": None,
    },
    "summaries": [
        {"text": " car accident caused damage.", "policy": "sup4_ppo_rm3_kl10", "note": "Driving fast."},
        {"text": " how can i get an investigation?", "policy": "ref", "note": "Unclear."},
    ],
    "choice": 1,
    "worker": "ikNmucwunMnYJCQpnq6ZYb57OW7NiD",
    "batch": "batch9",
    "split": "train",
    "extra": {"confidence": 8},
}


def test_summaries_keep_the_annotator(tmp_path):
    other = COMPARISON | {"choice": 0, "split": "valid2", "extra": {"confidence": None}}
    (first, second), _ = read(tmp_path, [COMPARISON, other])
    assert first.prompt == (
        "SUBREDDIT: r/legaladvice\n\nTITLE: Anybody with knowledge of the Dutch law around?\n\n"
        "POST: I had a car accident on friday.\n\nTL;DR:"
    )
    assert first.chosen == " how can i get an investigation?"
    assert second.chosen == " car accident caused damage."
    assert (first.client, first.category, first.split) == (COMPARISON["worker"], "legaladvice", "train")
    assert (first.extra["batch"], first.extra["confidence"]) == ("batch9", 8)
    assert second.split == "test"


def test_news_comparisons_have_an_article(tmp_path):
    news = COMPARISON | {
        "info": {"id": "x", "post": None, "title": None, "subreddit": None, "site": "cnn", "article": "News."}
    }
    (record,), _ = read(tmp_path, [news])
    assert (record.prompt, record.category) == ("News.\n\nTL;DR:", "cnn")


def test_imdb_loses_the_repeated_prompt(tmp_path):
    """chosen and rejected hold the prompt; the margin is r_chosen − r_rejected = 2.5 − (−1.75)."""
    row = {
        "prompt": "what ever you do",
        "chosen": "what ever you do). But I think it's a shame",
        "rejected": "what ever you do, you've got to be",
        "chosen_reward": 2.5,
        "rejected_reward": -1.75,
    }
    (record,), counts = read(tmp_path, [row])
    assert (record.prompt, record.chosen) == ("what ever you do", "). But I think it's a shame")
    assert record.rejected == ", you've got to be"
    assert record.margin == 4.25
    assert counts.prefixes == 1


def test_code_vulnerability_is_by_language(tmp_path):
    row = {
        "lang": "c++",
        "vulnerability": "Buffer overflows.",
        "system": "",
        "question": "Write a C++ function that copies a string.",
        "chosen": "```c++\nstrncpy\n```",
        "rejected": "```c++\nstrcpy\n```",
    }
    (record, other), _ = read(tmp_path, [row, row | {"system": "You are careful."}])
    assert record.prompt == user(row["question"])
    assert other.prompt == user(row["question"], "You are careful.")
    assert (record.category, record.column("lang"), record.column("vulnerability")) == (
        "c++",
        "c++",
        "Buffer overflows.",
    )


def test_webgpt_takes_the_higher_score_and_leaves_ties(tmp_path):
    """score_0 + score_1 = 0, "an answer is preferred if and only if its score is positive"; 0 is a tie."""
    row = {
        "question": {"dataset": "triviaqa", "id": "a7", "full_text": "Which river?"},
        "quotes_0": {"title": ["t"], "extract": ["e"]},
        "answer_0": "The Nile [1].",
        "tokens_0": {"prefix": [1], "completion": [2]},
        "score_0": -0.5,
        "quotes_1": {"title": [], "extract": []},
        "answer_1": "The Rhine.",
        "tokens_1": {"prefix": [1], "completion": [3]},
        "score_1": 0.5,
    }
    flat = row | {"question": "Which river?", "score_0": 0.25, "score_1": -0.25}
    (first, second), counts = read(tmp_path, [row, row | {"score_0": 0.0, "score_1": 0.0}, flat])
    assert (first.chosen, first.rejected, first.margin) == ("The Rhine.", "The Nile [1].", 1.0)
    assert (first.prompt, first.category) == (user("Which river?"), "triviaqa")
    assert (second.chosen, second.margin, second.prompt) == ("The Nile [1].", 0.5, user("Which river?"))
    assert (counts.read, counts.ties) == (3, 1)


def test_safe_rlhf_by_help_or_by_safety(tmp_path):
    row = {
        "prompt": "How do I open a lock?",
        "response_0": "Force it.",
        "response_1": "Call a locksmith.",
        "prompt_source": "Alpaca3-70B",
        "is_response_0_safe": False,
        "is_response_1_safe": True,
        "response_0_severity_level": 2,
        "better_response_id": 0,
        "safer_response_id": 1,
        "response_0_harm_category": {"Economic Crime": True},
    }
    (helpful,), _ = read(tmp_path, [row])
    (safe,), _ = read(tmp_path, [row], "safe-rlhf-safer")
    assert (helpful.chosen, safe.chosen) == ("Force it.", "Call a locksmith.")
    assert helpful.prompt == user("How do I open a lock?")
    assert helpful.extra["is_response_1_safe"] == 1


@pytest.mark.parametrize("hub", ["jondurbin/py-dpo-v0.1", "kaitchup/UltraFeedback-prompt-chosen-rejected"])
def test_instructions_become_conversations(tmp_path, hub):
    """The prompt of these sets is an instruction, so it becomes a turn of the user."""
    row = {"prompt": "Sort a list.", "chosen": "sorted(x)", "rejected": "x"}
    (record,), _ = read(tmp_path, [row], hub)
    assert (record.prompt, record.chosen) == (user("Sort a list."), "sorted(x)")
    (plain,), _ = read(tmp_path, [row])
    assert plain.prompt == "Sort a list."
    (system,), _ = read(tmp_path, [row | {"system": "Be terse."}], hub)
    assert system.prompt == user("Sort a list.", "Be terse.")
    turns = [
        [{"role": "user", "content": "Sort a list."}, {"role": "assistant", "content": row[name]}]
        for name in ("chosen", "rejected")
    ]
    (chat,), _ = read(tmp_path, [row | {"chosen": turns[0], "rejected": turns[1]}], hub)
    assert (chat.prompt, chat.chosen) == (record.prompt, record.chosen)


def test_hh_is_split_at_the_last_common_turn(tmp_path):
    start = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: A joke?\n\nAssistant:"
    row = {"chosen": start + " Why did", "rejected": start + " No."}
    (record,), _ = read(tmp_path, [row], "Anthropic/hh-rlhf")
    assert (record.prompt, record.chosen, record.rejected) == (start, " Why did", " No.")
    assert read(tmp_path, [row])[0] == [record]


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        # The dialogues differ in the middle. All text from there on belongs to the responses.
        (
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
            "\n\nHuman: a\n\nAssistant: x\n\nHuman: c\n\nAssistant: d",
            (
                "\n\nHuman: a\n\nAssistant:",
                " b\n\nHuman: c\n\nAssistant: d",
                " x\n\nHuman: c\n\nAssistant: d",
            ),
        ),
        ("I like cats", "I like cars", ("I like", " cats", " cars")),
        ("The sky is  blue", "The sky is  red", ("The sky is", "  blue", "  red")),
        ("yes", "no", ("", "yes", "no")),
        ("Hi there", "Hi there you", ("Hi", " there", " there you")),
        ("Hi there sir", "Hi there madam", ("Hi there", " sir", " madam")),
    ],
)
def test_dialogues_without_a_prompt(chosen, rejected, expected):
    assert split_dialogue(chosen, rejected) == expected
    prompt, first, second = expected
    assert (prompt + first, prompt + second) == (chosen, rejected)


TURNS = [{"role": "user", "content": "Hi"}]
HUB = [{"from": "human", "value": "Hi"}]
HUMAN, IM = "\n\nHuman: a\n\nAssistant: ", "<|im_start|>"


def reply(content):
    return [{"role": "assistant", "content": content}]


def turns(*lines):
    """Messages from lines like ``u:Hi``."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return tuple(Message(roles[line[0]], line[2:]) for line in lines)


def dialogue(*lines):
    return [{"role": turn.role, "content": turn.content} for turn in turns(*lines)]


def test_forms_of_prompt_and_responses(subtests):
    for prompt, chosen, rejected, expected in (
        # The forms of TRL: explicit text, explicit messages, implicit messages, a text prompt with messages.
        ("Hi", " a", " b", ("Hi", " a", " b")),
        (TURNS, reply("a"), reply("b"), (user("Hi"), "a", "b")),
        (None, TURNS + reply("a"), TURNS + reply("b"), (user("Hi"), "a", "b")),
        ("Hi", reply("a"), reply("b"), (user("Hi"), "a", "b")),
        ("Hi", TURNS + reply("a"), TURNS + reply("b"), (user("Hi"), "a", "b")),
        (TURNS, "a", "b", (user("Hi"), "a", "b")),
        (HUB, [{"from": "gpt", "value": "a"}], reply("b"), (user("Hi"), "a", "b")),
        # The prompt is removed only if both responses repeat it, as whole words.
        ("Hi", "Hi a", "Hi b", ("Hi", " a", " b")),
        ("Hi", "High five!", "His name?", ("Hi", "High five!", "His name?")),
        ("Hi", "Hi a", "Hiking", ("Hi", "Hi a", "Hiking")),
        ("Hello", "Hello! a", "Hello! b", ("Hello", "Hello! a", "Hello! b")),
        ("A: Q\nB:", "A: Q\nB:a", "A: Q\nB:b", ("A: Q\nB:", "a", "b")),
        ("Q\n", "Q\na", "Q\nb", ("Q\n", "a", "b")),
        ("你好吗？", "你好吗？好", "你好吗？不", ("你好吗？", "好", "不")),
        ("Hi", "Hi a", "Ho b", ("Hi", "Hi a", "Ho b")),
    ):
        with subtests.test(prompt=prompt, chosen=chosen):
            assert split_prompt(RawPair(prompt, chosen, rejected))[:3] == expected


def test_a_prompt_next_to_whole_dialogues(subtests):
    """``shared`` turns begin both dialogues, and ``expected`` ones are those of the prompt. No turn is
    lost, and none is there twice. A text prompt comes first, after a system message, or answers a last turn
    of the assistant, unless the shared turns contain it as whole words, or it consists of them."""
    for prompt, shared, expected in (
        (dialogue("s:S"), ["u:Hi"], ["s:S", "u:Hi"]),
        (dialogue("s:S", "u:Q"), ["u:Q"], ["s:S", "u:Q"]),
        (dialogue("u:Q"), ["s:S", "u:Q"], ["s:S", "u:Q"]),
        (dialogue("u:1", "a:2", "u:1"), ["u:1", "a:2", "u:3"], ["u:1", "a:2", "u:1", "a:2", "u:3"]),
        ("C", ["u:Q"], ["u:C", "u:Q"]),
        ("C", ["s:S", "u:Q"], ["s:S", "u:C", "u:Q"]),
        ("What is this?", ["u:hi"], ["u:What is this?", "u:hi"]),
        ("hi", ["u:What is this?"], ["u:hi", "u:What is this?"]),
        ("Read this: x\nhi", ["u:hi"], ["u:Read this: x\nhi", "u:hi"]),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", ["u:hi"], ["u:hi"]),
        ("\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant:", ["u:1", "a:2", "u:3"], None),
        ("<s>[INST] hi [/INST]", ["u:hi"], None),
        ("Q", ["s:S"], ["s:S", "u:Q"]),
        ("Q", ["u:1", "a:2"], ["u:1", "a:2", "u:Q"]),
        ("1", ["u:1", "a:2", "u:3"], None),
        ("Q ", ["u:By the way, Q"], None),
        ("System: S. User: Q", ["s:S", "u:Q"], None),
        ("", ["s:S"], None),
        ("S then Q", ["s:S"], ["s:S", "u:S then Q"]),
    ):
        with subtests.test(prompt=prompt, shared=shared):
            pair = RawPair(prompt, dialogue(*shared, "a:A"), dialogue(*shared, "a:B"))
            assert split_prompt(pair)[:3] == (turns(*(expected or shared)), "A", "B")


@pytest.mark.parametrize("shape", [json.dumps, lambda item: json.dumps(item, indent=1)])
def test_messages_as_json_text(tmp_path, shape):
    """A cell of a CSV file with messages is read like the messages, in every column, also of thumbs."""
    prompt, chosen, rejected = shape(TURNS), shape(TURNS + reply("a")), shape(TURNS + reply("b"))
    for row in (
        {"prompt": prompt, "chosen": "a", "rejected": "b"},
        {"prompt": shape(HUB), "chosen": shape(reply("a")), "rejected": shape(reply("b"))},
        {"chosen": chosen, "rejected": rejected},
    ):
        ((record,), _) = read(tmp_path, [row])
        assert (record.prompt, record.chosen, record.rejected) == (user("Hi"), "a", "b")
    ((record,), _) = read(tmp_path, [{"prompt": prompt, "completion": shape(reply("a")), "label": "up"}])
    assert (record.prompt, record.chosen) == (user("Hi"), "a")


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ('[{"name": "Hi"}]', "a", "b"),
        ('[{"role": "user", "content": "Hi"}', "a", "b"),
        ('[{"role": "user"}, {"role": "admin"}]', "a", "b"),
        ("[{" * 9000, "a", "b"),
        ("Write messages.", json.dumps([{"role": "user", "content": "Hi"}]), "No."),
    ],
)
def test_other_json_is_text(tmp_path, prompt, chosen, rejected):
    """Other objects, half a list, roles without content, and one response of JSON next to one of words."""
    ((record,), _) = read(tmp_path, [{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
    assert (record.prompt, record.chosen, record.rejected) == (prompt, chosen, rejected)


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ("Hi", "High time you asked.", "High time you asked."),
        ("Hello", "Hello! How can I help?", "Hello! How can I help?"),
        ("Hello", "Hello there", "Hello there"),
        ("Q:", "Q: a", " a"),
        ("User: Q\n", "User: Q\na", "a"),
    ],
)
def test_a_thumb_may_start_like_its_prompt(prompt, response, expected):
    """A greeting answers a greeting; only a prompt that ends in a colon or a new line is a repetition."""
    pair = RawPair(prompt, response, response, label=True)
    assert split_prompt(pair)[:3] == (prompt, expected, expected)


def test_refuses_other_forms(tmp_path, subtests):
    more = {
        "tool_calls": {"tool_calls": [{"id": "1"}]},
        "reasoning_content, name": {"reasoning_content": "so", "name": "ann"},
        "weight": {"weight": 0},
        "value": {"value": "other text"},
    }
    says = {"role": "assistant", "content": "a"}
    for prompt, chosen, rejected, message in (
        (None, TURNS + reply("a") + TURNS, TURNS + reply("b") + TURNS, "must have one assistant message"),
        ("Hi", reply("a"), " b", "chosen and rejected must be both text or both lists of messages"),
        ("Hi", [], [], "chosen is empty"),
        ("Hi", ["x"], reply("b"), "must contain only messages, not a string"),
        ("Hi", [{"role": "tool", "content": "x"}], reply("b"), "role 'tool'"),
        ("Hi", [{"role": "assistant", "content": None}], reply("b"), "content that is not text, but null"),
        ("Hi", reply([{"type": "image_url", "image_url": "x"}]), reply("b"), "a part of type 'image_url'"),
        ("Hi", reply([{"text": "a", "cache_control": 1}]), reply("b"), "text part with cache_control,"),
        *(("Hi", [says | own], reply("b"), f"chosen has a message with {key},") for key, own in more.items()),
        ("Hi", [says | more["value"] | {"content": None}], reply("b"), "chosen has a message with value,"),
        ("Hi", json.dumps([{"role": "tool", "content": "x"}]), json.dumps(reply("b")), "role 'tool'"),
        ("Hi", repr(reply("a")), repr(reply("b")), "Python text"),
        (None, f"{HUMAN}b{HUMAN}d", f"{HUMAN}x", "chosen must have one assistant message .* with 'Human:'"),
        (None, f"{IM}user\nHi", f"{IM}system\nHi{IM}user\nHo", "rejected must have one .* '<|im_start|>'"),
        ({"a": 1}, " a", " b", "prompt must be text or a list of messages, not an object"),
        (None, None, " b", "chosen is missing"),
    ):
        with subtests.test(prompt=prompt, chosen=chosen):
            row = {"chosen": chosen, "rejected": rejected}
            with pytest.raises(DataError, match=message):
                read(tmp_path, [row if prompt is None else {"prompt": prompt, **row}])


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_what_a_message_may_hold(tmp_path):
    """Text parts are joined by line breaks; a key without a value, which `datasets` fills in, is dropped."""
    empty = {"tool_calls": None, "name": "", "images": []}
    row = {
        "prompt": [{"role": "user", "content": parts("Look:", "a cat"), **empty}],
        "chosen": [
            {"role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "image": None}]}
        ],
        "rejected": reply(["No.", "Not at all."]),
    }
    ((record,), _) = read(tmp_path, [row])
    assert (record.prompt, record.chosen, record.rejected) == (
        user("Look:\na cat"),
        "Yes.",
        "No.\nNot at all.",
    )


@pytest.mark.parametrize("first", [True, False])
def test_texts_with_and_without_a_prompt_are_refused_in_one_file(tmp_path, first):
    """Row 2 would otherwise be a dialogue whose prompt is "A", next to rows whose prompt is a question."""
    rows = [{"prompt": "Q", "chosen": "A a", "rejected": "A b"}, {"chosen": "A a", "rejected": "A b"}]
    here, there = ("no", "a") if first else ("a", "no")
    message = (
        f"row 2: this row has {here} prompt, but row 1 has {there} prompt; texts without a prompt are read "
        "as whole dialogues, so give a prompt in all rows of a file or in none"
    )
    with pytest.raises(DataError, match=message):
        read(tmp_path, rows if first else rows[::-1])


def test_named_and_nested_columns(tmp_path):
    row = {
        "q": {"text": "Q"},
        "best": " a",
        "worst": " b",
        "by": 3.0,
        "a.b": "dotted",
        "long": "x" * 2000,
        "n": None,
    }
    columns = {"prompt": "q.text", "chosen": "best", "rejected": "worst", "client": "by", "category": "a.b"}
    (record,), _ = read(tmp_path, [row], columns=columns)
    assert (record.prompt, record.chosen, record.client, record.category) == ("Q", " a", "3", "dotted")
    assert record.extra == {}


def test_generic_rows_use_columns_of_the_record(tmp_path):
    row = {
        "prompt": "Q",
        "chosen": "a",
        "rejected": "b",
        "client": 5,
        "margin": "1.5",
        "split": "valid",
        "ok": True,
    }
    (record,), _ = read(tmp_path, [row])
    assert (record.client, record.margin, record.split, record.extra) == ("5", 1.5, "validation", {"ok": 1})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (SHP | {"labels": 2}, r"labels must be 1 \(A is preferred\) or 0 \(B is preferred\), not 2"),
        (SHP | {"score_ratio": 0}, "score_ratio must be positive, not 0"),
        (SHP | {"human_ref_A": None}, "human_ref_A is missing"),
        (COMPARISON | {"choice": 2}, "summaries must be a list of two, and choice must be 0 or 1"),
        (COMPARISON | {"summaries": []}, "summaries must be a list of two"),
        (COMPARISON | {"info": {"id": "x"}}, "neither a post nor an article"),
        (COMPARISON | {"extra": "8"}, "row 1: extra must be an object"),
        (COMPARISON | {"info": {"post": "x", "subreddit": ["x"]}}, "row 1: subreddit must be a text"),
        (COMPARISON | {"summaries": ["text", "text"]}, "row 1: malformed: string indices"),
    ],
)
def test_a_malformed_row_of_a_known_set(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, [row])


def test_get_format_takes_either_name():
    for form in FORMATS.values():
        assert formats.get_format(form.name) is form
        assert not form.hub or formats.get_format(form.hub) is form
    with pytest.raises(DataError, match="did you mean 'webgpt'"):
        formats.get_format("webgtp")
