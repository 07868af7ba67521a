"""Secure sums: exact whoever drops out when, random to the server, and closed to a server that lies."""

import dataclasses

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from prefed.privacy.secure import (
    Reveal,
    SecureClient,
    SecureError,
    SecureServer,
    primitives,
    threshold,
)

SESSION = b"run 7, round 3, train"


class Federation:
    """Clients c0, c1, … with numbers of their own, and what each has said so far."""

    def __init__(self, count, size=4, fewest=3):
        self.names = [f"c{number}" for number in range(count)]
        self.identities = {name: Ed25519PrivateKey.generate() for name in self.names}
        self.roster = {name: key.public_key() for name, key in self.identities.items()}
        self.clients = {name: self.client(name, fewest) for name in self.names}
        self.server = SecureServer(SESSION)
        draw = np.random.default_rng(count)
        self.values = {name: draw.normal(size=size) for name in self.names}

    def client(self, name, fewest=3):
        return SecureClient(name, self.identities[name], self.roster, SESSION, fewest)

    def shared(self, gone=()):
        """Up to the routed shares; ``gone`` advertise and share nothing."""
        keys = self.server.keys([client.advertise() for client in self.clients.values()])
        return self.server.route(
            {name: client.share(keys) for name, client in self.clients.items() if name not in gone}
        )

    def masked(self, gone=(), silent=()):
        """Up to the masked numbers of those that send them; ``silent`` share and send none."""
        return {
            name: self.clients[name].mask(self.values[name], sealed)
            for name, sealed in self.shared(gone).items()
            if name not in silent
        }

    def confirmed(self, gone=(), silent=(), mute=()):
        """Up to the signatures; ``mute`` send their numbers and sign nothing."""
        sent = self.server.collect(self.masked(gone, silent))
        return {name: self.clients[name].confirm(sent) for name in sent if name not in mute}

    def sum(self, gone=(), silent=(), mute=(), lost=()):
        """To the end; ``lost`` sign, and reveal nothing."""
        signed = self.confirmed(gone, silent, mute)
        reveals = [self.clients[name].reveal(signed) for name in signed if name not in lost]
        return self.server.sum(reveals)


def fixed(values):
    """The sum of numbers in fixed point, in whole numbers of any length."""
    return sum(round(value * 2**primitives.FRACTION) for value in values) / 2**primitives.FRACTION


@settings(max_examples=12)
@given(st.data())
def test_the_sum_is_exact_whoever_drops_out_when(data):
    """Law: of those whose numbers came, to the last bit of fixed point, with up to 30% of 10 gone in all."""
    count = data.draw(st.sampled_from([3, 4, 7, 10]))
    names = [f"c{number}" for number in range(count)]
    spare = count - threshold(count)
    out = data.draw(st.permutations(names))[: data.draw(st.integers(0, spare))]
    phase = {name: data.draw(st.sampled_from(["gone", "silent", "mute", "lost"])) for name in out}
    federation = Federation(count, size=3)
    for name in names:
        numbers = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3)
        federation.values[name] = np.array(data.draw(numbers))
    groups = {kind: [n for n in out if phase[n] == kind] for kind in ("gone", "silent", "mute", "lost")}
    total = federation.sum(**groups)
    sent = [name for name in names if phase.get(name) not in ("gone", "silent")]
    for place in range(3):
        assert total[place] == fixed(federation.values[name][place] for name in sent)


def test_three_of_ten_may_go_and_no_more():
    """A third of the clients, at different steps."""
    federation = Federation(10)
    total = federation.sum(gone=["c1"], silent=["c4"], lost=["c8"])
    sent = [name for name in federation.names if name not in ("c1", "c4")]
    assert total == pytest.approx(sum(federation.values[name] for name in sent), abs=1e-6)
    with pytest.raises(SecureError, match="6 of 10 clients sent their numbers, and 7 are needed"):
        Federation(10).sum(silent=["c1", "c2", "c3", "c4"])


def test_the_mean_is_that_of_fixed_point():
    """Rounded to multiples of 2^-24, each number is at most 2^-25 from its own, and so is the mean."""
    federation = Federation(5, size=1000)
    mean = federation.sum() / 5
    plain = np.mean(list(federation.values.values()), axis=0)
    assert np.abs(mean - plain).max() <= 2.0**-25


def test_two_sums_that_differ_by_one_client_reveal_its_numbers():
    """What no mask prevents: the others send the same numbers again, as a visit that is done again does, and
    the server says that one dropped out. The difference is that client's numbers, exact in fixed point."""
    first, second = Federation(4, size=50), Federation(4, size=50)
    second.values = first.values
    difference = first.sum() - second.sum(silent=["c2"])
    assert difference.tolist() == [fixed([value]) for value in first.values["c2"]]


def test_what_the_server_sees_of_a_client_is_random():
    """All its numbers are 1. Bytes of the masked ones are uniform (chi-squared: random bytes fail once in a
    million times), bits do not follow each other, and the same numbers give others the next time."""
    seen = []
    for _ in range(2):
        federation = Federation(4)
        federation.values = {name: np.ones(20_000) for name in federation.names}
        seen.append(federation.masked()["c2"])
    data = seen[0].tobytes()
    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    assert scipy.stats.chisquare(counts).pvalue > 1e-6
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8)).astype(float) * 2 - 1
    assert abs(float(bits.mean())) * len(bits) ** 0.5 < 5
    assert abs(float((bits[:-1] * bits[1:]).mean())) * len(bits) ** 0.5 < 5
    assert not np.intersect1d(seen[0], seen[1]).size


def test_one_mask_less_is_not_enough():
    """With its own mask taken off, the masks that it shares with others still hide a client's numbers."""
    federation = Federation(3, size=2000)
    masked = federation.masked()
    seed = federation.clients["c0"]._seed
    left = primitives.to_numbers(masked["c0"] - primitives.mask(seed, 2000))
    assert np.median(np.abs(left)) > 2.0 ** (62 - primitives.FRACTION - 8)


# A server that lies


def test_no_client_gives_both_kinds_of_share():
    """Each reveals, of every client, one share of one kind; and it reveals once."""
    federation = Federation(10)
    signed = federation.confirmed(silent=["c3", "c7"])
    client = federation.clients["c0"]
    reveal = client.reveal(signed)
    assert not set(reveal.seeds) & set(reveal.keys)
    assert set(reveal.keys) == {"c3", "c7"}
    with pytest.raises(SecureError, match="'reveal' was asked of 'c0', where 'done' is due: refused"):
        client.reveal(signed)


def test_a_second_list_of_names_is_refused():
    """To get both kinds of share of c5, the server shows some clients a list with it, others one without."""
    federation = Federation(10)
    sent = federation.server.collect(federation.masked())
    without = [name for name in sent if name != "c5"]
    some = {name: federation.clients[name].confirm(sent) for name in sent[:5]}
    others = {name: federation.clients[name].confirm(without) for name in sent[6:]}
    with pytest.raises(SecureError, match="5 clients have signed the names of the sum: too few"):
        federation.clients["c0"].reveal(some)
    with pytest.raises(SecureError, match=r"a signature of .* is not its own"):
        federation.clients["c1"].reveal({**some, **others, "c5": some["c0"]})
    with pytest.raises(SecureError, match="'confirm' was asked of 'c9', where 'reveal' is due"):
        federation.clients["c9"].confirm(sent)


def test_a_list_of_too_few_names_is_refused():
    federation = Federation(10)
    federation.masked()
    with pytest.raises(SecureError, match="too few clients"):
        federation.clients["c0"].confirm(["c0", "c1"])


def test_a_client_that_is_left_out_signs_nothing():
    federation = Federation(10)
    federation.masked()
    with pytest.raises(SecureError, match="not of the right ones"):
        federation.clients["c0"].confirm(federation.names[1:])


@pytest.mark.parametrize("change", ["seal", "mask", "client", "signature"])
def test_a_key_that_the_server_changed_is_refused(change):
    """As where it puts a key of its own in the place of another client's, to read what is sealed for it."""
    federation = Federation(4)
    keys = list(federation.server.keys([client.advertise() for client in federation.clients.values()]))
    own = primitives.public_bytes(primitives.new_key())
    value = {"seal": own, "mask": own, "client": "c9", "signature": bytes(64)}[change]
    keys[1] = dataclasses.replace(keys[1], **{change: value})
    with pytest.raises(SecureError, match=r"not its own|not on the roster"):
        federation.clients["c0"].share(keys)


def test_keys_of_another_session_are_refused():
    """A signature belongs to one sum."""
    federation = Federation(4)
    keys = [client.advertise() for client in federation.clients.values()]
    other = SecureClient("c1", federation.identities["c1"], federation.roster, b"another round")
    keys[1] = other.advertise()
    with pytest.raises(SecureError, match="a signature of 'c1' is not its own"):
        federation.clients["c0"].share(keys)


def test_a_list_without_the_client_or_with_one_twice_is_refused():
    for wrong in (lambda keys: keys[1:], lambda keys: [*keys, keys[2]]):
        federation = Federation(4)
        keys = [client.advertise() for client in federation.clients.values()]
        with pytest.raises(SecureError, match="a client twice, or not this client's own"):
            federation.clients["c0"].share(wrong(keys))


def test_a_sum_of_fewer_than_a_client_wants_is_refused():
    federation = Federation(4, fewest=5)
    keys = [client.advertise() for client in federation.clients.values()]
    with pytest.raises(SecureError, match="a sum of 4 clients: 5 are the fewest"):
        federation.clients["c0"].share(keys)
    with pytest.raises(SecureError, match="2 clients take part, and 3 are the fewest"):
        SecureServer(SESSION).keys(keys[:2])


def test_shares_that_were_changed_or_sent_to_another_are_refused():
    """A sealed box is for one receiver, from one sender, and no bit of it may change."""
    for wrong in (
        lambda boxes: {**boxes, "c1": boxes["c2"]},
        lambda boxes: {**boxes, "c1": boxes["c1"][:-1] + bytes([boxes["c1"][-1] ^ 1])},
        lambda boxes: {**boxes, "c1": b""},
    ):
        federation = Federation(4)
        boxes = federation.shared()["c0"]
        with pytest.raises(SecureError, match="the shares of 'c1' were changed on their way"):
            federation.clients["c0"].mask(federation.values["c0"], wrong(boxes))


def test_nothing_is_done_after_an_error_or_before_its_turn():
    federation = Federation(4)
    with pytest.raises(SecureError, match="'mask' was asked of 'c0', where 'advertise' is due"):
        federation.clients["c0"].mask(federation.values["c0"], {})
    with pytest.raises(SecureError, match="where 'failed' is due"):
        federation.clients["c0"].advertise()


def test_a_wrong_share_of_a_key_is_found():
    """The server computes the key's public half, and it is another one."""
    federation = Federation(4)
    signed = federation.confirmed(silent=["c3"])
    reveals = [federation.clients[name].reveal(signed) for name in signed]
    keys = {"c3": bytes(32)}
    reveals[0] = dataclasses.replace(reveals[0], keys=keys)
    with pytest.raises(SecureError, match="the shares of the key of 'c3' do not fit"):
        federation.server.sum(reveals)


# Clients that send malformed messages

JUNK = st.one_of(
    st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=40),
    st.binary(min_size=32, max_size=32) | st.sampled_from(["c0", "c3", "c9", [], (), {}, {"c0": 1}, set()]),
    st.lists(st.integers(), max_size=3) | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.sampled_from([np.zeros(2), np.zeros((2, 2), np.uint64), np.array(7, np.uint64), np.array(["a"])]),
    st.sampled_from([primitives.Mapping, object(), b"\1" + bytes(31), np.zeros(9, np.uint64)]),
)


def spoiled(message, data):
    """A message in which one thing, on some level, is another: a part, a name, one more, one less, itself."""
    if dataclasses.is_dataclass(message) and data.draw(st.integers(0, 5)):
        field = data.draw(st.sampled_from(dataclasses.fields(message))).name
        return dataclasses.replace(message, **{field: spoiled(getattr(message, field), data)})
    if isinstance(message, dict) and message and data.draw(st.integers(0, 5)):
        name = data.draw(st.sampled_from(sorted(message)))
        left = {key: value for key, value in message.items() if key != name}
        other = data.draw(st.sampled_from([name, name, "c9"]))
        return {**left, other: spoiled(message[name], data)} if data.draw(st.booleans()) else left
    if isinstance(message, list | tuple) and message and data.draw(st.integers(0, 5)):
        place = data.draw(st.integers(0, len(message) - 1))
        added = data.draw(st.sampled_from([[], [message[0]]]))
        return [*message[:place], spoiled(message[place], data), *message[place + 1 :], *added]
    return data.draw(JUNK)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["keys", "route", "collect", "sum"]), st.data())
def test_whatever_clients_send_is_a_sum_or_a_secure_error(step, data):
    """Law: one step gets what is malformed, and nothing else than SecureError is raised there or later."""
    federation = Federation(4, size=2)
    server, clients = federation.server, federation.clients

    def got(name, message):
        return getattr(server, name)(spoiled(message, data) if name == step else message)

    try:
        advertised = [client.advertise() for client in clients.values()]
        keys = got("keys", advertised)
        sealed = {name: client.share(keys) for name, client in clients.items() if name != "c3"}
        boxes = got("route", sealed)
        masked = {name: clients[name].mask(federation.values[name], boxes[name]) for name in boxes}
        signed = {name: clients[name].confirm(sent) for sent in [got("collect", masked)] for name in sent}
        got("sum", [clients[name].reveal(signed) for name in signed])
    except SecureError:
        pass


def test_a_step_before_its_turn_is_an_error_of_the_protocol():
    with pytest.raises(SecureError):
        SecureServer(SESSION).sum([])
    federation = Federation(3)
    federation.shared()
    with pytest.raises(SecureError, match="has nothing to reveal"):
        federation.server.sum([Reveal("c9", {}, {})])


@pytest.mark.parametrize(
    ("step", "message", "named"),
    [
        ("keys", lambda keys: [dataclasses.replace(keys[0], mask=b"short"), *keys[1:]], "'c0'"),
        ("keys", lambda keys: [*keys, keys[1]], "'c1'"),
        ("route", lambda boxes: {**boxes, "c1": {"c0": boxes["c1"]["c0"]}}, "'c1'"),
        ("collect", lambda masked: {**masked, "c2": masked["c2"].astype(float)}, "'c2'"),
        ("sum", lambda reveals: [dataclasses.replace(reveals[0], seeds={"c1": b"x"}), *reveals[1:]], "'c0'"),
    ],
)
def test_who_sends_what_is_malformed_is_named(step, message, named):
    """A new sum can leave that client out."""
    federation = Federation(4)
    own, give = getattr(federation.server, step), lambda given: own(message(given))
    setattr(federation.server, step, give)
    with pytest.raises(SecureError, match=named):
        federation.sum()


# The parts


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**38])
def test_numbers_that_do_not_fit_are_not_sent(value):
    """Among 4 clients each number has 2^62 / 2^24 / 4 = 2^36 to itself."""
    with pytest.raises(SecureError, match="not finite, or beyond"):
        primitives.to_words(np.array([value]), 4)
    assert primitives.to_numbers(primitives.to_words(np.array([-(2.0**36)]), 4)) == -(2.0**36)


@given(st.binary(min_size=32, max_size=32), st.integers(2, 5), st.integers(0, 3), st.randoms())
@settings(max_examples=10)
def test_any_least_shares_give_the_secret_and_fewer_are_refused(secret, least, more, draw):
    shares = dict(enumerate(primitives.split(secret, least, least + more)))
    some = draw.sample(sorted(shares), least)
    assert primitives.join({place: shares[place] for place in some}, least) == secret
    with pytest.raises(SecureError, match="shares of a secret came"):
        primitives.join({place: shares[place] for place in some[1:]}, least)


def test_a_mask_is_the_published_key_stream():
    """ChaCha20 with a zero key and nonce begins with 76 b8 e0 ad a0 f1 3d 90 (RFC 8439, appendix A.1)."""
    assert primitives.mask(bytes(32), 1).tobytes() == bytes.fromhex("76b8e0ada0f13d90")
