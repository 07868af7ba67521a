"""The identity of a site: an Ed25519 key that is made at the site and never leaves it."""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from prefed.core import files

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SECRET = 32
"""Bytes of a private or public key, and of a digest."""
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aiou"


class SecureError(RuntimeError):
    """A secure sum is impossible: a key or a message is not what it has to be. The message names the site."""


class Identity:
    """The identity of a site.

    Raises:
        SecureError: the package ``cryptography`` is not installed, or the key is damaged.
    """

    def __init__(self, secret: bytes) -> None:
        if find_spec("cryptography") is None:
            raise SecureError("secure sums need the package cryptography: pip install 'prefed[secure]'")
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if len(secret) != SECRET:
            raise SecureError(f"an identity has {SECRET} bytes, this one has {len(secret)}")
        self._key: Ed25519PrivateKey = Ed25519PrivateKey.from_private_bytes(secret)

    @classmethod
    def at(cls, path: Path, *, create: bool = False) -> Identity:
        """Read an identity from its file.

        Args:
            create: make one, with access for its owner only, if there is no file.

        Raises:
            SecureError: as for the class, or there is no file.
        """
        if not path.exists():
            if not create:
                raise SecureError(f"{path} is missing: run `prefed site keys CONFIG` to make this site's key")
            cls(bytes(SECRET))  # a missing package must not leave a file
            files.private_folder(path.parent)
            files.write(path, os.urandom(SECRET), mode=0o600)
        try:
            return cls(path.read_bytes())
        except SecureError as error:
            raise SecureError(f"{path}: {error}: restore it from a copy") from None

    @property
    def public(self) -> bytes:
        """The public key."""
        key: bytes = self._key.public_key().public_bytes_raw()
        return key

    def sign(self, text: bytes) -> bytes:
        """The Ed25519 signature of a text."""
        signature: bytes = self._key.sign(text)
        return signature


def signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Return whether a signature of ``text`` is by the identity with this public key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint(public: bytes) -> str:
    """128 bits of SHA-256 over a public key in eight words that can be read out on a telephone.

    Each word has 16 bits: consonants have four, vowels two (proquints, Wilkerson 2009, arXiv:0901.4016).

    >>> fingerprint(bytes(32))
    'sibod-zipag-hofad-dugij-papim-ruhoj-nasuf-gohog'
    """
    digest = hashlib.sha256(b"prefed identity\0" + public).digest()[:16]
    return "-".join(_word(digest[place] << 8 | digest[place + 1]) for place in range(0, 16, 2))


def _word(bits: int) -> str:
    places = ((12, _CONSONANTS), (10, _VOWELS), (6, _CONSONANTS), (4, _VOWELS), (0, _CONSONANTS))
    return "".join(letters[bits >> shift & len(letters) - 1] for shift, letters in places)


def is_fingerprint(text: str) -> bool:
    """Return whether a text has the form of a fingerprint.

    >>> is_fingerprint(fingerprint(bytes(32))), is_fingerprint("lutob-fikom")
    (True, False)
    """
    words = text.split("-")
    kinds = (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS)
    return len(words) == 8 and all(
        len(word) == 5 and all(map(str.__contains__, kinds, word)) for word in words
    )
