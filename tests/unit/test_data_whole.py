"""Whole texts, cut to their last characters: the lossy preparation of Distributed DPO's files."""

import pytest

from prefed.core import Key
from prefed.data import DataConfig, build_dataset
from preferences import jsonl, tokenizer

TURN = "\n\nHuman: What is it?\n\nAssistant:"
ONE = {"by": "iid", "clients": 1}


@pytest.fixture
def build(tmp_path):
    """A dataset of one client without test pairs; one token per byte, end-of-text is 0."""

    def build(rows, **settings):
        given = {"partition": ONE, "test_fraction": 0, "score": "whole", **settings}
        config = DataConfig(train=str(jsonl(tmp_path / "rows.jsonl", rows)), **given)
        return build_dataset(config, tokenizer(), Key(0), tmp_path / "data")

    return build


def texts(dataset, row=0):
    """The characters of prompt, chosen and rejected, read back from the ids; each end-of-text is ``$``."""
    made, pair = tokenizer(), dataset.tokens.pair(row)
    return [made.decode(list(ids)).replace("<eos>", "$") for ids in (pair.prompt, pair.chosen, pair.rejected)]


def test_the_last_characters_of_both_branches_are_scored(build):
    """Whole dialogues without a prompt column, as HH-RLHF's: end-of-text is all of the prompt, and each
    branch is the last 12 characters of its dialogue, with end-of-text."""
    dataset = build([{"chosen": f"{TURN} A dog.", "rejected": f"{TURN} Go away!"}], tail_characters=12)
    assert texts(dataset) == ["$", "tant: A dog.$", "nt: Go away!$"]
    whole = f"{TURN} A dog."
    assert dataset.tokens.record(0).chosen == whole[-12:]


def test_whole_dialogues_may_differ_early(build):
    """No response is split off, so what follows the first difference is scored like everything else."""
    early = [f"{TURN} {first}{TURN} Yes." for first in ("A dog.", "A cat.")]
    assert texts(build([dict(zip(("chosen", "rejected"), early, strict=True))])) == [
        "$",
        *(f"{text}$" for text in early),
    ]


@pytest.mark.parametrize("prompt", [TURN, [{"role": "user", "content": "What is it?"}]])
def test_a_prompt_is_scored_too(build, prompt):
    """A text prompt, or a conversation in the Human/Assistant form."""
    dataset = build([{"prompt": prompt, "chosen": " Yes.", "rejected": " No."}])
    assert texts(dataset) == ["$", f"{TURN} Yes.$", f"{TURN} No.$"]


def test_what_is_left_out_is_counted(build):
    """Of four rows one has a text below 6 characters, and two are alike in their last 8 characters."""
    rows = [
        {"prompt": "", "chosen": "abcdefgh", "rejected": "hgfedcba"},
        {"prompt": "", "chosen": "abcde", "rejected": "hgfedcba"},
        {"prompt": "", "chosen": "one in the end", "rejected": "two in the end"},
        {"prompt": "", "chosen": "three at the end", "rejected": "threw it the end"},
    ]
    counts = build(rows, tail_characters=8, min_characters=6).row_counts
    assert (counts.read, counts.short, counts.identical, counts.kept) == (4, 1, 2, 1)


def test_a_text_that_is_too_long_loses_its_end(build):
    """``max_length`` 6 leaves five tokens next to the prompt's one: no room for end-of-text. Texts that are
    alike as far as they go are no pair."""
    rows = [
        {"prompt": "", "chosen": "abcdefgh", "rejected": "xy"},
        {"prompt": "", "chosen": "abcdefgh", "rejected": "abcdexyz"},
    ]
    dataset = build(rows, max_length=6)
    assert texts(dataset) == ["$", "abcde", "xy$"]
    counts = dataset.row_counts
    assert (counts.shortened, counts.identical, counts.too_long, counts.kept) == (1, 1, 0, 1)


def test_shp_without_its_post(build):
    """``shp-responses`` has no prompt; where both scores are equal there is no preference."""
    row = {
        "history": "A post.",
        "human_ref_A": "First.",
        "human_ref_B": "Second.",
        "labels": 0,
        "domain": "x",
    }
    rows = [{**row, "score_A": 3, "score_B": 5}, {**row, "score_A": 4, "score_B": 4}]
    dataset = build(rows, format="shp-responses")
    assert texts(dataset) == ["$", "Second.$", "First.$"]
    assert (dataset.row_counts.ties, dataset.row_counts.kept) == (1, 1)
