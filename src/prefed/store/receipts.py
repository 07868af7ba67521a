"""What lies in the place of a private state where the state is kept by its client's site: a receipt of it."""

from __future__ import annotations

from prefed.core import State
from prefed.core.wire import decode_state, encode

_SITE, _RECEIPT = "site", "receipt"


def receipt_state(site: str, receipt: str) -> bytes:
    """The receipt that a site gives for a private state, encoded as a state is.

    >>> receipt_in(receipt_state("north", "000003-c66e"))
    '000003-c66e'
    """
    return encode(State({}, {_SITE: site, _RECEIPT: receipt}))


def receipt_in(stored: bytes) -> str | None:
    """The receipt in what :func:`receipt_state` made; ``None`` where a private state itself lies there."""
    receipt = decode_state(stored).values.get(_RECEIPT)
    return receipt if isinstance(receipt, str) else None


def holder_of(state: State) -> str | None:
    """The site that keeps a private state of which this is the receipt; ``None`` if it is none."""
    return str(state.values[_SITE]) if state.values.keys() == {_SITE, _RECEIPT} else None
