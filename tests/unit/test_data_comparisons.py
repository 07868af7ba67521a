"""Sets of votes and of ratings, on small rows in the published schema of each set."""

import csv
import json

import pytest

from prefed.data import DataError, Message, Source
from prefed.data.prompts import read_prompts
from preferences import jsonl, read_source


def read_file(path, form="auto", **settings):
    return read_source(path, format=form, **settings)[:2]


@pytest.fixture
def read(tmp_path):
    def read(*rows, **settings):
        return read_file(jsonl(tmp_path / "rows.jsonl", rows), **settings)

    return read


def user(content):
    return Message("user", content)


def assistant(content):
    return Message("assistant", content)


def responses(records):
    return [(record.chosen, record.rejected) for record in records]


def dialogue(*contents):
    roles = ("user", "assistant") * len(contents)
    return [{"content": content, "role": role} for content, role in zip(contents, roles, strict=False)]


ARENA = {
    "question_id": "q1",
    "model_a": "small",
    "model_b": "large",
    "winner": "model_a",
    "judge": "arena_user_7",
    "conversation_a": dialogue("Name a colour.", "Blue."),
    "conversation_b": dialogue("Name a colour.", "A dog."),
    "turn": 1,
    "anony": True,
    "language": "English",
    "tstamp": 1682351591.1,
    "openai_moderation": {"flagged": False},
}


def test_an_arena_vote_belongs_to_the_user_who_gave_it(read):
    records, counts = read(
        ARENA, ARENA | {"winner": "model_b"}, ARENA | {"winner": "tie"}, ARENA | {"winner": "tie (bothbad)"}
    )
    assert responses(records) == [("Blue.", "A dog."), ("A dog.", "Blue.")]
    assert {record.prompt for record in records} == {(user("Name a colour."),)}
    assert {record.client for record in records} == {"arena_user_7"}
    assert records[0].extra["language"] == "English"
    assert (counts.read, counts.ties) == (4, 2)


def test_an_arena_vote_on_dialogues_that_part_early_has_no_pair(read):
    """The vote is on all of it, and the second answers are to two different dialogues."""
    longer = {
        "conversation_a": dialogue("Hi", "Hello.", "Why?", "So."),
        "conversation_b": dialogue("Hi", "Hey.", "Why?", "No."),
    }
    with pytest.raises(DataError, match="row 1: chosen must have one assistant message"):
        read(ARENA | longer)
    _, counts = read(ARENA, ARENA | longer, invalid="drop")
    assert counts.read == 2
    shared = ARENA | {"conversation_b": dialogue("Hi", "Hello.", "Why?", "No.")}
    (record,), _ = read(shared | {"conversation_a": longer["conversation_a"]})
    assert record.prompt == (user("Hi"), assistant("Hello."), user("Why?"))


ARENA_55K = {
    "id": 30192,
    "model_a": "small",
    "model_b": "large",
    "prompt": json.dumps(["Name a colour."]),
    "response_a": json.dumps(["Blue."]),
    "response_b": json.dumps(["A dog."]),
    "winner_model_a": 0,
    "winner_model_b": 1,
    "winner_tie": 0,
}


def test_the_turns_of_arena_55k_are_lists_in_json(read, tmp_path):
    a = ARENA_55K | {"winner_model_a": 1, "winner_model_b": 0}
    tie = ARENA_55K | {"winner_model_b": 0, "winner_tie": 1}
    records, counts = read(ARENA_55K, a, tie)
    assert responses(records) == [("A dog.", "Blue."), ("Blue.", "A dog.")]
    assert records[0].prompt == (user("Name a colour."),)
    assert (counts.read, counts.ties) == (3, 1)
    file = tmp_path / "train.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ARENA_55K)
        writer.writeheader()
        writer.writerows([ARENA_55K, a, tie])
    from_csv, _ = read_file(file)
    assert responses(from_csv) == responses(records)


HELPSTEER3 = {
    "domain": "code",
    "language": "python",
    "context": dialogue("Hi", "Hello.", "Sort a list."),
    "response1": "sorted(x)",
    "response2": "x.sort()",
    "overall_preference": -2,
    "individual_preference": [{"score": -2, "reasoning": "…", "feedback1": "…", "feedback2": "…"}],
}


def test_helpsteer3_below_zero_prefers_response_1(read):
    """The card: -3 is "Response 1 is much better than Response 2", 3 the reverse, 0 "about the same"."""
    records, counts = read(*(HELPSTEER3 | {"overall_preference": k} for k in (-2, 3, 0)))
    assert responses(records) == [("sorted(x)", "x.sort()"), ("x.sort()", "sorted(x)")]
    assert [record.margin for record in records] == [2, 3]
    assert records[0].prompt == (user("Hi"), assistant("Hello."), user("Sort a list."))
    assert (records[0].category, records[0].client, records[0].extra) == (
        "code",
        None,
        {"language": "python", "overall_preference": -2},
    )
    assert (counts.read, counts.ties) == (3, 1)


def turn(name, prompt, texts, choice):
    return {
        f"{name}_turn_prompt": prompt,
        **{f"{name}_turn_response_{k}": text for k, text in zip("abcd", texts, strict=True)},
        f"{name}_turn_preferred_response": choice,
        f"{name}_turn_feedback": "It is short.",
    }


NO_TURN = (None, [None] * 4, None)
COMMUNITY = {
    "conversation_id": 11,
    "assigned_lang": "en",
    "annotator_id": 503,
    "annotator_country": "india",
    "is_pregenerated_first_prompt": True,
    **turn("first", "Name a colour.", ["Blue.", "Red.", "A dog.", "Green."], "response_b"),
    **turn("second", "Another?", ["No.", "Pink.", None, None], "response_b"),
    **turn("third", *NO_TURN),
    **turn("fourth", *NO_TURN),
}


def test_community_alignment_pairs_the_preferred_response_with_each_other_one(read):
    records, counts = read(COMMUNITY)
    assert responses(records) == [("Red.", "Blue."), ("Red.", "A dog."), ("Red.", "Green."), ("Pink.", "No.")]
    assert {record.prompt for record in records[:3]} == {(user("Name a colour."),)}
    assert records[3].prompt == (user("Name a colour."), assistant("Red."), user("Another?"))
    assert {(record.client, record.category) for record in records} == {("503", "en")}
    assert records[0].extra["annotator_country"] == "india"
    assert not any("turn" in name for name in records[0].extra)
    assert (counts.read, counts.ties) == (4, 0)
    undecided = COMMUNITY | turn("second", "Another?", ["No.", "Pink.", "Tan.", "Red."], None)
    records, counts = read(undecided)
    assert (len(records), counts.read, counts.ties) == (3, 4, 1)


def test_a_row_of_several_pairs_asks_each_prompt_once(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", [COMMUNITY])
    found = [row for row, _ in read_prompts(Source(path=str(file)))]
    assert [(len(row.prompt), row.response) for row in found] == [(1, "Red."), (3, "Pink.")]


def rated(role, content, turn, **more):
    return {"turn": turn, "role": role, "content": content, **more}


def reply(content, turn, score, chosen=False):
    more = {"score": score, "if_chosen": chosen, "within_turn_id": 0, "model_name": "m"}
    return rated("model", content, turn, **more)


HISTORY = [
    rated("user", "Name a colour.", 0),
    reply("Blue.", 0, 60),
    reply("EMPTY STRING", 0, 1),
    reply("A dog.", 0, 5),
    reply("Red.", 0, 88, True),
    rated("user", "Another?", 1),
    reply("Pink.", 1, 70, True),
    reply("Tan.", 1, 70),
    rated("user", "Thanks.", 2),
    reply("Bye.", 2, 40),
    reply("Welcome.", 2, 41, True),
]
PRISM = {
    "conversation_id": "c0",
    "user_id": "user0",
    "conversation_type": "unguided",
    "opening_prompt": "Name a colour.",
    "conversation_history": HISTORY,
    "open_feedback": "Good.",
}


def test_prism_pairs_the_best_response_of_a_turn_with_the_worst(read):
    """A response without text is none; a turn whose responses have one rating is a tie."""
    records, counts = read(PRISM)
    assert responses(records) == [("Red.", "A dog."), ("Welcome.", "Bye.")]
    assert [record.margin for record in records] == [83, 1]
    first = (user("Name a colour."), assistant("Red."), user("Another?"))
    assert [record.prompt for record in records] == [first[:1], (*first, assistant("Pink."), user("Thanks."))]
    assert {(record.client, record.category) for record in records} == {("user0", "unguided")}
    assert (counts.read, counts.ties) == (3, 1)


def test_of_equally_rated_responses_the_chosen_one_is_the_best(read):
    history = [HISTORY[0], reply("Blue.", 0, 88), reply("Red.", 0, 88, True), reply("A dog.", 0, 5)]
    records, _ = read(PRISM | {"conversation_history": history})
    assert responses(records) == [("Red.", "A dog.")]


def completion(text, fine, overall):
    return {
        "model": "m",
        "principle": "helpfulness",
        "custom_system_prompt": "Be kind.",
        "response": text,
        "annotations": {"honesty": {"Rating": "3", "Rationale": "…"}},
        "critique": "…",
        "fine-grained_score": fine,
        "overall_score": overall,
    }


ULTRAFEEDBACK = {
    "source": "sharegpt",
    "instruction": "Name a colour.",
    "models": ["m"] * 4,
    "correct_answers": ["None"],
    "incorrect_answers": ["None"],
    "completions": [
        completion("Cyan.", None, 9.0),
        completion("A dog.", 1.25, 10.0),
        completion("Blue.", 4.75, 8.0),
        completion("Red.", 4.75, 8.5),
    ],
}


def test_ultrafeedback_is_rated_by_the_mean_of_its_aspects(read):
    """Of the best two the first counts; a completion without a rating is neither best nor worst."""
    (record,), _ = read(ULTRAFEEDBACK)
    assert (record.chosen, record.rejected, record.margin) == ("Blue.", "A dog.", 3.5)
    assert (record.prompt, record.domain) == ((user("Name a colour."),), "sharegpt")


RATED = {"prompt": "Q:", "responses": [" a", " b", " c"], "ratings": [2, 5, 1], "client": "ann", "day": 3}


def test_ratings_pair_the_best_with_the_worst(read):
    one = RATED | {"ratings": [4, 4, 4]}
    (record,), counts = read(RATED, one)
    assert (record.prompt, record.chosen, record.rejected, record.margin) == ("Q:", " b", " c", 4)
    assert (record.client, record.extra) == ("ann", {"day": 3})
    assert (counts.read, counts.ties) == (2, 1)
    (record,), _ = read(RATED | {"responses": json.dumps(RATED["responses"]), "ratings": "[1, null, 3]"})
    assert (record.chosen, record.rejected, record.margin) == (" c", " a", 2)


GAP = COMMUNITY | turn("second", *NO_TURN) | turn("third", "More?", ["A.", "B.", "C.", "D."], "response_a")


def test_a_malformed_row_names_what_is_wrong(read, subtests):
    for row, words in (
        (ARENA | {"winner": "both"}, ["winner", "'both'"]),
        (ARENA | {"conversation_a": "[{'role': 'user'}]"}, ["conversation_a", "JSON"]),
        (ARENA_55K | {"winner_tie": 1}, ["winner_model_b", "winner_tie"]),
        (ARENA_55K | {"response_a": "[null]"}, ["rejected", "not text"]),
        (HELPSTEER3 | {"overall_preference": 4}, ["overall_preference", "4"]),
        (COMMUNITY | {"first_turn_preferred_response": "e"}, ["first_turn_preferred_response", "'e'"]),
        (COMMUNITY | {"first_turn_prompt": None, "second_turn_prompt": None}, ["first_turn_prompt"]),
        (GAP, ["third_turn_prompt", "second_turn_prompt"]),
        (PRISM | {"conversation_history": []}, ["conversation_history", "empty"]),
        (PRISM | {"conversation_history": [*HISTORY[:3], *HISTORY[5:]]}, ["turn 1", "chosen"]),
        (ULTRAFEEDBACK | {"completions": [{"response": "a"}]}, ["fine-grained_score"]),
        (RATED | {"ratings": [1, 2]}, ["responses has 3 entries, but ratings has 2"]),
        (
            {"interaction_id": 1, "user_prompt": "q", "model_response": "a", "score": 3},
            ["PRISM", "conversations"],
        ),
    ):
        with subtests.test(row=row, words=words):
            with pytest.raises(DataError) as error:
                read(row)
            assert "row 1: " in str(error.value)
            message = str(error.value).partition("row 1: ")[2]
            assert all(word in message for word in words)
            assert ("no known format has the columns" in message) == ("interaction_id" in row)


PAIRS = {
    "12": [{"prompt": "Q1", "chosen": "a", "rejected": "b"}],
    "7": [{"prompt": "Q2", "chosen": "c", "rejected": "d"}, {"prompt": "Q3", "chosen": "e", "rejected": "f"}],
}


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_object_of_clients(tmp_path, indent):
    """FedLLM-Bench's loader, on its Fed-ChatbotPA: ``for value in json.load(f).values()``, a client each."""
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(PAIRS, indent=indent))
    records, counts = read_file(file)
    assert [(record.client, record.prompt) for record in records] == [("12", "Q1"), ("7", "Q2"), ("7", "Q3")]
    assert counts.read == 3
    bad = {**PAIRS, "9": [{"prompt": "Q4", "chosen": "a", "rejected": ""}, "text"]}
    file.write_text(json.dumps(bad, indent=indent))
    with pytest.raises(DataError) as error:
        read_file(file)
    assert "row 4" in str(error.value)
    assert "row 5" in str(error.value)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("names", [("train", "test"), ("data",)])
def test_a_json_object_of_splits_is_no_object_of_clients(tmp_path, names, indent):
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(dict.fromkeys(names, PAIRS["7"]), indent=indent))
    with pytest.raises(DataError, match=r"pairs\.json"):
        read_file(file)


def test_a_row_of_message_lists_is_no_object_of_clients(tmp_path):
    file = tmp_path / "pairs.json"
    row = {"chosen": dialogue("Hi", "Hello."), "rejected": dialogue("Hi", "Hey.")}
    file.write_text(json.dumps(row))
    (record,), _ = read_file(file)
    assert (record.chosen, record.rejected) == ("Hello.", "Hey.")
