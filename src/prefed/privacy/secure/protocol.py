"""The messages of a secure sum, its clients and its server.

A client takes each step once, in order, and refuses what would give it away. The server passes messages on,
and takes the masks off the sum.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from prefed.core.lazy import np
from prefed.privacy.secure import primitives
from prefed.privacy.secure.primitives import SecureError, bound, mask, pair_key, to_numbers

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from numpy.typing import NDArray


LEAST = 3
"""The fewest clients of a sum: of two, each could compute the other's numbers."""


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
    """How many clients must stay to the end, of so many that started.

    Any two such groups have more than a third of all clients in common, so two lists of names would both be
    signed only if that many lied. Three of ten may drop out.

    >>> threshold(10), threshold(3)
    (7, 3)
    """
    return 2 * clients // 3 + 1


def confirmation(session: bytes, names: Iterable[str]) -> bytes:
    """What a client signs: whose numbers are in the sum."""
    return bound(session, "sum", *sorted(names))


class SecureClient:
    """One client in one sum. After an error it takes no further step.

    Args:
        identity: the key with which it signs.
        roster: client → its identity's public key, of all that may take part. It comes from a party that is
            not the server: whoever writes it can stand in for every other client.
        session: names the run, the round and the exchange; never used twice.
        fewest: it takes part in no sum of fewer clients. Less than a third of a sum's clients may be in
            league with a server that lies.

    Raises:
        SecureError: (from every step) the step is not due, or what the server says cannot be.
    """

    def __init__(
        self,
        client: str,
        identity: Ed25519PrivateKey,
        roster: Mapping[str, Ed25519PublicKey],
        session: bytes,
        fewest: int = LEAST,
    ) -> None:
        primitives.require()
        self.client = client
        self._fewest = max(fewest, LEAST)
        self._identity, self._roster, self._session = identity, dict(roster), session
        self._due = "advertise"
        self._seal, self._mask = primitives.new_key(), primitives.new_key()
        self._seed = secrets.token_bytes(primitives.SECRET)
        self._keys: dict[str, Keys] = {}
        self._own_shares = (b"", b"")
        self._shares: dict[str, tuple[bytes, bytes]] = {}
        self._sent: frozenset[str] = frozenset()

    def advertise(self) -> Keys:
        """Its public keys of this sum."""
        self._begin("advertise")
        seal, mask = primitives.public_bytes(self._seal), primitives.public_bytes(self._mask)
        signature = self._identity.sign(bound(self._session, "keys", self.client, seal, mask))
        self._keys = {self.client: Keys(self.client, seal, mask, signature)}
        self._due = "share"
        return self._keys[self.client]

    def share(self, keys: Sequence[Keys]) -> dict[str, bytes]:
        """Receiver → sealed shares of its mask key and of its seed.

        Args:
            keys: of all that take part, itself among them.
        """
        self._begin("share")
        named = {each.client: each for each in keys}
        if len(named) != len(keys) or named.get(self.client) != self._keys[self.client]:
            raise SecureError("the server's list of keys has a client twice, or not this client's own keys")
        if len(named) < self._fewest:
            raise SecureError(f"a sum of {len(named)} clients: {self._fewest} are the fewest")
        for each in keys:
            self._check(each.client, each.signature, "keys", each.client, each.seal, each.mask)
        if len({key for each in keys for key in (each.seal, each.mask)}) < 2 * len(keys):
            raise SecureError("two clients have one key")
        self._keys = named
        members, least = sorted(named), threshold(len(named))
        secret = self._mask.private_bytes_raw()
        pairs = zip(
            members,
            primitives.split(secret, least, len(members)),
            primitives.split(self._seed, least, len(members)),
            strict=True,
        )
        sealed = {}
        for other, key, seed in pairs:
            if other == self.client:
                self._own_shares = key, seed
            else:
                about = self._about(self.client, other)
                sealed[other] = primitives.seal(self._box(other), key + seed, about)
        self._due = "mask"
        return sealed

    def mask(self, values: NDArray[np.float64], sealed: Mapping[str, bytes]) -> NDArray[np.uint64]:
        """Its numbers in fixed point under primitives.

        Args:
            values: the same number of them for each client.
            sealed: sender → what it sealed for this client.
        """
        self._begin("mask")
        self._known(sealed)
        if self.client in sealed or len(sealed) + 1 < threshold(len(self._keys)):
            raise SecureError(f"shares of {len(sealed)} other clients came: too few, or this client's own")
        for sender, box in sealed.items():
            both = primitives.unseal(self._box(sender), box, self._about(sender, self.client))
            if both is None or len(both) != 2 * primitives.SECRET:
                raise SecureError(f"the shares of {sender!r} were changed on their way")
            self._shares[sender] = both[: primitives.SECRET], both[primitives.SECRET :]
        words = primitives.to_words(values, len(self._keys)) + primitives.mask(self._seed, len(values))
        for other in self._shares:
            pair = primitives.pair_key(self._mask, self._keys[other].mask, self._session, self.client, other)
            shared = primitives.mask(pair, len(values))
            words = words + shared if self.client < other else words - shared
        self._shares[self.client] = self._own_shares
        self._due = "confirm"
        return words

    def confirm(self, sent: Collection[str]) -> bytes:
        """Its signature of the names of those whose numbers came."""
        self._begin("confirm")
        self._known(sent)
        least = threshold(len(self._keys))
        if not set(sent) <= set(self._shares) or self.client not in sent or len(set(sent)) < least:
            raise SecureError(f"the sum is of too few clients ({least} are needed), or not of the right ones")
        self._sent = frozenset(sent)
        self._due = "reveal"
        signature: bytes = self._identity.sign(confirmation(self._session, sent))
        return signature

    def reveal(self, signatures: Mapping[str, bytes]) -> Reveal:
        """Its shares: of each client the one kind or the other, as all have signed.

        Args:
            signatures: client → its signature of the same names.
        """
        self._begin("reveal")
        if not set(signatures) <= self._sent or len(signatures) < threshold(len(self._keys)):
            raise SecureError(f"{len(signatures)} clients have signed the names of the sum: too few")
        for client, signature in signatures.items():
            self._check(client, signature, "sum", *sorted(self._sent))
        seeds = {client: self._shares[client][1] for client in sorted(self._sent)}
        keys = {client: self._shares[client][0] for client in sorted(set(self._shares) - self._sent)}
        self._shares = {}
        self._due = "done"
        return Reveal(self.client, seeds, keys)

    def _begin(self, step: str) -> None:
        due, self._due = self._due, "failed"
        if due != step:
            raise SecureError(f"{step!r} was asked of {self.client!r}, where {due!r} is due: refused")

    def _known(self, names: Collection[str]) -> None:
        strangers = sorted(set(names) - set(self._keys))
        if strangers or len(set(names)) < len(names):
            raise SecureError(f"a name is unknown or comes twice: {strangers[:3]}")

    def _check(self, client: str, signature: bytes, what: str, *parts: str | bytes) -> None:
        key = self._roster.get(client)
        if key is None:
            raise SecureError(f"{client!r} is not on the roster")
        if not primitives.signed(key, signature, bound(self._session, what, *parts)):
            raise SecureError(f"a signature of {client!r} is not its own")

    def _box(self, other: str) -> bytes:
        """The key under which shares go to and come from another client."""
        names = sorted((self.client, other))
        return primitives.agree(self._seal, self._keys[other].seal, self._session, "seal", *names)

    def _about(self, sender: str, receiver: str) -> bytes:
        return bound(self._session, "shares", sender, receiver)


M = TypeVar("M", Keys, Reveal)


class SecureServer:
    """One sum, as the server sees it. Clients may drop out at any step, as long as enough stay.

    Args:
        session: as its clients have it.

    Raises:
        SecureError: (from every step) too few clients are left, or what one sent is malformed or does not
            fit. The message names the client, which a new sum may leave out.
    """

    def __init__(self, session: bytes) -> None:
        primitives.require()
        self._session = session
        self._keys: dict[str, Keys] = {}
        self._sharers: tuple[str, ...] = ()
        self._masked: dict[str, NDArray[np.uint64]] = {}

    def keys(self, keys: Sequence[Keys]) -> tuple[Keys, ...]:
        """What every client that advertised gets: the keys of all of them."""
        for each in _sent(keys, Keys):
            if not all(_is_bytes(part, primitives.SECRET) for part in (each.seal, each.mask)):
                raise SecureError(f"the public keys of {each.client!r} are malformed")
            if not isinstance(each.signature, bytes):
                raise SecureError(f"the signature of {each.client!r} is malformed")
        self._keys = {each.client: each for each in sorted(keys, key=lambda each: each.client)}
        if len(self._keys) < LEAST:
            raise SecureError(f"{len(self._keys)} clients take part, and {LEAST} are the fewest")
        return tuple(self._keys.values())

    def route(self, sealed: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
        """Receiver → sender → sealed shares, among those that shared.

        Args:
            sealed: sender → receiver → sealed shares.
        """
        _check_mapping("what clients shared", sealed)
        self._sharers = tuple(client for client in self._keys if client in sealed)
        self._enough(len(self._sharers), "shared")
        for sender in self._sharers:
            _check_mapping(f"what {sender!r} shared", sealed[sender])
            if any(not _is_bytes(sealed[sender].get(each)) for each in self._sharers if each != sender):
                raise SecureError(f"the sealed shares of {sender!r} are not whole")
        return {
            receiver: {sender: sealed[sender][receiver] for sender in self._sharers if sender != receiver}
            for receiver in self._sharers
        }

    def collect(self, masked: Mapping[str, NDArray[np.uint64]]) -> tuple[str, ...]:
        """The names that every client is to confirm: those whose masked numbers came."""
        _check_mapping("what clients masked", masked)
        self._masked = {client: masked[client] for client in self._sharers if client in masked}
        self._enough(len(self._masked), "sent their numbers")
        for client, words in self._masked.items():
            if not (isinstance(words, np.ndarray) and words.dtype == np.uint64 and words.ndim == 1):
                raise SecureError(f"the masked numbers of {client!r} are no list of 64-bit words")
        if len({words.shape for words in self._masked.values()}) > 1:
            raise SecureError("clients sent different amounts of numbers")
        return tuple(self._masked)

    def sum(self, reveals: Sequence[Reveal]) -> NDArray[np.float64]:
        """The sum of the numbers of all that sent theirs; the masks of those that dropped out are undone."""
        for reveal in _sent(reveals, Reveal):
            if reveal.client not in self._sharers:
                raise SecureError(f"{reveal.client!r} has nothing to reveal")
            for shares in (reveal.seeds, reveal.keys):
                _check_mapping(f"what {reveal.client!r} revealed", shares)
                if not all(_is_bytes(share, primitives.SECRET) for share in shares.values()):
                    raise SecureError(f"a share that {reveal.client!r} revealed is malformed")
        self._enough(len(reveals), "revealed their shares")
        self._enough(len(self._masked), "sent their numbers")
        total = np.add.reduce(list(self._masked.values()))
        for client in self._masked:
            shares = {reveal.client: reveal.seeds[client] for reveal in reveals if client in reveal.seeds}
            total = total - mask(self._joined(shares), len(total))
        for gone in set(self._sharers) - set(self._masked):
            shares = {reveal.client: reveal.keys[gone] for reveal in reveals if gone in reveal.keys}
            key = primitives.key_of(self._joined(shares))
            if primitives.public_bytes(key) != self._keys[gone].mask:
                raise SecureError(f"the shares of the key of {gone!r} do not fit: a client sent a wrong one")
            for client in self._masked:
                pair = pair_key(key, self._keys[client].mask, self._session, client, gone)
                shared = mask(pair, len(total))
                total = total - shared if client < gone else total + shared
        return to_numbers(total)

    def _joined(self, shares: Mapping[str, bytes]) -> bytes:
        members = list(self._keys)
        places = {members.index(client): share for client, share in shares.items()}
        return primitives.join(places, threshold(len(members)))

    def _enough(self, count: int, what: str) -> None:
        least = threshold(len(self._keys))
        if count < least:
            raise SecureError(f"{count} of {len(self._keys)} clients {what}, and {least} are needed")


def _sent(messages: Sequence[M], kind: type[M]) -> Sequence[M]:
    """The messages of a step, each of another client.

    Raises:
        SecureError: one is of another kind, has no name of a client, or is a client's second.
    """
    if not isinstance(messages, Sequence) or not all(isinstance(each, kind) for each in messages):
        raise SecureError(f"a message is no {kind.__name__}")
    names = [each.client for each in messages]
    if not all(isinstance(name, str) for name in names):
        raise SecureError(f"a message of the kind {kind.__name__} has no client's name")
    if twice := [name for name in names if names.count(name) > 1]:
        raise SecureError(f"{twice[0]!r} sent its {kind.__name__} twice")
    return messages


def _check_mapping(what: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise SecureError(f"{what} is no mapping")


def _is_bytes(value: object, length: int | None = None) -> bool:
    return isinstance(value, bytes) and length in (None, len(value))
