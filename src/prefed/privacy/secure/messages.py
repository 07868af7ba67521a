"""What clients and server say to each other, and what each signature and key is bound to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LEAST = 3
"""The fewest clients of a sum: of two, each could compute the other's numbers."""


class SecureError(RuntimeError):
    """A message of the protocol is wrong, comes twice or too early, or too few clients are left."""


@dataclass(frozen=True)
class Keys:
    """A client's keys for one sum.

    Attributes:
        seal: X25519 public key under which others send it shares.
        mask: X25519 public key from which masks are made.
        signature: of both, by the client's identity.
    """

    client: str
    seal: bytes
    mask: bytes
    signature: bytes


@dataclass(frozen=True)
class Reveal:
    """A client's shares of what is still to be taken off.

    Attributes:
        seeds: client that sent its numbers → share of the seed of its own mask.
        keys: client that did not → share of its mask key.
    """

    client: str
    seeds: Mapping[str, bytes]
    keys: Mapping[str, bytes]


def threshold(clients: int) -> int:
    """How many clients must stay to the end, of so many that began.

    Any two such groups have more than a third of all clients in common, so two lists of names would both be
    signed only if that many lied. Three of ten may drop out.

    >>> threshold(10), threshold(3)
    (7, 3)
    """
    return 2 * clients // 3 + 1


def bound(session: bytes, what: str, *parts: str | bytes) -> bytes:
    """A text for signatures and keys that belongs to one session and one purpose alone.

    >>> bound(b"run 1", "keys", "ab", "c") == bound(b"run 1", "keys", "a", "bc")
    False
    """
    texts = (part if isinstance(part, str) else part.hex() for part in parts)
    return json.dumps(["prefed secure 1", session.hex(), what, *texts]).encode()


def confirmation(session: bytes, names: Iterable[str]) -> bytes:
    """What a client signs: whose numbers are in the sum."""
    return bound(session, "sum", *sorted(names))
