"""The server of a secure sum: it passes messages on, and takes the masks off the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from prefed.core.lazy import np
from prefed.privacy.secure import primitives
from prefed.privacy.secure.masks import mask, pair_key, to_numbers
from prefed.privacy.secure.messages import LEAST, Keys, Reveal, SecureError, threshold

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
