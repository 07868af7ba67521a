"""Check whether the Hugging Face hub is reachable before libraries send many requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 5.0
"""Timeout of the request to the hub, in seconds."""


@contextmanager
def in_reach() -> Iterator[bool]:
    """Yield whether the hub is reachable. If not, Hugging Face libraries use only their cache in the block.

    Without this check they request each of several files six times before they use the cache, which takes
    half a minute or more. With ``HF_HUB_OFFLINE=1`` in the environment no request is sent.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        yield False
        return
    answers = _answers(constants.ENDPOINT)
    # is_offline_mode() reads this constant. `datasets` has no argument for it, and reads the environment
    # variable only at import.
    constants.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers(endpoint: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=PATIENCE)
    except Exception:  # the exception classes differ between versions of the library
        return False
    return True
