"""A judge of tests that goes by what a client likes."""

from prefed.align.judge import Verdict


class LikingJudge:
    """Prefers the text that its client likes more, which a subclass says; equal ones are a tie."""

    def __init__(self, argument, options):
        self.client = options.taste
        self.identity = {"client": self.client}

    def compare(self, questions):
        for each in questions:
            first, second = self.liking(each.first), self.liking(each.second)
            yield Verdict((float(first > second) + float(first >= second)) / 2, "")
