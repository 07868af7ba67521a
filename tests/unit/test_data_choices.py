"""Selectors' questions as tokens: wording, letters, both orders, pairs that are too long."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from law_examples import examples
from prefed.config import Experiment
from prefed.core import Key
from prefed.data import (
    ChoiceEncoder,
    ChoiceTemplate,
    DataConfig,
    DataError,
    DataMismatchError,
    FederatedDataset,
    Message,
    Record,
    SelectorConfig,
    TokenSet,
    build_dataset,
    dialogue,
    instruction,
    write_choices,
)
from prefed.data.encoding import Encoded
from prefed.methods import METHODS
from prefed.runs.build import build_data
from preferences import jsonl, merging, pairs, tokenizer

GENERAL = SelectorConfig()
POST = {"subreddit": "tifu", "title": "Locked out", "post": "I left my {key} inside."}
ASCII = [chr(k) for k in range(33, 127)]


def llama():
    """In the manner of Llama's: blanks become ▁, one stands before every text, other bytes have tokens."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{k:02X}>" for k in range(256)), "▁", *ASCII, "▁A", "▁B"]
    vocabulary = {name: k for k, name in enumerate(names)}
    merges = [("▁", "A"), ("▁", "B")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def wordpiece(letters=ASCII):
    names = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), "Better", "Query"]
    backend = Tokenizer(models.WordPiece({name: k for k, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def unsplit(*merges):
    """A byte-level BPE whose merges may cross blanks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: k for k, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def write(folder, records, made=None, config=GENERAL, max_length=512):
    return write_choices(folder, made or tokenizer(), config, records, max_length)


def texts(tokens, row):
    return tuple(tokenizer().decode(ids) for ids in tokens.pair(row))


def test_the_questions_are_those_of_figure_4():
    made = tokenizer()
    record = Record("unused", " a short one", " a long one", extra=POST)
    head, query = ChoiceTemplate(made, "summary").question(record)
    assert head + query == (
        "Below is a forum post followed by two summaries. Pick a more precise and concise one that "
        "summarizes the most important points in the given forum post, without including unimportant or "
        "irrelevant details. State your choice with a single capital letter, i.e., “A” if SUMMARY A is "
        "better, “B” if SUMMARY B is better.\n\n### SUBREDDIT: r/tifu\n### TITLE: Locked out\n"
        "### POST: I left my {key} inside."
    )
    assert ChoiceTemplate(made, "summary").branches("S1", "S2") == (
        "\n### SUMMARY A: S1\n### SUMMARY B: S2\n### YOUR CHOICE: A",
        "\n### SUMMARY A: S2\n### SUMMARY B: S1\n### YOUR CHOICE: B",
    )
    answer = ChoiceTemplate(made, "answer")
    assert "".join(answer.question(Record("How?\n", "x", "y"))) == (
        "Below is a query followed by two responses. Pick a helpful response that is precise, concise, and "
        "casual. State your choice with a single capital letter, i.e., “A” if RESPONSE A is better, “B” if "
        "RESPONSE B is better.\n\n### QUERY: How?"
    )
    assert answer.branches("x", "y")[1] == "\n### RESPONSE A: y\n### RESPONSE B: x\n### YOUR CHOICE: B"


def test_generation_templates_are_those_of_figure_4():
    start = "Below is an instruction that describes a task"
    end = "Write a response that appropriately completes the request.\n\n### Instruction:\nDo it.\n\n"
    assert instruction("Do it.") == f"{start}. {end}### Response:"
    with_input = f"{start}, paired with an input that provides further context. {end}"
    assert instruction("Do it.", "To this.") == f"{with_input}### Input:\nTo this.\n\n### Response:"


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (tokenizer(), ("A", "B")),
        (merging(), None),
        (llama(), ("▁A", "▁B")),
        (wordpiece(), ("A", "B")),
        (unsplit(("Ġ", "A"), ("Ġ", "B")), ("ĠA", "ĠB")),
        (unsplit((":", "Ġ"), (":Ġ", "A"), (":Ġ", "B")), (":ĠA", ":ĠB")),
    ],
    ids=["bytes", "byte-level", "llama", "wordpiece", "blank and letter", "colon, blank and letter"],
)
def test_every_family_reads_the_text_as_it_tokenises_it(tmp_path, made, names):
    """The oracle tokenises the three texts by itself; with Llama's blank before every text, each whole
    text, of which the question's ids are the beginning."""
    tokens = write(tmp_path, [Record("Why?", " zebra", " apple ")], made)
    start = [made.bos_token_id] if made.bos_token_id is not None and made("x")["input_ids"][0] == 1 else []
    expected = ["Query: Why?", "\nA: apple\nB: zebra\nBetter: A", "\nA: zebra\nB: apple\nBetter: B"]
    ids = made(expected, add_special_tokens=False)["input_ids"]
    if names == ("▁A", "▁B"):
        wholes = made([expected[0] + branch for branch in expected[1:]], add_special_tokens=False)[
            "input_ids"
        ]
        assert all(whole[: len(ids[0])] == ids[0] for whole in wholes)
        ids[1:] = (whole[len(ids[0]) :] for whole in wholes)
    assert [part.tolist() for part in tokens.pair(0)] == [start + ids[0], ids[1], ids[2]]
    assert tokens.letters == (ids[1][-1], ids[2][-1])
    if names is not None:
        assert tuple(made.convert_ids_to_tokens(tokens.letters)) == names


@pytest.mark.parametrize(
    "made",
    [
        wordpiece([letter for letter in ASCII if letter != "B"]),  # B is unknown
        wordpiece([letter for letter in ASCII if letter not in "AB"]),  # both are
        unsplit(("Ġ", "A")),  # " A" is one token and " B" two
        unsplit(("r", ":"), (":", "Ġ"), ("r:", "Ġ"), ("r:Ġ", "A")),
    ],
    ids=["one unknown", "both unknown", "one joined", "one joined further"],
)
def test_a_tokenizer_without_two_letters_is_refused(made):
    with pytest.raises(DataError, match='a selector needs a tokenizer that encodes "Better: A" and "Better'):
        ChoiceTemplate(made)


def test_a_letter_that_joins_the_text_before_it_is_refused(tmp_path):
    """This tokenizer joins the tail to a response that ends with z, so the letter is not a separate token."""
    pieces = [(" ", -1.0), ("\n", -1.0), *((letter, -1.0) for letter in ASCII), ("z\nBetter: A", -0.1)]
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces)))
    assert len(write(tmp_path / "y", [Record("Q", "b", "a")], made)) == 1
    with pytest.raises(DataError, match="the pairs to be judged, row 2: the tokenizer merges the answer"):
        write(tmp_path / "z", [Record("Q", "b", "a"), Record("Q", "z", "a")], made)


def test_a_conversation_is_plain_dialogue_inside_the_template(tmp_path):
    talk = (Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Bye"))
    chat = [Record(talk[:1], "a", "b"), Record(talk, "a", "b")]
    tokens = write(tmp_path, chat)
    assert texts(tokens, 0)[0] == "Query: Hi"
    assert texts(tokens, 1)[0] == "Query: " + dialogue(talk).strip()


text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    str.strip
)


@examples(12)
@given(st.lists(st.tuples(text, text, text), min_size=1, max_size=4), st.sampled_from([24, 40, 60, 400]))
def test_swapping_the_responses_turns_the_orientation_alone(tmp_path_factory, triples, max_length):
    """Whatever is chosen, the tokens are the same; so are those of a pair that is shortened."""
    records = [Record(*triple) for triple in triples if triple[1] != triple[2]]
    folder = tmp_path_factory.mktemp("choices")
    one = write(folder / "one", records, max_length=max_length)
    other = write(folder / "other", [record.swapped() for record in records], max_length=max_length)
    assert one.rows.tolist() == other.rows.tolist()
    assert (one.orientations == 1 - other.orientations).all()
    for row in range(len(one)):
        assert all(np.array_equal(a, b) for a, b in zip(one.pair(row), other.pair(row), strict=True))
        assert one.record(row) == other.record(row).swapped()
        assert one.orientations[row] == (one.record(row).chosen < one.record(row).rejected)


def test_both_orders_are_there(tmp_path):
    """A known mistake of earlier code: the chosen response always shown as A, or in one order only."""
    tokens = write(tmp_path, [Record("Q", "yes", "no"), Record("Q", "no", "yes")])
    for row in range(2):
        assert texts(tokens, row)[1:] == ("\nA: no\nB: yes\nBetter: A", "\nA: yes\nB: no\nBetter: B")
    assert tokens.orientations.tolist() == [0, 1]


AROUND = len("Query: " + "\nA: \nB: \nBetter: ")
"""Tokens that the model reads around the texts, one a byte."""


@pytest.mark.parametrize(
    ("lengths", "room", "rest"),
    [
        ((10, 30, 12), 52, (10, 30, 12)),  # all of it fits
        ((10, 30, 12), 40, (10, 18, 12)),  # 18 + 12 = 30
        ((10, 30, 25), 40, (10, 15, 15)),  # 15 + 15 = 30
        ((10, 30, 25), 39, (10, 14, 14)),  # 15 + 15 = 30 are too many
        ((10, 30, 25), 26, (10, 8, 8)),
        ((10, 30, 25), 22, (6, 8, 8)),  # a response keeps 8: the prompt loses its beginning
        ((10, 30, 5), 20, (7, 8, 5)),
        ((10, 5, 4), 15, (6, 5, 4)),
        ((10, 30, 25), 16, None),  # a token of the prompt stays
    ],
)
def test_the_rule_for_long_pairs(tmp_path, lengths, room, rest):
    """Responses before the prompt, both down to a common length, at least 8; one token is one byte here."""
    query, first, second = ("".join(chr(97 + k % 26) for k in range(n)) for n in lengths)
    second = second.upper()
    tokens = write(tmp_path, [Record(query, first, second)], max_length=AROUND + room)
    if rest is None:
        assert len(tokens) == 0
        return
    query, first, second = query[lengths[0] - rest[0] :], first[: rest[1]], second[: rest[2]]
    assert texts(tokens, 0) == (
        f"Query: {query}",
        f"\nA: {second}\nB: {first}\nBetter: A",
        f"\nA: {first}\nB: {second}\nBetter: B",
    )


def test_a_character_is_not_cut_in_two(tmp_path):
    """Of 18 tokens each response gets 9: nine letters, or four characters of two bytes."""
    tokens = write(tmp_path, [Record("Q", "z" * 20, "ä" * 10)], max_length=AROUND + 1 + 18)
    assert texts(tokens, 0)[1] == "\nA: zzzzzzzzz\nB: ääää\nBetter: A"


@given(st.tuples(text, text, text), st.integers(17, 90), st.sampled_from([tokenizer(), merging(), llama()]))
def test_shortened_pairs_fit_and_are_cut_between_characters(triple, room, made):
    """Every kind of character and tokenizer: nothing is too long, and each text is a part of its own."""
    query, *responses = (part.strip() for part in triple)
    first, second = sorted(responses)
    if first == second:
        return
    encoder = ChoiceEncoder(made, GENERAL, max_length=AROUND + room)
    (outcome,) = encoder.encode([Record(query, first, second)])
    if not isinstance(outcome, Encoded):
        return
    assert len(outcome.prompt) + max(map(len, outcome.branches)) - 1 <= AROUND + room
    # Llama's puts a ▁ before each text.
    asked, said = (
        made.decode(ids, skip_special_tokens=True).removeprefix(" ")
        for ids in (outcome.prompt, outcome.branches[0])
    )
    assert query.endswith(asked.removeprefix("Query:").strip())
    a, b = said.removeprefix("\nA: ").removesuffix("\nBetter: A").split("\nB: ")
    assert first.startswith(a)
    assert second.startswith(b)


def built(tmp_path, rows, config, made=None, **options):
    path = jsonl(tmp_path / "rows.jsonl", rows)
    options = {"partition": {"by": "iid", "clients": 1}, "test_fraction": 0.0, **options}
    folder = tmp_path / f"data{len(list(tmp_path.iterdir()))}"
    return build_dataset(DataConfig(train=str(path), **options), made or tokenizer(), Key(0), folder, config)


def test_long_pairs_are_counted_or_refused(tmp_path):
    """Of four pairs the second and third are long; the last differs from its rival in what does not fit."""
    rows = [
        {"prompt": "Q", "chosen": "yes", "rejected": "no"},
        {"prompt": "Q", "chosen": "y" * 50, "rejected": "n" * 40},
        {"prompt": "Q" * 60, "chosen": "y" * 9, "rejected": "no"},
        {"prompt": "Q", "chosen": "y" * 40 + "es", "rejected": "y" * 40 + "ou"},
    ]
    options = {"max_length": AROUND + 40}
    counts = built(tmp_path, rows, GENERAL, **options).row_counts
    assert (counts.kept, counts.shortened, counts.cut, counts.too_long) == (3, 2, 1, 1)
    counts = built(tmp_path, rows, SelectorConfig(too_long="drop"), **options).row_counts
    assert (counts.kept, counts.shortened, counts.cut, counts.too_long) == (1, 0, 0, 3)
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: the selector question has 115 tokens") as error:
        built(tmp_path, rows, SelectorConfig(too_long="error"), **options)
    assert 'too_long = "shorten" or "drop"' in str(error.value)
    with pytest.raises(DataError, match=r"1: selector question longer than (.|\n)*needs max_length = 115"):
        built(tmp_path, rows[1:2], SelectorConfig(too_long="drop"), **options)


def test_a_long_pair_shifts_no_label(tmp_path):
    """A known mistake of earlier code: tokens without the long row but labels with it."""
    records = [Record(f"Q{k}", "yes" if k % 3 else "a", "no" * (60 if k == 4 else 1)) for k in range(9)]
    tokens = write(tmp_path, records, config=SelectorConfig(too_long="drop"), max_length=60)
    assert tokens.rows.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    for row, number in enumerate(tokens.rows):
        record = records[number - 1]
        assert tokens.record(row) == record
        assert texts(tokens, row)[0] == f"Query: Q{number - 1}"
        shown_as_a = texts(tokens, row)[1].splitlines()[1]
        assert (shown_as_a == f"A: {record.chosen}") == tokens.orientations[row]


def test_responses_that_differ_in_blanks_alone_are_identical(tmp_path):
    rows = [{"prompt": "Q", "chosen": "yes", "rejected": " yes\n"}, *pairs(2)]
    counts = built(tmp_path, rows, GENERAL).row_counts
    assert (counts.identical, counts.kept) == (1, 2)


def comparison(choice, **info):
    return {
        "info": {"id": "t3", **POST, **info},
        "summaries": [{"text": " first"}, {"text": " second"}],
        "choice": choice,
        "worker": "w",
        "split": "train",
    }


def test_a_choice_of_0_is_kept(tmp_path):
    """A known mistake of earlier code: ``if choice`` takes 0 for no choice."""
    long = "x" * 2000
    rows = [comparison(0), comparison(1, title="Other"), comparison(0, post=long)]
    dataset = built(tmp_path, rows, SelectorConfig(template="summary"), max_length=3000)
    assert (dataset.row_counts.kept, dataset.row_counts.ties) == (3, 0)
    assert dataset.tokens.orientations.tolist() == [1, 0, 1]
    assert texts(dataset.tokens, 1)[0].endswith("r/tifu\n### TITLE: Other\n### POST: I left my {key} inside.")
    assert texts(dataset.tokens, 2)[0].endswith(f"POST: {long}")


def test_figure_4_generates_summaries_from_the_same_rows(tmp_path):
    dataset = built(tmp_path, [comparison(1)], GENERAL, format="summarize-from-feedback-instruction")
    assert dataset.tokens.record(0).prompt == instruction(
        "Summarize the following Reddit post in a paragraph of 50 words or less.",
        "SUBREDDIT: r/tifu\nTITLE: Locked out\nPOST: I left my {key} inside.",
    )
    with pytest.raises(DataError, match="row 1: info has no title, which the instruction contains"):
        built(tmp_path, [comparison(1, title="")], GENERAL, format="summarize-from-feedback-instruction")


def test_a_summary_needs_its_fields(tmp_path):
    missing = r"row 1: no subreddit and no title and no post \(also rows 2, 3\)\n"
    with pytest.raises(DataError, match=missing) as error:
        built(tmp_path, pairs(3), SelectorConfig(template="summary"))
    assert (
        str(error.value).count(
            '[selector] template = "summary" requires these fields. Use rows with them, or set'
        )
        == 1
    )


def test_mirrored_copies_are_never_trained_and_validated_on(tmp_path):
    """A known mistake of earlier code: (x, a, b) in training and (x, b, a) in validation."""
    rows = pairs(40)
    rows += [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    dataset = built(tmp_path, rows, GENERAL, validation_fraction=0.3, test_fraction=0.2)
    (data,) = dataset.clients.values()
    parts = [set(dataset.tokens.pairs[part]) for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in (data.train, data.validation, data.test)] == [40, 24, 16]
    assert [len(part) for part in parts] == [20, 12, 8]
    assert len(set().union(*parts)) == 40


def test_a_flip_turns_the_orientation_alone(tmp_path):
    """Here "A: n" is one token, so that the two orders of "no" and "yes" differ in length."""
    made = unsplit(("A", ":"), ("A:", "Ġ"), ("A:Ġ", "n"))
    config = {"by": "column", "column": "who"}
    rows = pairs(8, who=lambda k: "ab"[k % 2])
    plain = built(tmp_path, rows, GENERAL, made, partition=config)
    flipped = built(tmp_path, rows, GENERAL, made, partition=config, flip=["b"])
    assert plain.tokens.orientations.tolist() == [0] * 8
    assert flipped.tokens.orientations.tolist() == [0, 1] * 4
    for row in range(8):
        before, after = plain.tokens.pair(row), flipped.tokens.pair(row)
        assert len(before[1]) < len(before[2])
        assert all(np.array_equal(*parts) for parts in zip(before, after, strict=True))
    assert np.array_equal(plain.tokens.lengths, flipped.tokens.lengths)
    assert flipped.tokens.record(1) == plain.tokens.record(1).swapped()
    assert plain.fingerprint != flipped.fingerprint


def test_a_folder_is_of_one_kind(tmp_path):
    """A policy's manifest has no letters. It is not taken for a selector's."""
    config = DataConfig(
        train=str(jsonl(tmp_path / "x.jsonl", pairs(9))), partition={"by": "iid", "clients": 2}
    )
    policy = build_dataset(config, tokenizer(), Key(0), tmp_path / "policy")
    choice = build_dataset(config, tokenizer(), Key(0), tmp_path / "choice", GENERAL)
    assert policy.tokens.letters is None
    assert "letters" not in json.loads((tmp_path / "policy/tokens.json").read_text())
    assert FederatedDataset.open(tmp_path / "choice").tokens.letters == choice.tokens.letters is not None
    assert TokenSet.empty().letters is None
    # The same clients hold the same pairs.
    for name, data in policy.clients.items():
        assert np.array_equal(data.train, choice.clients[name].train)
    for folder, selector in [
        ("policy", GENERAL),
        ("choice", None),
        ("choice", SelectorConfig(template="answer")),
    ]:
        with pytest.raises(DataMismatchError, match="contains data prepared from different selector;"):
            build_dataset(config, tokenizer(), Key(0), tmp_path / folder, selector)


BASE = {
    "data": {"train": "pairs.jsonl", "partition": {"by": "iid", "clients": 2}},
    "model": {"name": "some/model"},
    "method": {"name": "feddpo"},
}


def test_a_method_that_reads_choices_gets_questions(tmp_path, monkeypatch):
    tokenizer().save_pretrained(tmp_path / "model")
    train = str(jsonl(tmp_path / "x.jsonl", pairs(4)))
    tables = BASE | {"data": BASE["data"] | {"train": train}, "model": {"name": str(tmp_path / "model")}}
    asked = Experiment.model_validate({**tables, "selector": {"template": "answer"}})
    assert build_data(asked, tmp_path / "policy").tokens.letters is None
    monkeypatch.setattr("prefed.config.settings.METHODS", {"feddpo": METHODS["fedbis"]})
    tokens = build_data(asked, tmp_path / "choice").tokens
    assert tokens.letters is not None
    assert texts(tokens, 0)[1] == "\n### RESPONSE A: no 0\n### RESPONSE B: yes 0\n### YOUR CHOICE: A"
