"""Secure sums: masks against a twin in plain Python, laws of the sum, and members that are refused."""

import hashlib
import hmac
import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from law_examples import examples

pytest.importorskip("cryptography")

from prefed.privacy.secure import (
    Identity,
    Participant,
    SecureError,
    Session,
    check_members,
    check_upload,
    fingerprint,
)
from prefed.privacy.secure.identity import is_fingerprint
from prefed.privacy.secure.sums import sum_words


class Federation:
    """Sites s0, s1, … in a run, each with a session as it was shown."""

    def __init__(self, count, size=4):
        names = [f"s{number:02d}" for number in range(count)]
        self.identities = {name: Identity(hashlib.sha256(name.encode()).digest()) for name in names}
        self.sites = {
            name: Participant(own, "wards", "7" * 16, name) for name, own in self.identities.items()
        }
        self.pins = {name: fingerprint(own.public) for name, own in self.identities.items()}
        self.session = self.of(names, size)

    def of(self, names, size=4, **changes):
        members = tuple(self.sites[name].member for name in names)
        fields = {"attempt": 1, "settings": "5" * 64, "download": "d" * 64, **changes}
        return Session("wards", "7" * 16, 3, "train", size=size, members=members, **fields)


# The twin: RFC 7748, 5869 and 8439 in Python's integers


def x25519(secret, public):
    p = 2**255 - 19
    k = int.from_bytes(secret, "little") & ~(7 | 1 << 255) & ~(1 << 255) | 1 << 254
    x1 = int.from_bytes(public, "little") & (1 << 255) - 1
    x2, z2, x3, z3 = 1, 0, x1, 1
    for place in reversed(range(255)):
        if bit := k >> place & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        x3, z3 = (d * a + c * b) ** 2 % p, x1 * (d * a - c * b) ** 2 % p
        e = a * a - b * b
        x2, z2 = a * a * b * b % p, e * (a * a + 121665 * e) % p
        if bit:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, p - 2, p) % p).to_bytes(32, "little")


def hkdf(secret, info):
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\1", "sha256")


def chacha20(key, count):
    def turn(s, a, b, c, d):
        for first, second, third, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[first] = (s[first] + s[second]) % 2**32
            mixed = s[third] ^ s[first]
            s[third] = (mixed << by | mixed >> 32 - by) % 2**32

    words = []
    for block in range(-(-count // 16)):
        start = [*np.frombuffer(b"expand 32-byte k" + key, "<u4").tolist(), block, 0, 0, 0]
        state = start.copy()
        for _ in range(10):
            for column in range(4):
                turn(state, column, 4 + column, 8 + column, 12 + column)
            for column in range(4):
                turn(state, column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
        words += [(one + other) % 2**32 for one, other in zip(start, state, strict=True)]
    return words[:count]


def twin(federation, name, numbers):
    """One site's masked words, from private bytes alone."""
    session = federation.session
    fields = {
        "federation": session.federation,
        "run": session.run,
        "round": session.round,
        "exchange": session.exchange,
        "attempt": session.attempt,
        "settings": session.settings,
        "download": session.download,
        "size": session.size,
        "members": [[m.site, m.identity.hex(), m.key.hex()] for m in session.members],
    }
    text = json.dumps(["prefed sum 1", "session", fields], sort_keys=True).encode()
    digest = hashlib.sha256(text).hexdigest()
    own, total = federation.sites[name]._key.private_bytes_raw(), list(numbers)
    for other in session.members:
        if other.site != name:
            about = {"session": digest, "pair": sorted((name, other.site))}
            info = json.dumps(["prefed sum 1", "mask", about], sort_keys=True).encode()
            mask = chacha20(hkdf(x25519(own, other.key), info), session.size)
            sign = 1 if name < other.site else -1
            total = [(one + sign * each) % 2**32 for one, each in zip(total, mask, strict=True)]
    return total


def test_masks_are_those_of_the_twin():
    """Three sites, 21 words: more than one block of ChaCha20."""
    federation = Federation(3, size=21)
    numbers = np.random.default_rng(1).integers(0, 2**32, 21, dtype=np.uint32)
    for name, site in federation.sites.items():
        assert site.mask(numbers, federation.session).tolist() == twin(federation, name, numbers.tolist())


# Laws


def uploads(federation, numbers, sessions=None):
    return [
        site.mask(np.asarray(own, np.int64).astype(np.uint32), (sessions or {}).get(name, federation.session))
        for (name, site), own in zip(federation.sites.items(), numbers, strict=True)
    ]


@examples(20)
@given(st.data())
def test_the_sum_is_exact_in_any_order(data):
    """Of whole numbers whose sum is within 32 bits, also negative ones and those at the ends of the range."""
    count = data.draw(st.integers(3, 8))
    most = (2**31 - 1) // count
    numbers = data.draw(
        st.lists(st.lists(st.integers(-most, most), min_size=4, max_size=4), min_size=count, max_size=count)
    )
    sent = data.draw(st.permutations(uploads(Federation(count), numbers)))
    assert sum_words(sent).tolist() == [sum(column) for column in zip(*numbers, strict=True)]


def is_uniform(words):
    """Bytes are equally frequent (chi-squared: random bytes fail once in a million times), bits follow each
    other independently within five standard deviations."""
    data = np.ascontiguousarray(words).view(np.uint8)
    counts = np.bincount(data, minlength=256)
    bits = np.unpackbits(data).astype(float) * 2 - 1
    drift = abs(float((bits[1:] * bits[:-1]).mean())) * len(bits) ** 0.5
    return scipy.stats.chisquare(counts).pvalue > 1e-6 and drift < 5


SPOILT = {
    "another download": {"download": "e" * 64},
    "another attempt": {"attempt": 2},
    "other settings": {"settings": "6" * 64},
}


@pytest.mark.parametrize("what", ["an upload", "a missing upload", *SPOILT, "other members"])
def test_one_mask_that_is_missing_makes_it_uniform(what):
    """All sites send ones. A single upload, the sum without one site, and the sum in which one site was shown
    something else are random; the right sum is not."""
    federation = Federation(4, size=20_000)
    ones = np.ones((4, 20_000), np.int64)
    if what in SPOILT:
        sent = uploads(federation, ones, {"s02": replace(federation.session, **SPOILT[what])})
    elif what == "other members":
        sent = uploads(federation, ones, {"s02": federation.of(["s00", "s01", "s02"], 20_000)})
    else:
        sent = uploads(federation, ones)
        assert (sum_words(sent) == 4).all()
        sent = sent[:1] if what == "an upload" else sent[:3]
    assert is_uniform(sum_words(sent).astype(np.uint32))


def test_each_session_and_each_process_has_its_own_masks():
    """The same numbers give unrelated words in the next attempt, and after a restart."""
    federation, again = Federation(3, 50), Federation(3, 50)
    zeros = np.zeros(50, np.uint32)
    first = federation.sites["s00"].mask(zeros, federation.session)
    second = federation.sites["s00"].mask(zeros, replace(federation.session, attempt=2))
    third = again.sites["s00"].mask(zeros, again.session)
    assert not {*first.tolist()} & {*second.tolist()} & {*third.tolist()}
    assert federation.pins == again.pins


# What a site refuses


def changed(federation, what):
    """The session as a lying hub shows it to s00."""
    members = list(federation.session.members)
    foreign = Participant(Identity(b"x" * 32), "wards", "7" * 16, "s01").member
    match what:
        case "foreign identity":
            members[1] = foreign
        case "key of the hub":
            members[1] = replace(members[1], key=foreign.key)
        case "key of another run":
            members[1] = Participant(federation.identities["s01"], "wards", "8" * 16, "s01").member
        case "invented site":
            members.append(replace(foreign, site="s99"))
        case "own key twice":
            members[1] = replace(members[0], site="s01")
        case "own key changed":
            members[0] = Participant(federation.identities["s00"], "wards", "7" * 16, "s00").member
        case "twice":
            members.insert(1, members[1])
        case "too few":
            members = members[:2]
        case "fewer than required":
            members = members[:3]
    return replace(federation.session, members=tuple(members))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("foreign identity", "site 's01' has another key: its fingerprint is .*, and .sites. has"),
        ("key of the hub", "'s01' in this run is not signed by its identity"),
        ("key of another run", "'s01' in this run is not signed by its identity"),
        ("invented site", "site 's99' has no fingerprint in .sites."),
        ("own key twice", "'s01' has another key"),
        ("own key changed", "does not have this site with its own keys"),
        ("twice", "is not sorted"),
        ("too few", "a sum of 2 sites: 4 are the fewest"),
        ("fewer than required", "a sum of 3 sites: 4 are the fewest"),
    ],
)
def test_members_who_are_not_pinned_or_signed_are_refused(what, words):
    """Refused for one reason each; the unchanged session passes."""
    federation = Federation(4)
    own = federation.sites["s00"].member
    check_members(federation.session, own, federation.pins, 4)
    with pytest.raises(SecureError, match=words) as caught:
        check_members(changed(federation, what), own, federation.pins, 4)
    if what == "foreign identity":
        assert federation.pins["s01"] in str(caught.value)
        assert fingerprint(Identity(b"x" * 32).public) in str(caught.value)


def test_a_changed_upload_is_refused():
    """A byte flipped, a byte less, another receipt or none, another session, another site."""
    federation = Federation(3)
    site, session = federation.sites["s01"], federation.session
    words, receipts = site.mask(np.ones(4, np.uint32), session).tobytes(), {"ada": "000003-" + "7" * 32}
    signature = site.sign(words, receipts, session)
    check_upload(words, receipts, signature, session, site.member)
    for words_, receipts_, signature_, session_, site_ in (
        (bytes([words[0] ^ 1]) + words[1:], receipts, signature, session, site.member),
        (words, {}, signature, session, site.member),
        (words, {"ada": "000002-" + "7" * 32}, signature, session, site.member),
        (words, receipts, bytes([signature[0] ^ 1]) + signature[1:], session, site.member),
        (words, receipts, signature, replace(session, round=4), site.member),
        (words, receipts, signature, session, federation.sites["s02"].member),
    ):
        with pytest.raises(SecureError, match="was changed"):
            check_upload(words_, receipts_, signature_, session_, site_)
    with pytest.raises(SecureError, match="15 bytes, not 16"):
        check_upload(words[:-1], receipts, signature, session, site.member)


# Identities


def test_an_identity_is_made_once_and_is_its_owners_alone(tmp_path):
    path = tmp_path / "state" / "identity"
    with pytest.raises(SecureError, match="run `prefed site keys"):
        Identity.at(path)
    made = Identity.at(path, create=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.at(path, create=True).public == made.public
    path.write_bytes(b"short")
    with pytest.raises(SecureError, match="has 5: restore it from a copy"):
        Identity.at(path)


@given(st.binary(min_size=32, max_size=32))
def test_fingerprints_are_read_back(public):
    """Read by the table of proquints, the words are the first 128 bits of the digest."""
    text, bits = fingerprint(public), 0
    for letter in text.replace("-", ""):
        consonant = letter in "bdfghjklmnprstvz"
        bits = bits << (4 if consonant else 2) | ("bdfghjklmnprstvz" if consonant else "aiou").index(letter)
    assert bits.to_bytes(16, "big") == hashlib.sha256(b"prefed identity\0" + public).digest()[:16]
    assert is_fingerprint(text)
    assert not is_fingerprint(text[:-1])
    assert not is_fingerprint(text.replace("-", " "))
