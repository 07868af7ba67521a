"""The Hugging Face hub: asked once whether it answers, before libraries that would ask many times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PATIENCE", "in_reach"]

PATIENCE = 5.0
"""Seconds that the hub has to answer."""


@contextmanager
def in_reach() -> Iterator[bool]:
    """Whether the hub answers; inside, where it does not, its libraries look at their local cache alone.

    Left to themselves they try each of several files six times, half a minute and more, before they look
    there. ``HF_HUB_OFFLINE=1`` in the environment spares the question too.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        yield False
        return
    answers = _answers(constants.ENDPOINT)
    # What is_offline_mode() reads. `datasets` heeds no argument for it, and the variable in the environment
    # is read but once, when the library is first imported.
    constants.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers(endpoint: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=PATIENCE)
    except Exception:  # the transport's own kinds, which differ between versions of the library
        return False
    return True
