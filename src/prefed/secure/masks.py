"""Numbers in fixed point, masks, and shares of secrets: each primitive is a maintained library's.

Masks are the key stream of ChaCha20, keys come of X25519 and HKDF (package ``cryptography``), shares are
Shamir's over GF(2^128) (package ``pycryptodome``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from prefed.core.lazy import np
from prefed.secure.messages import SecureError, bound

if TYPE_CHECKING:
    from numpy.typing import NDArray

SECRET = 32
"""Bytes of a key and of a seed."""
_HALF = SECRET // 2
FRACTION = 24
"""Bits behind the point: numbers are rounded to multiples of 2^-24."""


def to_words(values: NDArray[np.float64], clients: int) -> NDArray[np.uint64]:
    """Numbers in fixed point, modulo 2^64.

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
    """``size`` words of ChaCha20's key stream; each key serves one mask, so its nonce is 0."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), dtype="<u8").astype(np.uint64)


def agree(own: X25519PrivateKey, other: bytes, session: bytes, what: str, *parts: str | bytes) -> bytes:
    """The key that two clients share for one purpose; ``parts`` are the same on both sides.

    Raises:
        SecureError: ``other`` is no usable public key.
    """
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise SecureError(f"a public key cannot be used: {error}") from error
    kdf = HKDF(algorithm=hashes.SHA256(), length=SECRET, salt=None, info=bound(session, what, *parts))
    derived: bytes = kdf.derive(shared)
    return derived


def split(secret: bytes, least: int, count: int) -> list[bytes]:
    """``count`` shares of a secret of 32 bytes, any ``least`` of which give it, and fewer tell nothing.

    Its two halves are shared independently: the library's field has 16 bytes.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    halves = (Shamir.split(least, count, part) for part in (secret[:_HALF], secret[_HALF:]))
    return [low + high for (_, low), (_, high) in zip(*halves, strict=True)]


def join(shares: Mapping[int, bytes], least: int) -> bytes:
    """The secret of :func:`split`.

    Args:
        shares: place of a share in the list, from 0, → share.

    Raises:
        SecureError: there are fewer than ``least``.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    if len(shares) < least:
        raise SecureError(f"{len(shares)} shares of a secret came, and {least} are needed")
    some = sorted(shares.items())[:least]
    return b"".join(
        bytes(Shamir.combine([(place + 1, share[half : half + _HALF]) for place, share in some]))
        for half in (0, _HALF)
    )
