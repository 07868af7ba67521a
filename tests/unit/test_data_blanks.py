"""Tokenizers that put a blank before every text: none comes between a prompt and its response."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from prefed.data import ChoiceEncoder, PolicyEncoder, Record, SelectorConfig, Template
from prefed.data.encoding import Encoded, continuation_text, token_ids
from preferences import CHATML, merging, tokenizer
from tokenizer_zoo import MADE, TEXTS, blank, llama


def encoded(made: Any, prompt: str, chosen: str, rejected: str = "never", kind: Any = "auto") -> Encoded:
    encoder = PolicyEncoder(made, Template(made, kind), max_length=10_000, too_long="error")
    (outcome,) = encoder.encode([Record(prompt, chosen, rejected)])
    assert isinstance(outcome, Encoded)
    return outcome


@pytest.mark.parametrize("kind", MADE)
@given(data=st.data())
def test_a_response_follows_its_prompt_without_a_blank(kind: str, data: st.DataObject) -> None:
    """A text cut anywhere is a prompt and a response. Their ids decode to the text. Where one token of the
    whole text ends and the next begins at the cut, by the tokenizer's own offsets, they are its ids."""
    made, text = MADE[kind], data.draw(st.sampled_from(TEXTS)).strip()
    cut = data.draw(st.integers(1, len(text) - 1))
    outcome = encoded(made, text[:cut], text[cut:])
    (*response, end), _ = outcome.branches
    assert end == made.eos_token_id
    assert made.decode([*outcome.prompt, *response]) == text
    whole = made(text, return_offsets_mapping=True, add_special_tokens=False)
    if any(one[1] == cut == other[0] for one, other in pairwise(whole["offset_mapping"])):
        assert [*outcome.prompt, *response] == whole["input_ids"]


@pytest.mark.parametrize("kind", ["llama 2", "metaspace always", "metaspace first", "metaspace never"])
def test_blanks_and_bytes_at_the_boundary(kind: str) -> None:
    prompts = ["Q:", "Q: ", "Q:\n", "Q ☃☃", "😀", "Human: Grüße ☃\n\nAssistant:"]
    responses = ["yes", " yes", "  yes", "\nyes", "☃", "\n\n\n☃ 1"]
    for prompt, response in product(prompts, responses):
        outcome = encoded(MADE[kind], prompt, response)
        ids = outcome.branches[0][:-1]
        assert MADE[kind].decode([*outcome.prompt, *ids]) == prompt + response
        assert continuation_text(MADE[kind], outcome.prompt, ids) == response


def test_an_added_token_starts_a_text_anew_as_in_the_whole() -> None:
    """After an added token Llama 2's tokenizer begins again, with a blank, and models learned to do so.
    ``first`` does not."""
    for kind in ("llama 2", "metaspace always", "metaspace first"):
        made = MADE[kind]
        outcome = encoded(made, "[/INST]", "yes", kind="rendered")
        assert [*outcome.prompt, *outcome.branches[0][:-1]] == made("[/INST]yes")["input_ids"]
        assert continuation_text(made, outcome.prompt, outcome.branches[0][:-1]) == "yes"
    outcome = encoded(MADE["llama 2"], "[/INST]", "yes", kind="rendered")
    assert token_ids(MADE["llama 2"], ["yes"])[0] == outcome.branches[0][:-1]


def test_a_response_without_a_prompt_is_a_text_of_its_own() -> None:
    made = MADE["llama 2"]
    outcome = encoded(made, "", "yes")
    assert outcome.branches[0][:-1] == made("yes")["input_ids"]


@pytest.mark.parametrize("kind", MADE)
def test_a_selectors_question_has_no_blank_between_its_parts(kind: str) -> None:
    """The question and either continuation decode to the text of the template; so does a shortened one."""
    made = MADE[kind]
    record = Record(TEXTS[0].strip(), TEXTS[1].strip(), TEXTS[2].strip())
    a, b = sorted((record.chosen, record.rejected))
    text = f"Query: {record.prompt}\nA: {a}\nB: {b}\nBetter: A"
    (whole,) = ChoiceEncoder(made, SelectorConfig(), max_length=10_000).encode([record])
    assert isinstance(whole, Encoded)
    ids = [*whole.prompt, *whole.branches[0]]
    assert made.decode(ids) == made.decode(made(text, add_special_tokens=False)["input_ids"])
    assert len(ids) <= len(made(text, add_special_tokens=False)["input_ids"]) + 1
    (short,) = ChoiceEncoder(made, SelectorConfig(), max_length=len(ids) - 6).encode([record])
    assert isinstance(short, Encoded)
    assert short.shortened
    assert "  " not in made.decode([*short.prompt, *short.branches[0]])


def test_byte_level_tokenizers_keep_their_ids() -> None:
    """Without a blank of the tokenizer's own, prompt and response are the ids of either by itself."""
    for made in (merging(), tokenizer(), tokenizer(bos=True), tokenizer(chat=CHATML)):
        for text in TEXTS[:5]:
            for cut in range(1, len(text), 7):
                outcome = encoded(made, text[:cut], text[cut:])
                prompt, response = token_ids(made, [text[:cut], text[cut:]])
                assert outcome.prompt[-len(prompt) :] == prompt
                assert outcome.branches[0][:-1] == response


def test_a_byte_level_tokenizer_with_a_blank_of_its_own() -> None:
    """``add_prefix_space``: the blank comes before the prompt alone, as before the whole text."""
    made = merging()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    outcome = encoded(made, "Assistant:", "yes")
    assert made.decode([*outcome.prompt, *outcome.branches[0][:-1]]) == " Assistant:yes"


def test_long_texts_of_one_call_do_not_change_the_next() -> None:
    """The copy without a blank has no limit of its own, whatever the last call of the tokenizer set."""
    made = llama(blank(), None)
    made("x" * 50, truncation=True, max_length=3)
    outcome = encoded(made, "Ass", "istant " * 20)
    assert made.decode([*outcome.prompt, *outcome.branches[0][:-1]]) == "Ass" + "istant " * 20
    assert len(np.unique(outcome.branches[0])) > 1
