"""The Hugging Face hub: one request shows whether it answers, before libraries make many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 5.0
"""Seconds to wait for the hub's answer."""


@contextmanager
def in_reach() -> Iterator[bool]:
    """Whether the hub answers. If it does not, its libraries use only their local cache inside the ``with``.

    By themselves they request each of several files six times before they use the cache, which takes half a
    minute and more. With ``HF_HUB_OFFLINE=1`` in the environment there is no request at all.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        yield False
        return
    answers = _answers(constants.ENDPOINT)
    # is_offline_mode() reads this. `datasets` has no argument for it, and the environment's variable is read
    # only when the library is first imported.
    constants.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers(endpoint: str) -> bool:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=PATIENCE)
    except Exception:  # their classes differ between versions of the library
        return False
    return True
