"""A client of a secure sum: it takes each step once, in order, and refuses what would give it away."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from prefed.privacy.secure import masks, primitives
from prefed.privacy.secure.messages import LEAST, Keys, Reveal, SecureError, bound, confirmation, threshold

if TYPE_CHECKING:
    import numpy as np
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from numpy.typing import NDArray


class SecureClient:
    """One client in one sum. After an error it goes on with no further step.

    Args:
        client: its id.
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
        """Its numbers in fixed point under masks.

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
        words = masks.to_words(values, len(self._keys)) + masks.mask(self._seed, len(values))
        for other in self._shares:
            pair = masks.pair_key(self._mask, self._keys[other].mask, self._session, self.client, other)
            shared = masks.mask(pair, len(values))
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
