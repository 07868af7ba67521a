"""A judge of tests that goes by what a client likes."""

from prefed.align.judge import Verdict
from prefed.align.judge.names import ARGUMENTS
from prefed.runs.labels import JUDGES


def install(patch, judge):
    """Make a judge known as ``liking``, while ``patch`` holds."""
    patch.setitem(JUDGES.builtin, "liking", judge)
    patch.setitem(ARGUMENTS, "liking", "")


class LikingJudge:
    """Prefers the text that its client likes more, which a subclass says; equal ones are a tie."""

    def __init__(self, argument, options):
        self.client = options.taste
        self.identity = {"client": self.client}

    def compare(self, questions):
        for each in questions:
            first, second = self.liking(each.first), self.liking(each.second)
            yield Verdict((float(first > second) + float(first >= second)) / 2, "")
