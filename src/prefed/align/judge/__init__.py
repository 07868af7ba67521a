"""Judges decide which of two responses to a prompt is better.

A judge is asked about both orders of the responses, and :func:`outcome` combines its two verdicts.
"""

from prefed.align.judge.questions import (
    TEMPLATES,
    Judge,
    JudgeError,
    PairTemplate,
    Question,
    Verdict,
    outcome,
)

__all__ = [
    "TEMPLATES",
    "Judge",
    "JudgeError",
    "PairTemplate",
    "Question",
    "Verdict",
    "outcome",
]
