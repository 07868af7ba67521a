"""One sum: who takes part, what its masks are bound to, and the masks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from prefed.core.lazy import np
from prefed.privacy.secure.identity import SECRET, Identity, SecureError, fingerprint, signed

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST = 3
"""The fewest sites of a sum: of two, each could compute the other's numbers."""


@dataclass(frozen=True)
class Member:
    """A site's keys in one run.

    Attributes:
        identity: its Ed25519 public key.
        key: its X25519 public key, which lives as long as its process.
        signature: of ``key`` and the run, by ``identity``.
    """

    site: str
    identity: bytes
    key: bytes
    signature: bytes


@dataclass(frozen=True)
class Session:
    """All that the sites of one sum must agree on; masks cancel only among sites with equal sessions.

    Attributes:
        attempt: 1, or 2 after a first attempt in which a site was missing.
        settings: digest of the run's experiment and clients.
        download: :func:`sha256` of what the sites were sent.
        size: number of words.
        members: the sites, sorted by name.
    """

    federation: str
    run: str
    round: int
    exchange: str
    attempt: int
    settings: str
    download: str
    size: int
    members: tuple[Member, ...]

    @property
    def name(self) -> bytes:
        """SHA-256 of the session. It must never be used for two uploads of a site."""
        fields = asdict(self)
        fields["members"] = [[each.site, each.identity.hex(), each.key.hex()] for each in self.members]
        return hashlib.sha256(_text("session", fields)).digest()


class Participant:
    """A site in the sums of one run. Its key for agreements exists only in this process.

    So a site that was killed, or whose disk was restored, cannot repeat a mask.

    Attributes:
        member: its keys, for the other sites.
    """

    def __init__(self, identity: Identity, federation: str, run: str, site: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._identity = identity
        self._key = X25519PrivateKey.generate()
        self._about = federation, run
        key = self._key.public_key().public_bytes_raw()
        self.member = Member(site, identity.public, key, identity.sign(_key_text(federation, run, site, key)))

    def mask(self, words: NDArray[np.uint32], session: Session) -> NDArray[np.uint32]:
        """Words plus this site's masks, modulo 2^32. The session must have passed :func:`check_members`."""
        masked = words
        for other in session.members:
            if other == self.member:
                continue
            mask = np.frombuffer(self._stream(other, session, 4 * len(words)), "<u4")
            masked = masked + mask if self.member.site < other.site else masked - mask
        return masked

    def sign(self, words: bytes, receipts: Mapping[str, str], session: Session) -> bytes:
        """The signature of an upload: masked words, and client → receipt of its new private state."""
        return self._identity.sign(_upload_text(words, receipts, session))

    def _stream(self, other: Member, session: Session, size: int) -> bytes:
        """ChaCha20 under a key from HKDF-SHA256, which is used once, so the nonce is 0."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(other.key))
        except ValueError as error:
            raise SecureError(f"the key of site {other.site!r} cannot be used: {error}") from error
        pair = sorted((self.member.site, other.site))
        info = _text("mask", {"session": session.name.hex(), "pair": pair})
        key = HKDF(hashes.SHA256(), SECRET, salt=None, info=info).derive(secret)
        stream: bytes = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))
        return stream


def check_members(session: Session, own: Member, pins: Mapping[str, str], least: int) -> None:
    """Check at a site that a sum is among the right sites.

    Args:
        own: this site's keys.
        pins: other site → the fingerprint of its identity.
        least: the fewest sites.

    Raises:
        SecureError: the members are too few, not sorted, or one is not who the pins say; or this site is not
            among them.
    """
    members = session.members
    names = [each.site for each in members]
    if names != sorted(set(names)) or own not in members:
        raise SecureError("the list of sites is not sorted, or does not have this site with its own keys")
    if len(members) < max(least, LEAST):
        raise SecureError(f"a sum of {len(members)} sites: {max(least, LEAST)} are the fewest")
    for each in members:
        if each == own:
            continue
        if each.site not in pins:
            raise SecureError(f"site {each.site!r} has no fingerprint in [sites] of this site's file")
        if (found := fingerprint(each.identity)) != pins[each.site]:
            raise SecureError(
                f"site {each.site!r} has another key: its fingerprint is {found}, and [sites] has "
                f"{pins[each.site]}. Ask the site by telephone before changing [sites]"
            )
        if each.identity == own.identity or each.key == own.key:
            raise SecureError(f"site {each.site!r} has this site's key")
        check_key(each, session.federation, session.run)


def check_key(member: Member, federation: str, run: str) -> None:
    """Check that a site's key in a run is signed by the identity that comes with it.

    Raises:
        SecureError: it is not.
    """
    if not signed(member.identity, member.signature, _key_text(federation, run, member.site, member.key)):
        raise SecureError(f"the key of site {member.site!r} in this run is not signed by its identity")


def check_upload(
    words: bytes, receipts: Mapping[str, str], signature: bytes, session: Session, site: Member
) -> None:
    """Check at the hub that an upload has the right length and came from this site unchanged.

    Raises:
        SecureError: it does not.
    """
    if len(words) != 4 * session.size:
        raise SecureError(f"its upload has {len(words):,} bytes, not {4 * session.size:,}")
    if not signed(site.identity, signature, _upload_text(words, receipts, session)):
        raise SecureError("its upload is not signed by its identity for this sum: it was changed")


def sum_words(uploads: Sequence[NDArray[np.uint32]]) -> NDArray[np.int64]:
    """The sum of all uploads of a session, in which masks cancel; exact below 2^31 in magnitude."""
    total = uploads[0].copy()
    for words in uploads[1:]:
        total += words
    return total.view(np.int32).astype(np.int64)


def sha256(data: bytes) -> str:
    """The digest that sessions are bound to, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _text(what: str, fields: Mapping[str, object]) -> bytes:
    """A text for signatures and keys that has one purpose and no other reading."""
    return json.dumps(["prefed sum 1", what, fields], sort_keys=True).encode()


def _key_text(federation: str, run: str, site: str, key: bytes) -> bytes:
    return _text("key", {"federation": federation, "run": run, "site": site, "key": key.hex()})


def _upload_text(words: bytes, receipts: Mapping[str, str], session: Session) -> bytes:
    fields = {"session": session.name.hex(), "words": sha256(words), "receipts": dict(receipts)}
    return _text("upload", fields)
