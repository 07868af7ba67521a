"""Numbers in fixed point, and the masks on them: whole numbers modulo 2^64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefed.core.lazy import np
from prefed.privacy.secure.messages import SecureError
from prefed.privacy.secure.primitives import agree, stream

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from numpy.typing import NDArray

FRACTION = 24
"""Bits behind the point: numbers are rounded to multiples of 2^-24."""


def to_words(values: NDArray[np.float64], clients: int) -> NDArray[np.uint64]:
    """Numbers in fixed point.

    Args:
        clients: how many are added up at most: their sum must stay in range.

    Raises:
        SecureError: a number is not finite, or so large that a sum could run over.
    """
    most = 2.0 ** (62 - FRACTION) / clients
    if not (np.isfinite(values).all() and (np.abs(values) <= most).all()):
        raise SecureError(f"a number is not finite, or beyond {most:g}, the most among {clients} clients")
    return np.rint(values * 2.0**FRACTION).astype(np.int64).view(np.uint64)


def to_numbers(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The numbers that :func:`to_words` made these of, or a sum of them."""
    return words.view(np.int64).astype(np.float64) / 2.0**FRACTION


def mask(key: bytes, size: int) -> NDArray[np.uint64]:
    """The ``size`` words of a mask; each key serves one mask."""
    return np.frombuffer(stream(key, 8 * size), dtype="<u8").astype(np.uint64)


def pair_key(own: X25519PrivateKey, other: bytes, session: bytes, *names: str) -> bytes:
    """The key of the mask that two clients share, as either of them computes it."""
    return agree(own, other, session, "mask", *sorted(names))
