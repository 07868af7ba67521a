import math

import numpy as np
import pytest

from prefed.core import Key
from prefed.data import Record, synthetic
from prefed.data.synthetic import (
    ATTRIBUTES,
    attributes,
    corpus,
    generate,
    opposed_tastes,
    oracle_accuracy,
    tastes,
    utility,
)


@pytest.mark.parametrize("clients", [2, 6, 10, 12])
def test_tastes_agree_on_warmth_and_cancel_elsewhere(clients):
    drawn = tastes(Key(3), clients)
    assert len(drawn) == clients
    for name in ATTRIBUTES:
        weights = [taste.weights[name] for taste in drawn.values()]
        if name == "warmth":
            assert set(weights) == {1.5}
        else:
            assert sum(weights) == 0
            assert set(weights) == {-1.0, 1.0}


@pytest.mark.parametrize("clients", [2, 6, 12])
def test_opposed_tastes_are_two_and_add_up_to_nothing(clients):
    """Each half has one of them; ±1.5 and four times ±1, so a response that is ideal for one has utility 5.5
    to it and −5.5 to the other."""
    drawn = list(opposed_tastes(Key(3), clients).values())
    assert len({taste.describe() for taste in drawn}) == 2
    for name in ATTRIBUTES:
        weights = [taste.weights[name] for taste in drawn]
        assert sum(weights) == 0
        assert {abs(weight) for weight in weights} == {1.5 if name == "warmth" else 1.0}
    records = generate(Key(3), clients=clients, train=3, test=1, opposed=True)
    weights = {taste.client: taste for taste in drawn}
    for record in records:
        assert record.extra["utility_chosen"] == utility(record.chosen, weights[record.client])


def test_an_odd_crowd_nearly_cancels():
    for name in ("tone", "length"):
        assert abs(sum(taste.weights[name] for taste in tastes(Key(0), 5).values())) == 1


def test_every_response_shows_every_attribute():
    """And each sign occurs in about half of the responses of a corpus (±5 sd)."""
    texts = [text.split("Assistant:")[1] for text in corpus(Key(0), 400)]
    signs = [attributes(text) for text in texts]
    assert all(set(sign) == set(ATTRIBUTES) for sign in signs)
    for name in ATTRIBUTES:
        assert abs(np.mean([sign[name] for sign in signs])) < 5 / math.sqrt(400)


def test_attributes_of_other_text():
    assert attributes("") == {}
    assert attributes(" The weather is fine.") == {"length": -1}
    # A part of a word does not count: "wild" in "wilder".
    assert "strength" not in attributes(" a wilder ride")


def test_utility_is_a_sum_of_signed_weights():
    """warm +1.5, casual −(−1) = +1, bold +1, careful −1, short −(+1): 1.5 + 1 + 1 − 1 − 1 = 1.5."""
    taste = synthetic.Taste(
        "x", {"warmth": 1.5, "tone": -1.0, "strength": 1.0, "caution": -1.0, "length": 1.0}
    )
    text = " How about a bold soup. Please check it first. I hope you love it."
    assert utility(text, taste) == 1.5
    assert taste.describe() == "warm, casual, bold, daring, long"


def test_the_same_key_gives_the_same_records():
    first, again, other = (generate(Key(seed), train=5, test=5) for seed in (0, 0, 1))
    assert first == again != other
    more = generate(Key(0), train=5, test=9)
    assert [r.prompt for r in more if r.split == "train"] == [r.prompt for r in first if r.split == "train"]


def test_labels_follow_bradley_terry():
    """Given the margins, the number of labels the oracle gets right is a sum of Bernoulli(σ(margin)).

    With 6 × 400 labels its mean is known to within 5 standard deviations.
    """
    records = generate(Key(5), train=400, test=0)
    p = np.array([1 / (1 + math.exp(-r.margin)) for r in records])
    spread = math.sqrt((p * (1 - p)).sum()) / len(p)
    assert abs(oracle_accuracy(records) - p.mean()) < 5 * spread
    # The smaller the margin, the noisier the labels, as in the model.
    near = np.array([r.margin <= 2 for r in records])
    right = np.array([r.extra["utility_chosen"] > r.extra["utility_rejected"] for r in records])
    assert right[near].mean() < right[~near].mean()


def test_the_oracle_needs_utilities():
    with pytest.raises(ValueError, match="no records"):
        oracle_accuracy([])
    with pytest.raises(ValueError, match="a record has no utility_chosen or utility_rejected"):
        oracle_accuracy([Record("Q", "a", "b")])


def test_nobody_can_please_two_opposites():
    """Two responses differ in tone alone: three of six clients prefer one, and three the other."""
    drawn = list(tastes(Key(0), 6).values())
    casual = " How about a mild soup. Just go for it. Suit yourself."
    formal = " May I suggest a mild soup. Just go for it. Suit yourself."
    wishes = [utility(formal, taste) > utility(casual, taste) for taste in drawn]
    assert sum(wishes) == 3
