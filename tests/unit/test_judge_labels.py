"""A judge that labels an alignment's pairs in the selectors' place."""

import pytest

from prefed.align import AlignError
from prefed.align.judge import Verdict
from prefed.align.judge.questions import by_score
from prefed.config import AlignConfig
from prefed.data import Record
from prefed.runs.align import check_judge
from prefed.runs.labels import JudgeLabels


class LongerIsBetter:
    """The longer text is better; "first" makes it take the first one, and "mute" keeps it silent."""

    identity = None

    def compare(self, questions):
        for question in questions:
            texts = (question.first, question.second)
            if "mute" in texts:
                yield Verdict(None, "no words")
            else:
                yield Verdict(1.0, "first") if "first" in texts else by_score(*map(len, texts), "")


def test_scores_are_outcomes_in_both_orders():
    """Longer and shorter: 1 and −1. Equal lengths, and a judge that always takes the first: 0. A pair without
    a verdict is left out, and shifts none."""
    pairs = [("longer", "text"), ("mute", "x"), ("text", "longer"), ("abcd", "text"), ("first", "x")]
    asked, scores = JudgeLabels(LongerIsBetter()).scores([Record("p", *pair) for pair in pairs])
    assert asked.tolist() == [0, 2, 3, 4]
    assert scores.tolist() == [[1, -1, 0, 0]]


def test_nobody_answers():
    asked, scores = JudgeLabels(LongerIsBetter()).scores([Record("p", "mute", "x")])
    assert (asked.shape, scores.shape) == ((0,), (1, 0))


def test_names_of_judges():
    assert AlignConfig(prompts="p.jsonl").judge_name is None
    assert AlignConfig(prompts="p.jsonl", labels=1).judge_name is None
    known = AlignConfig(prompts="p.jsonl", labels="judge:reward:a/b")
    assert known.judge_name == "reward:a/b"
    check_judge(known)
    with pytest.raises(AlignError, match=r"labels = 'judge:rewards:model': .*did you mean 'reward'"):
        check_judge(AlignConfig(prompts="p.jsonl", labels="judge:rewards:model"))
    for labels in ("all", "judge:", -1):
        modes = "majority, mean, minimum, adaptive, a selector's number from 0, judge:NAME, or clients"
        with pytest.raises(ValueError, match=f"labels must be {modes}"):
            AlignConfig(prompts="p.jsonl", labels=labels)
    for labels in ("judge:./mine.py", "judge:pack.judges:BEST"):
        with pytest.raises(ValueError, match="an alignment does not load a judge from a file"):
            AlignConfig(prompts="p.jsonl", labels=labels)
