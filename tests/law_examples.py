"""How many examples hypothesis draws for a law."""

from hypothesis import settings

SHARE = 1.0
"""The share of them that is drawn; ``conftest.py`` lowers it without ``--all``."""


def examples(most):
    """Settings of a law that is tried on ``most`` examples with ``--all``."""
    return settings(max_examples=max(2, round(SHARE * most)))
