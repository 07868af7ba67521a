"""The demo's pairs for a chat model: whose they are, and what they differ in."""

from prefed.core import Key
from prefed.data import synthetic_chat
from prefed.data.synthetic_chat import STYLES


def test_the_first_two_clients_are_opposed_and_so_are_the_last_two():
    ada, ben, cleo, dan = STYLES.values()
    assert (not ada.casual, not ada.brief) == (ben.casual, ben.brief)
    assert (not cleo.casual, not cleo.brief) == (dan.casual, dan.brief)
    assert len(set(STYLES.values())) == 4
    assert all(style.kind for style in STYLES.values())


def test_a_client_prefers_its_style_on_questions_that_no_test_pair_has():
    records = synthetic_chat.generate(Key(7), train=30, test=20)
    assert [r.client for r in records if r.split == "train"] == [c for c in STYLES for _ in range(30)]
    questions = {
        split: {r.prompt[0].content for r in records if r.split == split} for split in ("train", "test")
    }
    assert len(questions["train"]) == 24
    assert len(questions["test"]) == synthetic_chat.TESTED
    assert questions["train"].isdisjoint(questions["test"])
    assert set(synthetic_chat.PROMPTS).isdisjoint(questions["train"] | questions["test"])
    formal = ("Certainly. ", "Thank you for asking. ")
    for record in records:
        style = STYLES[record.client]
        assert record.chosen.startswith(formal) is not style.casual
        assert (record.chosen.count(". ") + record.chosen.count("! ") < 4) is style.brief
    assert records == synthetic_chat.generate(Key(7), train=30, test=20)
    assert records != synthetic_chat.generate(Key(8), train=30, test=20)
