"""The primitives of a secure sum, and masks on numbers in fixed point, which are whole numbers modulo 2^64.

Each primitive is a maintained library's, ``cryptography`` or ``pycryptodome``. Both are imported at their
first use, so that prefed works without them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from prefed.core.lazy import np

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from numpy.typing import NDArray


SECRET = 32
"""Bytes of a key and of a seed."""
_HALF = SECRET // 2
_NONCE = 12


class SecureError(RuntimeError):
    """A message of the protocol is wrong, comes twice or too early, or too few clients are left."""


def bound(session: bytes, what: str, *parts: str | bytes) -> bytes:
    """A text for signatures and keys that belongs to only one session and one purpose.

    >>> bound(b"run 1", "keys", "ab", "c") == bound(b"run 1", "keys", "a", "bc")
    False
    """
    texts = (part if isinstance(part, str) else part.hex() for part in parts)
    return json.dumps(["prefed secure 1", session.hex(), what, *texts]).encode()


def require() -> None:
    """See that both libraries are there.

    Raises:
        SecureError: one of them is not installed.
    """
    missing = [name for name in ("cryptography", "Crypto") if find_spec(name) is None]
    if missing:
        raise SecureError(f"a secure sum needs the package {missing[0]!r}: pip install 'prefed[secure]'")


def new_key() -> X25519PrivateKey:
    """A key for agreements, of the system's secure random numbers."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate()


def key_of(secret: bytes) -> X25519PrivateKey:
    """The key with these private bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def public_bytes(key: X25519PrivateKey) -> bytes:
    """The public half of a key."""
    public: bytes = key.public_key().public_bytes_raw()
    return public


def agree(own: X25519PrivateKey, other: bytes, session: bytes, what: str, *parts: str) -> bytes:
    """The key that two clients share for one purpose: X25519, then HKDF-SHA256.

    Args:
        other: the other one's public key.
        parts: what else the key is bound to, the same on both sides.

    Raises:
        SecureError: ``other`` is no usable public key.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise SecureError(f"a public key cannot be used: {error}") from error
    kdf = HKDF(algorithm=hashes.SHA256(), length=SECRET, salt=None, info=bound(session, what, *parts))
    derived: bytes = kdf.derive(shared)
    return derived


def stream(key: bytes, size: int) -> bytes:
    """So many bytes of ChaCha20's key stream. Each key serves once, so its nonce is 0."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None)
    made: bytes = cipher.encryptor().update(bytes(size))
    return made


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """``text`` under AES-256-GCM, bound to ``about``."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(_NONCE)
    sealed: bytes = AESGCM(key).encrypt(nonce, text, about)
    return nonce + sealed


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """The text of :func:`seal`; ``None`` if a bit of it, or what it is about, is another."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        text: bytes = AESGCM(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], about)
    except (InvalidTag, ValueError):
        return None
    return text


def signed(key: Ed25519PublicKey, signature: bytes, text: bytes) -> bool:
    """Whether the signature is one of ``text`` by the owner of ``key``."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, text)
    except InvalidSignature:
        return False
    return True


def split(secret: bytes, least: int, count: int) -> list[bytes]:
    """``count`` shares of a secret of 32 bytes, any ``least`` of which give it, and fewer reveal nothing.

    Its two halves are shared independently: the field of the library's Shamir shares has 16 bytes.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    halves = (Shamir.split(least, count, part) for part in (secret[:_HALF], secret[_HALF:]))
    return [low + high for (_, low), (_, high) in zip(*halves, strict=True)]


def join(shares: Mapping[int, bytes], least: int) -> bytes:
    """The secret of :func:`split`.

    Args:
        shares: place of a share in the list, from 0, → share.

    Raises:
        SecureError: there are fewer than ``least``, or one has another length.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    if len(shares) < least:
        raise SecureError(f"{len(shares)} shares of a secret came, and {least} are needed")
    if any(len(share) != SECRET for share in shares.values()):
        raise SecureError(f"a share of a secret has another length than {SECRET}")
    some = sorted(shares.items())[:least]
    return b"".join(
        bytes(Shamir.combine([(place + 1, share[half : half + _HALF]) for place, share in some]))
        for half in (0, _HALF)
    )


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
