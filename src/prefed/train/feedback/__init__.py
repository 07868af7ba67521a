"""Kinds of feedback: pairs, thumbs, and choices between two responses shown to a selector."""

from prefed.train.feedback.choices import CHOICES
from prefed.train.feedback.kind import Feedback
from prefed.train.feedback.pairs import PAIRS
from prefed.train.feedback.thumbs import THUMBS

__all__ = ["CHOICES", "KINDS", "PAIRS", "THUMBS", "Feedback"]

KINDS = (PAIRS, THUMBS, CHOICES)
"""The kinds that rows of a dataset may be of, if they are not of the kind that a run trains on."""
