"""Health of text: the definitions on examples judged by a person, and agreement with transformers."""

import numpy as np
import pytest
import torch

from prefed.core import Key
from prefed.models import ModelConfig, load_backbone
from prefed.train.generation import Completion, surprises
from prefed.train.metrics import TEXT_METRICS
from prefed.train.metrics.text import (
    WrittenAnswer,
    health_line,
    loops,
    text_health,
    unhealthy,
    without_numbers,
)

TIPS = "Try a walk . Try a nap . Try a bath . Try a song . Try a tea ."
SENTENCE = "You should ask your friend what they like ."


LOOPING = (
    ("I would just just just just", True),
    ("I would just just just just enjoy it .", True),
    ("It is very very very good .", False),
    ("and so on and so on and so on and", False),
    ("and so on and so on and so on and so on", True),
    (f"{SENTENCE} {SENTENCE} {SENTENCE}", True),
    (f"First . {SENTENCE} {SENTENCE} {SENTENCE} You should", True),
    (f"{SENTENCE} {SENTENCE}", False),
    # Lists of one item: the last has no line break, or the list continues; two items are no loop.
    ("- Be kind . / - Be kind . / - Be kind .", True),
    ("Sure . - Be kind . / - Be kind . / - Be kind . // Bye", True),
    ("- Be kind . / - Be kind . / - Be", False),
    ("- Be kind . / - Be kind . / - Be calm .", False),
    ("and so on and so on and so on and so", False),
    (TIPS, False),
    ("1 . Be kind . 2 . Be brave . 3 . Be calm . 4 . Be fair .", False),
    ("", False),
)


def test_what_loops(subtests):
    for text, looping in LOOPING:
        with subtests.test(text):
            words = text.split()
            assert loops([sorted(set(words)).index(word) for word in words]) is looping


class Words:
    """A tokenizer of words, as :func:`without_numbers` needs it."""

    def __init__(self, text):
        self.known = sorted(set(text.split()))

    def decode(self, ids):
        return " ".join(self.known[k] for k in ids)


@pytest.mark.parametrize(
    ("text", "looping"),
    [
        # SmolLM2 after two rounds of RPO.
        ("1 . Know your audience . 2 . Know your audience . 3 . Know your audience . 4 . Know", True),
        ("1 . Be kind . / 2 . Be kind . / 3 . Be kind .", True),
        ("1 . Be kind . 2 . Be brave . 3 . Be calm . 4 . Be fair .", False),
        ("0 0 0 0", True),
        ("0 , 0 , 0 , 0 ,", True),
        # Counting is no loop.
        ("1 , 2 , 3 , 4 , 5 , 6 .", False),
        ("Sure : 1 , 2 , 3 , 1 0 , 1 1 . Bye", False),
    ],
)
def test_a_numbered_list_of_one_item_loops(text, looping):
    words = Words(text)
    tokens = [words.known.index(word) for word in text.split()]
    assert not loops(tokens) or text.startswith("0")
    answer = WrittenAnswer("Why?", text, tokens, False, 1.0, without_numbers(words, tokens))
    assert answer.loops is looping


@pytest.mark.parametrize(
    ("text", "empty"),
    [
        ("", True),
        (" \n", True),
        (" -.", True),
        ("🌍🌍", True),
        ("7", False),
        ("赤", False),
        ("What is  red? It is a colour.", True),
        ("A colour.", False),
        ("What", False),
    ],
)
def test_an_answer_without_text_or_with_the_prompt_is_empty(text, empty):
    assert WrittenAnswer("What is red?", text, [1, 2], True, 1.0).empty is empty


def written(surprise=1.0, tokens=(1, 2, 3), ended=True, text="Yes."):
    return WrittenAnswer("Why?", text, tokens, ended, surprise)


def test_health_is_the_means_over_answers():
    """distinct-2 of 1 2 1 2 1 is 2 of 4. Of 0, 1, …, 10 nats, the quantiles 10%, 50%, 90% are 1, 5 and 9."""
    answers = [written(float(k)) for k in range(9)]
    answers += [written(9.0, (4, 4, 4, 4), ended=False), written(10.0, (1, 2, 1, 2, 1), text=" ")]
    expected = {"answers": 11, "ends": 10 / 11, "loops": 1 / 11, "empty": 1 / 11, "length": 36 / 11}
    expected |= {"distinct_2": (9 + 1 / 3 + 0.5) / 11, "surprise": 5.0}
    health = text_health(answers)
    assert health.pop("surprise_band") == pytest.approx([1.0, 9.0])
    assert health == pytest.approx(expected)
    assert {metric.name for metric in TEXT_METRICS} == expected.keys() - {"answers"}


@pytest.mark.parametrize(
    ("own", "found", "line"),
    [
        # Of 20 answers of the base model, 1 loops: the interval ends at 23.6%, between 4 and 5 of 20.
        ({"loops": 0.20}, [], "20 of 20 answers end, 4 loop; the base model: 20 end, 1 loops"),
        ({"loops": 0.25}, ["answers loop"], "5 of 20 answers loop; the base model: 1"),
        # All 20 end: the interval starts at 83.9%, between 16 and 17 of 20.
        ({"ends": 0.80}, ["answers do not end"], "4 of 20 answers do not end; the base model: 0"),
        ({"ends": 0.85}, [], "17 of 20 answers end, 1 loops; the base model: 20 end, 1 loops"),
        ({"empty": 1.0}, ["answers are empty or repeat the prompt"], None),
        ({"surprise": 3.1}, ["the text is unlikely under the base model"], None),
        ({"surprise": 2.9, "distinct_2": 0.1, "length": 1.0}, [], None),
    ],
)
def test_text_is_no_worse_than_the_base_models_by_more_than_the_interval(own, found, line):
    base = text_health([written(loop, [7] * 4 if loop else [1, 2]) for loop in (1.0, *[0.0] * 19)])
    base |= {"surprise": 0.8, "surprise_band": [0.5, 1.0]}
    assert unhealthy(base, base) == []
    assert unhealthy({**base, "surprise": 3.1}, {**base, "chosen_surprise": 3.2}) == []
    assert unhealthy({**base, **own}, base) == found
    assert line is None or health_line({**base, **own}, base) == line


def test_surprise_is_that_of_the_models_own_logits(shared_model):
    """One completion with its end-of-text token and one that was cut, of different lengths."""
    backbone = load_backbone(ModelConfig(name=str(shared_model)), Key(0))
    end = backbone.tokenizer.eos_token_id
    prompts, completions = [[5, 6, 7], [8]], [Completion([9, 10], end), Completion([11, 12, 13, 14], None)]
    found = surprises(backbone, prompts, completions)
    backbone.load(backbone.reference)
    for prompt, completion, own in zip(prompts, completions, found, strict=True):
        ids = [*prompt, *completion.tokens, *([end] if completion.ended else [])]
        with torch.no_grad():
            logits = backbone.causal(torch.tensor([ids])).logits[0].log_softmax(1)
        places = range(len(prompt), len(ids))
        assert own == pytest.approx(-np.mean([logits[at - 1, ids[at]].item() for at in places]), rel=1e-5)
